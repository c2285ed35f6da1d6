"""The probe: find by validation how strong the regulariser and how large the learning rate must be for these data.

Successive halving over a log grid: all arms train for some epochs, the better half goes on, and so on; then the
winner's neighbours try to beat it. A weak regulariser is fast and soon over-fits, a strong one is slow and wins late:
so the first rung is long enough for the former to peak, and arms are ranked by what they still promise. An arm that
stops gaining ends early, as in any run. Decisions are recorded, and read back instead of taken again.

Where time allows, the learning rate, the horizon of the average, dropout and the size of vectors are challenged in turn
the same way, each from the best arm so far.

Strengths are stated per data set, l2 · rows: the weight of the prior against all rows. So one grid suits data of any
size, and what a sample of the rows finds holds for all of them.
"""

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

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
from recap_ctr.jobs.executor import Executor, Job
from recap_ctr.jobs.progress import say
from recap_ctr.models.catalogue import parse_model
from recap_ctr.storage.claims import claim
from recap_ctr.storage.files import read_object, write_json
from recap_ctr.storage.locks import locked
from recap_ctr.training.loop import train as train_weights
from recap_ctr.training.pool import read_pool

RESULT, VALID = "probe.json", "valid"
CONFIRM_STEP = 4
FURTHER = ("horizon_factors", "dropouts", "dim_factors")
LATER = (
    *FURTHER,
    "extend",
)  # Settings that leave no trace in a directory's name where they are switched off.
BEYOND = "l2 beyond the grid"
CLEAR = 2.0  # Standard errors by which larger vectors must win: every row of the table pays for them.


class ProbeConfig(Frozen):
    """What the probe tries, and for how long."""

    strengths: tuple[NonNegativeFloat, ...] = (1e1, 1e2, 1e3, 1e4, 1e5)
    """Strengths of the regulariser, as l2 · rows."""
    rungs: tuple[PositiveInt, ...] = (8, 16)
    """Epochs after which the better half is kept."""
    refinements: tuple[PositiveFloat, ...] = (0.5, 0.25)
    """Decades to each side of the best strength so far, tried one after the other."""
    rate_factors: tuple[PositiveFloat, ...] = (0.5, 2.0)
    """Factors of the learning rate that are tried next, unless it is set."""
    horizon_factors: tuple[PositiveFloat, ...] = (0.5, 2.0)
    """Factors of the average's horizon that are tried next."""
    dropouts: tuple[Annotated[float, Field(ge=0, lt=1)], ...] = (0.0, 0.2)
    """Rates of dropout that are tried next, if the model has dropout."""
    dim_factors: tuple[PositiveFloat, ...] = (0.5, 2.0)
    """Factors of the vectors' size that are tried last; a larger size must win clearly."""
    extend: NonNegativeInt = 4
    """How many strengths beyond the grid may be tried, one after the other, as long as the best is at its end."""
    confirm: NonNegativeInt = 16
    """For how many epochs the most promising arm may go on, until it has indeed passed all others."""
    max_rows: PositiveInt = 300_000
    """Training rows to use, drawn at random, where there are more."""

    def identity(self) -> dict[str, Any]:
        """Return the part of the settings that names a probe's directory; a challenge that is switched off is left
        out."""
        values = self.model_dump(mode="json")
        return {key: value for key, value in values.items() if value or key not in LATER}

    def arms(self, rows: int, learning_rate: float) -> "list[Arm]":
        """Return the first arms: one for each strength."""
        return [Arm(three_digits(strength / rows), learning_rate) for strength in self.strengths]

    def most_epochs(self, *, probe_rate: bool) -> int:
        """Return the epochs of all arms together if none stops early, without those beyond the grid or to confirm."""

        def halving(arms: int) -> int:
            total = before = 0
            for epochs in self.rungs if arms else ():
                total += arms * (epochs - before)
                before, arms = epochs, max(arms // 2, 1)
            return total

        challenges = [self.rate_factors if probe_rate else (), self.horizon_factors, self.dropouts]
        return (
            halving(len(self.strengths))
            + len(self.refinements) * halving(2)
            + sum(halving(len(values)) for values in challenges)
            + len(self.dim_factors) * self.rungs[-1]
        )


@dataclass(frozen=True)
class Arm:
    """One candidate of the probe. None means: as configured."""

    l2: float
    learning_rate: float
    horizon: float | None = None
    """Horizon of the average, in epochs."""
    dropout: float | None = None
    dim: int | None = None

    @property
    def name(self) -> str:
        """Return a name for messages and for the arm's directory."""
        values = {key: value for key, value in asdict(self).items() if value is not None}
        return ",".join(f"{key}={value:.3g}" for key, value in values.items())

    def train_config(self, training: TrainConfig) -> TrainConfig:
        """Return the training settings with what this arm changes."""
        if self.horizon is not None and training.ema_epochs:
            training = training.with_horizons(self.horizon / training.ema_epochs[0])
        return training.model_copy(update={"l2": self.l2, "learning_rate": self.learning_rate})

    def model_config(self, model: str, config: Frozen) -> Frozen:
        """Return the model's config with what this arm changes; refuse it where the two don't go together."""
        changes: dict[str, Any] = {}
        if self.dropout is not None:
            changes |= dict.fromkeys(dropouts_of(config), self.dropout)
        if self.dim is not None and "dim" in type(config).model_fields:
            changes["dim"] = self.dim
        return parse_model(model, {**config.model_dump(mode="json"), **changes}) if changes else config


def dropouts_of(config: Frozen) -> list[str]:
    """Return the names of a model's rates of dropout."""
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
    epochs: int
    """How many epochs it was allowed; it used fewer if it stopped gaining."""

    @property
    def auc(self) -> float:
        """Return the best validation AUC so far."""
        return max(self.aucs)

    @property
    def outlook(self) -> float:
        """Return the AUC if the last gain were to last for as long again; it keeps slow starters in the race."""
        gain = self.aucs[-1] - self.aucs[-2] if len(self.aucs) > 1 else 0.0
        return max(self.auc, self.aucs[-1] + max(gain, 0.0) * len(self.aucs))

    def lead(self, other: "Standing") -> float:
        """Return how far this arm is ahead: at its best if the other stopped by itself, else at the same epoch."""
        seen = len(other.aucs)
        return (self.auc if seen < other.epochs else max(self.aucs[:seen])) - other.auc


@dataclass(frozen=True)
class ProbeResult:
    """The probe's answer. None means: as configured."""

    l2: float
    learning_rate: float
    auc: float
    seconds_per_epoch: float
    """Time of an epoch of one run on all training rows, on this machine."""
    runner_up: str | None
    margin: float
    """The best arm's validation AUC minus the runner-up's; `margin_error` is the difference's standard error."""
    margin_error: float
    horizon: float | None = None
    dropout: float | None = None
    dim: int | None = None
    skipped: tuple[str, ...] = ()
    """Settings that there was no time to challenge."""
    edge: Literal["", "weakest", "strongest"] = ""
    """Whether l2 is the weakest or the strongest that was tried, so that the best may lie beyond."""

    @property
    def verdict(self) -> str:
        """Return in words how sure the answer is."""
        if self.runner_up is None:
            return "there was no other arm to compare it with"
        ratio = self.margin / self.margin_error if self.margin_error > 0 else math.inf
        certainty = "clear" if ratio > 3 else "likely" if ratio > 1.5 else "a toss-up"
        limit = f"; it is the {self.edge} l2 that was tried, and the best may lie beyond" if self.edge else ""
        return (
            f"{certainty}: {100 * self.margin:.3f} ± {100 * self.margin_error:.3f} points of validation AUC"
            f" ahead of {self.runner_up}{limit}"
        )

    @property
    def choices(self) -> str:
        """Return the settings that were found, in words."""
        further = (("horizon", self.horizon), ("dropout", self.dropout), ("dim", self.dim))
        text = "".join(f", {name} {value:g}" for name, value in further if value is not None)
        return f"l2 {self.l2:g}, learning rate {self.learning_rate:g}{text}"


def three_digits(value: float) -> float:
    """Return a number with three significant digits, which suits names of directories."""
    return float(f"{value:.3g}")


def survivors(standings: Sequence[Standing]) -> list[Standing]:
    """Return the better half, by outlook; ties go to the stronger regulariser, which is the safer one."""
    ranked = sorted(standings, key=lambda standing: (-standing.outlook, -standing.arm.l2))
    return ranked[: max(len(ranked) // 2, 1)]


def is_worth_its_size(standing: Standing, base: Standing, error: float, *, larger: bool) -> bool:
    """Return whether another size of vectors should replace the base: a smaller one if better, a larger if clearly so.

    `error` is the standard error of the difference. Every row of the table pays for larger vectors.
    """
    return -base.lead(standing) > (CLEAR * error if larger else 0.0)


@dataclass
class Race:
    """A probe of one model on prepared data, in a directory of its own.

    With the logit tables of `teachers` the probed model is a student. l2 is always found; with `seconds`, the other
    settings are challenged only as long as they are expected to fit in that time.
    """

    config: ProbeConfig
    model: str
    model_config: Frozen
    training: TrainConfig
    data: PreparedData
    out: Path
    threads: int
    device: str
    probe_rate: bool = True
    teachers: tuple[Path, ...] = ()
    pool: tuple[Path, ...] = ()
    """The teachers' logits of recombined rows, if it learns from these, too."""
    seconds: float | None = None
    deadline: float | None = None
    """The time, of `time.time`, at which every arm ends with what it has."""
    standings: dict[Arm, Standing] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    extended: int = 0
    """How many strengths beyond the grid were tried."""

    @property
    def rows(self) -> int:
        """Return how many training rows each arm trains on."""
        return min(len(self.data.train), self.config.max_rows)

    def inputs(self) -> dict[str, Any]:
        """Return what the answer depends on."""
        inputs: dict[str, Any] = {
            "data": self.data.fingerprint,
            "model": {"name": self.model, "config": self.model_config.model_dump(mode="json")},
            "train": self.training.model_dump(mode="json"),
            "probe": {**self.config.identity(), "rate": self.probe_rate},
            "threads": self.threads,
            "device": self.device,
        }
        if self.teachers:
            inputs["teachers"] = [LogitTable(path).checksum for path in self.teachers]
        if self.pool:
            inputs["pool"] = [LogitTable(path).checksum for path in self.pool]
        if self.seconds is not None:
            inputs["seconds"] = self.seconds
        return inputs

    def run(self, executor: Executor, *, quiet: bool = False) -> ProbeResult:
        """Find the settings, or read the answer of a finished probe."""
        if claim(self.out, self.inputs(), finished=RESULT, force=False):
            return read_result(self.out)
        if min(self.config.rungs) < 1 or sorted(set(self.config.rungs)) != list(self.config.rungs):
            raise InputError("the probe's rungs must rise")
        self._executor, self._quiet = executor, quiet
        started = time.monotonic()
        best = self._halve(self.config.arms(self.rows, self.training.learning_rate))
        while (arm := self._beyond(best)) is not None:
            best = self._challenge(best, [arm])
        best = self._challenge_in_turn(self._refine(best))
        self._confirm(best)
        best = self._choose_size(self._settle())
        return self._record(best, time.monotonic() - started)

    def _advance(self, arms: Sequence[Arm], epochs: int) -> list[Standing]:
        """Train all arms to the end of epoch `epochs`, side by side."""
        arms = list(dict.fromkeys(arms))
        jobs = [Job(arm.name, train_arm, self._arguments(arm, epochs)) for arm in arms]
        results = self._executor.run(jobs, title=f"probe to epoch {epochs}", quiet=self._quiet)
        for arm, result in zip(arms, results, strict=True):
            # An interrupted probe may have left an arm further on than it should be here.
            aucs, losses = result["aucs"][:epochs], result["loglosses"][:epochs]
            loss = losses[aucs.index(max(aucs))]
            self.standings[arm] = Standing(arm, aucs, loss, result["seconds"], epochs)
        return [self.standings[arm] for arm in arms]

    def _arguments(self, arm: Arm, epochs: int) -> dict[str, Any]:
        # A cosine schedule ends with the last rung, at whatever rung the arm is looked at.
        last = self.training.max_epochs if self.training.schedule == "cosine" else epochs
        training = arm.train_config(self.training).model_copy(update={"max_epochs": last, "checkpoints": 0})
        return {
            "data": str(self.data.path),
            "model": self.model,
            "model_config": arm.model_config(self.model, self.model_config).model_dump(mode="json"),
            "train": training.model_dump(mode="json"),
            "until": epochs,
            "rows": self.rows,
            "threads": self.threads,
            "device": self.device,
            "out": str(self.out / "arms" / arm.name),
            "teachers": [str(path) for path in self.teachers],
            "pool": [str(path) for path in self.pool],
            "deadline": self.deadline,
        }

    def _halve(self, arms: Sequence[Arm]) -> Standing:
        """Train arms rung by rung, keep the better half at each, and return the winner."""
        remaining = list(arms)
        for epochs in self.config.rungs:
            standings = self._advance(remaining, epochs)
            if not self._quiet:
                order = sorted(standings, key=lambda standing: -standing.auc)
                listed = "; ".join(f"{standing.arm.name} {100 * standing.auc:.3f}" for standing in order)
                say(f"  epoch {epochs}: {listed}")
            remaining = [standing.arm for standing in survivors(standings)]
        return self.standings[remaining[0]]

    def _challenge(self, best: Standing, arms: Sequence[Arm]) -> Standing:
        """Return the better of the best so far and the winner of `arms`."""
        return survivors([best, self._halve(arms)])[0] if arms else best

    def _edge(self, best: Standing) -> Literal["", "weakest", "strongest"]:
        """Return at which end of the strengths so far the best is, if it is at one; nothing is weaker than 0."""
        tried = {arm.l2 for arm in self.standings}
        if len(tried) < 2 or min(tried) < best.arm.l2 < max(tried) or best.arm.l2 == 0:
            return ""
        return "weakest" if best.arm.l2 == min(tried) else "strongest"

    def _beyond(self, best: Standing) -> Arm | None:
        """Return an arm one step beyond the end of the grid that the best arm is at; None if it is at no end, or no
        more may be tried."""
        edge = self._edge(best)
        if not edge or self.extended == self.config.extend:
            return None
        tried = sorted({arm.l2 for arm in self.standings})
        last, before = (tried[0], tried[1]) if edge == "weakest" else (tried[-1], tried[-2])
        step = last / before if before else 10.0
        arm = replace(best.arm, l2=three_digits(last * step))
        if not self._fits([arm]):
            if BEYOND not in self.skipped:
                self.skipped.append(BEYOND)
            return None
        self.extended += 1
        return arm

    def _settle(self) -> Standing:
        """Return the best of all arms; while it is at an end of the strengths, try another beyond it.

        It need not be the one that promised most, whose neighbours were tried.
        """
        while True:
            best = max(self.standings.values(), key=lambda standing: standing.auc)
            arm = self._beyond(best)
            if arm is None:
                return best
            self._confirm(self._challenge(best, [arm]))

    def _refine(self, best: Standing) -> Standing:
        """Try strengths of the regulariser ever closer to the best."""
        for decades in self.config.refinements if best.arm.l2 else ():
            strengths = [three_digits(best.arm.l2 * 10**power) for power in (-decades, decades)]
            best = self._challenge(best, [replace(best.arm, l2=l2) for l2 in strengths])
        return best

    def _challenge_in_turn(self, best: Standing) -> Standing:
        """Challenge the learning rate, the average's horizon and dropout, as far as time allows."""
        settings = ("learning_rate", "horizon", "dropout") if self.probe_rate else ("horizon", "dropout")
        for setting in settings:
            arms = self.challengers(setting, best.arm)
            if self._fits(arms):
                best = self._challenge(best, arms)
            else:
                self.skipped.append(setting)
        return best

    def _confirm(self, best: Standing) -> None:
        """Let an arm that promises most go on until it has indeed passed all others, or has had its epochs."""
        reached = last = self.config.rungs[-1]
        while best.auc < max(standing.auc for standing in self.standings.values()):
            if len(best.aucs) < reached or reached >= last + self.config.confirm:
                return
            reached += CONFIRM_STEP
            best = self._advance([best.arm], reached)[0]

    def _choose_size(self, best: Standing) -> Standing:
        """Try other sizes of vectors around the best arm."""
        arms = self.challengers("dim", best.arm)
        if not self._fits(arms):
            self.skipped.append("dim")
            return best
        base = best
        for standing in self._advance(arms, self.config.rungs[-1]) if arms else ():
            larger = (standing.arm.dim or 0) > getattr(self.model_config, "dim", 0)
            if is_worth_its_size(
                standing, base, self._difference_error(standing.arm, base.arm), larger=larger
            ):
                best = max(best, standing, key=lambda candidate: candidate.auc)
            elif larger:
                # It may be better, but not at its price: the best must not be measured against it.
                del self.standings[standing.arm]
        return best

    def challengers(self, setting: str, best: Arm) -> list[Arm]:
        """Return the best arm with one setting changed; none where the model has no such setting."""
        if setting == "learning_rate":
            values: list[Any] = [
                three_digits(best.learning_rate * factor) for factor in self.config.rate_factors
            ]
        elif setting == "horizon":
            horizons = self.training.ema_epochs
            values = [horizons[0] * factor for factor in self.config.horizon_factors if horizons]
        elif setting == "dropout":
            rates = {getattr(self.model_config, name) for name in dropouts_of(self.model_config)}
            values = [rate for rate in self.config.dropouts if rates and rates != {rate}]
        else:
            dim = getattr(self.model_config, "dim", None)
            values = [int(dim * factor) for factor in self.config.dim_factors] if dim else []
        arms = []
        for value in values:
            arm = replace(best, **{setting: value})
            with suppress(InputError):  # Such as a size that the number of heads does not divide.
                arm.model_config(self.model, self.model_config)
                arms.append(arm)
        return arms

    def _fits(self, arms: Sequence[Arm]) -> bool:
        """Return whether there is time for these arms, judging by how long the arms so far have taken."""
        if self.seconds is None:
            return True
        spent = sum(standing.seconds for standing in self.standings.values())
        epochs = sum(len(standing.aucs) for standing in self.standings.values())
        expected = len(arms) * self.config.rungs[-1] * spent / epochs
        return (spent + expected) / self._executor.workers <= self.seconds

    def _difference_error(self, arm: Arm, other: Arm) -> float:
        """Return the standard error of the difference of two arms' validation AUC."""
        logits, others = (
            LogitTable(self.out / "arms" / each.name / VALID).logits_NM[:, 0] for each in (arm, other)
        )
        valid = self.data.valid
        return metrics.auc_difference(valid.labels, logits, others, valid.weights).standard_error

    def _record(self, best: Standing, seconds: float) -> ProbeResult:
        """Write the answer with all arms, and return it."""
        others = sorted(
            (standing for standing in self.standings.values() if standing is not best),
            key=lambda standing: -standing.auc,
        )
        spent = sum(standing.seconds for standing in self.standings.values())
        epochs = sum(len(standing.aucs) for standing in self.standings.values())
        result = ProbeResult(
            l2=three_digits(best.arm.l2 * self.rows / len(self.data.train)),
            learning_rate=best.arm.learning_rate,
            auc=best.auc,
            seconds_per_epoch=spent / epochs * len(self.data.train) / self.rows,
            runner_up=others[0].arm.name if others else None,
            margin=best.lead(others[0]) if others else 0.0,
            margin_error=self._difference_error(best.arm, others[0].arm) if others else 0.0,
            horizon=best.arm.horizon,
            dropout=best.arm.dropout,
            dim=best.arm.dim,
            skipped=tuple(self.skipped),
            edge=self._edge(best),
        )
        arms = [
            {**asdict(standing.arm), "valid_auc": standing.aucs, "valid_logloss": standing.logloss}
            for standing in self.standings.values()
        ]
        record = {
            "kind": "probe",
            "found": asdict(result),
            "arms": arms,
            "rows": self.rows,
            "seconds": seconds,
        }
        write_json(self.out / RESULT, record)
        return result


def read_result(directory: Path) -> ProbeResult:
    """Return the answer of a finished probe."""
    values = read_object(directory / RESULT, "the record of a probe")["found"]
    return ProbeResult(**{**values, "skipped": tuple(values.get("skipped", ()))})


def finalists(directory: Path) -> dict[Arm, LogitTable]:
    """Return the validation logits of the better half of a finished probe's arms, best first.

    They are estimators at no further cost.
    """
    record = read_object(directory / RESULT, "the record of a probe")
    ranked = sorted(record["arms"], key=lambda entry: -max(entry["valid_auc"]))
    arms = [Arm(**{field.name: entry.get(field.name) for field in fields(Arm)}) for entry in ranked]
    better = arms[: max(len(arms) // 2, 1)]
    return {arm: LogitTable(directory / "arms" / arm.name / VALID) for arm in better}


def train_arm(
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
    pool: Sequence[str] = (),
    deadline: float | None = None,
) -> dict[str, Any]:
    """Train one arm to the end of epoch `until`, from its saved state. The arguments are plain, for a job."""
    torch.set_num_threads(threads)
    prepared, directory = PreparedData(Path(data), verify=False), Path(out)
    training = parse(TrainConfig, train, "probe")
    fixed = {key: value for key, value in train.items() if key != "max_epochs"}
    claim(directory, {"train": fixed, "rows": rows}, finished=RESULT, force=False)
    targets = teacher_targets([Path(path) for path in teachers], prepared)[:] if teachers else None
    recombined = read_pool([Path(path) for path in pool], training.recombined, prepared)
    if rows < len(prepared.train):
        drawn = np.random.default_rng([training.seed, rows]).choice(len(prepared.train), rows, replace=False)
        recombined = None if recombined is None else recombined.take(np.sort(drawn), len(prepared.train))
        prepared.train = prepared.train.take(np.sort(drawn))
        targets = targets if targets is None else targets[np.sort(drawn)]
    on = torch.device(device)
    with locked(directory):
        trained = train_weights(
            model,
            parse_model(model, model_config),
            training,
            prepared,
            directory,
            device=on,
            targets=targets,
            pool=recombined,
            until=until,
            deadline=deadline,
        )
        best = trained.history[trained.best_epoch - 1]
        estimator = Estimator(directory.name, best.step)
        write_logits(directory / VALID, {estimator: trained.model}, prepared, VALID, on)
    return {
        "aucs": [epoch.valid_auc for epoch in trained.history],
        "loglosses": [epoch.valid_logloss for epoch in trained.history],
        "seconds": trained.seconds,
    }
