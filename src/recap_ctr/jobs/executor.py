"""Jobs, and what runs them: this process here, processes of this machine in `local`, a cluster in `ray`.

A job is a function of a module with plain arguments. It crosses to another process as the function's dotted name and
its arguments as JSON, so it can be run again after a crash, by hand or on another machine, and nothing is pickled.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from recap_ctr.jobs.progress import board, sent_to
from recap_ctr.plugins import resolve


@dataclass(frozen=True)
class Job:
    """A call of `function`, a function of a module, with arguments that JSON can hold."""

    name: str
    function: Callable[..., Any]
    arguments: dict[str, Any]

    def __post_init__(self) -> None:
        """Refuse what another process could not import, such as a lambda, a method or a function of a script."""
        try:
            found_again = (
                self.function.__module__ != "__main__" and resolve(self.dotted_name) is self.function
            )
        except AttributeError:
            found_again = False
        if not found_again:
            raise ValueError(f"job {self.name}: {self.dotted_name} is not a function of a module")

    @property
    def dotted_name(self) -> str:
        """Return the function's name as module:function, by which another process finds it."""
        return f"{self.function.__module__}:{self.function.__qualname__}"


class JobError(RuntimeError):
    """A job ended in a way that the user can't put right."""


class LostWorkerError(JobError):
    """A worker is gone, and others can't go on without it; all of them together can begin again."""


class Executor(Protocol):
    """What runs jobs."""

    @property
    def workers(self) -> int:
        """Return how many jobs run at a time."""
        ...

    def run(
        self,
        jobs: Sequence[Job],
        *,
        title: str,
        quiet: bool = False,
        done: Callable[[int, Any], None] | None = None,
    ) -> list[Any]:
        """Run all jobs and return their results in order; call `done` with each job's index and result as it ends."""
        ...


class SideBySide(Executor, Protocol):
    """What can also run jobs that need each other, all of them at the same time."""

    def together(self, count: int) -> AbstractContextManager[Executor]:
        """Reserve workers for `count` jobs; what is yielded runs all of them at once, and replaces no lost worker."""
        ...


@dataclass(frozen=True)
class InThisProcess:
    """Run jobs one after the other in this process."""

    workers: int = 1

    def run(
        self,
        jobs: Sequence[Job],
        *,
        title: str,
        quiet: bool = False,
        done: Callable[[int, Any], None] | None = None,
    ) -> list[Any]:
        """Run all jobs and return their results in order; call `done` with each job's index and result as it ends."""
        results = []
        with board(title, len(jobs), quiet=quiet) as shown:
            for index, job in enumerate(jobs):
                with sent_to(partial(shown.receive, job.name)):
                    results.append(job.function(**job.arguments))
                shown.finish(job.name)
                if done is not None:
                    done(index, results[-1])
        return results
