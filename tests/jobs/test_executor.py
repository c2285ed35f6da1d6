"""Jobs hold functions that another process can find, and run in this one too."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from recap_ctr.jobs.executor import InThisProcess, Job
from recap_ctr.jobs.local import LocalProcesses
from recap_ctr.jobs.progress import brief, say
from recap_ctr.storage.hashes import fingerprint
from tests.support import job_functions


def test_a_job_is_named_after_its_function() -> None:
    assert Job("hash", fingerprint, {}).dotted_name == "recap_ctr.storage.hashes:fingerprint"


def nested() -> Callable[[], None]:
    def inside() -> None:
        pass

    return inside


class Holder:
    def method(self) -> None:
        pass


@pytest.mark.parametrize(
    "function",
    [lambda: None, nested(), Holder.method, Holder().method],
    ids=["lambda", "nested", "function of a class", "method"],
)
def test_what_another_process_could_not_import_is_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"^job seed 1: .* is not a function of a module$"):
        Job("seed 1", function, {})


def test_another_function_of_the_same_name_is_refused() -> None:
    def echo(value: int) -> int:
        return value

    echo.__module__, echo.__qualname__ = job_functions.__name__, "echo"
    with pytest.raises(ValueError, match="echo is not a function of a module"):
        Job("seed 1", echo, {"value": 1})


def test_functions_of_a_script_are_refused() -> None:
    script = "from recap_ctr.jobs.executor import Job\ndef work(): pass\nJob('seed 1', work, {})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "ValueError: job seed 1: __main__:work is not a function of a module" in done.stderr


def test_jobs_in_this_process_are_done_in_order(capfd: pytest.CaptureFixture[str]) -> None:
    jobs = [Job(f"seed {seed}", job_functions.echo, {"value": seed}) for seed in (3, 1, 2)]
    ended: list[tuple[int, int]] = []
    results = InThisProcess().run(
        jobs, title="teachers", done=lambda index, value: ended.append((index, value))
    )
    assert results == [3, 1, 2]
    assert ended == [(0, 3), (1, 1), (2, 2)]
    assert capfd.readouterr().err.endswith("teachers: 3 of 3 done (seed 2)\n")


@pytest.mark.parametrize("executor", [InThisProcess(), LocalProcesses(1)])
def test_a_quiet_executor_shows_no_progress(
    executor: InThisProcess | LocalProcesses, capfd: pytest.CaptureFixture[str]
) -> None:
    assert executor.workers == 1
    assert executor.run([Job("hash", fingerprint, {"value": 1})], title="test", quiet=True) == [
        fingerprint(1)
    ]
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
@pytest.mark.parametrize("executor", [InThisProcess(), LocalProcesses(1)])
def test_messages_of_a_job_are_shown_under_its_name_unless_quiet(
    executor: InThisProcess | LocalProcesses, capfd: pytest.CaptureFixture[str]
) -> None:
    jobs = [Job("seed 1", say, {"text": "epoch 1"})]
    executor.run(jobs, title="test")
    assert capfd.readouterr() == ("", "seed 1: epoch 1\n")
    with brief():
        executor.run(jobs, title="test")
    executor.run(jobs, title="test", quiet=True)
    assert capfd.readouterr() == ("", "")


def test_jobs_of_jobs_are_shown_under_both_names(capfd: pytest.CaptureFixture[str]) -> None:
    InThisProcess().run([Job("outer", job_functions.say_in_a_job, {"text": "hello"})], title="test")
    say("afterwards")
    assert capfd.readouterr() == ("", "outer: inner: hello\nafterwards\n")


def test_an_error_in_this_process_is_passed_on() -> None:
    jobs = [Job("seed 1", job_functions.fail, {}), Job("seed 2", say, {"text": "never"})]
    with pytest.raises(KeyError, match="a mistake of ours"):
        InThisProcess().run(jobs, title="test", quiet=True)
