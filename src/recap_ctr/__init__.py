"""RECAP: click-through-rate prediction with the accuracy of an ensemble at the size and cost of one model."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recap_ctr.config import TrainConfig
    from recap_ctr.data.prepare import Preparation, Split, prepare
    from recap_ctr.data.shards import PreparedData
    from recap_ctr.data.synthetic import SyntheticConfig, SyntheticData
    from recap_ctr.errors import InputError
    from recap_ctr.models import MODELS
    from recap_ctr.packed import load_artifact
    from recap_ctr.runs import RunConfig, run
    from recap_ctr.schema import Field, Schema, read_schema
    from recap_ctr.score import Engine, Scorer
    from recap_ctr.sklearn import CTRClassifier

# Loaded on first use: `import recap_ctr` costs nothing, and what needs no torch works without it.
_PUBLIC = {
    "CTRClassifier": "sklearn",
    "Engine": "score",
    "Field": "schema",
    "InputError": "errors",
    "MODELS": "models",
    "Preparation": "data.prepare",
    "PreparedData": "data.shards",
    "RunConfig": "runs",
    "Schema": "schema",
    "Scorer": "score",
    "Split": "data.prepare",
    "SyntheticConfig": "data.synthetic",
    "SyntheticData": "data.synthetic",
    "TrainConfig": "config",
    "load_artifact": "packed",
    "prepare": "data.prepare",
    "read_schema": "schema",
    "run": "runs",
}

__all__ = [
    "MODELS",
    "CTRClassifier",
    "Engine",
    "Field",
    "InputError",
    "Preparation",
    "PreparedData",
    "RunConfig",
    "Schema",
    "Scorer",
    "Split",
    "SyntheticConfig",
    "SyntheticData",
    "TrainConfig",
    "load_artifact",
    "prepare",
    "read_schema",
    "run",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return __all__
