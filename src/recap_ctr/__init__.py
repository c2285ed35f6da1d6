"""RECAP: click-through-rate prediction with the accuracy of an ensemble at the size and cost of one model."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recap_ctr.config import TrainConfig
    from recap_ctr.data.prepare import Preparation, prepare
    from recap_ctr.data.shards import PreparedData
    from recap_ctr.data.split import Split
    from recap_ctr.data.synthetic import SyntheticConfig, SyntheticData
    from recap_ctr.errors import InputError
    from recap_ctr.inference.engine import Engine
    from recap_ctr.inference.scorer import Scorer
    from recap_ctr.inference.torch_backend import load_artifact
    from recap_ctr.models.catalogue import MODELS
    from recap_ctr.schema import Field, Schema, read_schema
    from recap_ctr.sklearn import CTRClassifier
    from recap_ctr.training.run import RunConfig, run

# Loaded on first use: `import recap_ctr` costs nothing, and what needs no torch works without it.
_PUBLIC = {
    "CTRClassifier": "sklearn",
    "Engine": "inference.engine",
    "Field": "schema",
    "InputError": "errors",
    "MODELS": "models.catalogue",
    "Preparation": "data.prepare",
    "PreparedData": "data.shards",
    "RunConfig": "training.run",
    "Schema": "schema",
    "Scorer": "inference.scorer",
    "Split": "data.split",
    "SyntheticConfig": "data.synthetic",
    "SyntheticData": "data.synthetic",
    "TrainConfig": "config",
    "load_artifact": "inference.torch_backend",
    "prepare": "data.prepare",
    "read_schema": "schema",
    "run": "training.run",
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
