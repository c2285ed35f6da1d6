"""The rows by which a worker checks and compares versions."""

import polars as pl

from recap_ctr.serve.codec import Table
from recap_ctr.serve.versions import RECENT_BYTES, RECENT_ROWS, RecentRows, sample_rows
from tests.support.fake_engine import FakeEngine


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
