"""Jobs as processes: order, number, failures, and that none outlives its parent.

A job must name a function of the package. Those of these tests are put there, in the worker only, by the module that
Python imports at its start (`sitecustomize`).
"""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from recap_ctr.errors import InputError
from recap_ctr.jobs.local import Job, JobError, run_jobs
from recap_ctr.storage.hashes import fingerprint

CUSTOMIZE = """
import sys, jobs_of_the_tests
sys.modules["recap_ctr.jobs_of_the_tests"] = jobs_of_the_tests
"""
JOBS = """
import fcntl, os, signal, stat, sys, time
from pathlib import Path


def echo(value, after=0.0):
    time.sleep(after)
    return value


def count(directory):
    mine = Path(directory, str(os.getpid()))
    mine.touch()
    time.sleep(0.05)
    seen = len(list(Path(directory).iterdir()))
    time.sleep(0.05)
    mine.unlink()
    return seen


def hold(lock, busy=False):
    # Until the end: the lock is free when the process is gone.
    file = open(lock, "w")
    fcntl.flock(file, fcntl.LOCK_EX)
    Path(lock + ".held").touch()
    while True:
        if not busy:
            time.sleep(60)


def wait_for(path):
    while not Path(path).exists():
        time.sleep(0.005)


def refuse(after, message, fix=None):
    from recap_ctr.errors import InputError
    wait_for(after)
    raise InputError(message, fix=fix)


def fail():
    raise KeyError("a mistake of ours")


def leave(code):
    os._exit(code)


def stop():
    sys.exit(0)


def die(after=os.sep):
    wait_for(after)
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_the_middle_of_a_line():
    events = next(fd for fd in range(3, 64) if is_pipe(fd))
    os.write(events, b'{"kind": "resu')
    os.kill(os.getpid(), signal.SIGKILL)


def is_pipe(fd):
    try:
        return stat.S_ISFIFO(os.fstat(fd).st_mode)
    except OSError:
        return False


def chatter():
    print('{"kind": "result", "value": "forged"}')
    sys.stdout.write("no newline")
    sys.stdout.flush()
    os.write(1, b'\\n{"kind": "end"}\\n')
    os.system("echo from a child")
    return "mine"


def not_json():
    return {1, 2}
"""


@pytest.fixture(autouse=True)
def functions(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    where = tmp_path_factory.mktemp("path")
    (where / "sitecustomize.py").write_text(CUSTOMIZE)
    (where / "jobs_of_the_tests.py").write_text(JOBS)
    monkeypatch.setenv("PYTHONPATH", str(where), prepend=os.pathsep)
    return where


def job(name: str, function: str, **arguments: object) -> Job:
    return Job(name, f"recap_ctr.jobs_of_the_tests:{function}", arguments)


def is_free(lock: Path) -> bool:
    """Whether whoever held it is gone."""
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def wait_until(true: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.005)


def fails_and_leaves_nobody(lock: Path, other: Job, kind: type[Exception], message: str) -> Exception:
    """`other` fails beside a job that would run for ever, and that it may wait for."""
    with pytest.raises(kind, match=message) as caught:
        run_jobs([job("endless", "hold", lock=str(lock)), other], workers=2, title="test", quiet=True)
    assert is_free(lock)
    return caught.value


def test_results_come_in_the_order_of_the_jobs() -> None:
    """Those that end first too, long ones too, and those of real functions of the package."""
    values = [{"a": [1, None, "ü"]}, "x" * 100_000]
    jobs = [job(str(at), "echo", value=value, after=0.1 - 0.1 * at) for at, value in enumerate(values)]
    jobs.append(Job("last", "recap_ctr.storage.hashes:fingerprint", {"value": values}))
    assert run_jobs(jobs, workers=3, title="test", quiet=True) == [*values, fingerprint(values)]


def test_no_jobs() -> None:
    assert run_jobs([], workers=1, title="test") == []


@pytest.mark.parametrize("workers", [1, 2])
def test_so_many_at_a_time_and_no_more(workers: int, tmp_path: Path) -> None:
    jobs = [job(str(at), "count", directory=str(tmp_path)) for at in range(workers + 1)]
    assert max(run_jobs(jobs, workers=workers, title="test", quiet=True)) <= workers


def test_without_workers_nothing_is_begun() -> None:
    with pytest.raises(ValueError, match="0 workers"):
        run_jobs([job("one", "echo", value=1)], workers=0, title="test")


def test_bad_input_is_told_with_the_name_of_the_job_and_its_fix(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    refuses = job("seed 2", "refuse", after=f"{lock}.held", message="row 3: no 'ü'", fix="rename it")
    error = fails_and_leaves_nobody(lock, refuses, InputError, "row 3")
    assert isinstance(error, InputError)
    assert (error.message, error.fix) == ("seed 2: row 3: no 'ü'", "rename it")


@pytest.mark.parametrize(
    ("function", "arguments", "code"),
    [
        ("leave", {"code": 3}, 3),
        ("leave", {"code": 0}, 0),
        ("stop", {}, 0),
        ("die", {}, -signal.SIGKILL),
        ("die_in_the_middle_of_a_line", {}, -signal.SIGKILL),
        ("fail", {}, 1),
        ("not_json", {}, 1),
        ("nothing_of_that_name", {}, 1),
        ("echo", {"unknown": 1}, 1),
    ],
)
def test_a_job_without_a_result_is_an_error(
    function: str, arguments: dict[str, object], code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(JobError, match=f"^one ended without a result, with code {code}$"):
        run_jobs([job("one", function, **arguments)], workers=1, title="test", quiet=True)
    assert ("a mistake of ours" in capfd.readouterr().err) == (function == "fail")


def test_a_job_that_dies_takes_the_others_along(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    fails_and_leaves_nobody(lock, job("dies", "die", after=f"{lock}.held"), JobError, "dies ended")


def test_a_worker_that_never_reads_its_job(functions: Path) -> None:
    (functions / "sitecustomize.py").write_text("import os; os._exit(7)")
    long = job("long", "echo", value="x" * 1_000_000)  # more than a pipe holds
    with pytest.raises(JobError, match="long ended without a result, with code 7"):
        run_jobs([long], workers=1, title="test", quiet=True)


@pytest.mark.parametrize("module", ["jobs_of_the_tests", "recap_ctr_jobs", "recap_ctr"])
def test_functions_of_other_packages_are_refused(module: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(JobError, match="with code 1"):
        run_jobs([Job("one", f"{module}:echo", {"value": 1})], workers=1, title="test", quiet=True)
    assert f"{module} is not a module of this package" in capfd.readouterr().err


def test_files_of_the_current_directory_are_no_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("json.py", "rich.py", "recap_ctr.py"):
        (tmp_path / name).write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    assert run_jobs([job("one", "echo", value=1)], workers=1, title="test", quiet=True) == [1]


def test_what_a_job_prints_is_no_event(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_jobs([job("one", "chatter")], workers=1, title="test", quiet=True) == ["mine"]
    shown = capfd.readouterr()
    assert shown.out == ""
    for text in ("forged", "no newline", "from a child"):
        assert text in shown.err


def test_what_a_job_says_is_told_under_its_name(capfd: pytest.CaptureFixture[str]) -> None:
    jobs = [
        Job(f"seed {seed}", "recap_ctr.jobs.progress:say", {"text": f"epoch [{seed}] {{ü}}"})
        for seed in (1, 2)
    ]
    assert run_jobs(jobs, workers=1, title="teachers") == [None, None]
    assert capfd.readouterr() == (
        "",
        "seed 1: epoch [1] {ü}\nteachers: 1 of 2 done (seed 1)\n"
        "seed 2: epoch [2] {ü}\nteachers: 2 of 2 done (seed 2)\n",
    )


def test_nothing_is_told_when_quiet(capfd: pytest.CaptureFixture[str]) -> None:
    jobs = [Job(str(at), "recap_ctr.jobs.progress:say", {"text": "hello"}) for at in range(2)]
    run_jobs(jobs, workers=2, title="test", quiet=True)
    assert capfd.readouterr() == ("", "")


PARENT = """
import json, sys
from recap_ctr.jobs.local import Job, run_jobs
jobs = [Job(name, "recap_ctr.jobs_of_the_tests:hold", arguments) for name, arguments in json.loads(sys.argv[1])]
run_jobs(jobs, workers=len(jobs), title="test", quiet=True)
"""


def parent_of_two(tmp_path: Path) -> tuple["subprocess.Popen[str]", list[Path]]:
    """A process with two endless jobs, one of which keeps its core busy; both have begun."""
    locks = [tmp_path / "sleeping", tmp_path / "busy"]
    jobs = [(lock.name, {"lock": str(lock), "busy": lock.name == "busy"}) for lock in locks]
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, json.dumps(jobs)],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        wait_until(lambda: all(Path(f"{lock}.held").exists() for lock in locks), 30)
    except AssertionError:
        parent.kill()
        raise
    return parent, locks


def last_words(parent: "subprocess.Popen[str]") -> str:
    """What it and its workers said until the last of them was gone."""
    with parent:
        try:
            return parent.communicate(timeout=20)[1]
        finally:
            parent.kill()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_workers_end_with_their_parent_however_it_ends(how: signal.Signals, tmp_path: Path) -> None:
    parent, locks = parent_of_two(tmp_path)
    assert not any(map(is_free, locks))
    parent.send_signal(how)
    last_words(parent)
    wait_until(lambda: all(map(is_free, locks)), 10)


def test_an_interrupt_from_the_terminal_ends_all_and_is_told_once(tmp_path: Path) -> None:
    """Ctrl-C reaches every process of the terminal."""
    parent, locks = parent_of_two(tmp_path)
    os.killpg(parent.pid, signal.SIGINT)
    told = last_words(parent)
    assert all(map(is_free, locks))
    assert told.count("Traceback") == 1
    assert told.strip().endswith("KeyboardInterrupt")
