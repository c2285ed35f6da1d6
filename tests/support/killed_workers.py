"""Workers of a hyperparameter search that are killed. Their module is small because each of them imports it."""

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

from recap_ctr.jobs.executor import Job
from recap_ctr.jobs.local import LocalProcesses
from recap_ctr.recipe.tune import work
from recap_ctr.training.loop import Trainer


def work_until_killed(**arguments: Any) -> int:
    """Do a worker's job until the middle of a trial's second epoch, then be killed by the system."""
    step_of_trainer = Trainer.step

    def step(trainer: Trainer) -> int:
        if trainer.progress.step == trainer.steps_per_epoch + 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return step_of_trainer(trainer)

    with mock.patch.object(Trainer, "step", step):
        return work(**arguments)


@dataclass(frozen=True)
class KilledWorkers:
    """Local processes whose workers are killed."""

    workers: int

    def run(self, jobs: Sequence[Job], *, title: str, quiet: bool) -> list[Any]:
        killed = [Job(job.name, work_until_killed, job.arguments) for job in jobs]
        return LocalProcesses(self.workers).run(killed, title=title, quiet=quiet)
