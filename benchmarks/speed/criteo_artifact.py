"""Pack and export a RECAP of Criteo's shape with random weights: speed does not depend on them.

    python -m benchmarks.speed.criteo_artifact --out artifact/ [--seed 0] [--small]

39 fields of 16, rank 96, eight routes that branch late; vocabularies as large as those of Criteo_x4 (`--small`: at most
1,000 values each). Another seed is another model for the same requests.
"""

from __future__ import annotations

import argparse
import json
from functools import cache
from pathlib import Path

import numpy as np
import polars as pl
import torch

from benchmarks.speed.generate import CHUNK, CRITEO, Field, draw_integers, draw_ranks, universe
from recap_ctr.axes.routes import late_routes
from recap_ctr.data.encode import Encoder, FittedField
from recap_ctr.evaluation.calibrate import AffineCalibration
from recap_ctr.inference.artifact import write_artifact
from recap_ctr.inference.export import export
from recap_ctr.models.recap import Recap, RecapConfig
from recap_ctr.schema import Field as SchemaField
from recap_ctr.schema import Schema


def known_values(small: bool) -> list[pl.Series]:
    """Values of each field, the most frequent first; of the integers their buckets."""
    salts = np.random.default_rng(0).integers(1 << 32, size=len(CRITEO.fields))
    columns = []
    for field, salt in zip(CRITEO.fields, salts, strict=True):
        if field.log_normal:
            columns.append(pl.Series(field.name, np.arange(-1, field.size - 3)).cast(pl.String))
        else:
            kept = universe(field, int(salt))
            columns.append(kept.head(1000) if small else kept)
    return columns


def schema_field(field: Field) -> SchemaField:
    if field.log_normal:
        return SchemaField(name=field.name, kind="numeric", transform="log-square")
    return SchemaField(name=field.name, kind="categorical")


@cache
def rows(count: int) -> pl.DataFrame:
    """Raw rows for requests: values by Zipf's law, some missing, and of the small vocabularies some unseen."""
    salts = np.random.default_rng(0).integers(1 << 32, size=len(CRITEO.fields))
    rng = np.random.default_rng(1)
    columns = []
    for field, salt in zip(CRITEO.fields, salts, strict=True):
        if field.log_normal:
            column = pl.Series(field.name, draw_integers(field, rng)[:count].astype(np.float64))
        else:
            column = universe(field, int(salt)).gather(draw_ranks(field, rng)[:count])
        absent = pl.Series(rng.random(CHUNK)[:count] < field.missing)
        columns.append(column.set(absent, None))
    return pl.DataFrame(columns)


def write(out: Path, seed: int, small: bool, *, graphs: bool = True) -> int:
    """Write the artifact, with a graph for each setting of the dial by default; return its number of parameters."""
    schema = Schema(label=CRITEO.label, fields=tuple(map(schema_field, CRITEO.fields)))
    fitted = [
        FittedField(field, values, np.arange(len(values), 0, -1))
        for field, values in zip(schema.fields, known_values(small), strict=True)
    ]
    encoder = Encoder(schema, fitted)
    torch.manual_seed(seed)
    config = RecapConfig(lora_rank=96, binding="free")
    model = Recap(config, encoder.layout).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # adapters begin at zero: then all routes would agree
            parameter.add_(torch.randn_like(parameter), alpha=0.01)
    write_artifact(
        out,
        name="recap",
        config=config,
        weights={name: tensor.numpy() for name, tensor in model.state_dict().items()},
        encoder=encoder,
        calibration=AffineCalibration(1.0, 0.0),
        shift=0.0,
        metrics={},
        data={"name": "generated", "fingerprint": "0" * 32, "rows": 0},
        training={"seed": seed},
        routes=tuple(late_routes(config, 8)),
    )
    if graphs:
        export(out, quiet=True)
    return sum(parameter.numel() for parameter in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    print(json.dumps({"out": str(args.out), "parameters": write(args.out, args.seed, args.small)}))


if __name__ == "__main__":
    main()
