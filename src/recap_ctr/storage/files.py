"""The one way to write a file: whole or absent, never through a link, never two writers at once.

A file is written under a hidden name that nobody else has, beside its place; synced to disk; and renamed into it, while
a lock keeps others away. What a killed writer left behind is removed by the next one (docs/decisions/0024).
"""

import ctypes
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from recap_ctr.errors import InputError
from recap_ctr.storage.hashes import fingerprint
from recap_ctr.storage.locks import held

CHECKSUM = "checksum"
"""The last key of every JSON object that we write: the fingerprint of all others."""
RESTORE = "restore the file, or make it again"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
# Windows has no links to follow here, and would otherwise translate line ends.
_FLAGS = os.O_WRONLY | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)


def sync_directory(path: Path) -> None:
    """Make the names inside `path` survive a power cut, not only the bytes behind them."""
    if os.name != "nt":  # Windows can't open a directory, and needs no such call.
        _sync(path)


def sync_tree(path: Path) -> None:
    """Make a directory survive a power cut, with everything in it."""
    for entry in sorted(path.rglob("*")):
        sync_directory(entry) if entry.is_dir() else _sync(entry)
    sync_directory(path)


def make_directory(path: Path) -> None:
    """Make a directory, and those above it, unless they are there; their names survive a power cut."""
    if path.is_dir():
        return
    make_directory(path.parent)
    path.mkdir(exist_ok=True)
    sync_directory(path.parent)


def new_file(path: Path) -> BinaryIO:
    """Open a file for writing that is not there yet: neither a file nor a link in its place is written to.

    It is for files inside a directory that is not in its place yet; `atomic_directory` syncs them.
    """
    return open(os.open(path, _FLAGS | os.O_EXCL, 0o666), "wb")  # noqa: PTH123, a descriptor has no path


def append_file(path: Path) -> BinaryIO:
    """Open a file for writing at its end, and make it if it is not there; a link is not followed."""
    return open(os.open(path, _FLAGS | os.O_APPEND, 0o666), "ab")  # noqa: PTH123, a descriptor has no path


def copy_file(source: str | Path, target: str | Path) -> None:
    """Copy the content of a file to a new one, inside a directory that is not in its place yet."""
    with Path(source).open("rb") as file, new_file(Path(target)) as copy:
        shutil.copyfileobj(file, copy)


@contextmanager
def atomic_file(
    path: Path, *, wait: bool = True, before_rename: Callable[[Path], None] = lambda _: None
) -> Iterator[BinaryIO]:
    """Yield a file that takes the place of `path` only when the block ends without an error.

    Writers of one file take turns; without `wait` the second is refused. `before_rename` is called with the finished
    file, which is still beside its place.
    """
    path = path.parent.resolve() / path.name
    with held(path, wait=wait):
        partial = _new_partial(path)
        try:
            with new_file(partial) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            before_rename(partial)
            partial.replace(path)
            sync_directory(path.parent)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


@contextmanager
def scratch_directory(path: Path) -> Iterator[Path]:
    """Yield an empty directory for what the writer of `path`, who must hold it, needs meanwhile."""
    path = path.parent.resolve() / path.name
    _remove_leftovers(path, "scratch")
    scratch = _hidden(path, "scratch")
    scratch.mkdir()
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Yield an empty directory that takes the place of `path` when the block ends without an error.

    An existing `path` is exchanged in one system call, so that at every moment either the old directory or the new one
    stands there, whole. Where `path` is a link, it stays one, and what it leads to is exchanged.
    """
    path = path.resolve()
    make_directory(path.parent)
    with held(path):
        partial = _new_partial(path)
        partial.mkdir()
        try:
            yield partial
            sync_tree(partial)
            if path.exists():
                _exchange(partial, path)
            else:
                partial.rename(path)
            sync_directory(path.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def is_partial(name: str, of: str) -> bool:
    """Return whether `name` is that of an unfinished file or directory, by this version or an earlier one.

    >>> is_partial(".a.json.0123abcd.partial", "a.json"), is_partial(".a.json.partial", "a.json")
    (True, True)
    """
    return _is_hidden(name, of, "partial")


def _new_partial(path: Path) -> Path:
    """Return a name for the unfinished `path`, which this process holds; remove what killed writers left."""
    _remove_leftovers(path, "(partial|scratch)")
    return _hidden(path, "partial")


def _hidden(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.{kind}")


def _is_hidden(name: str, of: str, kind: str) -> bool:
    return re.fullmatch(rf"\.{re.escape(of)}\.([0-9a-f]{{8}}\.)?{kind}", name) is not None


def _remove_leftovers(path: Path, kind: str) -> None:
    for entry in path.parent.iterdir():
        if _is_hidden(entry.name, path.name, kind):
            with suppress(OSError):  # Another user's, perhaps; it does no harm.
                _remove(entry)


def write_json(path: Path, value: object) -> None:
    """Write a JSON value to `path`; the file is whole or absent, and an object carries its checksum."""
    with atomic_file(path) as file:
        file.write(json_bytes(with_checksum(value) if isinstance(value, dict) else value))


def with_checksum(value: dict[str, Any]) -> dict[str, Any]:
    """Return an object with the checksum of its other keys, as the last one."""
    if CHECKSUM in value:
        raise ValueError(f"the key {CHECKSUM!r} is taken by the checksum of the file")
    plain = json.loads(json.dumps(value, allow_nan=False))  # As it will be read: keys are text.
    return {**plain, CHECKSUM: fingerprint(plain)}


def json_bytes(value: object) -> bytes:
    """Return a JSON value as the one sequence of bytes in which it is stored."""
    return (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def read_json(path: Path) -> Any:
    """Return the value in a JSON file that we wrote; refuse a file that is damaged.

    Files of earlier versions have no checksum, and are read without one.
    """
    raw = path.read_bytes()
    try:
        value = json.loads(raw)
        if not isinstance(value, dict) or not value or not is_checksum(last_key := next(reversed(value))):
            return value
        plain = {key: entry for key, entry in value.items() if key != last_key}
        is_whole = value.get(CHECKSUM) == fingerprint(plain) and raw == json_bytes(value)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not valid JSON: {error}", fix=RESTORE) from None
    if not is_whole:
        raise InputError(f"{path} is damaged: it differs from its checksum", fix=RESTORE)
    return plain


def read_object(path: Path, what: str) -> dict[str, Any]:
    """Return the object in a JSON file that we wrote; refuse any other value, which is not `what` it should be."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise InputError(f"{path} is not {what}: it holds {type(value).__name__}, not an object", fix=RESTORE)
    return value


def is_checksum(key: str) -> bool:
    """Return whether a key is that of the checksum, one damaged character allowed: else damage could hide it."""
    return len(key) == len(CHECKSUM) and sum(map(str.__ne__, key, CHECKSUM)) <= 1


def remove_directory(path: Path) -> None:
    """Remove a directory, if it is there, all at once: half of one must not look like a whole one."""
    _remove_leftovers(path, "scratch")
    if path.is_dir():
        aside = _hidden(path, "scratch")
        path.rename(aside)
        shutil.rmtree(aside)


def empty_directory(directory: Path, last: str = "") -> None:
    """Remove everything in a directory; the entry called `last` goes last."""
    for entry in sorted(directory.iterdir(), key=lambda entry: entry.name == last):
        _remove(entry)


def _remove(entry: Path) -> None:
    shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _exchange(new: Path, old: Path) -> None:
    """Put the directory `new` in the place of `old`, in one step where the system can."""
    libc = None if os.name == "nt" else ctypes.CDLL(None, use_errno=True)
    if libc is not None and hasattr(libc, "renameat2"):
        names = os.fsencode(new), os.fsencode(old)
        if libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
            return
    # Without the system call there is a moment at which neither stands in place; the old one is still on disk.
    aside = old.with_name(f".{old.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    old.rename(aside)
    new.rename(old)
    shutil.rmtree(aside)
