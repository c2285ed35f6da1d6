"""Files that are whole or absent: written beside their place, synced to disk, then renamed into it."""

import ctypes
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from recap_ctr.errors import InputError

_CHUNK = 1 << 20
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def sync_directory(path: Path) -> None:
    """Make the names inside `path` survive a power cut, not only the bytes behind them."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that takes the place of `path` only when the block ends without an error."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        sync_directory(path.parent)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: object) -> None:
    with atomic_file(path) as file:
        file.write((json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> Any:
    """Parse a JSON file of ours; anything else in its place is the user's to put right."""
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{path} is not valid JSON: {error}", fix="restore the file, or make it anew"
        ) from None


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def fingerprint(value: object) -> str:
    """A short name for any JSON value: equal values, and only they, share it."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@contextmanager
def locked(directory: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold `directory` against a second process that would write the same output, or take turns with it."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise InputError(
                f"another process is writing {directory}", fix="wait for it, or choose another --out"
            ) from None
        yield
    finally:
        os.close(fd)


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Yield an empty directory that takes the place of `path` when the block ends without an error.

    What an interrupted attempt left behind is removed first. An existing `path` is exchanged in one system call,
    so that at every moment either the old directory or the new one stands there, whole. Where `path` is a link, it
    stays one, and what it leads to is exchanged.
    """
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    if partial.is_symlink():  # not ours: what it leads to would be emptied
        partial.unlink()
    partial.mkdir(exist_ok=True)
    with locked(partial):
        try:
            _empty(partial)
            yield partial
            for file in sorted(partial.rglob("*")):
                _sync(file)
            sync_directory(partial)
            if path.exists():
                _exchange(partial, path)
            else:
                partial.rename(path)
            sync_directory(path.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _empty(directory: Path, last: str = "") -> None:
    for entry in sorted(directory.iterdir(), key=lambda entry: entry.name == last):
        shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _exchange(new: Path, old: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "renameat2"):
        names = os.fsencode(new), os.fsencode(old)
        if libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
            return
    # Without the system call there is a moment at which neither stands in place; the old one is still on disk.
    aside = old.with_name(f".{old.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    old.rename(aside)
    new.rename(old)
    shutil.rmtree(aside)


INPUTS = "inputs.json"


def claim(out: Path, inputs: dict[str, Any], *, finished: str, force: bool) -> bool:
    """Take the directory `out` for work on `inputs`; true if that work stands finished there already.

    Unfinished work on the same inputs is left in place, to be resumed. Finished work, or work on other inputs, is
    replaced only with `force`, and a directory that isn't ours never is.
    """
    if out.is_dir() and any(entry.name != f".{INPUTS}.partial" for entry in out.iterdir()):
        if not (out / INPUTS).is_file():
            raise InputError(f"{out} exists and holds something else", fix="choose another --out")
        known = read_json(out / INPUTS)
        if known == inputs and not (force and (out / finished).is_file()):
            return (out / finished).is_file()
        if not force:
            changed = sorted(key for key in {*known, *inputs} if known.get(key) != inputs.get(key))
            raise InputError(
                f"{out} belongs to other inputs (changed: {', '.join(changed)})",
                fix="choose another --out, or replace it with --force",
            )
        with locked(out):
            _empty(out, last=INPUTS)  # until the end the directory is known as ours
    elif out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file", fix="choose another --out")
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / INPUTS, inputs)
    return False


def take(out: Path, mark: str) -> None:
    """Take the directory `out` for work whose parts are named after their inputs, so that none replaces another.

    `mark` is the file that says so; a directory with something in it but no mark isn't ours.
    """
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file", fix="choose another --out")
    if out.is_dir() and any(out.iterdir()) and not (out / mark).is_file():
        raise InputError(f"{out} exists and holds something else", fix="choose another --out")
    out.mkdir(parents=True, exist_ok=True)
    if not (out / mark).is_file():
        write_json(out / mark, {"kind": mark.removesuffix(".json")})


def is_made(out: Path, inputs: dict[str, Any] | None, *, force: bool) -> bool:
    """Whether the output `out` was made from just these inputs; made from others, it is replaced only with `force`.

    A file has no room for its inputs, so their fingerprint stands beside it (`record`). None, as of a pipe, equals
    nothing.
    """
    if not out.exists() or force:
        _record_of(out).unlink(missing_ok=True)
        return False
    if inputs is not None and _record_of(out).is_file() and read_json(_record_of(out)) == fingerprint(inputs):
        return True
    raise InputError(f"{out} exists", fix="choose another --out, or replace it with --force")


def record(out: Path, inputs: dict[str, Any] | None) -> None:
    """Say beside a finished output what it was made from."""
    if inputs is not None:
        write_json(_record_of(out), fingerprint(inputs))


def _record_of(out: Path) -> Path:
    return out.with_name(f".{out.name}.{INPUTS}")
