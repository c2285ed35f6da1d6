"""The probe: how strong the regulariser and how large the step must be for these data, found on validation.

Successive halving over a log grid: all candidates train for some epochs, the better half goes on, and so on; then the
winner's neighbours try to beat it. A weak regulariser is fast and soon over-fits, a strong one is slow and wins late:
so the first rung is long enough for the former to peak, and candidates are ranked by what they still promise. One that
stops gaining is done early, as in any run. What was decided is recorded, and read back instead of decided again.

Strengths are given per data set, l2 · rows: the weight of the prior against all rows. So a grid suits data of any size,
and what a sample of the rows found holds for all of them.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from recap_ctr import environment, metrics
from recap_ctr.config import Frozen, TrainConfig, parse
from recap_ctr.data.shards import PreparedData
from recap_ctr.distil import teacher_targets
from recap_ctr.engine import Job, run_jobs
from recap_ctr.errors import InputError
from recap_ctr.logits import Estimator, LogitTable
from recap_ctr.models import parse_model
from recap_ctr.predict import write_logits
from recap_ctr.progress import say
from recap_ctr.storage import claim, read_json, write_json
from recap_ctr.train import train as fit_weights

RESULT, VALID = "probe.json", "valid"
CONFIRM_STEP = 4


class ProbeConfig(Frozen):
    """What is tried, and for how long."""

    strengths: tuple[NonNegativeFloat, ...] = (1e1, 1e2, 1e3, 1e4, 1e5)
    """l2 · rows."""
    rungs: tuple[PositiveInt, ...] = (8, 16)
    """Epochs after which the better half is kept."""
    refinements: tuple[PositiveFloat, ...] = (0.5, 0.25)
    """Decades to each side of the best strength so far, tried one after the other."""
    rate_factors: tuple[PositiveFloat, ...] = (0.5, 2.0)
    """Then those of the learning rate, where it isn't given."""
    confirm: NonNegativeInt = 16
    """Epochs that an arm which promises most may go on, until it has indeed passed all others."""
    max_rows: PositiveInt = 300_000
    """Training rows, drawn at random, where there are more."""


@dataclass(frozen=True)
class Arm:
    """One candidate."""

    l2: float
    learning_rate: float

    @property
    def name(self) -> str:
        return f"l2={self.l2:.3g},learning_rate={self.learning_rate:.3g}"


@dataclass
class Standing:
    """How an arm has done so far."""

    arm: Arm
    aucs: list[float]
    logloss: float
    seconds: float
    asked: int
    """Epochs that it was given; it has used fewer if it stopped gaining."""

    @property
    def auc(self) -> float:
        return max(self.aucs)

    @property
    def outlook(self) -> float:
        """Its AUC if the last epoch's gain were to last for as long again: what keeps slow starters in the race."""
        gain = self.aucs[-1] - self.aucs[-2] if len(self.aucs) > 1 else 0.0
        return max(self.auc, self.aucs[-1] + max(gain, 0.0) * len(self.aucs))

    def lead(self, other: "Standing") -> float:
        """By how much it is ahead: in the end if the other stopped by itself, else when that was last seen."""
        seen = len(other.aucs)
        return (self.auc if seen < other.asked else max(self.aucs[:seen])) - other.auc


@dataclass(frozen=True)
class Found:
    """The probe's answer."""

    l2: float
    learning_rate: float
    auc: float
    seconds_per_epoch: float
    """Of one run on all training rows, on this machine."""
    runner_up: str | None
    margin: float
    """The best's validation AUC minus the runner-up's, and the standard error of that difference."""
    margin_error: float

    @property
    def verdict(self) -> str:
        if self.runner_up is None:
            return "there was nothing to compare it with"
        ratio = self.margin / self.margin_error if self.margin_error > 0 else math.inf
        sure = "clear" if ratio > 3 else "likely" if ratio > 1.5 else "a toss-up"
        return (
            f"{sure}: {100 * self.margin:.3f} ± {100 * self.margin_error:.3f} points of validation AUC"
            f" before {self.runner_up}"
        )


def grid(config: ProbeConfig, rows: int, learning_rate: float) -> list[Arm]:
    return [Arm(_rounded(strength / rows), learning_rate) for strength in config.strengths]


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def survivors(standings: Sequence[Standing]) -> list[Standing]:
    """The better half, by outlook; ties go to the stronger regulariser, which is the safer one."""
    ranked = sorted(standings, key=lambda one: (-one.outlook, -one.arm.l2))
    return ranked[: max(len(ranked) // 2, 1)]


def probe(
    config: ProbeConfig,
    model: str,
    model_config: Frozen,
    settings: TrainConfig,
    data: PreparedData,
    out: Path,
    *,
    threads: int,
    device: str,
    probe_rate: bool = True,
    teachers: Sequence[Path] = (),
    workers: int | None = None,
    quiet: bool = False,
) -> Found:
    """Find l2 and, if wanted, the learning rate for `model`; the rest of `settings` is taken as it is.

    With the logit tables of `teachers` it is a student that is probed.
    """
    inputs: dict[str, Any] = {
        "data": data.fingerprint,
        "model": {"name": model, "config": model_config.model_dump(mode="json")},
        "train": settings.model_dump(mode="json"),
        "probe": {**config.model_dump(mode="json"), "rate": probe_rate},
        "threads": threads,
        "device": device,
    }
    if teachers:
        inputs["teachers"] = [LogitTable(path).checksum for path in teachers]
    if claim(out, inputs, finished=RESULT, force=False):
        return Found(**read_json(out / RESULT)["found"])
    if min(config.rungs) < 1 or sorted(set(config.rungs)) != list(config.rungs):
        raise InputError("the probe's rungs must rise")
    workers = workers or max(environment.num_cores() // threads, 1)
    rows = min(len(data.train), config.max_rows)
    standings: dict[Arm, Standing] = {}

    def advance_all(arms: Sequence[Arm], epochs: int) -> list[Standing]:
        jobs = [
            Job(
                arm.name,
                "recap_ctr.probe:advance",
                {
                    "data": str(data.path), "model": model, "model_config": inputs["model"]["config"],
                    "train": _settings(settings, arm, epochs).model_dump(mode="json"), "rows": rows,
                    "threads": threads, "device": device, "out": str(out / "arms" / arm.name),
                    "teachers": [str(path) for path in teachers],
                },
            )
            for arm in arms
        ]  # fmt: skip
        answers = run_jobs(jobs, workers=workers, title=f"probe to epoch {epochs}", quiet=quiet)
        for arm, answer in zip(arms, answers, strict=True):
            # An interrupted probe may have left an arm further on than it is asked for here.
            aucs, losses = answer["aucs"][:epochs], answer["loglosses"][:epochs]
            loss = losses[aucs.index(max(aucs))]
            standings[arm] = Standing(arm, aucs, loss, answer["seconds"], epochs)
        return [standings[arm] for arm in arms]

    def race(arms: Sequence[Arm]) -> Standing:
        left = list(arms)
        for epochs in config.rungs:
            now = advance_all(left, epochs)
            if not quiet:
                order = sorted(now, key=lambda one: -one.auc)
                say(f"  epoch {epochs}: " + "; ".join(f"{one.arm.name} {100 * one.auc:.3f}" for one in order))
            left = [one.arm for one in survivors(now)]
        return standings[left[0]]

    def challenge(best: Standing, arms: Sequence[Arm]) -> Standing:
        return survivors([best, race(arms)])[0] if arms else best

    began = time.monotonic()
    best = race(grid(config, rows, settings.learning_rate))
    for decades in config.refinements if best.arm.l2 else ():
        around = [_rounded(best.arm.l2 * 10**power) for power in (-decades, decades)]
        best = challenge(best, [replace(best.arm, l2=l2) for l2 in around])
    rates = [_rounded(best.arm.learning_rate * factor) for factor in config.rate_factors if probe_rate]
    best = challenge(best, [replace(best.arm, learning_rate=rate) for rate in rates])
    reached = config.rungs[-1]
    while best.auc < max(one.auc for one in standings.values()) and len(best.aucs) == reached:
        if reached >= config.rungs[-1] + config.confirm:
            break
        reached += CONFIRM_STEP
        best = advance_all([best.arm], reached)[0]
    best = max(standings.values(), key=lambda one: one.auc)
    others = sorted((one for one in standings.values() if one is not best), key=lambda one: -one.auc)
    margin, error = (
        (best.lead(others[0]), _error(data, out, best.arm, others[0].arm)) if others else (0.0, 0.0)
    )
    epochs_run = sum(len(one.aucs) for one in standings.values())
    found = Found(
        l2=_rounded(best.arm.l2 * rows / len(data.train)),
        learning_rate=best.arm.learning_rate,
        auc=best.auc,
        seconds_per_epoch=sum(one.seconds for one in standings.values())
        / epochs_run
        * len(data.train)
        / rows,
        runner_up=others[0].arm.name if others else None,
        margin=margin,
        margin_error=error,
    )
    record = {
        "kind": "probe",
        "found": asdict(found),
        "arms": [
            {**asdict(one.arm), "valid_auc": one.aucs, "valid_logloss": one.logloss}
            for one in standings.values()
        ],
        "rows": rows,
        "seconds": time.monotonic() - began,
    }
    write_json(out / RESULT, record)
    return found


def _settings(settings: TrainConfig, arm: Arm, epochs: int) -> TrainConfig:
    return settings.model_copy(
        update={"l2": arm.l2, "learning_rate": arm.learning_rate, "max_epochs": epochs, "checkpoints": 0}
    )


def _error(data: PreparedData, out: Path, best: Arm, other: Arm) -> float:
    """Standard error of the difference of two arms' validation AUC."""
    one, two = (LogitTable(out / "arms" / arm.name / VALID).logits_NM[:, 0] for arm in (best, other))
    return metrics.auc_difference(data.valid.labels, one, two).standard_error


def advance(
    data: str,
    model: str,
    model_config: dict[str, Any],
    train: dict[str, Any],
    rows: int,
    threads: int,
    device: str,
    out: str,
    teachers: Sequence[str] = (),
) -> dict[str, Any]:
    """Train one arm up to its `max_epochs`, from where it stands; the arguments are plain, for the engine."""
    torch.set_num_threads(threads)
    prepared, directory = PreparedData(Path(data), verify=False), Path(out)
    settings = parse(TrainConfig, train, "probe")
    fixed = {key: value for key, value in train.items() if key != "max_epochs"}
    claim(directory, {"train": fixed, "rows": rows}, finished=RESULT, force=False)
    targets = teacher_targets([Path(path) for path in teachers], prepared) if teachers else None
    if rows < len(prepared.train):
        drawn = np.random.default_rng([settings.seed, rows]).choice(len(prepared.train), rows, replace=False)
        prepared.train = prepared.train.take(np.sort(drawn))
        targets = targets if targets is None else targets[np.sort(drawn)]
    device_ = torch.device(device)
    trained = fit_weights(
        model,
        parse_model(model, model_config),
        settings,
        prepared,
        directory,
        device=device_,
        targets=targets,
    )
    best = trained.history[trained.best_epoch - 1]
    estimator = Estimator(directory.name, best.step)
    write_logits(directory / VALID, {estimator: trained.model}, prepared, VALID, device_)
    return {
        "aucs": [line.valid_auc for line in trained.history],
        "loglosses": [line.valid_logloss for line in trained.history],
        "seconds": trained.seconds,
    }
