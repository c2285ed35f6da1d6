"""CTRClassifier: a click model under scikit-learn's conventions."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import polars as pl
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_array
from sklearn.utils.validation import check_is_fitted, validate_data

from recap_ctr.data.frames import as_frame
from recap_ctr.data.prepare import write_prepared_data
from recap_ctr.data.source import Block
from recap_ctr.errors import InputError
from recap_ctr.evaluation.metrics import sigmoid
from recap_ctr.inference.artifact import write_artifact
from recap_ctr.inference.engine import Engine
from recap_ctr.inference.manifest import MANIFEST, read_artifact_manifest
from recap_ctr.inference.scorer import Scorer
from recap_ctr.jobs.progress import say
from recap_ctr.schema import Schema
from recap_ctr.sklearn.rows import (
    Array,
    Floats,
    Rows,
    describe_columns,
    is_weighted,
    labelled_rows,
    preparation,
    two_classes,
)

if TYPE_CHECKING:
    from recap_ctr.data.shards import PreparedData
    from recap_ctr.recipe.config import RecipeConfig
    from recap_ctr.training.config import RunConfig

# Torch takes seconds to import. So whatever needs it is imported where it is used, not with the class.


@contextmanager
def _value_errors() -> Iterator[None]:
    """Raise what a user can put right as a ValueError, which scikit-learn's callers expect."""
    try:
        yield
    except InputError as error:
        raise ValueError(str(error)) from error


class CTRClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A click model as a scikit-learn classifier.

    `X` is a polars or pandas frame, or an array of numbers, strings or objects; missing values are welcome. Columns
    without names are called x0, x1, ... in the schema. `y` holds any two classes; `classes_[1]` is the click.

    Without a `schema`, it is inferred from the rows by the rules of `recap fit`: text and codes are categories,
    measurements lie between quantiles, lists and joined values are multi fields. Columns that identify rows, copy the
    label, never change, or hold the time are no features: `dropped_columns_` names them with the reason, and `schema_`
    is the schema that was used.

    A fit holds out rows for early stopping and calibration: `validation_fraction` of each class at random, or those
    given to `fit`.

    Without `teachers` a fit is `recap train`: one model. With them it is `recap fit`: it finds `l2` and the learning
    rate on the held-out rows, trains the teachers side by side in separate processes (cores / `threads` at a time),
    and on their mean one student, which is what is kept. Same rows, seed and threads, same model as the command's. A
    parameter that is None takes that command's default:

    =====================  ====================  ================================================================
    parameter              without teachers      with teachers
    =====================  ====================  ================================================================
    model                  fcn                   recap (`auto`: recap or fcn, whichever is better on held-out rows)
    l2, learning_rate      1e-5, 1e-3            probed, l2 again for the student; with l2 alone given, rate 1e-3
    schedule               plateau               constant
    ema, ema_epochs        no average            average of the weights, horizon 4 epochs
    batch_size             4096                  4096, but less where an epoch would have fewer than 64 steps
    max_epochs, patience   100, 2                60, 3
    routes, of recap       1                     8 where their gain on held-out rows is beyond chance, else 1
    =====================  ====================  ================================================================

    `l2="probe"` looks for l2 without teachers as well, and trains as with them. `budget` is in minutes: teachers and
    epochs are cut to fit it. `random_state` seeds the rows held out and the model, or the student (there modulo 1000:
    the seeds from 1000 on are the teachers'). `report_` is the report that the command would write.

    >>> import numpy as np, polars as pl
    >>> rng = np.random.default_rng(0)
    >>> rows = pl.DataFrame({"row": range(300), "ad": rng.choice(["a", "b", "c"], 300)})
    >>> clicked = (rows["ad"] == "a").to_numpy() & (rng.random(300) < 0.9)
    >>> model = CTRClassifier("lr", learning_rate=0.1, batch_size=32, random_state=1).fit(rows, clicked)
    >>> model.score(rows, clicked) > 0.9, list(model.dropped_columns_)
    (True, ['row'])
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
        """Train on `X` and `y`; `validation` is (X, y) or (X, y, sample_weight). A row of weight 0 is left out."""
        from recap_ctr.sklearn.training import config_from, seed_of, torch_left_alone

        config = config_from(self.get_params(deep=False))
        label = str(getattr(y, "name", None) or "label")  # A named series keeps its name in the schema.
        rows = labelled_rows(self._frame(X, y, reset=True), y, sample_weight)
        self.classes_ = two_classes(rows.y)
        valid = None if validation is None else self._validation_rows(validation)
        self.schema_, self.dropped_columns_ = describe_columns(
            rows, self.classes_, label, self.schema, weighted=is_weighted(rows, valid)
        )
        if self.verbose:
            for column, reason in self.dropped_columns_.items():
                say(f"column {column!r} is not a field: {reason}")
        plan = preparation(
            self.schema_,
            self.classes_,
            rows,
            valid,
            fraction=self.validation_fraction,
            seed=seed_of(config),
        )
        with TemporaryDirectory(prefix="recap-") as directory, torch_left_alone():
            data, _ = write_prepared_data(plan, Path(directory, "a data frame"), quiet=not self.verbose)
            self._train(config, data, Path(directory, "run"))
        return self

    def _train(self, config: "RunConfig | RecipeConfig", data: "PreparedData", out: Path) -> None:
        """Train, and keep the report and the model in memory."""
        from recap_ctr.inference.torch_backend import load_artifact
        from recap_ctr.recipe.config import RecipeConfig
        from recap_ctr.sklearn.training import recipe_to_repeat, train
        from recap_ctr.training.config import ARTIFACT
        from recap_ctr.training.report import FitReport

        parameters = self.get_params(deep=False)
        self.report_ = train(config, parameters, data, out)
        self.artifact_ = load_artifact(out / ARTIFACT)
        # `load` needs this beside the artifact; it is part of the manifest, so that `save` is a plain copy.
        self.artifact_.manifest["data"] |= {
            "classes": self.classes_.tolist(),
            "columns": self._columns,
            "named": hasattr(self, "feature_names_in_"),
            "dropped": self.dropped_columns_,
        }
        if isinstance(config, RecipeConfig) and isinstance(self.report_, FitReport):
            self.artifact_.manifest["data"]["recipe"] = recipe_to_repeat(config, self.report_, parameters)

    @_value_errors()
    def decision_function(self, X: Any) -> Floats:
        """Return the calibrated logits of `classes_[1]`."""
        check_is_fitted(self)
        scorer = Scorer(Engine.of(self.artifact_))
        return scorer.logits(Block(self._frame(X, reset=False), 1, "the data frame"))

    def predict_proba(self, X: Any) -> Floats:
        """Return the calibrated probabilities of both classes, one row each."""
        logits = self.decision_function(X)
        return np.column_stack([sigmoid(-logits), sigmoid(logits)])

    def predict(self, X: Any) -> Array:
        """Return the likelier class of each row."""
        logits = self.decision_function(X)
        predicted: Array = self.classes_[(logits > 0).astype(np.intp)]
        return predicted

    @_value_errors()
    def save(self, path: str | Path) -> None:
        """Write the artifact directory that `recap` commands, `recap_ctr.load` and `CTRClassifier.load` read.

        An older artifact in `path` is replaced; anything else is refused.
        """
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
            profile=artifact.profile,
            **{part: artifact.manifest[part] for part in ("metrics", "data", "training")},
        )

    @classmethod
    @_value_errors()
    def load(cls, path: str | Path) -> Self:
        """Return the classifier of an artifact, fitted, with the settings it was trained with.

        An artifact that a command wrote has the classes 0 and 1.
        """
        from recap_ctr.inference.torch_backend import load_artifact
        from recap_ctr.sklearn.training import TRAINING

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
        loaded.schema_ = artifact.encoder.schema
        loaded.dropped_columns_ = data.get("dropped", {})
        columns = data.get("columns") or list(artifact.encoder.schema.input_columns)
        loaded.n_features_in_ = len(columns)
        if data.get("named", True):
            loaded.feature_names_in_ = np.array(columns, dtype=object)
        return loaded

    @property
    def _columns(self) -> list[str]:
        unnamed = [f"x{i}" for i in range(self.n_features_in_)]
        return list(getattr(self, "feature_names_in_", unnamed))

    def _frame(self, X: Any, y: Any = "no_validation", *, reset: bool) -> pl.DataFrame:
        """Return `X` with the columns of the fit; frames keep the type of each column, all else becomes one array."""
        if isinstance(X, pl.LazyFrame):
            X = X.collect()
        elif not hasattr(X, "columns"):
            kind = None if hasattr(X, "dtype") else object  # Numpy would make text of a list's numbers.
            X = check_array(X, dtype=kind, ensure_all_finite="allow-nan", input_name="X", estimator=self)
        validate_data(self, X, y, reset=reset, skip_check_array=True)
        frame = as_frame(X)
        return frame.rename(dict(zip(frame.columns, self._columns, strict=True)))

    def _validation_rows(self, validation: tuple[Any, ...]) -> Rows:
        if len(validation) not in (2, 3):
            raise ValueError(
                f"validation has {len(validation)} entries; it is (X, y) or (X, y, sample_weight)"
            )
        rows = labelled_rows(self._frame(validation[0], reset=False), *validation[1:])
        unknown = rows.y[~np.isin(rows.y, self.classes_)]
        if len(unknown):
            raise ValueError(f"validation has label {unknown[0]!s}, which y has not")
        return rows
