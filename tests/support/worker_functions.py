"""Jobs of workers that train one model together, as tests start them."""

import io
import os
import signal
import sys
import time
from contextlib import redirect_stdout
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from recap_ctr.axes.logits import Estimator
from recap_ctr.axes.predict import write_logits
from recap_ctr.cli.main import main
from recap_ctr.config import TrainConfig
from recap_ctr.data.shards import PreparedData
from recap_ctr.jobs.executor import LostWorkerError
from recap_ctr.models.catalogue import parse_model
from recap_ctr.nn.group import Group
from recap_ctr.nn.interface import Inputs, Output
from recap_ctr.nn.weights import save_tensors
from recap_ctr.training import checkpoint, loop, workers
from recap_ctr.training.loop import STATE, Trainer
from recap_ctr.training.workers import INTERFACE, loopback, member, run_as_worker, torchrun_member

CPU = torch.device("cpu")


def trainer_in_double(model: str, settings: dict[str, Any], train: dict[str, Any], data: str) -> Trainer:
    """Return a trainer whose weights and losses are double: rounding then hides no mistake, and Adam magnifies none."""
    torch.set_default_dtype(torch.float64)
    try:
        rows = PreparedData(Path(data), verify=False)
        trainer = Trainer(model, parse_model(model, settings), TrainConfig(**train), rows, CPU)
    finally:
        torch.set_default_dtype(torch.float32)
    loss = trainer.loss

    def loss_in_double(output: Output, labels_B: Tensor, weights_B: Tensor | None) -> Tensor:
        return loss(output, labels_B.double(), None if weights_B is None else weights_B.double())

    trainer.loss = loss_in_double
    trainer.model.register_forward_pre_hook(_with_numbers_like_weights)
    return trainer


def _with_numbers_like_weights(model: nn.Module, arguments: tuple[Inputs]) -> tuple[Inputs]:
    (inputs,) = arguments
    return (Inputs(inputs.ids_BW, inputs.values_BN.to(next(model.parameters()).dtype)),)


def take_steps(
    rank: int, size: int, meeting: str, data: str, out: str, cases: list[dict[str, Any]]
) -> list[float]:
    """Train each case for some steps, write its weights, and return the losses; all cases share one process group.

    A case resumes from the state in its directory if there is one, and leaves its own there.
    """
    os.environ.setdefault(INTERFACE, loopback())
    losses = []
    with member(Group(rank, size, local_size=size), "cpu", meeting=Path(meeting)):
        for case in cases:
            directory = Path(out) / case["name"]
            directory.mkdir(parents=True, exist_ok=True)
            trainer = trainer_in_double(case["model"], case["settings"], case["train"], data)
            if (directory / STATE).is_file():
                trainer.resume(directory)
            for _ in range(case["steps"]):
                trainer.step()
            losses.append(trainer.progress.loss_sum)
            trainer.save(directory)
            checkpoint.save_whole(directory / "weights.safetensors", trainer.model)
            if case.get("logits"):
                rows = PreparedData(Path(data), verify=False)
                estimators = {Estimator("run"): trainer.model.float()}
                write_logits(directory / "logits", estimators, rows, "valid", CPU)
    return losses


def run_and_die(saves: int, **arguments: Any) -> dict[str, Any]:
    """Do a run that saves after every step; the second worker is killed before it writes a part of its last state."""
    loop.SAVE_SECONDS = -1.0
    parts = 0

    def save_or_die(*written: Any) -> None:
        nonlocal parts
        parts += 1
        if parts == saves and arguments["rank"] == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        save_tensors(*written)

    setattr(checkpoint, "save_tensors", save_or_die)  # noqa: B010
    return run_as_worker(**arguments)


def run_and_be_killed_once(**arguments: Any) -> dict[str, Any]:
    """Do a run that saves after every step; the second worker is killed in its sixth, the first time."""
    loop.SAVE_SECONDS = -1.0
    step_of_trainer, mark = Trainer.step, Path(f"{arguments['out']}.killed")

    def step(trainer: Trainer) -> int:
        if arguments["rank"] == 1 and trainer.progress.step == 5 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return step_of_trainer(trainer)

    with mock.patch.object(Trainer, "step", step):
        return run_as_worker(**arguments)


def meet(rank: int, size: int, directory: str) -> int:
    """Wait until all jobs of a group are here, and return how many there are; two at a time would wait forever."""
    place, end = Path(directory), time.monotonic() + 60
    (place / f"{rank}-came").touch()
    while len(list(place.glob("*-came"))) < size:
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.05)
    return size


def lose_the_other(rank: int) -> None:
    """Do as a worker that lost contact."""
    raise LostWorkerError(f"worker {rank} lost contact")


def join_by_torchrun(variables: dict[str, str], after: float) -> float:
    """Join the group that torchrun's variables describe, after some seconds, and return the sum of all ranks."""
    time.sleep(after)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "TIMEOUT", timedelta(seconds=20))
        for name, value in variables.items():
            patch.setenv(name, value)
        with torchrun_member("cpu") as group:
            return float(group.sum_(torch.tensor(float(group.rank))))


def command_of_torchrun(command: list[str], variables: dict[str, str]) -> str:
    """Run `recap` as torchrun runs it, with its variables, and return what it prints."""
    with (
        pytest.MonkeyPatch.context() as patch,
        redirect_stdout(io.StringIO()) as printed,
        pytest.raises(SystemExit) as end,
    ):
        patch.setattr(sys, "argv", ["recap", *command])
        for name, value in variables.items():
            patch.setenv(name, value)
        main()
    assert end.value.code == 0
    return printed.getvalue()
