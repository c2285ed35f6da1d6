"""A small log of two weeks with every kind of field, and what preparation makes of it."""

from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import polars as pl

from recap_ctr.data.shards import PreparedData
from recap_ctr.data.split import Split
from recap_ctr.schema import Field, Schema
from tests.support.preparing import prepared

START = int(datetime(2026, 3, 2, tzinfo=UTC).timestamp())
DAY = 86_400
SCHEMA = Schema(
    label="click",
    time="ts",
    fields=(
        Field(name="user", kind="categorical", min_count=2),
        Field(name="site", kind="categorical"),
        Field(name="zip", kind="categorical"),
        Field(name="tags", kind="multi", max_len=3),
        Field(name="referrer", kind="categorical", hash_buckets=50),
        Field(name="price", kind="numeric"),
        Field(name="age", kind="numeric", transform="quantiles", num_buckets=32),
        Field(name="stay", kind="numeric", transform="linear", num_buckets=32),
        Field(name="hour", kind="categorical", derive="hour", source="ts", unit="s"),
    ),
)


def daily_log(days: int, rows_a_day: int = 800, first_day: int = 0, seed: int = 0) -> pl.DataFrame:
    """Return the rows of some days."""
    rng = np.random.default_rng((seed, first_day))
    rows = days * rows_a_day
    seconds = np.sort(rng.integers(0, DAY * days, rows)) + START + DAY * first_day
    common = rng.geometric(0.1, (5, rows))
    price = pl.Series(np.round(rng.lognormal(3, 1, rows), 2))
    return pl.DataFrame(
        {
            "ts": seconds,
            "click": (rng.random(rows) < 0.2).astype(np.int8),
            "user": [f"u{value}" for value in rng.integers(0, 400, rows)],
            "site": [f"Site{value}.example" for value in common[0]],
            "zip": [f"{37 * value:05d}" for value in common[1]],
            "tags": [f"t{a} t{b}" for a, b in common[2:4].T],
            "referrer": [f"r{value}" for value in common[4]],
            "price": price.set(pl.Series(rng.random(rows) < 0.1), None),
            "age": rng.integers(16, 90, rows),
            "stay": np.round(rng.gamma(2.0, 30.0, rows), 1),
        }
    )


def prepared_log(out: Path, schema: Schema = SCHEMA) -> PreparedData:
    """Prepare two weeks of it, split by time."""
    return prepared(daily_log(14), out, schema, Split(kind="time"))
