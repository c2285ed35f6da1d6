"""Raw tables become prepared data: by time where there is one, unless told otherwise."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from recap_ctr.data.quality import quality_notes
from recap_ctr.data.shards import MANIFEST, PreparedData
from recap_ctr.data.table import open_table, prepare
from recap_ctr.errors import InputError
from recap_ctr.schema import Field, Schema

ROWS = 1_000
START = 1_651_000_000  # 2022-04-26 19:06:40
PLAIN = Field(name="site", kind="categorical")


def log(**columns: Any) -> pl.DataFrame:
    rng = np.random.default_rng(3)
    return pl.DataFrame(
        {"click": rng.integers(0, 2, ROWS), "site": [f"s{i}" for i in rng.integers(0, 9, ROWS)], **columns}
    )


@pytest.mark.parametrize(
    ("moments", "description"),
    [
        (
            START + 600 * np.arange(ROWS),
            "by time; train until 2022-05-02 08:16, valid until 2022-05-03 00:56, test until 2022-05-03 17:36 (UTC)",
        ),
        (
            1_000 * (START + 600 * np.arange(ROWS)),
            "by time; train until 2022-05-02 08:16, valid until 2022-05-03 00:56, test until 2022-05-03 17:36 (UTC)",
        ),
        (
            pl.from_epoch(pl.Series(START + 600 * np.arange(ROWS)), "s").dt.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "by time; train until 2022-05-02 08:16, valid until 2022-05-03 00:56, test until 2022-05-03 17:36 (UTC)",
        ),
        (
            20_220_401 + np.arange(ROWS) // 50,
            "by time; train until 2022-04-16, valid until 2022-04-18, test until 2022-04-20",
        ),
        (
            np.arange(ROWS) / 2,
            "by time; train until 399.5, valid until 449.5, test until 499.5",
        ),
    ],
    ids=["seconds", "milliseconds", "iso", "compact", "counter"],
)
def test_a_log_with_a_time_is_split_by_it(moments: Any, description: str, tmp_path: Path) -> None:
    data = prepare(log(time=moments), label="click", out=tmp_path / "data")
    assert [len(data.train), len(data.valid), len(data.test)] == [800, 100, 100]
    assert data.split == description
    assert data.train.rows.tolist() == list(range(800))


def test_a_random_split_can_be_asked_for_and_is_the_default_without_a_time(tmp_path: Path) -> None:
    timed = log(time=START + 60 * np.arange(ROWS))
    asked = prepare(timed, label="click", split="random", seed=5, out=tmp_path / "asked")
    plain = prepare(log(), label="click", ratio=(6, 2, 2), out=tmp_path / "plain")
    assert asked.split == "at random, 8:1:1, seed 5"
    assert plain.split == "at random, 6:2:2, seed 1"
    assert asked.train.rows.tolist() != list(range(800))


def test_a_time_with_gaps_is_no_order_and_that_is_said(tmp_path: Path) -> None:
    moments = [None if row % 50 == 7 else 1_700_000_000 + 60 * row for row in range(ROWS)]
    table = open_table(log(ts=pl.Series(moments)), label="click")
    rule = table.split_rule()
    data, _ = table.prepared(tmp_path / "data", rule, quiet=True)
    assert rule.kind == "random" and data.split_note is not None
    assert quality_notes(data)[0] == data.split_note
    assert f"NOT by time: 'ts' has no time in {ROWS // 50} of {ROWS:,} rows (2.0%)" in data.split_note
    assert "drop those rows or fill in their times" in data.split_note
    without = replace(table.preparation(rule), split_note=None)
    assert without.fingerprint == table.preparation(rule).fingerprint
    with pytest.raises(InputError, match="can't be split by time: 'ts' has no time in"):
        table.split_rule("time")
    assert table.preparation(table.split_rule("hash:site")).split_note is None


def test_other_splits_are_described(tmp_path: Path) -> None:
    parts = ["train"] * 600 + ["valid"] * 200 + ["test"] * 200
    schema = Schema(label="click", fields=(PLAIN,))
    by_column = prepare(log(part=parts), schema=schema, split_column="part", out=tmp_path / "column")
    by_table = prepare(log(), schema=schema, valid=log(), out=tmp_path / "table")
    assert by_column.split == "by the column 'part'"
    assert by_table.split == "as given, a table for each part"


def test_the_description_is_no_part_of_the_fingerprint(tmp_path: Path) -> None:
    data = prepare(log(time=START + 60 * np.arange(ROWS)), label="click", out=tmp_path / "data")
    path = data.path / MANIFEST
    manifest = json.loads(path.read_text())
    del manifest["split"], manifest["checksum"]
    path.write_text(json.dumps(manifest))
    older = PreparedData(data.path)
    assert older.split is None
    assert older.fingerprint == data.fingerprint


def test_a_derived_field_gives_its_unit_to_the_dates(tmp_path: Path) -> None:
    # As numbers these are also dates of 2010, day by day.
    moments = [int(f"2010{10 + i // 500:02d}{1 + i // 100 % 5:02d}") for i in range(ROWS)]
    hour = Field(name="hour", kind="categorical", derive="hour", source="t", unit="yymmddhh")
    for name, fields, year in (("dates", (PLAIN,), "2010"), ("hours", (PLAIN, hour), "2020")):
        schema = Schema(label="click", time="t", fields=fields)
        data = prepare(log(t=moments), schema=schema, out=tmp_path / name)
        assert f"by time; train until {year}-" in str(data.split)


def test_columns_are_ignored_where_a_schema_is_inferred(tmp_path: Path) -> None:
    rows = log(bought=[index % 7 for index in range(ROWS)])
    data = prepare(rows, label="click", ignore=["bought"], out=tmp_path / "data")
    assert [field.name for field in data.schema.fields] == ["site"]
    schema = Schema(label="click", fields=(PLAIN,))
    with pytest.raises(InputError, match=r"remove the \[\[fields\]\] table of 'bought' from the schema"):
        open_table(rows, schema=schema, ignore=["bought"])
