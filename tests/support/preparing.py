"""Small preparations: tables, schemas and what was written."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl

from recap_ctr.data.prepare import Preparation, write_prepared_data
from recap_ctr.data.shards import PreparedData, Shard
from recap_ctr.data.source import FrameSource, Source
from recap_ctr.data.split import Split
from recap_ctr.schema import Field, Schema

PLAIN = Schema(label="y", fields=(Field(name="c", kind="categorical"),))


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
