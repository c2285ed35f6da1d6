"""What does the work of a recipe's stages: for real here, or as a rehearsal that counts what is missing."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from recap_ctr.axes.logits import table_checksum
from recap_ctr.data.shards import PreparedData
from recap_ctr.jobs.executor import Executor, Job
from recap_ctr.recipe.probe import ProbeResult, Race
from recap_ctr.training.config import RunConfig
from recap_ctr.training.parallel import Runs, run_many


class StageRunner(Protocol):
    """Whatever does the work of the stages: for real, or as a rehearsal that only counts what is missing."""

    @property
    def workers(self) -> int:
        """Return how many runs are trained at a time."""
        ...

    @property
    def keeps_plans(self) -> bool:
        """Return whether decisions may be recorded; those of a rehearsal may rest on guesses."""
        ...

    def probe(self, race: Race) -> ProbeResult:
        """Find settings by a probe."""
        ...

    def train(
        self, configs: dict[Path, RunConfig], data: PreparedData, title: str, deadline: float | None = None
    ) -> Runs:
        """Do the runs side by side, each in its directory; read the reports of those that are finished.

        At the `deadline`, a time of `time.time`, training ends with what it has.
        """
        ...

    def run(self, jobs: Sequence[Job], title: str) -> list[Any]:
        """Run other jobs and return their results in order."""
        ...

    def checksum(self, table: Path) -> str:
        """Return the checksum of a logit table, which names what is learnt from it."""
        ...


@dataclass(frozen=True)
class Runner:
    """Do the work of the stages for real."""

    executor: Executor
    quiet: bool = False
    keeps_plans: bool = True

    @property
    def workers(self) -> int:
        """Return how many runs are trained at a time."""
        return self.executor.workers

    def probe(self, race: Race) -> ProbeResult:
        """Find settings by a probe."""
        return race.run(self.executor, quiet=self.quiet)

    def train(
        self, configs: dict[Path, RunConfig], data: PreparedData, title: str, deadline: float | None = None
    ) -> Runs:
        """Do the runs side by side, each in its directory; read the reports of those that are finished."""
        return run_many(
            configs, data, title=title, executor=self.executor, quiet=self.quiet, deadline=deadline
        )

    def run(self, jobs: Sequence[Job], title: str) -> list[Any]:
        """Run other jobs and return their results in order."""
        return self.executor.run(jobs, title=title, quiet=self.quiet)

    def checksum(self, table: Path) -> str:
        """Return the checksum of a logit table, which names what is learnt from it."""
        return table_checksum(table)
