"""Keep two processes from writing the same output."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from recap_ctr.errors import InputError


class BusyError(InputError):
    """Another process is writing the same output."""


@contextmanager
def locked(directory: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold `directory`, or what it leads to if it is a link, against other processes; see `held`."""
    with held(directory.resolve(), wait=wait):
        yield


@contextmanager
def held(path: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold `path` against other processes: refuse if one of them holds it, or, with `wait`, take turns.

    The lock is a hidden file beside it. The system frees it when its process ends, however it ends.
    """
    if not path.parent.is_dir():  # The library would make it.
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path.parent))
    lock = FileLock(path.with_name(f".{path.name}.lock"), timeout=-1 if wait else 0)
    try:
        lock.acquire()
    except Timeout:
        raise BusyError(
            f"another process is writing {path}", fix="wait for it, or choose another --out"
        ) from None
    try:
        yield
    finally:
        # A process that waits for the removed file notices that, and tries again with a new one.
        with suppress(OSError):  # Windows does not remove a file that is open
            Path(lock.lock_file).unlink()
        lock.release()
