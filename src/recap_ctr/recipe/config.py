"""What `recap fit` does: the recipe's settings, its presets, and the training that follows from them."""

import math
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from recap_ctr.config import Frozen, TrainConfig, parse
from recap_ctr.errors import InputError
from recap_ctr.inference.about import About
from recap_ctr.models.catalogue import parse_model
from recap_ctr.recipe.probe import ProbeConfig
from recap_ctr.training.report import RouteChoice

TEACHER_SEEDS = 1000  # Teacher m has seed 1000 + m, so that no student starts where a teacher did.
MAX_BATCH = 4096  # Rows of a batch, as published.
STEPS_PER_EPOCH = 64  # At least, where batches of 128 rows allow it.


class RecipeConfig(Frozen):
    """What `recap fit` does; every table may be given in part."""

    model: str = "recap"
    """The student's model by name; `auto` takes RECAP or FCN, whichever is better on validation rows."""
    model_settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of the student's model."""
    teacher_model: str = "fcn"
    """The model of the teachers, by name; by default the first of a portfolio."""
    teacher_settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of the teachers' model."""
    teachers: NonNegativeInt | None = None
    """M_seed of the paper: how many runs of one model teach. With 0, the student learns from labels alone. By default
    `recap fit` races a portfolio, and validation rows choose the teachers; the paper's tables have five teachers."""
    portfolio: tuple[str, ...] = ("qnn", "dcnv2", "final", "dnn", "fm")
    """Models that race beside the teachers' model where their number is not set, the most promising first."""
    routes: PositiveInt | None = None
    """K of Eq. 15, for a student that has routes; by default 8 where their gain on validation is beyond chance, else
    1."""
    route_choice: RouteChoice = "late"
    """How routes are chosen: those that share all but their last steps, random ones, or greedily on validation."""
    l2: float | None = Field(None, ge=0)
    """Strength of the embedding regulariser; by default the probe finds it."""
    learning_rate: PositiveFloat | None = None
    """Adam's step size; by default the probe finds it with l2, and it is 0.001 where l2 is set."""
    train: dict[str, Any] = Field(default_factory=dict)
    """Training settings that differ from the recipe's own."""
    teacher_train: dict[str, Any] = Field(default_factory=dict)
    """Training settings that differ for teachers only."""
    recombined: NonNegativeInt | None = None
    """Recombined rows for each training row, that students learn from by their teachers' logits alone; 0: none. By
    default three where a portfolio has networks that teach, fewer or none where scoring them would take long. With a
    number of teachers, none."""
    probe: ProbeConfig = ProbeConfig()
    """What the probe tries, and for how long."""
    student_factors: tuple[PositiveFloat, ...] = (1.0, 10**-0.5, 0.1)
    """Strengths of l2 that a second probe tries for a taught student, relative to the teachers', because learning from
    teachers regularises, too. There is no second probe if l2 or a budget is set."""
    ship: Literal["student", "best"] = "student"
    """What becomes the artifact: the student, or a teacher or the logistic regression where that is better on both
    halves of the validation rows."""
    refit: bool = True
    """Whether the model that a portfolio has chosen is trained again at the end, on all rows, including the held-out
    ones. The figures are measured before that, on rows that the measured model had not learned from."""
    calibration: Literal["affine", "isotonic"] = "affine"
    """How scores are calibrated on the validation rows."""
    negative_rate: float = Field(1.0, gt=0, le=1)
    """The share of negatives that was kept when the log was sampled."""
    slices: tuple[str, ...] | None = None
    """Fields for whose most frequent values the report shows figures, such as ["site", "hour"]; by default the three
    categorical fields with the fewest values."""
    seed: int = Field(1, ge=0, lt=TEACHER_SEEDS)
    """Seed of the student."""
    card: About = About()
    """What the model card says of owner, use and licence."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for table in ("train", "teacher_train"):
            for name in getattr(self, table):
                if name in ("l2", "learning_rate", "seed", "recombined"):
                    raise ValueError(f"{name} is a setting of the recipe itself: move it out of [{table}]")
        return self

    @property
    def num_teachers(self) -> int:
        """Return how many teachers of one model there are, if it is not a portfolio that teaches."""
        return 5 if self.teachers is None else self.teachers

    @property
    def students(self) -> tuple[str, ...]:
        """Return the models that are trained as students."""
        return ("recap", "fcn") if self.model == "auto" else (self.model,)

    def model_config_of(self, student: str) -> Frozen:
        """Return a student's model config; a second student of the teachers' kind is built like them."""
        settings = {self.teacher_model: self.teacher_settings, self.students[0]: self.model_settings}
        return parse_model(student, settings.get(student, {}))


PAPER = {
    # What the paper states: Table 4 and section 4. What it leaves open: T, the depths and their weights, K and how
    # routes are chosen, the fuse, the schedule of student and teachers. Our reading is in docs/decisions/0007.
    # What the method consists of stands here even where it is the default, which may change.
    "model": "recap",
    "teacher_model": "fcn",
    "model_settings": {
        "num_adapters": 8,
        "max_rank": 96,  # Where 96 would make the model larger than 1.05 FCN, the largest that does not.
        "form": "additive",
        "binding": "free",
        "sampling": "batch",
        "sample_from": 0,
        "fuse": "mean",
        "depth": 4,
        "train_depths": [2, 3, 4],
        "depth_weights": [1 / 3, 1 / 3, 1 / 3],
    },
    "teachers": 5,
    "routes": 8,
    "route_choice": "random",
    "recombined": 0,
    "calibration": "affine",
    "student_factors": [],
    "probe": {"horizon_factors": [], "dropouts": [], "dim_factors": []},
    "train": {
        "schedule": "cosine",
        "ema": 0.9995,
        "ema_epochs": [],
        "ema_warmup": 0,
        "max_epochs": 20,
        "kd_weight": 1.0,
        "kd_from": "mean",
    },
    "teacher_train": {"schedule": "plateau", "ema": 0, "max_epochs": 100, "patience": 2},
}
PRESETS: dict[str, dict[str, Any]] = {"default": {}, "paper": PAPER}


def recipe_config(preset: str, settings: dict[str, Any], origin: str) -> RecipeConfig:
    """Return a preset with `settings` on top of it, table by table; errors name `origin`."""
    if preset not in PRESETS:
        raise InputError(f"no preset {preset!r}", fix=f"choose from {', '.join(PRESETS)}")
    config = parse(RecipeConfig, merge_settings(PRESETS[preset], settings), origin)
    for student in config.students:  # Check models by name and settings before any work is done for them.
        config.model_config_of(student)
    parse_model(config.teacher_model, config.teacher_settings)
    for model in config.portfolio:
        parse_model(model, {})
    return config


def merge_settings(base: dict[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with `settings` on top, table by table.

    >>> merge_settings({"teachers": 5, "train": {"patience": 3}}, {"train": {"max_epochs": 9}})
    {'teachers': 5, 'train': {'patience': 3, 'max_epochs': 9}}
    """
    merged = dict(base)
    for key, value in settings.items():
        is_table = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = {**merged[key], **value} if is_table else value
    return merged


def batch_size(rows: int) -> int:
    """Return the published 4096, or less where an epoch would have too few steps.

    >>> batch_size(600_000), batch_size(120_000), batch_size(1_000)
    (4096, 1024, 128)
    """
    return 1 << min(12, max(7, math.floor(math.log2(max(rows / STEPS_PER_EPOCH, 1.0)))))


def training_of(config: RecipeConfig, rows: int, *, teacher: bool = False) -> TrainConfig:
    """Return how students, or teachers, are trained: at a constant rate, whose noise the weights' average removes."""
    defaults: dict[str, Any] = {
        "schedule": "constant",
        "ema_epochs": (4.0,),
        "max_epochs": 60,
        "patience": 3,
        "batch_size": batch_size(rows),
        "seed": config.seed,
        "learning_rate": config.learning_rate or 1e-3,
    }
    settings = {**config.train, **(config.teacher_train if teacher else {})}
    if teacher:  # Settings that only students use must not change the teachers' directories.
        for name in ("kd_weight", "kd_from"):
            settings.pop(name, None)
    if settings.get("ema") is not None:
        defaults["ema_epochs"] = ()
    if settings.get("schedule") == "cosine":  # The rate must have decayed before a run ends.
        defaults["patience"] = settings.get("max_epochs", defaults["max_epochs"])
    return parse(TrainConfig, {**defaults, **settings}, "recipe")
