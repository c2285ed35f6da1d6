"""Keep two processes from writing the same output."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from recap_ctr.errors import InputError


@contextmanager
def locked(directory: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold `directory` against other processes: refuse if one of them holds it, or, with `wait`, take turns.

    The lock is a hidden file beside the directory. The system frees it when its process ends, however it ends.
    """
    directory = directory.resolve()
    lock = FileLock(directory.with_name(f".{directory.name}.lock"), timeout=-1 if wait else 0)
    try:
        lock.acquire()
    except Timeout:
        raise InputError(
            f"another process is writing {directory}", fix="wait for it, or choose another --out"
        ) from None
    try:
        yield
    finally:
        # A process that waits for the removed file notices that, and tries again with a new one.
        with suppress(OSError):  # Windows does not remove a file that is open
            Path(lock.lock_file).unlink()
        lock.release()
