"""Places that a user may name: paths of this machine, and URLs of object stores (s3://, gs://, az://).

Everything in a store is worked on in a cache on this machine; `objects` moves it, and needs the library `obstore`.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from recap_ctr.errors import InputError

Place = str | Path
URL = re.compile(r"(s3|gs|az):/{1,2}([^/]+)/*(.*?)/*")  # A Path has lost one of the slashes.


def is_remote(place: object) -> bool:
    """Return whether a place, a URL or the path that was made of one, is in an object store.

    >>> is_remote("s3://bucket/clicks.csv"), is_remote(Path("gs://bucket/run")), is_remote("clicks.csv")
    (True, True, False)
    """
    return isinstance(place, str | Path) and URL.fullmatch(str(place)) is not None


def shown(place: Place) -> str:
    """Return a place as the user wrote it: a path that was made of a URL has lost a slash.

    >>> shown(Path("s3://bucket/run")), shown("clicks.csv")
    ('s3://bucket/run', 'clicks.csv')
    """
    return re.sub(r"^(\w+):/+", r"\1://", str(place)) if is_remote(place) else str(place)


def input_files(pattern: Place) -> list[tuple[Path, Path]]:
    """Return copies of the objects that a URL, a pattern or a prefix names: each path, and the root of its key."""
    copies: list[tuple[Path, Path]] = _objects(pattern).local_copies(pattern)
    return copies


def input_directory(place: Place, part: str = "") -> Path:
    """Return a local directory as it is; of one in a store a copy, of its subdirectory `part` alone if it has one."""
    return _objects(place).pull(place, part) if is_remote(place) else Path(place)


def has_directory(place: Place) -> bool:
    """Return whether `output_directory` has written a directory to this URL."""
    return is_remote(place) and _objects(place).has_tree(place)


def signature(place: Place) -> str:
    """Return a value that changes when the directory at a URL does."""
    return str(_objects(place).signature(place))


@contextmanager
def output_directory(place: Place) -> Iterator[Path]:
    """Yield a directory to work in; one that belongs in a store is brought here, and its changes go back.

    They go there once a minute and at the end, also of work that fails or is interrupted, so that another machine can
    go on. Nobody else may write there meanwhile.
    """
    if is_remote(place):
        with _objects(place).checked_out(place) as work:
            yield work
    else:
        yield Path(place)


def working_directory(place: Path) -> Path:
    """Return the directory that `output_directory` yields to the process that writes there, for one that helps it."""
    return Path(_objects(place).working_directory(place)) if is_remote(place) else place


@contextmanager
def output_file(place: Path, *, force: bool = False) -> Iterator[Path]:
    """Yield the path of a file to write; one that belongs in a store becomes an object when the block has ended.

    An object that exists is replaced only with `force`, also if it has come into being meanwhile.
    """
    if is_remote(place):
        with _objects(place).written(place, force=force) as path:
            yield path
    else:
        yield place


def _objects(place: Place) -> ModuleType:
    """Import what moves objects, or say how to install it."""
    try:
        from recap_ctr.storage import objects
    except ModuleNotFoundError as error:
        if error.name != "obstore":
            raise
        raise InputError(f"{shown(place)} needs obstore", fix="pip install 'recap-ctr[objects]'") from None
    return objects
