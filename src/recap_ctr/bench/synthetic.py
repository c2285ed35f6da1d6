"""The synthetic data as a benchmark: draw them, prepare them, and give them a recipe that suits their size."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recap_ctr.data.prepare import Preparation, write_prepared_data
from recap_ctr.data.shards import PreparedData
from recap_ctr.data.sink import open_sink
from recap_ctr.data.source import FileSource
from recap_ctr.data.synthetic import SyntheticConfig, SyntheticData
from recap_ctr.recipe.config import RecipeConfig, batch_size, merge_settings, recipe_config
from recap_ctr.schema import Field, Schema

NAME = "synthetic"
ROWS = 30_000  # With this size of `--data synthetic`, a table of a few models takes two minutes.


def synthetic_schema(num_fields: int) -> Schema:
    """Return the schema of synthetic clicks."""
    fields = (Field(name=f"f{i}", kind="categorical", min_count=2) for i in range(1, num_fields + 1))
    return Schema(label="click", row_id="row", fields=tuple(fields))


def draw(config: SyntheticConfig, log: Path, out: Path, *, quiet: bool) -> tuple[SyntheticData, PreparedData]:
    """Draw clicks into the file `log` and prepare them in `out`, unless they are there; return both."""
    drawn = SyntheticData(config)
    if not log.is_file():
        with open_sink(log) as sink:
            for block in drawn.blocks():
                sink.write(block.drop("bayes_logit"))
    schema = synthetic_schema(config.num_fields)
    data, _ = write_prepared_data(Preparation(schema, {"all": FileSource([log])}), out, quiet=quiet)
    return drawn, data


def quick_recipe(
    rows: int, seed: int, *, max_epochs: int, settings: Mapping[str, Any] | None = None
) -> RecipeConfig:
    """Return the recipe of `recap fit` cut to a few minutes: a small probe, large steps, a short average.

    `settings` override it, table by table.
    """
    quick: dict[str, Any] = {
        "learning_rate": 4e-3,
        "train": {
            "batch_size": batch_size(4 * rows),
            "max_epochs": max_epochs,
            "patience": 2,
            "ema_epochs": [2.0],
        },
        "probe": {
            # Four strengths, because two of them outlive the first rung: after four epochs a weak one still looks as
            # good as a strong one, after eight no more. Of three, one would be left, and on seed 1 it was the wrong
            # one.
            "strengths": [1e1, 1e2, 1e3, 1e4],
            "rungs": [4, 8],
            "refinements": [],
            "horizon_factors": [],
            "dropouts": [],
            "dim_factors": [],
            "confirm": 0,
        },
        "student_factors": [],
        "routes": 8,
        "seed": seed,
    }
    return recipe_config("default", merge_settings(quick, settings or {}), "the quick recipe")
