"""Jobs as processes: order, number, failures, and that none outlives its parent."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recap_ctr.errors import InputError
from recap_ctr.jobs import local
from recap_ctr.jobs.executor import Job, JobError
from recap_ctr.jobs.local import LocalProcesses
from recap_ctr.jobs.progress import announce_epoch, heard_by, say
from recap_ctr.storage.hashes import fingerprint
from tests.support import job_functions

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def workers_can_import_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)


def job(name: str, function: Callable[..., Any], **arguments: object) -> Job:
    return Job(name, function, arguments)


def run_jobs(jobs: list[Job], *, workers: int, title: str = "test", quiet: bool = True) -> list[Any]:
    return LocalProcesses(workers).run(jobs, title=title, quiet=quiet)


def is_free(lock: Path) -> bool:
    """Return whether whoever held the lock is gone."""
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
    """Run a job that fails next to one that would run for ever; return the error."""
    with pytest.raises(kind, match=message) as caught:
        run_jobs([job("endless", job_functions.hold, lock=str(lock)), other], workers=2)
    assert is_free(lock)
    return caught.value


@pytest.mark.slow
def test_results_come_in_the_order_of_the_jobs() -> None:
    """Also of those that end first, of long ones, and of functions of the package."""
    values = [{"a": [1, None, "ü"]}, "x" * 100_000]
    jobs = [
        job(str(at), job_functions.echo, value=value, after=0.1 - 0.1 * at) for at, value in enumerate(values)
    ]
    jobs.append(job("last", fingerprint, value=values))
    assert run_jobs(jobs, workers=3) == [*values, fingerprint(values)]


@pytest.mark.slow
def test_epochs_are_heard_of_in_the_process_that_gave_out_the_jobs() -> None:
    epochs: list[tuple[str, Any]] = []
    jobs = [job("run", announce_epoch, directory="runs/a", figures={"epoch": 1})]
    with heard_by(lambda directory, figures: epochs.append((directory, figures))):
        run_jobs(jobs, workers=1)
    run_jobs(jobs, workers=1)  # Nobody listens any more.
    assert epochs == [("runs/a", {"epoch": 1})]


def test_no_jobs() -> None:
    assert run_jobs([], workers=1) == []


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_so_many_at_a_time_and_no_more(workers: int, tmp_path: Path) -> None:
    jobs = [job(str(at), job_functions.count, directory=str(tmp_path)) for at in range(workers + 1)]
    assert max(run_jobs(jobs, workers=workers)) <= workers


def test_without_workers_nothing_is_begun() -> None:
    with pytest.raises(ValueError, match="0 workers"):
        run_jobs([job("seed 1", job_functions.echo, value=1)], workers=0)


def test_bad_input_is_told_with_the_name_of_the_job_and_its_fix(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    refuses = job(
        "seed 2", job_functions.refuse, after=f"{lock}.held", message="row 3: no 'ü'", fix="rename it"
    )
    error = fails_and_leaves_nobody(lock, refuses, InputError, "row 3")
    assert isinstance(error, InputError)
    assert (error.message, error.fix) == ("seed 2: row 3: no 'ü'", "rename it")


@pytest.mark.parametrize(
    ("function", "arguments", "code"),
    [
        (job_functions.leave, {"code": 3}, 3),
        (job_functions.leave, {"code": 0}, 0),
        (job_functions.stop, {}, 0),
        (job_functions.die, {}, -signal.SIGKILL),
        (job_functions.die_in_the_middle_of_a_line, {}, -signal.SIGKILL),
        (job_functions.fail, {}, 1),
        (job_functions.not_json, {}, 1),
        (job_functions.echo, {"unknown": 1}, 1),
    ],
)
def test_a_job_without_a_result_is_an_error(
    function: Callable[..., Any],
    arguments: dict[str, object],
    code: int,
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(JobError, match=f"^seed 1 ended without a result, with code {code}$"):
        run_jobs([job("seed 1", function, **arguments)], workers=1)
    assert ("a mistake of ours" in capfd.readouterr().err) == (function is job_functions.fail)


def test_a_function_that_the_worker_can_not_find_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PYTHONPATH")
    with pytest.raises(JobError, match="with code 1"):
        run_jobs([job("seed 1", job_functions.echo, value=1)], workers=1)
    assert "No module named" in capfd.readouterr().err


def test_a_job_that_dies_takes_the_others_along(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    fails_and_leaves_nobody(
        lock, job("dies", job_functions.die, after=f"{lock}.held"), JobError, "dies ended"
    )


@pytest.mark.slow
def test_a_killed_worker_is_replaced(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    echo = {"function": "tests.support.job_functions:echo", "arguments": {"value": 7}}
    jobs = [
        job("other", job_functions.echo, value=1),
        Job("killed once", job_functions.die_then_do, {"mark": str(tmp_path / "mark"), **echo}),
    ]
    assert LocalProcesses(1, retries=1).run(jobs, title="test") == [1, 7]
    assert "killed once: its worker was lost; it begins again with another\n" in capfd.readouterr().err
    with pytest.raises(JobError, match=f"always ended without a result, with code {-signal.SIGKILL}"):
        LocalProcesses(1, retries=1).run([job("always", job_functions.die)], title="test", quiet=True)
    with pytest.raises(JobError, match="fails ended without a result, with code 3"):
        LocalProcesses(1, retries=1).run(
            [job("fails", job_functions.leave, code=3)], title="test", quiet=True
        )


def test_a_worker_that_never_reads_its_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os; os._exit(7)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    long = job("long", job_functions.echo, value="x" * 1_000_000)  # more than a pipe holds
    with pytest.raises(JobError, match="long ended without a result, with code 7"):
        run_jobs([long], workers=1)


def test_files_of_the_current_directory_are_no_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("json.py", "rich.py", "recap_ctr.py"):
        (tmp_path / name).write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    assert run_jobs([job("seed 1", job_functions.echo, value=1)], workers=1) == [1]


def test_what_a_job_prints_is_no_event(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_jobs([job("seed 1", job_functions.chatter)], workers=1) == ["mine"]
    shown = capfd.readouterr()
    assert shown.out == ""
    for text in ("forged", "no newline", "from a child"):
        assert text in shown.err


@pytest.mark.slow
def test_what_a_job_says_is_told_under_its_name(capfd: pytest.CaptureFixture[str]) -> None:
    jobs = [job(f"seed {seed}", say, text=f"epoch [{seed}] {{ü}}") for seed in (1, 2)]
    assert run_jobs(jobs, workers=1, title="teachers", quiet=False) == [None, None]
    assert capfd.readouterr() == (
        "",
        "seed 1: epoch [1] {ü}\nteachers: 1 of 2 done (seed 1)\n"
        "seed 2: epoch [2] {ü}\nteachers: 2 of 2 done (seed 2)\n",
    )


def test_nothing_is_told_when_quiet(capfd: pytest.CaptureFixture[str]) -> None:
    jobs = [job(str(at), say, text="hello") for at in range(2)]
    run_jobs(jobs, workers=2)
    assert capfd.readouterr() == ("", "")


PARENT = """
import json, sys
from recap_ctr.jobs.executor import Job
from recap_ctr.jobs.local import LocalProcesses
from tests.support.job_functions import hold
jobs = [Job(name, hold, arguments) for name, arguments in json.loads(sys.argv[1])]
LocalProcesses(len(jobs)).run(jobs, title="test", quiet=True)
"""


def parent_of_two(tmp_path: Path) -> tuple["subprocess.Popen[str]", list[Path]]:
    """Start a process with two endless jobs, one of which keeps its core busy; return when both have begun."""
    locks = [tmp_path / "sleeping", tmp_path / "busy"]
    jobs = [(lock.name, {"lock": str(lock), "busy": lock.name == "busy"}) for lock in locks]
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, json.dumps(jobs)],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        wait_until(lambda: all(Path(f"{lock}.held").exists() for lock in locks), 60)
    except AssertionError:
        parent.kill()
        raise
    return parent, locks


def last_words(parent: "subprocess.Popen[str]") -> str:
    """Return what the process and its workers wrote until the last of them was gone."""
    with parent:
        try:
            return parent.communicate(timeout=60)[1]
        finally:
            parent.kill()


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_workers_end_with_their_parent_however_it_ends(how: signal.Signals, tmp_path: Path) -> None:
    parent, locks = parent_of_two(tmp_path)
    assert not any(map(is_free, locks))
    parent.send_signal(how)
    last_words(parent)
    wait_until(lambda: all(map(is_free, locks)), 60)


@pytest.mark.slow
def test_an_interrupt_from_the_terminal_ends_all_and_is_told_once(tmp_path: Path) -> None:
    """Ctrl-C reaches every process of the terminal."""
    parent, locks = parent_of_two(tmp_path)
    os.killpg(parent.pid, signal.SIGINT)
    error = last_words(parent)
    assert all(map(is_free, locks))
    assert error.count("Traceback") == 1
    assert error.strip().endswith("KeyboardInterrupt")


@pytest.mark.slow
def test_a_worker_takes_one_job_after_the_other() -> None:
    """Also those of a later call, and also after a job that met bad input."""
    executor = LocalProcesses(1)
    jobs = [job(str(at), job_functions.process_id) for at in range(3)]
    first = executor.run(jobs, title="test", quiet=True)
    assert len({*first, *executor.run(jobs, title="test", quiet=True)}) == 1

    with pytest.raises(InputError):
        executor.run(
            [job("bad", job_functions.refuse, after=__file__, message="no")], title="test", quiet=True
        )
    assert executor.run(jobs[:1], title="test", quiet=True) != first[:1]


@pytest.mark.slow
def test_idle_workers_end_with_their_executor() -> None:
    executor = LocalProcesses(1)
    (number,) = executor.run([job("one", job_functions.process_id)], title="test", quiet=True)
    os.kill(number, 0)
    del executor
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)


@pytest.mark.slow
def test_a_worker_that_died_while_idle_is_replaced() -> None:
    executor = LocalProcesses(1)
    ask = [job("one", job_functions.process_id)]
    (number,) = executor.run(ask, title="test", quiet=True)
    os.kill(number, signal.SIGKILL)
    os.waitid(os.P_PID, number, os.WEXITED | os.WNOWAIT)  # It is gone, and its parent has still to find out.
    assert executor.run(ask, title="test", quiet=True) != [number]


@pytest.mark.parametrize(("decided", "expected"), [(None, "4"), ("3", "3")])
def test_libraries_have_a_workers_share_of_the_cores(
    decided: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "num_cores", lambda: 8)
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    if decided:
        monkeypatch.setenv("OPENBLAS_NUM_THREADS", decided)
    jobs = [Job("a", job_functions.threads_of_libraries, {})]
    assert LocalProcesses(2).run(jobs, title="jobs", quiet=True) == [expected]
