"""A small artifact, to be damaged: logistic regression on two fields. The same version has the same bytes."""

from pathlib import Path

import numpy as np
import polars as pl
import torch

from recap_ctr.data.encode import Encoder, FittedField
from recap_ctr.evaluation.calibrate import AffineCalibration
from recap_ctr.inference.artifact import write_artifact
from recap_ctr.models.catalogue import build
from recap_ctr.models.lr import LRConfig
from recap_ctr.nn.weights import to_arrays
from recap_ctr.schema import Field, Schema


def write_small(out: Path, *, version: int = 0, num_values: int = 40) -> None:
    """Write a version; another version differs in one row of the table and in the number itself."""
    fields = [Field(name=name, kind="categorical") for name in ("a", "b")]
    values = pl.Series([f"value {number}" for number in range(num_values)])
    encoder = Encoder(
        Schema(label="y", fields=tuple(fields)),
        [FittedField(field, values, np.arange(num_values, 0, -1)) for field in fields],
    )
    torch.manual_seed(0)
    weights = to_arrays(build("lr", LRConfig(), encoder.layout).state_dict())
    table = next(name for name in weights if name.endswith("table.weight"))
    weights[table] = weights[table].copy()
    weights[table][3] = version
    figures = {"auc": 0.5, "logloss": 0.7, "calibration_error": 0.0}
    write_artifact(
        out,
        name="lr",
        config=LRConfig(),
        weights=weights,
        encoder=encoder,
        calibration=AffineCalibration(1.0, 0.0),
        shift=0.0,
        metrics={"valid": {"rows": 1, "base_rate_logloss": 0.7, "raw": figures, "calibrated": figures}},
        data={"name": "none", "fingerprint": "none", "rows": 1},
        training={"seed": 1, "version": version},
    )
