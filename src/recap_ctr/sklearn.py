"""CTRClassifier: raw rows to calibrated scores under scikit-learn's conventions, by the same code as the commands."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
import polars as pl
import torch
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import (
    assert_all_finite,
    check_array,
    check_consistent_length,
    check_random_state,
    column_or_1d,
)
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import check_is_fitted, validate_data

from recap_ctr.config import Frozen, TrainConfig, parse
from recap_ctr.data.prepare import Preparation, prepare
from recap_ctr.data.shards import PreparedData
from recap_ctr.data.source import Block, FrameSource, Source, as_frame
from recap_ctr.data.split import Split
from recap_ctr.errors import InputError
from recap_ctr.evaluation.metrics import sigmoid
from recap_ctr.inference.artifact import MANIFEST, read_artifact_manifest, write_artifact
from recap_ctr.inference.engine import Engine
from recap_ctr.inference.scorer import Scorer
from recap_ctr.inference.torch_backend import load_artifact
from recap_ctr.models.catalogue import parse_model
from recap_ctr.recipe.stages import TEACHER_SEEDS, Recipe, RecipeConfig
from recap_ctr.schema import Schema
from recap_ctr.training.run import ARTIFACT, RouteChoice, RunConfig, run

MAX_CATEGORIES = 20  # a column of floats with more distinct values than this holds measurements
TRAINING = (
    "learning_rate", "l2", "batch_size", "max_epochs", "patience", "update", "schedule", "ema", "ema_epochs",
    "kd_weight",
)  # fmt: skip
PROBE = "probe"
Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]


class _Settings(Frozen):
    """Those parameters of the classifier that neither TrainConfig nor the model's own settings check."""

    validation_fraction: float = Field(gt=0, lt=1)
    calibration: Literal["affine", "isotonic"]
    negative_rate: float = Field(gt=0, le=1)
    teachers: NonNegativeInt
    routes: PositiveInt | None
    route_choice: RouteChoice
    budget: PositiveFloat | None
    threads: PositiveInt


@contextmanager
def _value_errors() -> Iterator[None]:
    """scikit-learn's callers expect ValueError for what a user can put right."""
    try:
        yield
    except InputError as error:
        raise ValueError(str(error)) from error


@contextmanager
def _torch_left_alone() -> Iterator[None]:
    """A run seeds torch and sets its threads; the process that calls fit keeps its own."""
    threads = torch.get_num_threads()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_num_threads(threads)


class CTRClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A click model as a scikit-learn classifier.

    `X` is a polars or pandas frame, or an array of numbers, strings or objects; missing values are welcome. Without a
    `schema` every column is categorical, except floats with more than 20 distinct values: they are cut into quantiles.
    Columns without names are called x0, x1, ... in the schema. `y` holds any two classes; `classes_[1]` is the click.

    A fit holds out rows for early stopping and calibration: `validation_fraction` of each class at random, or those
    given to `fit`.

    Without `teachers` a fit is `recap train`: one model. With them it is `recap fit`: it finds `l2` and the learning
    rate on the held-out rows, trains the teachers side by side in processes of their own (cores / `threads` at a time),
    and on their mean one student, which is what is kept. Same rows, seed and threads, same model as the command's. What
    is None takes that command's own setting:

    =====================  ====================  ================================================================
    parameter              without teachers      with teachers
    =====================  ====================  ================================================================
    model                  fcn                   recap (`auto`: recap or fcn, whichever is better on held-out rows)
    l2, learning_rate      1e-5, 1e-3            probed, l2 again for the student; with l2 alone given, rate 1e-3
    schedule               plateau               constant
    ema, ema_epochs        no average            average of the weights, horizon 4 epochs
    batch_size             4096                  4096, but less where an epoch would have fewer than 64 steps
    max_epochs, patience   100, 2                60, 3
    routes, of recap       1                     8
    =====================  ====================  ================================================================

    `l2="probe"` looks for l2 without teachers as well, and trains as with them. `budget` is in minutes: teachers and
    epochs are cut to fit it. `random_state` seeds the rows held out and the model, or the student (there modulo 1000:
    the seeds from 1000 on are the teachers'). `report_` is the report that the command would write.

    >>> rng = np.random.default_rng(0)
    >>> rows = pl.DataFrame({"ad": rng.choice(["a", "b", "c"], 300), "hour": rng.integers(0, 24, 300)})
    >>> clicked = rows["ad"] == "a"
    >>> CTRClassifier("lr", learning_rate=0.1, batch_size=32, random_state=1).fit(rows, clicked).score(rows, clicked)
    1.0
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        model_settings: dict[str, Any] | None = None,
        schema: Schema | None = None,
        teachers: int = 0,
        teacher_model: str = "fcn",
        teacher_settings: dict[str, Any] | None = None,
        kd_weight: float = 1.0,
        routes: int | None = None,
        route_choice: str = "late",
        budget: float | None = None,
        learning_rate: float | None = None,
        l2: float | Literal["probe"] | None = None,
        batch_size: int | None = None,
        max_epochs: int | None = None,
        patience: int | None = None,
        update: str = "exact",
        schedule: str | None = None,
        ema: float | None = None,
        ema_epochs: Sequence[float] | None = None,
        validation_fraction: float = 0.1,
        calibration: str = "affine",
        negative_rate: float = 1.0,
        random_state: int | np.random.RandomState | None = None,
        threads: int = 1,
        device: str = "cpu",
        verbose: bool = False,
    ) -> None:
        self.model = model
        self.model_settings = model_settings
        self.schema = schema
        self.teachers = teachers
        self.teacher_model = teacher_model
        self.teacher_settings = teacher_settings
        self.kd_weight = kd_weight
        self.routes = routes
        self.route_choice = route_choice
        self.budget = budget
        self.learning_rate = learning_rate
        self.l2 = l2
        self.batch_size = batch_size
        self.max_epochs = max_epochs
        self.patience = patience
        self.update = update
        self.schedule = schedule
        self.ema = ema
        self.ema_epochs = ema_epochs
        self.validation_fraction = validation_fraction
        self.calibration = calibration
        self.negative_rate = negative_rate
        self.random_state = random_state
        self.threads = threads
        self.device = device
        self.verbose = verbose

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = tags.input_tags.string = tags.input_tags.categorical = True
        tags.classifier_tags.multi_class = False
        return tags

    @_value_errors()
    def fit(
        self, X: Any, y: Any, sample_weight: Any = None, *, validation: tuple[Any, ...] | None = None
    ) -> Self:
        """Train on `X` and `y`; `validation` is (X, y) or (X, y, sample_weight). A row of weight 0 is no row."""
        config = self._config()
        label = str(getattr(y, "name", None) or "label")  # a named series keeps its name in the schema
        rows = {"train": _rows(self._frame(X, y, reset=True), y, sample_weight)}
        y = rows["train"].y
        if (kind := type_of_target(y)) != "binary":
            raise ValueError(f"Only binary classification is supported. The type of the target is {kind}.")
        self.classes_ = np.unique(y)
        if len(self.classes_) < 2:
            raise ValueError(f"y holds {'1 class' if len(y) else 'no class'}, but two are needed")
        if validation is not None:
            rows["valid"] = self._validation_rows(validation)
        weighted = any(part.weights is not None for part in rows.values())
        schema = self._schema(rows["train"].frame, label, weighted)
        tables = {name: part.table(schema, self.classes_, weighted) for name, part in rows.items()}
        sources: dict[str, Source] = {
            name: FrameSource(table, origin=f"the {name} rows") for name, table in tables.items()
        }
        split = Split(kind="files")
        if validation is None:
            # One table with a split column, not two tables: an error then names the row by its number in X.
            column = _free("split", tables["train"].columns)
            seed = config.seed if isinstance(config, RecipeConfig) else config.train.seed
            held = pl.Series(column, self._held_out(y, seed))
            sources = {"all": FrameSource(tables["train"].with_columns(held))}
            split = Split(kind="column", column=column)
        with TemporaryDirectory(prefix="recap-") as directory, _torch_left_alone():
            preparation = Preparation(schema, sources, split)
            data, _ = prepare(preparation, Path(directory, "a data frame"), quiet=not self.verbose)
            self.report_ = self._train(config, data, Path(directory, "run"))
            self.artifact_ = load_artifact(Path(directory, "run", ARTIFACT))
        # What `load` needs beside the artifact; part of its manifest, so that `save` is a plain copy.
        self.artifact_.manifest["data"] |= {
            "classes": self.classes_.tolist(),
            "columns": self._columns,
            "named": hasattr(self, "feature_names_in_"),
        }
        if isinstance(config, RecipeConfig):
            # What was asked for, not what the probe found: fitted again, it looks again.
            names = {"teacher_model", "teacher_settings", "route_choice", "l2", "learning_rate"}
            self.artifact_.manifest["data"]["recipe"] = {
                **config.model_dump(mode="json", include=names),
                "teachers": self.report_["plan"]["teachers"],
                **({"l2": PROBE} if self.l2 == PROBE else {}),
            }
        return self

    def _train(self, config: RunConfig | RecipeConfig, data: PreparedData, out: Path) -> dict[str, Any]:
        quiet = not self.verbose
        if isinstance(config, RunConfig):
            return run(config, data, out, quiet=quiet)
        threads, budget = int(self.threads), None if self.budget is None else float(self.budget)
        recipe = Recipe(config, data, out, threads=threads, device=self.device, budget=budget, quiet=quiet)
        return recipe.run()

    @_value_errors()
    def decision_function(self, X: Any) -> Floats:
        """Calibrated logits of `classes_[1]`."""
        check_is_fitted(self)
        return Scorer(Engine.of(self.artifact_)).logits(
            Block(self._frame(X, reset=False), 1, "the data frame")
        )

    def predict_proba(self, X: Any) -> Floats:
        """Calibrated probabilities of both classes, one row each."""
        logits = self.decision_function(X)
        return np.column_stack([sigmoid(-logits), sigmoid(logits)])

    def predict(self, X: Any) -> Array:
        """The likelier class of each row."""
        logits = self.decision_function(X)
        predicted: Array = self.classes_[(logits > 0).astype(np.intp)]
        return predicted

    @_value_errors()
    def save(self, path: str | Path) -> None:
        """Write the artifact directory that `recap` commands, `Scorer` and `load` read; an older one is replaced."""
        check_is_fitted(self)
        path = Path(path)
        if path.exists() and (path.is_file() or any(path.iterdir())):
            if not (path / MANIFEST).is_file():
                raise InputError(f"{path} exists and is no artifact", fix="choose another path")
            read_artifact_manifest(path)
        artifact = self.artifact_
        write_artifact(
            path,
            name=artifact.name,
            config=artifact.config,
            weights=artifact.weights,
            routes=artifact.routes,
            encoder=artifact.encoder,
            calibration=artifact.calibration,
            shift=artifact.shift,
            dial=artifact.manifest.get("dial", []),
            **{part: artifact.manifest[part] for part in ("metrics", "data", "training")},
        )

    @classmethod
    @_value_errors()
    def load(cls, path: str | Path) -> Self:
        """The classifier of an artifact, fitted, with the settings it was trained with; labels of a log are 0 and 1."""
        artifact = load_artifact(Path(path))
        training, data = artifact.manifest["training"], artifact.manifest["data"]
        schema = artifact.encoder.schema
        if schema.weight not in data.get("columns", [schema.weight]):
            # It was no column of X but the weights of that fit; the next one may have none.
            schema = schema.model_copy(update={"weight": None})
        loaded = cls(
            artifact.name,
            model_settings=artifact.config.model_dump(mode="json"),
            schema=schema,
            calibration=artifact.manifest["calibration"]["kind"],
            negative_rate=math.exp(artifact.shift),
            random_state=training["seed"],
            routes=len(artifact.routes) or None,
            **{name: training[name] for name in TRAINING if name in training} | data.get("recipe", {}),
        )
        loaded.artifact_ = artifact
        loaded.classes_ = np.array(data.get("classes", [0, 1]))
        columns = data.get("columns") or [field.name for field in artifact.encoder.schema.fields]
        loaded.n_features_in_ = len(columns)
        if data.get("named", True):
            loaded.feature_names_in_ = np.array(columns, dtype=object)
        return loaded

    def _config(self) -> RunConfig | RecipeConfig:
        """What to do, checked: one run, or a recipe where there are teachers or something to probe."""
        names = _Settings.model_fields
        settings = parse(_Settings, {name: getattr(self, name) for name in names}, "CTRClassifier")
        probed = self.l2 == PROBE
        is_recipe = settings.teachers > 0 or probed
        if isinstance(self.random_state, int | np.integer):
            seed = int(self.random_state)  # as it is, so that `recap train --seed` trains the same model
        else:
            seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        seed = seed % TEACHER_SEEDS if is_recipe and seed >= 0 else seed
        values = {name: getattr(self, name) for name in TRAINING} | {"l2": None if probed else self.l2}
        given = {name: value for name, value in values.items() if value is not None}
        training = parse(TrainConfig, {**given, "seed": seed}, "CTRClassifier")
        try:
            torch.empty(0, device=self.device)
        except (RuntimeError, AssertionError) as error:
            raise ValueError(f"device {self.device!r}: {str(error).splitlines()[0]}") from None
        model = self.model or ("recap" if settings.teachers else "fcn")
        if not is_recipe:
            return RunConfig(
                model=model,
                model_config=parse_model(model, dict(self.model_settings or {})),
                train=training,
                calibration=settings.calibration,
                negative_rate=settings.negative_rate,
                reference=False,
                threads=settings.threads,
                device=self.device,
                routes=settings.routes or 1,
                route_choice=settings.route_choice,
            )
        own = _plain("recap" if model == "auto" else model, self.model_settings)
        # Without teachers the probe's runs are the model's own kind.
        alone = settings.teachers == 0 and model != "auto"
        teacher = model if alone else self.teacher_model
        checked = training.model_dump(include=set(given))
        recipe = {
            "model": model, "model_settings": own, "teachers": settings.teachers, "teacher_model": teacher,
            "teacher_settings": own if alone else _plain(teacher, self.teacher_settings),
            "routes": settings.routes, "route_choice": settings.route_choice,
            "l2": checked.pop("l2", None), "learning_rate": checked.pop("learning_rate", None), "train": checked,
            "calibration": settings.calibration, "negative_rate": settings.negative_rate, "seed": seed,
        }  # fmt: skip
        stated = {name: value for name, value in recipe.items() if value is not None}
        return parse(RecipeConfig, stated, "CTRClassifier")

    @property
    def _columns(self) -> list[str]:
        unnamed = [f"x{i}" for i in range(self.n_features_in_)]
        return list(getattr(self, "feature_names_in_", unnamed))

    def _frame(self, X: Any, y: Any = "no_validation", *, reset: bool) -> pl.DataFrame:
        """`X` with the columns of the fit; frames keep each column's own type, all else becomes one array."""
        if isinstance(X, pl.LazyFrame):
            X = X.collect()
        elif not hasattr(X, "columns"):
            kind = None if hasattr(X, "dtype") else object  # lest numpy makes text of a list's numbers
            X = check_array(X, dtype=kind, ensure_all_finite="allow-nan", input_name="X", estimator=self)
        validate_data(self, X, y, reset=reset, skip_check_array=True)
        frame = as_frame(X)
        return frame.rename(dict(zip(frame.columns, self._columns, strict=True)))

    def _schema(self, frame: pl.DataFrame, label: str, weighted: bool) -> Schema:
        if self.schema is None:
            fields = tuple(_field(column) for column in frame)
            schema = parse(Schema, {"label": _free(label, frame.columns), "fields": fields}, "X")
        elif isinstance(self.schema, Schema):
            schema = self.schema
        else:
            raise ValueError(f"schema is a {type(self.schema).__name__}, not a recap_ctr.schema.Schema")
        if weighted and schema.weight is None:
            name = _free("weight", [*frame.columns, schema.label])
            schema = schema.model_copy(update={"weight": name, "columns": None})
        return schema

    def _validation_rows(self, validation: tuple[Any, ...]) -> "_Rows":
        if len(validation) not in (2, 3):
            raise ValueError(
                f"validation has {len(validation)} entries; it is (X, y) or (X, y, sample_weight)"
            )
        rows = _rows(self._frame(validation[0], reset=False), *validation[1:])
        unknown = rows.y[~np.isin(rows.y, self.classes_)]
        if len(unknown):
            raise ValueError(f"validation has label {unknown[0]!s}, which y has not")
        return rows

    def _held_out(self, y: Array, seed: int) -> Array:
        """`valid` for the chosen share of each class, but one row at least, and `train` for the rest."""
        rng = np.random.default_rng(seed)
        split = np.full(len(y), "train")
        for label in self.classes_:
            rows = np.flatnonzero(y == label)
            if len(rows) < 2:
                raise ValueError(
                    f"class {label!s} has one row only: training and validation need one row each of every class"
                )
            count = min(max(round(self.validation_fraction * len(rows)), 1), len(rows) - 1)
            split[rng.choice(rows, count, replace=False)] = "valid"
        return split


@dataclass(frozen=True, eq=False)
class _Rows:
    frame: pl.DataFrame
    y: Array
    weights: Floats | None

    def table(self, schema: Schema, classes: Array, weighted: bool) -> pl.DataFrame:
        """The frame with y, as 0 and 1, and the weights under the schema's names."""
        frame = self.frame.with_columns(pl.Series(schema.label, np.searchsorted(classes, self.y)))
        weights = np.ones(len(self.y)) if self.weights is None else self.weights
        return frame.with_columns(pl.Series(schema.weight, weights)) if weighted else frame


def _rows(frame: pl.DataFrame, y: Any, sample_weight: Any = None) -> _Rows:
    """Rows whose labels and weights are as many as they are; a row of weight 0 is gone."""
    y = column_or_1d(y, warn=True)
    assert_all_finite(y, input_name="y")
    check_classification_targets(y)
    weights = None if sample_weight is None else column_or_1d(sample_weight, dtype=np.float64)
    check_consistent_length(frame, y, weights)
    if weights is None or weights.all():
        return _Rows(frame, y, weights)
    kept = weights != 0
    if not kept.any():
        raise ValueError("Sample weights must contain at least one non-zero number.")
    return _Rows(frame.filter(kept), y[kept], weights[kept])


def _field(column: pl.Series) -> dict[str, str]:
    if column.dtype.is_float() and column.n_unique() > MAX_CATEGORIES:
        return {"name": column.name, "kind": "numeric", "transform": "quantiles"}
    return {"name": column.name, "kind": "categorical"}


def _free(name: str, taken: list[str]) -> str:
    while name in taken:
        name = f"_{name}"
    return name


def _plain(model: str, settings: dict[str, Any] | None) -> dict[str, Any]:
    """A model's settings, checked, as JSON has them."""
    return parse_model(model, dict(settings or {})).model_dump(mode="json", exclude_unset=True)
