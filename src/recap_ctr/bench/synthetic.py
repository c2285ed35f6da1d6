"""The synthetic data as a benchmark: drawn, prepared, and a recipe cut to its size."""

from pathlib import Path
from typing import Any

from recap_ctr.data.prepare import Preparation, prepare
from recap_ctr.data.shards import PreparedData
from recap_ctr.data.sink import open_sink
from recap_ctr.data.source import FileSource
from recap_ctr.data.synthetic import SyntheticConfig, SyntheticData
from recap_ctr.recipe.probe import ProbeConfig
from recap_ctr.recipe.stages import RecipeConfig, batch_size
from recap_ctr.schema import Field, Schema

NAME = "synthetic"
ROWS = 30_000  # of `--data synthetic`: a table of a few models takes two minutes


def synthetic_schema(num_fields: int) -> Schema:
    fields = (Field(name=f"f{i}", kind="categorical", min_count=2) for i in range(1, num_fields + 1))
    return Schema(label="click", row_id="row", fields=tuple(fields))


def draw(config: SyntheticConfig, log: Path, out: Path, *, quiet: bool) -> tuple[SyntheticData, PreparedData]:
    """Draw clicks into the file `log` and prepare them in `out`, unless that is done."""
    drawn = SyntheticData(config)
    if not log.is_file():
        with open_sink(log) as sink:
            for block in drawn.blocks():
                sink.write(block.drop("bayes_logit"))
    schema = synthetic_schema(config.num_fields)
    data, _ = prepare(Preparation(schema, {"all": FileSource([log])}), out, quiet=quiet)
    return drawn, data


def quick_recipe(rows: int, seed: int, *, max_epochs: int, **changes: Any) -> RecipeConfig:
    """The recipe of `recap fit`, cut to a few minutes: a small probe, large steps, a short average."""
    # Four strengths, because two of them outlive the first rung: after four epochs a weak one still looks as good as a
    # strong one, after eight no more. Of three, one would be left, and on seed 1 it was the wrong one.
    own: dict[str, Any] = {
        "learning_rate": 4e-3,
        "train": {
            "batch_size": batch_size(4 * rows),
            "max_epochs": max_epochs,
            "patience": 2,
            "ema_epochs": [2.0],
        },
        "probe": ProbeConfig(
            strengths=(1e1, 1e2, 1e3, 1e4),
            rungs=(4, 8),
            refinements=(),
            horizon_factors=(),
            dropouts=(),
            dim_factors=(),
            confirm=0,
        ),
        "student_factors": (),
        "seed": seed,
    }
    return RecipeConfig(**{**own, **changes})
