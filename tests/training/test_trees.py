"""The columns that trees are given: categories without an order, numbers with theirs."""

import re
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from recap_ctr.data.prepare import Preparation, write_prepared_data
from recap_ctr.data.source import FrameSource
from recap_ctr.jobs import progress
from recap_ctr.schema import Field, Schema
from recap_ctr.training.trees import TreeColumns, fit_trees


@pytest.fixture(scope="module")
def rows() -> pl.DataFrame:
    rng = np.random.default_rng(0)
    price = rng.lognormal(size=4_000).round(3)
    clicks = rng.random(4_000) < np.where((price > 0.6) & (price < 1.5), 0.7, 0.1)
    holes = pl.Series(price).set(pl.Series(rng.random(4_000) < 0.1), None)
    site = [f"s{value}" for value in rng.integers(0, 30, 4_000)]
    return pl.DataFrame({"click": clicks.astype(int), "site": site, "price": holes, "size": price})


def test_buckets_of_a_number_keep_their_order(rows: pl.DataFrame, tmp_path: Path) -> None:
    fields = (
        Field(name="site", kind="categorical"),
        Field(name="price", kind="numeric", transform="quantiles"),
        Field(name="size", kind="numeric", transform="value"),
        Field(name="weight", kind="numeric", transform="linear", num_buckets=8),
    )
    rows = rows.with_columns(weight=pl.col("price") * 2)
    preparation = Preparation(Schema(label="click", fields=fields), {"all": FrameSource(rows)})
    data, _ = write_prepared_data(preparation, tmp_path / "data", quiet=True)
    columns = TreeColumns(data)
    assert columns.categories == [0]
    table, raw = columns.of(data.train), rows["price"].to_numpy()[data.train.rows]
    assert (np.isnan(table[:, 1]) >= np.isnan(raw)).all() and np.isnan(raw).any()
    present = ~np.isnan(table[:, 1])
    order = np.argsort(raw[present])
    assert (np.diff(table[present, 1][order]) >= 0).all()
    assert np.corrcoef(table[:, 2], rows["size"].to_numpy()[data.train.rows])[0, 1] > 0.999
    weight, edges = table[:, 3], data.encoder.fields[3].edges
    np.testing.assert_array_equal(np.isnan(weight), np.isnan(raw))
    np.testing.assert_allclose(
        weight[present], np.interp(2 * raw[present], edges, np.arange(len(edges))), atol=1e-4
    )


def test_a_deadline_keeps_the_rounds_so_far(rows: pl.DataFrame, tmp_path: Path) -> None:
    schema = Schema(label="click", fields=(Field(name="price", kind="numeric", transform="quantiles"),))
    data, _ = write_prepared_data(
        Preparation(schema, {"all": FrameSource(rows)}), tmp_path / "data", quiet=True
    )
    cut, whole = fit_trees(data, deadline=1.0), fit_trees(data)
    assert cut.booster.best_iteration == 1 and cut.is_cut
    assert whole.booster.best_iteration > 1 and not whole.is_cut


def test_each_round_is_shown(
    rows: pl.DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "PLAIN_SECONDS", 0.0)
    schema = Schema(label="click", fields=(Field(name="price", kind="numeric", transform="quantiles"),))
    data, _ = write_prepared_data(
        Preparation(schema, {"all": FrameSource(rows)}), tmp_path / "data", quiet=True
    )
    fit_trees(data, deadline=1.0)
    assert re.fullmatch(
        r"LightGBM: 3,200 rows, [\d,]+ rows/s, round 1, valid logloss 0\.\d{5}\n", capsys.readouterr().err
    )
    fit_trees(data, deadline=1.0, quiet=True)
    assert capsys.readouterr().err == ""
