"""RECAP: click-through-rate prediction with the accuracy of an ensemble at the size and cost of one model.

    import recap_ctr

    result = recap_ctr.fit("clicks.csv", label="click", out="model")
    scores = recap_ctr.predict(result.load(), "fresh.csv")

`prepare` turns a raw table into prepared data, `fit` trains one model that stands for an ensemble, `update` trains it
further on tomorrow's log, `run` trains one model from one seed, `load` opens an artifact, `predict` and `evaluate` use
one, and `check` looks for faults in rows. What a user can put right is raised as an `InputError`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recap_ctr.config import TrainConfig
    from recap_ctr.data.shards import PreparedData
    from recap_ctr.data.split import Split
    from recap_ctr.data.synthetic import SyntheticConfig, SyntheticData
    from recap_ctr.data.table import prepare
    from recap_ctr.errors import DataWarning, InputError
    from recap_ctr.inference.calls import check, evaluate, explain, load, predict
    from recap_ctr.inference.check import RowsCheck
    from recap_ctr.inference.scorer import RowsEvaluation, Scorer
    from recap_ctr.models.catalogue import MODELS
    from recap_ctr.recipe.config import RecipeConfig
    from recap_ctr.recipe.fit import FitResult, fit
    from recap_ctr.recipe.update import UpdateResult, update
    from recap_ctr.schema import Field, Schema
    from recap_ctr.sklearn.classifier import CTRClassifier
    from recap_ctr.training.config import RunConfig
    from recap_ctr.training.report import FitReport, RunReport
    from recap_ctr.training.run import run

    __version__: str

__all__ = [
    "MODELS",
    "CTRClassifier",
    "DataWarning",
    "Field",
    "FitReport",
    "FitResult",
    "InputError",
    "PreparedData",
    "RecipeConfig",
    "RowsCheck",
    "RowsEvaluation",
    "RunConfig",
    "RunReport",
    "Schema",
    "Scorer",
    "Split",
    "SyntheticConfig",
    "SyntheticData",
    "TrainConfig",
    "UpdateResult",
    "__version__",
    "check",
    "evaluate",
    "explain",
    "fit",
    "load",
    "predict",
    "prepare",
    "run",
    "update",
]

# Loaded on first use: `import recap_ctr` costs nothing, and what needs no torch works without it.
_MODULES = {
    "CTRClassifier": "sklearn.classifier",
    "DataWarning": "errors",
    "Field": "schema",
    "FitReport": "training.report",
    "FitResult": "recipe.fit",
    "InputError": "errors",
    "MODELS": "models.catalogue",
    "PreparedData": "data.shards",
    "RecipeConfig": "recipe.config",
    "RowsCheck": "inference.check",
    "RowsEvaluation": "inference.scorer",
    "RunConfig": "training.config",
    "RunReport": "training.report",
    "Schema": "schema",
    "Scorer": "inference.scorer",
    "Split": "data.split",
    "SyntheticConfig": "data.synthetic",
    "SyntheticData": "data.synthetic",
    "TrainConfig": "config",
    "UpdateResult": "recipe.update",
    "check": "inference.calls",
    "evaluate": "inference.calls",
    "explain": "inference.calls",
    "fit": "recipe.fit",
    "load": "inference.calls",
    "predict": "inference.calls",
    "prepare": "data.table",
    "run": "training.run",
    "update": "recipe.update",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__


def _version() -> str:
    """Return the version of the installed package; a placeholder for a source tree that is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("recap-ctr")
    except PackageNotFoundError:
        return "0+unknown"
