"""Files that are whole or absent: written beside their place, synced to disk, then renamed into it."""

import ctypes
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from recap_ctr.errors import InputError
from recap_ctr.storage.locks import locked

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def sync_directory(path: Path) -> None:
    """Make the names inside `path` survive a power cut, not only the bytes behind them."""
    if os.name != "nt":  # Windows can't open a directory, and needs no such call.
        _sync(path)


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
    """Write a JSON value to `path`; the file is whole or absent."""
    with atomic_file(path) as file:
        file.write((json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> Any:
    """Return the value in a JSON file that we wrote; refuse a file that is damaged."""
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{path} is not valid JSON: {error}", fix="restore the file, or make it again"
        ) from None


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
    if partial.is_symlink():  # Not ours: what it leads to would be emptied.
        partial.unlink()
    partial.mkdir(exist_ok=True)
    with locked(partial):
        try:
            empty_directory(partial)
            yield partial
            for entry in sorted(partial.rglob("*")):
                sync_directory(entry) if entry.is_dir() else _sync(entry)
            sync_directory(partial)
            if path.exists():
                _exchange(partial, path)
            else:
                partial.rename(path)
            sync_directory(path.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def empty_directory(directory: Path, last: str = "") -> None:
    """Remove everything in a directory; the entry called `last` goes last."""
    for entry in sorted(directory.iterdir(), key=lambda entry: entry.name == last):
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
