"""All rows as training rows, with vocabularies that grow: old ids stay, and values of held-out rows get new ones."""

from pathlib import Path

import numpy as np
import polars as pl

from recap_ctr.data.grow import changes, row_map
from recap_ctr.data.shards import PreparedData
from recap_ctr.data.split import Split
from recap_ctr.data.table import open_table
from recap_ctr.data.whole import WholeLog, base_of, holds_the_same_rows
from recap_ctr.schema import Field, Schema


def test_all_rows_train(prepared: PreparedData) -> None:
    whole = WholeLog(prepared.path)
    parts = [prepared.train, prepared.valid, prepared.test]
    assert np.array_equal(whole.train.rows, np.concatenate([part.rows for part in parts]))
    assert np.array_equal(whole.train.ids, np.concatenate([part.ids for part in parts]))
    assert np.array_equal(whole.train.labels, np.concatenate([part.labels for part in parts]))
    assert np.array_equal(whole.valid.rows, prepared.valid.rows), "held-out rows are still apart, too"
    assert whole.fingerprint != prepared.fingerprint, "no run may be taken for one without these rows"
    assert not whole.is_in_time_order


def test_values_of_held_out_rows_are_known_then(
    click_log: pl.DataFrame, click_schema: Schema, prepared: PreparedData, tmp_path: Path
) -> None:
    """The value `late` comes in a few held-out rows only, and `rare` once in both parts, where two are needed."""
    held_out = np.isin(np.arange(len(click_log)), np.concatenate([prepared.valid.rows, prepared.test.rows]))
    ad = click_log["ad"].to_numpy().copy()
    ad[np.flatnonzero(held_out)[:5]] = "late"
    ad[[np.flatnonzero(~held_out)[0], np.flatnonzero(held_out)[9]]] = "rare"
    table = open_table(click_log.with_columns(pl.Series("ad", ad)), schema=click_schema)
    measured, _ = table.prepared(tmp_path / "measured", Split(), quiet=True)
    grown = table.prepared_with(base_of(measured), tmp_path / "grown", Split())

    assert holds_the_same_rows(measured, grown)
    added, forgotten = changes(measured.encoder, grown.encoder)
    assert added["ad"] == 2 and not forgotten
    before, after = (data.encoder.fields[1] for data in (measured, grown))
    assert set(after.values[-2:]) == {"late", "rare"}
    assert after.values[: len(before.values)].to_list() == before.values.to_list()
    total = click_log.with_columns(pl.Series("ad", ad))["ad"].value_counts()
    counts = dict(zip(after.values.to_list(), after.counts.tolist(), strict=True))
    assert counts == {value: count for value, count in total.rows() if value in counts}, "of all rows, once"
    rows = row_map(measured.encoder, grown.encoder)
    is_known = measured.train.ids[:, 1] != before.oov + measured.layout.fields[1].offset
    assert np.array_equal(rows.target_V[measured.train.ids[is_known]], grown.train.ids[is_known])


def test_quantiles_keep_their_edges_and_counts(tmp_path: Path) -> None:
    """They do not grow, so without counts all of their values would pass for rare ones."""
    fields = [
        Field(name=name, kind="numeric", transform=name, num_buckets=4) for name in ("linear", "quantiles")
    ]
    numbers = np.random.default_rng(0).gamma(2.0, size=300)
    frame = pl.DataFrame({"click": [row % 2 for row in range(300)], "linear": numbers, "quantiles": numbers})
    table = open_table(frame, schema=Schema(label="click", fields=tuple(fields)))
    measured, _ = table.prepared(tmp_path / "measured", Split(), quiet=True)
    grown = table.prepared_with(base_of(measured), tmp_path / "grown", Split())
    for before, after in zip(measured.encoder.fields, grown.encoder.fields, strict=True):
        assert after.edges == before.edges and after.counts.tolist() == before.counts.tolist()
        assert after.counts.sum() == len(measured.train)
    assert holds_the_same_rows(measured, grown)
    for name in ("ids", "values"):
        np.testing.assert_array_equal(getattr(measured.test, name), getattr(grown.test, name))
