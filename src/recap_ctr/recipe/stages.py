"""The whole recipe: from prepared data to one model that stands for an ensemble.

Stages: probe, teachers, student, report and artifact. Each has a directory named after what it was made from, so a
changed setting redoes the stages that depend on it and no other, and going back finds the old ones. All of them resume.
"""

import json
import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean
from typing import Any, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from recap_ctr.axes.logits import LogitTable, mean_logit
from recap_ctr.config import Frozen, TrainConfig, parse
from recap_ctr.data.quality import field_quality
from recap_ctr.data.shards import PreparedData
from recap_ctr.diagnose import Cube, curve
from recap_ctr.errors import InputError
from recap_ctr.evaluation.calibrate import fitting
from recap_ctr.evaluation.evaluate import evaluate
from recap_ctr.evaluation.sampling import negative_rate_shift, sampling_weights, undo_sampling
from recap_ctr.inference.artifact import is_same_model
from recap_ctr.jobs import machine as environment
from recap_ctr.jobs.progress import say
from recap_ctr.models.catalogue import parse_model, short_name
from recap_ctr.models.recap import RecapConfig
from recap_ctr.recipe.probe import FURTHER, Arm, Found, ProbeConfig, probe
from recap_ctr.storage.files import atomic_directory, read_json, write_json
from recap_ctr.storage.hashes import fingerprint
from recap_ctr.storage.locks import locked
from recap_ctr.training.run import (
    ARTIFACT,
    REPORT,
    RouteChoice,
    RunConfig,
    default_threads,
    epoch_seconds,
    run_many,
    teacher_tables,
)

PLAN = "plan.json"
TEACHER_SEEDS = 1000  # teacher m has seed 1000 + m, so that no student starts where a teacher did
STEPS_PER_EPOCH = 64  # at least, where batches of 128 rows allow it
MIN_EPOCHS = 6
PROBE_SHARE = 0.25  # of a budget: what the probe may take beyond its search for l2


class RecipeConfig(Frozen):
    """What `recap fit` does; every table may be given in part."""

    model: str = "recap"
    """The student: a model by name, or auto: RECAP or FCN, whichever is better on validation."""
    model_settings: dict[str, Any] = Field(default_factory=dict)
    teacher_model: str = "fcn"
    teacher_settings: dict[str, Any] = Field(default_factory=dict)
    teachers: NonNegativeInt = 5
    """M_seed of the paper; without teachers the student learns from labels alone."""
    routes: PositiveInt = 8
    """K of Eq. 15, for a student that has routes."""
    route_choice: RouteChoice = "late"
    l2: float | None = Field(None, ge=0)
    """Strength of the embedding regulariser; None: the probe finds it."""
    learning_rate: PositiveFloat | None = None
    """None: the probe finds it along with l2; 0.001 where l2 is given."""
    train: dict[str, Any] = Field(default_factory=dict)
    """What else of TrainConfig differs from the recipe's own settings."""
    teacher_train: dict[str, Any] = Field(default_factory=dict)
    """What of it differs for teachers only."""
    probe: ProbeConfig = ProbeConfig()
    student_factors: tuple[PositiveFloat, ...] = (1.0, 10**-0.5, 0.1)
    """Strengths that a second probe tries for a taught student, relative to the teachers': soft targets regularise
    too. It is left out where l2 is given, or a budget."""
    calibration: Literal["affine", "isotonic"] = "affine"
    negative_rate: float = Field(1.0, gt=0, le=1)
    seed: int = Field(1, ge=0, lt=TEACHER_SEEDS)

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in ("train", "teacher_train"):
            for given in getattr(self, name):
                if given in ("l2", "learning_rate", "seed"):
                    raise ValueError(f"{given} stands beside [{name}], not inside it")
        return self

    @property
    def students(self) -> tuple[str, ...]:
        return ("recap", "fcn") if self.model == "auto" else (self.model,)

    def settings_of(self, student: str) -> Frozen:
        """A student's model config; one of the teachers' kind beside the recipe's own is built like them."""
        own = {self.teacher_model: self.teacher_settings, self.students[0]: self.model_settings}
        return parse_model(student, own.get(student, {}))


PAPER = {
    # What the paper states: Table 4 and section 4. What it leaves open: T, the depths and their weights, K and how
    # routes are chosen, the fuse, the schedule of student and teachers. Our reading is in docs/decisions/0007.
    "model": "recap",
    "model_settings": {
        "num_adapters": 8,
        "lora_rank": 96,
        "binding": "free",
        "depth": 4,
        "train_depths": [2, 3, 4],
        "depth_weights": [1 / 3, 1 / 3, 1 / 3],
    },
    "teachers": 5,
    "routes": 8,
    "route_choice": "random",
    "student_factors": [],
    "probe": {"horizon_factors": [], "dropouts": [], "dim_factors": []},
    "train": {"schedule": "cosine", "ema": 0.9995, "ema_epochs": [], "max_epochs": 20, "kd_weight": 1.0},
    "teacher_train": {"schedule": "plateau", "ema": 0, "max_epochs": 100, "patience": 2},
}
PRESETS: dict[str, dict[str, Any]] = {"default": {}, "paper": PAPER}


def batch_size(rows: int) -> int:
    """The published 4096, or less where an epoch would have too few steps.

    >>> batch_size(600_000), batch_size(120_000), batch_size(1_000)
    (4096, 1024, 128)
    """
    return 1 << min(12, max(7, math.floor(math.log2(max(rows / STEPS_PER_EPOCH, 1.0)))))


def train_config(config: RecipeConfig, rows: int, *, teacher: bool = False) -> TrainConfig:
    """The recipe's training: a constant rate, whose noise the average of the weights removes."""
    own: dict[str, Any] = {
        "schedule": "constant",
        "ema_epochs": (4.0,),
        "max_epochs": 60,
        "patience": 3,
        "batch_size": batch_size(rows),
        "seed": config.seed,
        "learning_rate": config.learning_rate or 1e-3,
    }
    given = {**config.train, **(config.teacher_train if teacher else {})}
    if teacher:  # what only a student has a use for must not make its teachers others
        given.pop("kd_weight", None)
    if given.get("ema") is not None:
        own["ema_epochs"] = ()
    return parse(TrainConfig, {**own, **given}, "recipe")


def _racing(race: ProbeConfig, settings: TrainConfig) -> TrainConfig:
    """An arm's settings: the probe's own rungs say how long it trains."""
    own = {"seed": TEACHER_SEEDS, "max_epochs": race.rungs[-1], "checkpoints": 0}
    return settings.model_copy(update=own)


@dataclass(frozen=True)
class Plan:
    """What the recipe will do where it had a choice: decided once, then read back."""

    l2: float
    learning_rate: float
    teachers: int
    max_epochs: int | None
    """None: as configured."""
    given_up: tuple[str, ...]
    horizon: float | None = None
    """What else the probe found; None: as configured."""
    dropout: float | None = None
    dim: int | None = None

    @property
    def arm(self) -> Arm:
        return Arm(self.l2, self.learning_rate, self.horizon, self.dropout, self.dim)


class Recipe:
    """A recipe at work in a directory."""

    def __init__(
        self,
        config: RecipeConfig,
        data: PreparedData,
        out: Path,
        *,
        threads: int | None = None,
        device: str = "cpu",
        workers: int | None = None,
        budget: float | None = None,
        quiet: bool = False,
    ) -> None:
        """`budget` is in minutes."""
        self.config, self.data, self.out, self.device, self.budget, self.quiet = (
            config, data, out, device, budget, quiet
        )  # fmt: skip
        self.teacher_config = parse_model(config.teacher_model, config.teacher_settings)
        self.threads = threads or default_threads(self.teacher_config, data.layout)
        self.workers = workers or environment.side_by_side(self.threads, device)
        self.settings = train_config(config, len(data.train))
        self.teacher_settings = train_config(config, len(data.train), teacher=True)
        self.began = time.monotonic()

    def say(self, text: str) -> None:
        if not self.quiet:
            say(text)

    def directory(self, stage: str, inputs: dict[str, Any]) -> Path:
        return self.out / f"{stage}-{fingerprint({'data': self.data.fingerprint, **inputs})[:10]}"

    def place(self, stage: str, config: RunConfig) -> Path:
        """Of runs that differ in their seed alone."""
        return self.directory(stage, config.without_seed(self.data))

    @property
    def _plan_file(self) -> Path:
        inputs = {
            "recipe": self.config.model_dump(
                mode="json", exclude={"seed", "routes", "route_choice", "calibration", "negative_rate"}
            )
            | {"probe": self.config.probe.identity()},
            "threads": self.threads, "device": self.device, "budget": self.budget,
        }  # fmt: skip
        return self.directory("plan", inputs) / PLAN

    def record(self, plan: Plan) -> None:
        """What was decided, by the recipe or for it: it is read back, not decided again."""
        self._plan_file.parent.mkdir(parents=True, exist_ok=True)
        write_json(self._plan_file, asdict(plan))

    def plan(self) -> Plan:
        """Probe where needed, and fit teachers and epochs to the budget; what was decided is recorded."""
        config = self.config
        if self._plan_file.is_file():
            known = read_json(self._plan_file)
            return Plan(**{**known, "given_up": tuple(known["given_up"])})
        if config.l2 is not None:
            found = None
            self.say(f"probe: skipped, l2 is given ({config.l2:g})")
        else:
            found = self._probe()
            also = "".join(
                f", {what} {value:g}"
                for what, value in (
                    ("horizon", found.horizon),
                    ("dropout", found.dropout),
                    ("dim", found.dim),
                )
                if value is not None
            )
            self.say(
                f"probe: l2 {found.l2:g}, learning rate {found.learning_rate:g}{also};"
                f" validation AUC {100 * found.auc:.3f}; {found.verdict}"
            )
        plan = Plan(
            l2=found.l2 if found else config.l2 or 0.0,
            learning_rate=config.learning_rate or (found.learning_rate if found else 1e-3),
            teachers=config.teachers,
            max_epochs=None,
            given_up=tuple(f"the probe of {what.replace('_', ' ')}" for what in found.skipped)
            if found
            else (),
            horizon=found.horizon if found else None,
            dropout=found.dropout if found else None,
            dim=found.dim if found else None,
        )
        if self.budget is not None:
            plan = self._within_budget(plan, found)
        self.record(plan)
        return plan

    def _probe(self) -> Found:
        self.say(
            f"probe: {len(self.config.probe.strengths)} strengths of the regulariser,"
            f" up to {self.config.probe.rungs[-1]} epochs each, {self.workers} at a time"
        )
        return self._race(
            self.probe_directory, self._open_questions(), self.config.teacher_model, self.teacher_config,
            self.teacher_settings, probe_rate=self.config.learning_rate is None, seconds=self._probe_seconds,
        )  # fmt: skip

    @property
    def _probe_seconds(self) -> float | None:
        return None if self.budget is None else 60 * self.budget * PROBE_SHARE

    @property
    def probe_directory(self) -> Path:
        """Where the probe of the teachers' settings is, if they are probed."""
        config = self.config
        asked: dict[str, Any] = {"settings": config.teacher_settings, "rate": config.learning_rate is None}
        if self._probe_seconds is not None:
            asked["seconds"] = self._probe_seconds
        return self._race_directory(
            "probe", self._open_questions(), config.teacher_model, self.teacher_settings, asked
        )

    def _open_questions(self) -> ProbeConfig:
        """The probe without what the user has decided, for teachers or for the student."""
        config = self.config
        trained = {**config.train, **config.teacher_train}
        built = {**config.model_settings, **config.teacher_settings}
        decided: dict[str, tuple[float, ...]] = {}
        if {"ema", "ema_epochs", "ema_warmup"} & trained.keys():
            decided["horizon_factors"] = ()
        if any(name.endswith("dropout") for name in built):
            decided["dropouts"] = ()
        fitting_sizes = tuple(factor for factor in config.probe.dim_factors if self._suits_students(factor))
        if "dim" in built or fitting_sizes != config.probe.dim_factors:
            decided["dim_factors"] = () if "dim" in built else fitting_sizes
        return config.probe.model_copy(update=decided)

    def _suits_students(self, factor: float) -> bool:
        """Whether students can have vectors of the size that the teachers would have."""
        dim = getattr(self.teacher_config, "dim", None)
        if dim is None:
            return False
        arm = Arm(0.0, 1.0, dim=int(dim * factor))
        try:
            for student in self.config.students:
                arm.model_config(student, self.config.settings_of(student))
        except InputError:
            return False
        return True

    def _race_directory(
        self, stage: str, race: ProbeConfig, model: str, settings: TrainConfig, asked: dict[str, Any]
    ) -> Path:
        """`asked` is what else names the stage."""
        inputs = {
            "probe": race.identity(), "train": _racing(race, settings).model_dump(mode="json"), "model": model,
            "threads": self.threads, "device": self.device, **asked,
        }  # fmt: skip
        return self.directory(stage, inputs)

    def _race(
        self,
        directory: Path,
        race: ProbeConfig,
        model: str,
        model_config: Frozen,
        settings: TrainConfig,
        *,
        probe_rate: bool = False,
        teachers: tuple[Path, ...] = (),
        seconds: float | None = None,
    ) -> Found:
        """A probe in a stage of its own."""
        return probe(
            race, model, model_config, _racing(race, settings), self.data, directory, threads=self.threads,
            device=self.device, probe_rate=probe_rate, teachers=teachers, workers=self.workers, seconds=seconds,
            quiet=self.quiet,
        )  # fmt: skip

    def _within_budget(self, plan: Plan, found: Found | None) -> Plan:
        """Down to half of the epochs, then fewer teachers, down to two, then still fewer epochs."""
        assert self.budget is not None
        per_epoch = found.seconds_per_epoch if found else epoch_seconds(self._teacher(plan), self.data)
        left = max(60 * self.budget - (time.monotonic() - self.began), 1.0)
        students = -(-len(self.config.students) // self.workers)

        def waves(teachers: int) -> int:
            return -(-teachers // self.workers) + students

        def seconds(teachers: int, epochs: int) -> float:
            return waves(teachers) * epochs * per_epoch

        wanted = max(self.settings.max_epochs, self.teacher_settings.max_epochs)
        given_up = list(plan.given_up)
        teachers, epochs = plan.teachers, wanted
        while teachers > 2 and seconds(teachers, epochs) > left and seconds(teachers, wanted // 2) > left:
            teachers -= 1
        if seconds(teachers, epochs) > left:
            epochs = max(min(wanted, int(left / (waves(teachers) * per_epoch))), MIN_EPOCHS)
        if teachers < plan.teachers:
            given_up.append(f"{plan.teachers - teachers} of {plan.teachers} teachers")
        if epochs < wanted:
            given_up.append(f"epochs after {epochs} (of up to {wanted})")
        if seconds(teachers, epochs) > left:
            given_up.append(
                f"the budget itself: about {seconds(teachers, epochs) / 60:.0f} minutes are needed"
            )
        self.say(
            f"budget: {left / 60:.0f} minutes are left at {per_epoch:.1f} s an epoch;"
            f" {teachers} teachers, at most {epochs} epochs"
            + (f"; given up: {', '.join(given_up)}" if given_up else "")
        )
        return replace(plan, teachers=teachers, max_epochs=epochs, given_up=tuple(given_up))

    def run_config(self, plan: Plan, model: str, model_config: Frozen, settings: TrainConfig) -> RunConfig:
        """A run of `model` as planned."""
        settings = plan.arm.train_config(settings)
        if plan.max_epochs is not None:
            settings = settings.model_copy(update={"max_epochs": min(settings.max_epochs, plan.max_epochs)})
        return RunConfig(
            model=model,
            model_config=plan.arm.model_config(model, model_config),
            train=settings,
            calibration=self.config.calibration,
            negative_rate=self.config.negative_rate,
            reference=False,
            threads=self.threads,
            device=self.device,
        )

    def student_l2(self, plan: Plan, student: str, model_config: Frozen, teachers: Sequence[Path]) -> float:
        """The regulariser of a taught student: of the teachers' strength or weaker, as validation says."""
        factors = self.config.student_factors
        if not teachers or len(factors) < 2 or self.config.l2 is not None or self.budget is not None:
            return plan.l2
        model_config = plan.arm.model_config(student, model_config)
        rows, tables = len(self.data.train), teacher_tables(teachers, "train")
        race = self.config.probe.model_copy(
            update={
                "strengths": tuple(factor * plan.l2 * rows for factor in factors), "refinements": (),
                **dict.fromkeys(FURTHER, ()),
            }
        )  # fmt: skip
        asked = {
            "settings": model_config.model_dump(mode="json"),
            "teachers": self._checksums(tables),
        }
        settings = replace(plan.arm, l2=self.settings.l2).train_config(self.settings)
        directory = self._race_directory(f"probe-{short_name(student)}", race, student, settings, asked)
        found = self._race(directory, race, student, model_config, settings, teachers=tables)
        self.say(f"probe of the student: l2 {found.l2:g}; {found.verdict}")
        return found.l2

    def _checksums(self, tables: Sequence[Path]) -> list[str]:
        return [LogitTable(path).checksum for path in tables]

    def _teacher(self, plan: Plan) -> RunConfig:
        """What all teachers have in common."""
        return self.run_config(plan, self.config.teacher_model, self.teacher_config, self.teacher_settings)

    def train(self, configs: dict[Path, RunConfig], title: str) -> dict[Path, dict[str, Any]]:
        """Runs side by side, as many as this recipe may; what is finished is read."""
        return run_many(configs, self.data, title=title, workers=self.workers, quiet=self.quiet)

    def teachers(self, plan: Plan) -> dict[Path, dict[str, Any]]:
        """Directories of the teachers, trained, with their logit tables; a smaller number takes the first of them."""
        if not plan.teachers:
            return {}
        base = self._teacher(plan)
        where = self.place("teachers", base)
        configs = {
            where / f"teacher-{m}": base.with_(seed=TEACHER_SEEDS + m) for m in range(1, plan.teachers + 1)
        }
        self.say(f"teachers: {plan.teachers} × {self.config.teacher_model}, {self.workers} at a time")
        return self.train(configs, "teachers")

    def students(self, plan: Plan, teachers: Sequence[Path]) -> dict[Path, dict[str, Any]]:
        """One student, or one of each kind where validation is to choose."""
        configs = {}
        for student in self.config.students:
            model_config = self.config.settings_of(student)
            l2 = self.student_l2(plan, student, model_config, teachers)
            base = self.run_config(replace(plan, l2=l2), student, model_config, self.settings)
            config = base.with_(
                seed=self.config.seed,
                teachers=teacher_tables(teachers, "train"),
                routes=self.config.routes if isinstance(model_config, RecapConfig) else 1,
                route_choice=self.config.route_choice,
            )
            configs[self.directory(f"student-{short_name(student)}", config.training(self.data))] = config
        self.say(f"student: {' and '.join(self.config.students)}, taught by {len(teachers)} teachers")
        return self.train(configs, "student")

    def ensembles(self, teachers: Sequence[Path]) -> list[dict[str, Any]]:
        """The mean logit of the first 1, 2, .. teachers, calibrated and measured like a model."""
        found = []
        fit, rate = fitting(self.config.calibration), self.config.negative_rate
        shards = {split: getattr(self.data, split) for split in ("valid", "test")}
        for count in range(1, len(teachers) + 1):
            raw = {
                split: undo_sampling(
                    mean_logit([LogitTable(path) for path in teacher_tables(teachers[:count], split)]),
                    shard,
                    rate,
                )
                for split, shard in shards.items()
                if len(shard)
            }
            calibration = fit(self.data.valid.labels, *raw["valid"])
            figures = {
                split: evaluate(shards[split].labels, logits, calibration, weights=weights)
                for split, (logits, weights) in raw.items()
            }
            found.append({"teachers": count, "metrics": figures})
        return found

    def run(self) -> dict[str, Any]:
        """All stages; returns the report."""
        self.out.mkdir(parents=True, exist_ok=True)
        with locked(self.out):
            plan = self.plan()
            teachers = self.teachers(plan)
            return self.finish(plan, teachers, self.students(plan, list(teachers)))

    def finish(
        self, plan: Plan, teachers: dict[Path, dict[str, Any]], students: dict[Path, dict[str, Any]]
    ) -> dict[str, Any]:
        """Ship the student that is best on validation, and report it beside its teachers."""
        chosen = max(students, key=lambda path: students[path]["metrics"]["valid"]["raw"]["auc"])
        report = self._report(plan, teachers, students, chosen)
        if not is_same_model(chosen / ARTIFACT, self.out / ARTIFACT):  # it may have graphs by now
            with atomic_directory(self.out / ARTIFACT) as partial:
                shutil.copytree(chosen / ARTIFACT, partial, dirs_exist_ok=True)
        write_json(self.out / REPORT, report)
        return report

    def _report(
        self,
        plan: Plan,
        teachers: dict[Path, dict[str, Any]],
        students: dict[Path, dict[str, Any]],
        chosen: Path,
    ) -> dict[str, Any]:
        student = students[chosen]
        ensembles = self.ensembles(list(teachers))
        split = "test" if "test" in student["metrics"] else "valid"
        report = {
            **student,
            "recipe": self.config.model_dump(mode="json"),
            "plan": {**asdict(plan), "given_up": list(plan.given_up)},
            "student": str(chosen.relative_to(self.out)),
            "students": {str(path.relative_to(self.out)): one["metrics"] for path, one in students.items()},
            "teacher_runs": {
                str(path.relative_to(self.out)): {
                    "metrics": one["metrics"], "seed": one["train"]["seed"], "parameters": one["parameters"],
                    "epochs": len(one["history"]), "seconds": one["seconds"],
                }
                for path, one in teachers.items()
            },
            "ensembles": ensembles,
            "fields": field_quality(self.data),
            "recovered": None,
            "date": datetime.now(UTC).date().isoformat(),
        }  # fmt: skip
        if len(teachers) > 1:
            alone = mean(one["metrics"][split]["raw"]["auc"] for one in teachers.values())
            together = ensembles[-1]["metrics"][split]["raw"]["auc"]
            own = student["metrics"][split]["raw"]["auc"]
            report["recovered"] = (own - alone) / (together - alone) if together > alone else None
            report["size_against_teacher"] = (
                student["parameters"] / next(iter(teachers.values()))["parameters"]
            )
            report["averaging"] = self._averaging(list(teachers), split)
        return report

    def _averaging(self, teachers: Sequence[Path], split: str) -> dict[str, Any]:
        """What the mean of more and more teachers gains, beside what Eq. 6 predicts from their disagreement."""
        shard, rate = getattr(self.data, split), self.config.negative_rate
        tables = [LogitTable(path) for path in teacher_tables(teachers, split)]
        cube, weights = (
            Cube.from_tables(tables, shift=negative_rate_shift(rate)),
            sampling_weights(shard, rate),
        )
        found = asdict(curve(cube, shard.labels, "run", weights=weights))
        plain: dict[str, Any] = json.loads(json.dumps(found))  # with lists, as the file has it
        return plain


def recipe_config(preset: str, given: dict[str, Any], origin: str) -> RecipeConfig:
    """A preset with what was given on top of it, table by table."""
    if preset not in PRESETS:
        raise InputError(f"no preset {preset!r}", fix=f"known are {', '.join(PRESETS)}")
    merged = dict(PRESETS[preset])
    for key, value in given.items():
        known = merged.get(key)
        merged[key] = {**known, **value} if isinstance(known, dict) and isinstance(value, dict) else value
    config = parse(RecipeConfig, merged, origin)
    for student in config.students:  # names and settings of models, before any work is done for them
        config.settings_of(student)
    parse_model(config.teacher_model, config.teacher_settings)
    return config
