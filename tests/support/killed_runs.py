"""A run that is killed once. Its module is small because each worker imports it."""

import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

from recap_ctr.training.loop import Trainer
from recap_ctr.training.parallel import run_and_write_logits


def run_killed_once(out: str, **arguments: Any) -> dict[str, Any]:
    """Do a run, but be killed in its second epoch, the first time."""
    step_of_trainer, mark = Trainer.step, Path(f"{out}.killed")

    def step(trainer: Trainer) -> int:
        if trainer.progress.step == trainer.steps_per_epoch + 1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return step_of_trainer(trainer)

    with mock.patch.object(Trainer, "step", step):
        return run_and_write_logits(out=out, **arguments)
