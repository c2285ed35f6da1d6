"""What decides a run's outcome: the model, its settings and its training, from a TOML file or from Python."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, Self

from recap_ctr.axes.logits import table_checksum
from recap_ctr.config import Frozen, TrainConfig, parse, read_toml
from recap_ctr.data.layout import Layout
from recap_ctr.data.shards import PreparedData
from recap_ctr.errors import InputError
from recap_ctr.evaluation.sampling import negative_rate_shift
from recap_ctr.inference.manifest import WEIGHTS
from recap_ctr.jobs import machine
from recap_ctr.models.catalogue import parse_model
from recap_ctr.models.recap import RecapConfig
from recap_ctr.storage.hashes import sha256
from recap_ctr.training.report import RouteChoice

WIDE = 256  # Numbers per row from which on a step's matrix products are worth dividing among threads.
HISTORY, ARTIFACT, LOGITS = "history.csv", "artifact", "logits"  # In the directory of a run.


@dataclass(frozen=True)
class RunSettings:
    """What a TOML file says about a run, still unchecked: a model by name, its settings, and its training."""

    model: str
    model_settings: dict[str, Any]
    train: dict[str, Any]
    origin: str = ""
    """Where the settings come from, in a word, such as published or defaults; tables show it."""


def read_settings(path: Path, model: str = "fcn") -> RunSettings:
    """Return the tables [model] and [train] of a file, and its `origin`; [model] may lack the model's name."""
    tables = read_toml(path)
    origin = str(tables.pop("origin", ""))
    for key, table in tables.items():
        if key not in ("model", "train") or not isinstance(table, dict):
            raise InputError(f"{path}: unknown table {key}", fix="use only [model] and [train]")
    settings = dict(tables.get("model", {}))
    return RunSettings(str(settings.pop("name", model)), settings, tables.get("train", {}), origin)


def settings_for(model: str | None, path: Path | None) -> RunSettings:
    """Return the settings in `path`; ignore its [model] table if `model` names another model."""
    expected = model or "fcn"
    settings = RunSettings(expected, {}, {}) if path is None else read_settings(path, expected)
    return settings if model in (None, settings.model) else replace(settings, model=model, model_settings={})


def default_threads(config: Frozen, layout: Layout) -> int:
    """Return all cores for wide models, 1 for narrow ones, which more threads only slow down (docs/decisions/0004)."""
    return machine.num_cores() if layout.num_fields * getattr(config, "dim", 1) >= WIDE else 1


@dataclass(frozen=True)
class RunConfig:
    """All that decides a run's outcome, other than the data."""

    model: str
    model_config: Frozen
    train: TrainConfig
    calibration: Literal["affine", "isotonic"] = "affine"
    negative_rate: float = 1.0
    """The share of negatives that was kept when the log was sampled."""
    train_baseline: bool = True
    """Whether to train logistic regression, and LightGBM where it is installed, for comparison."""
    report_fields: bool = True
    """Whether to report how much of each field is unknown or has drifted."""
    slices: tuple[str, ...] | None = None
    """Fields that the report slices by; by default the three with the fewest values."""
    threads: int = 1
    device: str = "cpu"
    teachers: tuple[Path, ...] = ()
    """Logit tables over the training rows; with them the run is a student."""
    pool: tuple[Path, ...] = ()
    """Logit tables over the recombined rows, of those teachers that can score them; see `training.pool`."""
    routes: int | None = 1
    """K of Eq. 15: how many routes the artifact averages. One is the home route, unless it is chosen greedily.

    None: `MAX_ROUTES` if their gain in AUC on validation rows is beyond chance, else one.
    """
    route_choice: RouteChoice = "late"
    """Routes that share all but their last steps, random ones, or those late ones that do best on validation."""
    beside: tuple[Path, ...] = ()
    """Finished runs of lr, rates and boosted, put beside the towers of RECAP if that is better on validation rows."""
    on_top: Path | None = None
    """A finished run of rates, beside which RECAP's towers are trained from the start."""

    def __post_init__(self) -> None:
        negative_rate_shift(self.negative_rate)  # It refuses an impossible rate.
        if self.train.update == "convex" and self.model != "lr":
            raise InputError(
                f"update is convex, and the loss of {self.model} is not",
                fix='use update = "exact" or "fast", or train lr',
            )
        has_columns = isinstance(self.model_config, RecapConfig) and self.model_config.sampling == "fixed"
        if self.train.kd_from == "column" and not has_columns:
            raise InputError(
                f"kd_from is column, and rows have no columns of their own in {self.model}",
                fix='train recap with binding = "columns" and sampling = "fixed"',
            )
        self._check_pool()
        if self.routes is not None and self.routes < 1:
            raise InputError(f"{self.routes} routes: at least one is needed")
        if (self.routes or 1) > 1 and not isinstance(self.model_config, RecapConfig):
            raise InputError(f"{self.model} has no routes", fix="remove --routes, or train recap")

    def _check_pool(self) -> None:
        """Refuse recombined rows without teachers that have scored them."""
        if bool(self.train.recombined) != bool(self.teachers and self.pool):
            raise InputError(
                f"recombined is {self.train.recombined}, and teachers have"
                f" {'' if self.pool else 'not '}scored recombined rows for this run",
                fix="let `recap fit` train teachers and student: --set recombined=3",
            )
        if self.pool and self.train.kd_from == "column":
            raise InputError(
                "kd_from is column, and recombined rows are scored by all teachers together",
                fix="set recombined=0",
            )

    def with_seed(self, seed: int) -> "RunConfig":
        """Return the same run from another seed."""
        return replace(self, train=self.train.model_copy(update={"seed": seed}))

    def taught_by(self, teachers: tuple[Path, ...]) -> "RunConfig":
        """Return the same student with other teachers, which have scored the same recombined rows, if there are any."""
        pool = tuple(table.with_name(self.pool[0].name) for table in teachers) if self.pool else ()
        return replace(self, teachers=teachers, pool=pool)

    def to_json(self) -> dict[str, Any]:
        """Return the config as plain JSON values, for a job."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return values | {
            "model_config": self.model_config.model_dump(mode="json"),
            "train": self.train.model_dump(mode="json"),
            "teachers": [str(path) for path in self.teachers],
            "pool": [str(path) for path in self.pool],
            "beside": [str(path) for path in self.beside],
            "on_top": None if self.on_top is None else str(self.on_top),
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Return the config that `to_json` wrote."""
        parsed = {
            "model_config": parse_model(values["model"], values["model_config"]),
            "train": parse(TrainConfig, values["train"], "run"),
            "slices": None if values["slices"] is None else tuple(values["slices"]),
            "teachers": tuple(Path(path) for path in values["teachers"]),
            "pool": tuple(Path(path) for path in values["pool"]),
            "beside": tuple(Path(path) for path in values["beside"]),
            "on_top": None if values["on_top"] is None else Path(values["on_top"]),
        }
        return cls(**{**values, **parsed})

    def training_inputs(
        self, data: PreparedData, checksum: Callable[[Path], str] = table_checksum
    ) -> dict[str, Any]:
        """Return what the weights depend on; it names a run's directory. `checksum` is that of a teacher's table."""
        return {
            "data": data.fingerprint,
            "model": {"name": self.model, "config": self.model_config.model_dump(mode="json")},
            "train": self.train.model_dump(mode="json"),
            "threads": self.threads,
            "device": self.device,
            "teachers": [checksum(path) for path in self.teachers],
            **({"pool": [checksum(path) for path in self.pool]} if self.pool else {}),
            **(
                {"parts": [sha256(run / ARTIFACT / WEIGHTS) for run in self.beside]}
                if self.model == "blend"
                else {}
            ),
            **({"on_top": sha256(self.on_top / ARTIFACT / WEIGHTS)} if self.on_top else {}),
        }

    def inputs_without_seed(
        self, data: PreparedData, checksum: Callable[[Path], str] = table_checksum
    ) -> dict[str, Any]:
        """Return what runs that differ only in their seed have in common."""
        inputs = self.training_inputs(data, checksum)
        return {**inputs, "train": {key: value for key, value in inputs["train"].items() if key != "seed"}}
