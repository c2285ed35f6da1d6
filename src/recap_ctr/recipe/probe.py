"""The probe: how strong the regulariser and how large the step must be for these data, found on validation.

Successive halving over a log grid: all candidates train for some epochs, the better half goes on, and so on; then the
winner's neighbours try to beat it. A weak regulariser is fast and soon over-fits, a strong one is slow and wins late:
so the first rung is long enough for the former to peak, and candidates are ranked by what they still promise. One that
stops gaining is done early, as in any run. What was decided is recorded, and read back instead of decided again.

Where time allows, the rate, the horizon of the average, dropout and the size of vectors are challenged in turn the same
way, each from the best settings so far.

Strengths are given per data set, l2 · rows: the weight of the prior against all rows. So a grid suits data of any size,
and what a sample of the rows found holds for all of them.
"""

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

from recap_ctr.axes.logits import Estimator, LogitTable
from recap_ctr.axes.predict import write_logits
from recap_ctr.axes.teachers import teacher_targets
from recap_ctr.config import Frozen, TrainConfig, parse
from recap_ctr.data.shards import PreparedData
from recap_ctr.errors import InputError
from recap_ctr.evaluation import metrics
from recap_ctr.jobs import machine as environment
from recap_ctr.jobs.local import Job, run_jobs
from recap_ctr.jobs.progress import say
from recap_ctr.models.catalogue import parse_model
from recap_ctr.storage.claims import claim
from recap_ctr.storage.files import read_json, write_json
from recap_ctr.storage.locks import locked
from recap_ctr.training.loop import train as fit_weights

RESULT, VALID = "probe.json", "valid"
CONFIRM_STEP = 4
FURTHER = ("horizon_factors", "dropouts", "dim_factors")
CLEAR = 2.0  # standard errors by which larger vectors must win: they are paid for with every row of the table


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
    horizon_factors: tuple[PositiveFloat, ...] = (0.5, 2.0)
    """Then those of the average's horizon."""
    dropouts: tuple[Annotated[float, Field(ge=0, lt=1)], ...] = (0.0, 0.2)
    """Then rates of dropout, for a model that has it."""
    dim_factors: tuple[PositiveFloat, ...] = (0.5, 2.0)
    """Then those of the vectors' size; a larger one must win clearly."""
    confirm: NonNegativeInt = 16
    """Epochs that an arm which promises most may go on, until it has indeed passed all others."""
    max_rows: PositiveInt = 300_000
    """Training rows, drawn at random, where there are more."""

    def identity(self) -> dict[str, Any]:
        """What names a stage. A challenge that isn't asked for leaves no trace."""
        return {
            key: value for key, value in self.model_dump(mode="json").items() if value or key not in FURTHER
        }


@dataclass(frozen=True)
class Arm:
    """One candidate."""

    l2: float
    learning_rate: float
    horizon: float | None = None
    """Of the average, in epochs; None here and below: as configured."""
    dropout: float | None = None
    dim: int | None = None

    @property
    def name(self) -> str:
        given = {key: value for key, value in asdict(self).items() if value is not None}
        return ",".join(f"{key}={value:.3g}" for key, value in given.items())

    def train_config(self, settings: TrainConfig) -> TrainConfig:
        """The settings with what this candidate changes."""
        if self.horizon is not None and settings.ema_epochs:
            settings = settings.with_horizons(self.horizon / settings.ema_epochs[0])
        return settings.model_copy(update={"l2": self.l2, "learning_rate": self.learning_rate})

    def model_config(self, model: str, config: Frozen) -> Frozen:
        """The model's config with what this candidate changes; refused where the two don't go together."""
        own: dict[str, Any] = {}
        if self.dropout is not None:
            own |= dict.fromkeys(dropouts_of(config), self.dropout)
        if self.dim is not None and "dim" in type(config).model_fields:
            own["dim"] = self.dim
        return parse_model(model, {**config.model_dump(mode="json"), **own}) if own else config


def dropouts_of(config: Frozen) -> list[str]:
    """The names of a model's rates of dropout."""
    return [
        name
        for name in type(config).model_fields
        if name.endswith("dropout") and isinstance(getattr(config, name), float)
    ]


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
    horizon: float | None = None
    """None here and below: as configured."""
    dropout: float | None = None
    dim: int | None = None
    skipped: tuple[str, ...] = ()
    """What there was no time to challenge."""

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


def challengers(
    what: str, config: ProbeConfig, best: Arm, settings: TrainConfig, model: str, model_config: Frozen
) -> list[Arm]:
    """The best so far with one setting changed; none where there is nothing of the kind to change."""
    if what == "learning_rate":
        values: list[Any] = [_rounded(best.learning_rate * factor) for factor in config.rate_factors]
    elif what == "horizon":
        values = [settings.ema_epochs[0] * factor for factor in config.horizon_factors if settings.ema_epochs]
    elif what == "dropout":
        own = {getattr(model_config, name) for name in dropouts_of(model_config)}
        values = [rate for rate in config.dropouts if own and own != {rate}]
    else:
        dim = getattr(model_config, "dim", None)
        values = [int(dim * factor) for factor in config.dim_factors] if dim else []
    found = []
    for value in values:
        arm = replace(best, **{what: value})
        with suppress(InputError):  # such as a size that heads don't divide
            arm.model_config(model, model_config)
            found.append(arm)
    return found


def survivors(standings: Sequence[Standing]) -> list[Standing]:
    """The better half, by outlook; ties go to the stronger regulariser, which is the safer one."""
    ranked = sorted(standings, key=lambda one: (-one.outlook, -one.arm.l2))
    return ranked[: max(len(ranked) // 2, 1)]


def is_worth_its_size(one: Standing, base: Standing, error: float, *, larger: bool) -> bool:
    """Smaller vectors need only be better; larger ones clearly, since every row of the table pays for them."""
    return -base.lead(one) > (CLEAR * error if larger else 0.0)


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
    seconds: float | None = None,
    quiet: bool = False,
) -> Found:
    """Find l2 and, if wanted, the learning rate for `model`, then what else is asked for; the rest is taken as it is.

    With the logit tables of `teachers` it is a student that is probed. l2 is found however long it takes; with
    `seconds`, what comes after it only as long as it is forecast to fit.
    """
    inputs: dict[str, Any] = {
        "data": data.fingerprint,
        "model": {"name": model, "config": model_config.model_dump(mode="json")},
        "train": settings.model_dump(mode="json"),
        "probe": {**config.identity(), "rate": probe_rate},
        "threads": threads,
        "device": device,
    }
    if teachers:
        inputs["teachers"] = [LogitTable(path).checksum for path in teachers]
    if seconds is not None:
        inputs["seconds"] = seconds
    if claim(out, inputs, finished=RESULT, force=False):
        return read_found(out)
    if min(config.rungs) < 1 or sorted(set(config.rungs)) != list(config.rungs):
        raise InputError("the probe's rungs must rise")
    workers = workers or environment.side_by_side(threads, device)
    rows = min(len(data.train), config.max_rows)
    standings: dict[Arm, Standing] = {}

    def advance_all(candidates: Sequence[Arm], epochs: int) -> list[Standing]:
        arms = list(dict.fromkeys(candidates))
        jobs = [
            Job(
                arm.name,
                "recap_ctr.recipe.probe:advance",
                {
                    "data": str(data.path), "model": model,
                    "model_config": arm.model_config(model, model_config).model_dump(mode="json"),
                    "train": _settings(settings, arm, epochs).model_dump(mode="json"), "until": epochs, "rows": rows,
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

    def fits(arms: Sequence[Arm]) -> bool:
        """Whether there is time for as many more, by what those so far have taken."""
        if seconds is None:
            return True
        spent = sum(one.seconds for one in standings.values())
        epochs = sum(len(one.aucs) for one in standings.values())
        return (spent + len(arms) * config.rungs[-1] * spent / epochs) / workers <= seconds

    began = time.monotonic()
    best = race(grid(config, rows, settings.learning_rate))
    for decades in config.refinements if best.arm.l2 else ():
        around = [_rounded(best.arm.l2 * 10**power) for power in (-decades, decades)]
        best = challenge(best, [replace(best.arm, l2=l2) for l2 in around])
    skipped = []
    for what in ("learning_rate", "horizon", "dropout") if probe_rate else ("horizon", "dropout"):
        arms = challengers(what, config, best.arm, settings, model, model_config)
        if fits(arms):
            best = challenge(best, arms)
        else:
            skipped.append(what)
    reached = config.rungs[-1]
    while best.auc < max(one.auc for one in standings.values()) and len(best.aucs) == reached:
        if reached >= config.rungs[-1] + config.confirm:
            break
        reached += CONFIRM_STEP
        best = advance_all([best.arm], reached)[0]
    best = max(standings.values(), key=lambda one: one.auc)
    sizes = challengers("dim", config, best.arm, settings, model, model_config)
    if fits(sizes):
        base = best
        for one in advance_all(sizes, config.rungs[-1]) if sizes else ():
            larger = (one.arm.dim or 0) > getattr(model_config, "dim", 0)
            if is_worth_its_size(one, base, _error(data, out, one.arm, base.arm), larger=larger):
                best = max(best, one, key=lambda one: one.auc)
            elif larger:
                del standings[one.arm]  # perhaps better, but at its price not what the best is measured by
    else:
        skipped.append("dim")
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
        horizon=best.arm.horizon,
        dropout=best.arm.dropout,
        dim=best.arm.dim,
        skipped=tuple(skipped),
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
    """Of an arm that may go on to so many epochs; a cosine ends with the last rung, wherever it is looked at before."""
    last = settings.max_epochs if settings.schedule == "cosine" else epochs
    return arm.train_config(settings).model_copy(update={"max_epochs": last, "checkpoints": 0})


def read_found(probed: Path) -> Found:
    """The answer of a finished probe."""
    known = read_json(probed / RESULT)["found"]
    return Found(**{**known, "skipped": tuple(known.get("skipped", ()))})


def most_epochs(config: ProbeConfig, *, probe_rate: bool) -> int:
    """Of all arms together, should none stop early; without those that confirm the winner."""

    def race(arms: int) -> int:
        total = before = 0
        for epochs in config.rungs if arms else ():
            total += arms * (epochs - before)
            before, arms = epochs, max(arms // 2, 1)
        return total

    turns = [config.rate_factors if probe_rate else (), config.horizon_factors, config.dropouts]
    return (
        race(len(config.strengths))
        + len(config.refinements) * race(2)
        + sum(race(len(turn)) for turn in turns)
        + len(config.dim_factors) * config.rungs[-1]
    )


def finalists(probed: Path) -> dict[Arm, LogitTable]:
    """Validation logits of the better half of a finished probe's arms, best first: estimators at no further cost."""
    record = read_json(probed / RESULT)
    ranked = sorted(record["arms"], key=lambda one: -max(one["valid_auc"]))
    arms = [Arm(**{field.name: one.get(field.name) for field in fields(Arm)}) for one in ranked]
    return {arm: LogitTable(probed / "arms" / arm.name / VALID) for arm in arms[: max(len(arms) // 2, 1)]}


def _error(data: PreparedData, out: Path, best: Arm, other: Arm) -> float:
    """Standard error of the difference of two arms' validation AUC."""
    one, two = (LogitTable(out / "arms" / arm.name / VALID).logits_NM[:, 0] for arm in (best, other))
    return metrics.auc_difference(data.valid.labels, one, two, data.valid.weights).standard_error


def advance(
    data: str,
    model: str,
    model_config: dict[str, Any],
    train: dict[str, Any],
    until: int,
    rows: int,
    threads: int,
    device: str,
    out: str,
    teachers: Sequence[str] = (),
) -> dict[str, Any]:
    """Train one arm to the end of epoch `until`, from where it stands; the arguments are plain, for the engine."""
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
    with locked(directory):
        trained = fit_weights(
            model, parse_model(model, model_config), settings, prepared, directory,
            device=device_, targets=targets, until=until,
        )  # fmt: skip
        best = trained.history[trained.best_epoch - 1]
        estimator = Estimator(directory.name, best.step)
        write_logits(directory / VALID, {estimator: trained.model}, prepared, VALID, device_)
    return {
        "aucs": [line.valid_auc for line in trained.history],
        "loglosses": [line.valid_logloss for line in trained.history],
        "seconds": trained.seconds,
    }
