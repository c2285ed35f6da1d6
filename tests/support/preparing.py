"""Small preparations: tables, schemas and what was written."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from recap_ctr.data.prepare import Preparation, write_prepared_data
from recap_ctr.data.shards import PreparedData, Shard
from recap_ctr.data.source import FrameSource, Source
from recap_ctr.data.split import Split
from recap_ctr.schema import Field, Schema

PLAIN = Schema(label="y", fields=(Field(name="c", kind="categorical"),))
EVERY_KIND = Schema(
    label="y",
    weight="w",
    group="user",
    time="t",
    row_id="id",
    fields=(
        Field(name="user", kind="categorical"),
        Field(name="item", kind="categorical", min_count=2),
        Field(name="site", kind="categorical", hash_buckets=11),
        Field(name="tags", kind="multi", separator="|", max_len=3),
        Field(name="words", kind="multi", max_len=2, pooling="sum", hash_buckets=5),
        Field(name="price", kind="numeric"),
        Field(name="visits", kind="numeric", transform="log-square", missing=("0",)),
        Field(name="age", kind="numeric", transform="quantiles", num_buckets=4, missing=("-1", "3")),
        Field(name="t", kind="numeric", transform="quantiles", num_buckets=3),
        Field(name="score", kind="numeric", transform="linear", num_buckets=5, missing=("-1",)),
    ),
)


def every_kind(rows: int, seed: int = 0) -> pl.DataFrame:
    """Return rows for `EVERY_KIND`; sums of the prices are exact in any order, whatever the block boundaries."""
    rng = np.random.default_rng(seed)

    def gaps(values: Any, share: float = 0.1) -> pl.Series:
        return pl.Series(values).set(pl.Series(rng.random(rows) < share), None)

    return pl.DataFrame(
        {
            "id": np.arange(rows) + 2**60,
            "y": rng.integers(0, 2, rows),
            "w": rng.integers(0, 9, rows) / 4,
            "t": rng.integers(0, 50, rows),
            "user": gaps(rng.zipf(1.5, rows) % 20 + 2**60),
            "item": gaps([f'it"em,\n{i}' for i in rng.zipf(1.3, rows) % 40]),
            "site": gaps([f"site-{i}" for i in rng.integers(0, 30, rows)]),
            "tags": gaps(["|".join(rng.choice(["a", "b", "ü"], rng.integers(1, 5))) for _ in range(rows)]),
            "words": gaps([" ".join(rng.choice(["p", "q"], rng.integers(1, 4))) for _ in range(rows)]),
            "price": gaps(rng.integers(-100, 100, rows) / 4),
            "visits": gaps(rng.integers(-2, 500, rows)),
            "age": gaps(rng.integers(-1, 90, rows)),
            "score": gaps(np.minimum(rng.integers(-90, 100, rows), 70) / 4),
        }
    )


def contents(directory: Path) -> dict[str, bytes]:
    """Return all files below a directory."""
    files = (path for path in sorted(directory.rglob("*")) if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


def arrays(directory: Path) -> dict[str, bytes]:
    """Return all files of prepared data but the manifest, which also records where the rows came from."""
    return {name: data for name, data in contents(directory).items() if name != "manifest.json"}


def prepared(
    table: pl.DataFrame | Source, out: Path, schema: Schema = PLAIN, split: Split | None = None
) -> PreparedData:
    """Prepare a table, and open the result again."""
    source = FrameSource(table) if isinstance(table, pl.DataFrame) else table
    _, done = write_prepared_data(Preparation(schema, {"all": source}, split or Split()), out, quiet=True)
    assert not done
    return PreparedData(out)


def shards(data: PreparedData) -> list[Shard]:
    """Return train, valid and test."""
    return [data.train, data.valid, data.test]


def simple(rows: int, **columns: Sequence[Any]) -> pl.DataFrame:
    """Return rows for the schema `PLAIN`, with further or other columns."""
    return pl.DataFrame(
        {"y": [i % 2 for i in range(rows)], "c": [f"v{i % 7}" for i in range(rows)]} | columns
    )


def by_column(splits: str, **columns: Sequence[Any]) -> tuple[pl.DataFrame, Split]:
    """Return rows of these splits, one letter a row, then four more so that valid and test have both labels."""
    names = {"r": "train", "v": "valid", "t": "test"}
    filled = {name: [*values, *[None] * 4] for name, values in columns.items()}
    table = {
        "split": [names[letter] for letter in splits + "vvtt"],
        "y": [i % 2 for i in range(len(splits) + 4)],
    }
    return pl.DataFrame(table | filled, strict=False), Split(kind="column", column="split")
