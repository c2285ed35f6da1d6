"""One run: training from one seed, then calibration, evaluation and the artifact, in one resumable directory."""

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from recap_ctr.axes.teachers import TeacherTargets, teacher_targets
from recap_ctr.config import Frozen
from recap_ctr.data.shards import PreparedData, Rows
from recap_ctr.errors import InputError
from recap_ctr.inference.manifest import MANIFEST
from recap_ctr.inference.torch_backend import load_artifact
from recap_ctr.jobs.progress import say
from recap_ctr.models.catalogue import PARTS
from recap_ctr.models.recap import RecapConfig, assign_columns
from recap_ctr.nn.group import Group, current_group
from recap_ctr.storage.claims import claim, is_claimed
from recap_ctr.storage.files import remove_directory
from recap_ctr.storage.locks import locked
from recap_ctr.training.beside import BLEND, train_blend
from recap_ctr.training.boosted import BOOSTED, train_boosted
from recap_ctr.training.breakdown import check_slices
from recap_ctr.training.config import ARTIFACT, LOGITS, RunConfig
from recap_ctr.training.finish import finish
from recap_ctr.training.linear import train_linear
from recap_ctr.training.loop import Start, Trained, Trainer, train
from recap_ctr.training.pool import read_pool
from recap_ctr.training.rates import RATES, train_rates, with_rates
from recap_ctr.training.report import REPORT, RunReport, read_report

# Parts of a run that other packages know by this address, whichever file of this package holds them.
__all__ = [
    "advance",
    "epoch_seconds",
    "is_finished",
    "reopen",
    "run",
]
TIMED_STEPS = 16


def run(
    config: RunConfig,
    data: PreparedData,
    out: Path,
    *,
    force: bool = False,
    quiet: bool = False,
    deadline: float | None = None,
) -> RunReport:
    """Train a run, or go on with one that was interrupted, or read the report of a finished one.

    At the `deadline`, a value of `time.time`, training ends with the weights that it has. Workers of a group train the
    run together; only the first claims the directory, and writes what is written once for a run.
    """
    group = current_group()
    quiet = quiet or not group.is_first
    if group.size > 1:
        _refuse_group(config)
    check_slices(config.slices, data.schema)
    torch.set_num_threads(max(config.threads // group.local_size, 1))
    inputs = config.training_inputs(data)
    trained_before = group.decide(group.is_first and claim(out, inputs, finished=REPORT, force=force))
    _refuse_unshared(out, inputs, group)
    if trained_before and group.decide(group.is_first and is_finished(out, config)):
        if not quiet:
            say(f"{out} is up to date")
        return read_report(out)
    with locked(out) if group.is_first else nullcontext():
        if trained_before and group.is_first:
            if not quiet:
                say(f"{out} is trained; calibrating, measuring and packing it again")
            _remove_results(out, config)
        trained = _train(config, data, out, quiet=quiet, deadline=deadline)
        return finish(config, data, out, trained, quiet=quiet)


def _refuse_group(config: RunConfig) -> None:
    """Refuse what only one worker can do."""
    if config.train.update == "convex" or config.model in PARTS:
        raise InputError(f"{config.model} of this kind is trained by one worker", fix="remove --workers")
    if config.beside or config.on_top is not None:
        raise InputError("parts beside the towers are put there by one worker", fix="remove --workers")


def _refuse_unshared(out: Path, inputs: dict[str, Any], group: Group) -> None:
    """Refuse a directory that some workers don't see: the first one has just claimed it."""
    missing = int(group.sum_(torch.tensor(int(not is_claimed(out, inputs)))))
    if missing:
        raise InputError(
            f"{missing} of {group.size} workers don't see {out}, which the first one has made",
            fix="choose an --out that all machines share; if it is a URL, let RECAP_CACHE name such a directory",
        )


def advance(
    config: RunConfig,
    data: PreparedData,
    out: Path,
    *,
    until: int | None,
    deadline: float | None,
    quiet: bool,
) -> Trained:
    """Train the weights of a run for a while, and return the best so far; nothing is calibrated or packed.

    `until` is an epoch, `deadline` a time of `time.time`. What an earlier call packed is removed, because it is out of
    date.
    """
    torch.set_num_threads(config.threads)
    was_packed = claim(out, config.training_inputs(data), finished=REPORT, force=False)
    with locked(out):
        if was_packed:
            _remove_results(out, config, trained_on=True)
        return _train(config, data, out, quiet=quiet, until=until, deadline=deadline)


def _train(
    config: RunConfig,
    data: PreparedData,
    out: Path,
    *,
    quiet: bool,
    until: int | None = None,
    deadline: float | None = None,
) -> Trained:
    """Train the weights, or go on from the last saved state."""
    device = torch.device(config.device)
    if config.train.update == "convex":
        return train_linear(
            config.model_config, data, device, config.train.seed, deadline=deadline, quiet=quiet
        )
    if config.model == BLEND:
        return train_blend(config.beside, data, device)
    if config.model == BOOSTED:
        return train_boosted(
            config.model_config,
            data,
            device,
            threads=config.threads,
            seed=config.train.seed,
            deadline=deadline,
            quiet=quiet,
        )
    if config.model == RATES:
        return train_rates(
            config.model_config,
            config.train,
            data,
            out,
            device=device,
            until=until,
            deadline=deadline,
            quiet=quiet,
        )
    targets = _targets(config, data) if config.teachers else None
    model_config: Frozen = config.model_config
    rows: Rows = data
    start = None
    if config.on_top is not None:
        rates = load_artifact(config.on_top / ARTIFACT).model
        model_config, rows, initial = with_rates(model_config, rates, data)
        start = Start(initial)
    return train(
        config.model,
        model_config,
        config.train,
        rows,
        out,
        device=device,
        targets=targets,
        start=start,
        pool=read_pool(config.pool, config.train.recombined, data),
        until=until,
        deadline=deadline,
        quiet=quiet,
    )


def _targets(config: RunConfig, data: PreparedData) -> TeacherTargets:
    """Return what a student learns from, one probability for each training row."""
    if config.train.kd_from == "mean":
        return teacher_targets(config.teachers, data)
    assert isinstance(config.model_config, RecapConfig)
    num_adapters = config.model_config.num_adapters

    def columns_of(rows: slice) -> npt.NDArray[np.int64]:
        ids = torch.from_numpy(np.array(data.train.ids[rows]))
        columns: npt.NDArray[np.int64] = assign_columns(ids, num_adapters).numpy()
        return columns

    return teacher_targets(config.teachers, data, columns_of)


def is_finished(out: Path, config: RunConfig) -> bool:
    """Return whether a trained run has been calibrated, measured and packed as `config` wants it.

    A run whose artifact was moved away is not finished: it is packed again.
    """
    if not (out / REPORT).is_file() or not (out / ARTIFACT / MANIFEST).is_file():
        return False
    report = read_report(out)
    return (
        report.calibration == config.calibration
        and report.negative_rate == config.negative_rate
        and report.slices == (None if config.slices is None else list(config.slices))
        and (report.reference is not None) == config.train_baseline
        and (report.routes.count, report.routes.choice) == (config.routes, config.route_choice)
        and (report.beside is not None) == bool(config.beside)
    )


def reopen(config: RunConfig, out: Path) -> None:
    """Go back to the trained weights of a run that was packed early, so that the next call trains it further."""
    with locked(out):
        _remove_results(out, config, trained_on=True)


def _remove_results(out: Path, config: RunConfig, *, trained_on: bool = False) -> None:
    """Go back to the trained weights. Remove the logits too, if weights or the routes that they are of may change."""
    routes = read_report(out).routes
    may_change = trained_on or config.route_choice == "greedy" or config.routes is None or config.beside
    if may_change or (routes.count, routes.choice) != (config.routes, config.route_choice):
        remove_directory(out / LOGITS)
    (out / REPORT).unlink()


def epoch_seconds(config: RunConfig, data: PreparedData) -> float:
    """Return how long an epoch of a run takes on this machine, measured over a few of its steps."""
    torch.set_num_threads(config.threads)
    trainer = Trainer(config.model, config.model_config, config.train, data, torch.device(config.device))
    trainer.step()
    steps = min(TIMED_STEPS, trainer.steps_per_epoch)
    started = time.monotonic()
    for _ in range(steps):
        trainer.step()
    return (time.monotonic() - started) / steps * trainer.steps_per_epoch
