"""Let MLflow open an artifact: what `mlflow.pyfunc.load_model` calls, and what writes such a model without pickle.

An MLflow model of ours is the artifact itself beside MLflow's description of it, which names this module as its loader.
"""

import re
from pathlib import Path
from typing import Any

from recap_ctr.data.frames import as_frame
from recap_ctr.data.source import Block
from recap_ctr.inference.artifact import Artifact, read_artifact
from recap_ctr.inference.calls import load
from recap_ctr.inference.scorer import OUTPUT_COLUMNS, Scorer


class ArtifactModel:
    """An artifact under MLflow's convention: `predict` takes a pandas frame and returns one."""

    def __init__(self, scorer: Scorer) -> None:
        self.scorer = scorer

    def predict(self, model_input: Any, params: dict[str, Any] | None = None) -> Any:
        """Return the calibrated probabilities (`score`) and logits of raw rows; there are no `params`."""
        import pandas as pd

        rows = Block(as_frame(model_input), 1, "the data frame")
        scores = self.scorer.scores(self.scorer.renamed(rows))
        columns = zip(OUTPUT_COLUMNS, (scores.probability_B, scores.logit_B), strict=True)
        return pd.DataFrame(dict(columns), index=getattr(model_input, "index", None))


def _load_pyfunc(path: str) -> ArtifactModel:
    """Load the artifact of an MLflow model; MLflow finds this function by its name."""
    return ArtifactModel(load(path))


def save_model(artifact: str | Path, path: str | Path) -> None:
    """Write an artifact, or that of a run or fit, as an MLflow model to the new directory `path`."""
    import mlflow.pyfunc

    mlflow.pyfunc.save_model(str(path), **_description(Path(artifact)))


def log_model(artifact: str | Path, name: str = "model") -> str:
    """Log an artifact, or that of a run or fit, to the active MLflow run, and return the URI to load it by."""
    import mlflow.pyfunc

    return str(mlflow.pyfunc.log_model(name=name, **_description(Path(artifact))).model_uri)


def _description(artifact: Path) -> dict[str, Any]:
    """Return the arguments by which MLflow saves or logs the artifact: a module to import and files to copy."""
    read = read_artifact(artifact)
    return {
        "loader_module": __name__,
        "data_path": str(read.path),
        "signature": _signature(read),
        "pip_requirements": [_requirement(read), "pandas"],
        "metadata": {"data_fingerprint": read.manifest["data"]["fingerprint"]},
    }


def _signature(artifact: Artifact) -> Any:
    """Return the columns that MLflow passes on, of any type: the encoder reads ids as numbers or as text alike."""
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, DataType, Schema
    from mlflow.types.schema import AnyType

    columns = artifact.encoder.schema.input_columns
    return ModelSignature(
        inputs=Schema([ColSpec(AnyType(), name, required=False) for name in columns]),
        outputs=Schema([ColSpec(DataType.double, name) for name in OUTPUT_COLUMNS]),
    )


def _requirement(artifact: Artifact) -> str:
    """Return what a server of the model installs: PyTorch only without exported graphs, a version only if released."""
    import recap_ctr

    name, version = "recap-ctr" if artifact.graphs else "recap-ctr[train]", recap_ctr.__version__
    return f"{name}=={version}" if re.fullmatch(r"[\d.]+", version) else name
