"""Jobs that are not done twice."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from recap_ctr.jobs.executor import InThisProcess, Job
from recap_ctr.jobs.resumable import ResumableJobs
from tests.support import job_functions

JOBS = [Job(str(at), job_functions.echo, {"value": at * 10}) for at in range(4)]


@dataclass(frozen=True)
class Interrupted(InThisProcess):
    """Is interrupted after so many jobs."""

    after: int = 0

    def run(
        self,
        jobs: Sequence[Job],
        *,
        title: str,
        quiet: bool = False,
        done: Callable[[int, Any], None] | None = None,
    ) -> list[Any]:
        super().run(jobs[: self.after], title=title, quiet=quiet, done=done)
        raise KeyboardInterrupt


def run(directory: Path) -> tuple[list[Any], list[int]]:
    """Return the results, and which jobs were run for them."""
    ran: list[int] = []
    executor = ResumableJobs(InThisProcess(), directory)
    results = executor.run(JOBS, title="a title", quiet=True, done=lambda at, _: ran.append(at))
    assert executor.shares == {"a title": pytest.approx(1.0)}
    return results, ran


def test_only_what_is_missing_is_run(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        ResumableJobs(Interrupted(after=2), tmp_path).run(JOBS, title="a title", quiet=True)
    assert run(tmp_path) == ([0, 10, 20, 30], [2, 3])
    ResumableJobs(InThisProcess(), tmp_path).forget("a title", 1)
    assert run(tmp_path) == ([0, 10, 20, 30], [1])
    assert run(tmp_path) == ([0, 10, 20, 30], [])


def test_a_damaged_result_is_made_again(tmp_path: Path) -> None:
    run(tmp_path)
    file = sorted(tmp_path.glob("*.json"))[2]
    file.write_text(file.read_text().replace("20", "21"))
    assert run(tmp_path) == ([0, 10, 20, 30], [2])


def test_what_was_done_before_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run(tmp_path)
    ResumableJobs(InThisProcess(), tmp_path).run(JOBS, title="a title")
    assert capfd.readouterr().err == "a title: 4 of 4 were done before\n"


def test_once(tmp_path: Path) -> None:
    values = iter([None, [3], 5])
    for _ in range(2):
        jobs = ResumableJobs(InThisProcess(), tmp_path)
        assert jobs.once("first", lambda: next(values)) is None
        assert jobs.once("second", lambda: next(values)) == [3]


def test_directories_that_no_result_names_are_removed(tmp_path: Path) -> None:
    for name in ("named-1", "named-2", "abandoned"):
        (tmp_path / name / "inside").mkdir(parents=True)
    (tmp_path / "file").touch()
    jobs = ResumableJobs(InThisProcess(), tmp_path / "results")
    jobs.once("first", lambda: {"directory": str(tmp_path / "named-1")})
    jobs.run([Job("one", job_functions.echo, {"value": ["named-2"]})], title="t", quiet=True)
    jobs.remove_abandoned(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "named-1", "named-2", "results"]
