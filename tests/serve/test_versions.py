"""The rows by which a worker checks and compares versions."""

import numpy as np
import polars as pl
import pytest

from recap_ctr.data.encode import Encoder, FittedField
from recap_ctr.data.source import Block
from recap_ctr.errors import InputError
from recap_ctr.schema import Field, Schema
from recap_ctr.serve.columns import Table
from recap_ctr.serve.config import ServeConfig
from recap_ctr.serve.versions import (
    RECENT_BYTES,
    RECENT_ROWS,
    RecentRows,
    check_fields,
    describe,
    sample_rows,
)
from tests.support.fake_engine import FakeEngine
from tests.support.running_server import version_of


def test_only_small_requests_are_kept() -> None:
    recent = RecentRows()
    for size in (100, RECENT_BYTES, RECENT_BYTES + 1):
        recent.add(Table(10, {"site": [str(size)] * 10}), size)
    assert [table.columns["site"][0] for table in recent.tables()] == ["100", str(RECENT_BYTES)]
    for _ in range(RECENT_ROWS):
        recent.add(Table(3, {}), 10)
    assert RECENT_ROWS - 3 < sum(table.height for table in recent.tables()) <= RECENT_ROWS


def test_sample_rows_hold_values_and_one_empty_row() -> None:
    engine = FakeEngine({})
    rows = sample_rows(engine.encoder, 40)
    encoded = engine.encode(rows)
    assert rows.height == 40 and rows.head(1).select(pl.all().is_null().all()).row(0) == (True,) * rows.width
    assert encoded.num_unseen.sum() == 0 and (encoded.num_missing == 1).all()
    assert sample_rows(engine.encoder, 1).height == 1


def test_sample_rows_cover_all_edges_however_far_apart() -> None:
    field = Field(name="debt", kind="numeric", transform="linear")
    edges = (-1.7e308, 0.0, 1.0, 1.7e308)
    fitted = FittedField(field, pl.Series(["0", "1", "2", "3"]), np.ones(4, np.int64), edges=edges)
    encoder = Encoder(Schema(label="click", fields=(field,)), [fitted])
    rows = sample_rows(encoder, 41)
    assert rows["debt"].null_count() == 1 and rows["debt"][-1] == edges[-1]
    encoded = encoder.encode(Block(rows, 1, "rows"))
    assert {*encoded.ids_BW[1:, 0].tolist()} == {1, 2, 3} and encoded.num_missing.tolist() == [1]


class TestDerivedFields:
    """What clients see is the column of moments, not the hour and the weekday that the model takes from it."""

    def test_sample_rows_hold_moments(self) -> None:
        engine = FakeEngine({"time": "at"})
        rows = sample_rows(engine.encoder, 200)
        assert rows.columns == list(engine.encoder.schema.input_columns)
        encoded = engine.encode(rows)
        assert encoded.num_unseen.sum() == 0 and (encoded.num_missing == 1).all()
        assert [len(set(encoded.ids_BW[1:, column])) for column in (-2, -1)] == [24, 7]

    def test_the_description_lists_columns(self) -> None:
        version = version_of(FakeEngine({"time": "at"}), ServeConfig(artifact=""))
        names = [field["name"] for field in describe(version, {})["fields"]]
        assert names == list(version.codec.columns)
        assert describe(version, {})["fields"][-1] == {
            "name": "at",
            "kind": "time",
            "values": 0,
            "suggestions": False,
            "separator": None,
            "unit": "ms",
        }

    def test_an_offer_without_the_column_is_refused(self) -> None:
        plain, timed = (
            version_of(FakeEngine(manifest), ServeConfig(artifact="")) for manifest in ({}, {"time": "at"})
        )
        check_fields(timed, plain)
        with pytest.raises(InputError, match="the categorical field 'at', but the offered artifact has no"):
            check_fields(plain, timed)
