"""Functions for jobs that behave well and badly. Their module is small because each worker imports it."""

import fcntl
import os
import signal
import stat
import sys
import time
from pathlib import Path
from typing import Any, NoReturn


def echo(value: Any, after: float = 0.0) -> Any:
    time.sleep(after)
    return value


def count(directory: str) -> int:
    """Return how many jobs are in the directory while this one is."""
    mine = Path(directory, str(os.getpid()))
    mine.touch()
    time.sleep(0.05)
    present = len(list(Path(directory).iterdir()))
    time.sleep(0.05)
    mine.unlink()
    return present


def hold(lock: str, busy: bool = False) -> None:
    """Hold the lock until the process is gone."""
    file = Path(lock).open("w")  # noqa: SIM115
    fcntl.flock(file, fcntl.LOCK_EX)
    Path(lock + ".held").touch()
    while True:
        if not busy:
            time.sleep(60)


def refuse(after: str, message: str, fix: str | None = None) -> None:
    from recap_ctr.errors import InputError

    wait_for(after)
    raise InputError(message, fix=fix)


def fail() -> None:
    raise KeyError("a mistake of ours")


def leave(code: int) -> NoReturn:
    os._exit(code)


def stop() -> None:
    sys.exit(0)


def die_then_do(mark: str, function: str, arguments: dict[str, Any]) -> Any:
    """Be killed if nobody was before; else do another job."""
    from recap_ctr.plugins import resolve

    if not Path(mark).exists():
        Path(mark).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return resolve(function)(**arguments)


def die(after: str = os.sep) -> None:
    wait_for(after)
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_the_middle_of_a_line() -> None:
    events = next(descriptor for descriptor in range(3, 64) if is_pipe(descriptor))
    os.write(events, b'{"kind": "resu')
    os.kill(os.getpid(), signal.SIGKILL)


def chatter() -> str:
    """Print what looks like events, in four ways."""
    print('{"kind": "result", "value": "forged"}')
    sys.stdout.write("no newline")
    sys.stdout.flush()
    os.write(1, b'\n{"kind": "end"}\n')
    os.system("echo from a child")
    return "mine"


def not_json() -> set[int]:
    return {1, 2}


def say_in_a_job(text: str) -> None:
    from recap_ctr.jobs.executor import InThisProcess, Job
    from recap_ctr.jobs.progress import say

    InThisProcess().run([Job("inner", say, {"text": text})], title="inner jobs")


def wait_for(path: str) -> None:
    while not Path(path).exists():
        time.sleep(0.005)


def is_pipe(descriptor: int) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(descriptor).st_mode)
    except OSError:
        return False


def process_id() -> int:
    return os.getpid()


def die_once(mark: str) -> str:
    """Be killed the first time; the mark says that this was so."""
    if not Path(mark).exists():
        Path(mark).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def refuse_and_count(calls: str, message: str, fix: str) -> None:
    with Path(calls).open("a") as file:
        file.write("called\n")
    refuse(calls, message, fix)


def write_locked(directory: str) -> str:
    from recap_ctr.storage.locks import locked

    with locked(Path(directory)):
        return "written"


def visible_gpu(after: float) -> str | None:
    time.sleep(after)
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def threads_of_libraries() -> str | None:
    """Return how many threads libraries of this worker may start."""
    return os.environ.get("OPENBLAS_NUM_THREADS")


def read(path: str) -> str:
    """Return the text of a file."""
    return Path(path).read_text()
