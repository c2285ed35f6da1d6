"""Vocabularies that grow: ids stay, frequent values are added once, forgotten ones make room."""

from collections import Counter
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from recap_ctr.data.encode import Encoder, FittedField
from recap_ctr.data.grow import Base, changes, grow_field, row_map
from recap_ctr.data.prepare import Preparation, write_prepared_data
from recap_ctr.data.rare import load_rare
from recap_ctr.data.shards import PreparedData
from recap_ctr.data.source import Block, FrameSource
from recap_ctr.data.split import Split
from recap_ctr.errors import InputError
from recap_ctr.schema import Field, Schema

MIN_COUNT = 3
DAY = 86_400
SCHEMA = Schema(
    label="click",
    time="ts",
    fields=(
        Field(name="ad", kind="categorical", min_count=MIN_COUNT),
        Field(name="tags", kind="multi", max_len=2),
        Field(name="price", kind="numeric"),
        Field(name="site", kind="categorical", hash_buckets=7),
        Field(name="stay", kind="numeric", transform="linear", num_buckets=6),
    ),
)
NONE = np.zeros(0, np.int64)


def day(number: int, rows: int = 80) -> pl.DataFrame:
    """Rows whose ads and tags move on from day to day."""
    rng = np.random.default_rng(number)
    ads = [f"ad{number * 4 + int(value)}" for value in rng.geometric(0.15, rows)]
    tags = [" ".join(f"t{number + int(tag)}" for tag in rng.integers(0, 5, 2)) for _ in range(rows)]
    clicks = rng.integers(0, 2, rows)
    clicks[[0, 1, -2, -1]] = [0, 1, 0, 1]
    return pl.DataFrame(
        {
            "click": clicks,
            "ts": 1_767_571_200 + DAY * number + np.sort(rng.integers(0, DAY, rows)),
            "ad": ads,
            "tags": tags,
            "price": rng.random(rows),
            "site": [f"s{value}" for value in rng.integers(0, 30, rows)],
            "stay": rng.gamma(2.0, 10.0 + number, rows),
        }
    )


def prepared(frame: pl.DataFrame, out: Path, base: Base | None = None) -> PreparedData:
    rule = Split(kind="time", ratio=(4, 1, 0))
    return write_prepared_data(
        Preparation(SCHEMA, {"all": FrameSource(frame)}, rule, base=base), out, quiet=True
    )[0]


def base_of(data: PreparedData, **forgetting: object) -> Base:
    return Base(data.fingerprint, data.encoder, load_rare(data.path, data.encoder), **forgetting)  # type: ignore[arg-type]


def ids_of(encoder: Encoder, field: int) -> dict[str, int]:
    fitted = encoder.fields[field]
    names = {number: fitted.value_of(number) for number in range(fitted.size)}
    return {name: number for number, name in names.items() if name is not None}


@pytest.mark.slow
def test_ids_stay_through_ten_updates_and_counts_add_up(tmp_path: Path) -> None:
    data = prepared(day(0), tmp_path / "0")
    counted = Counter(day(0)["ad"].to_list())
    for number in range(1, 11):
        before = data.encoder
        data = prepared(day(number), tmp_path / str(number), base_of(data))
        counted.update(day(number)["ad"].to_list())
        for field, (old, new) in enumerate(zip(before.fields, data.encoder.fields, strict=True)):
            if old.grows:
                assert ids_of(before, field).items() <= ids_of(data.encoder, field).items()
            assert (old.oov, old.mean, old.scale, old.edges) == (new.oov, new.mean, new.scale, new.edges)
        kept = ids_of(data.encoder, 0)
        # All values that are frequent by now have an id, whenever their rows came.
        assert {value for value, count in counted.items() if count >= MIN_COUNT} <= kept.keys()
        assert all(counted[value] >= MIN_COUNT for value in kept)
        rare = dict(load_rare(data.path, data.encoder)[0].rows())
        assert rare == {value: count for value, count in counted.items() if value not in kept}
        ad = data.encoder.fields[0]
        assert {*kept.values(), 0, ad.oov} == set(range(ad.size)) and data.layout.fields[0].oov == ad.oov
        reopened = PreparedData(data.path).encoder
        assert ids_of(reopened, 0) == kept and reopened.layout == data.layout


def test_rows_are_encoded_as_the_encoder_alone_would(tmp_path: Path) -> None:
    data = prepared(day(0), tmp_path / "0")
    grown = prepared(day(3), tmp_path / "1", base_of(data))
    numbers = np.concatenate([grown.train.rows, grown.valid.rows])
    order = np.argsort(numbers)
    encoded = grown.encoder.encode(Block(day(3), 1, "test"))
    for name, matrix in (("ids", encoded.ids_BW), ("values", encoded.values_BN)):
        parts = [getattr(shard, name) for shard in (grown.train, grown.valid)]
        np.testing.assert_array_equal(matrix, np.concatenate(parts)[order])


def test_numbers_beyond_the_edges_of_before_stay_at_the_outermost(tmp_path: Path) -> None:
    data = prepared(day(0), tmp_path / "0")
    grown = prepared(day(3).with_columns(stay=pl.col("stay") + 1e4), tmp_path / "1", base_of(data))
    field, place = grown.encoder.fields[-1], grown.layout.fields[-1]
    assert field.edges == data.encoder.fields[-1].edges and max(field.edges) < 1e3
    assert (grown.train.ids[:, place.start] == place.last - 1).all()
    assert (grown.train.values[:, place.number_column] == 1).all()


def test_a_grown_table_reads_as_before(tmp_path: Path) -> None:
    data = prepared(day(0), tmp_path / "0")
    grown = prepared(day(2), tmp_path / "1", base_of(data))
    rows = row_map(data.encoder, grown.encoder)
    table = np.random.default_rng(0).random((data.layout.num_rows, 2))
    after = rows.grow(table)
    for number in (0, 2):  # Rows with new values too: these read OOV's vector, as they did.
        block = Block(day(number), 1, "test")
        assert (after[grown.encoder.encode(block).ids_BW] == table[data.encoder.encode(block).ids_BW]).all()
    assert (after[rows.target_V] == table).all()
    moments = rows.grow_counters(table)
    assert (moments[rows.fresh_G] == 0).all() and (moments[rows.target_V] == table).all()
    added, forgotten = changes(data.encoder, grown.encoder)
    assert sum(added.values()) == rows.fresh_G.sum() and forgotten == {}
    with pytest.raises(InputError, match="'ad' is not one that grew"):
        row_map(grown.encoder, data.encoder)


def test_what_was_not_seen_for_long_is_forgotten_and_makes_room(tmp_path: Path) -> None:
    data = prepared(day(0), tmp_path / "0")
    last = np.full(data.layout.num_rows, 1_767_571_200.0)
    grown = prepared(day(5), tmp_path / "1", base_of(data, last_V=last, forget_after=3.0 * DAY))
    seen = set(day(5)["ad"].to_list())
    before, after = ids_of(data.encoder, 0), ids_of(grown.encoder, 0)
    gone = before.keys() - seen
    assert gone and not gone & after.keys()
    assert all(after[value] == before[value] for value in before.keys() & seen)  # Seen again: not forgotten.
    added = after.keys() - before.keys()
    assert {after[value] for value in added} & {before[value] for value in gone}  # They take the free ids.
    rows = row_map(data.encoder, grown.encoder)
    oov = grown.encoder.fields[0].oov
    assert all(rows.target_V[before[value]] == oov for value in gone)
    assert changes(data.encoder, grown.encoder)[1]["ad"] == len(gone)
    early = prepared(day(5), tmp_path / "2", base_of(data, last_V=last, forget_after=9.0 * DAY))
    assert changes(data.encoder, early.encoder)[1] == {}


def test_a_gap_is_no_value() -> None:
    field = Field(name="ad", kind="categorical")
    fitted = FittedField(field, pl.Series(["a", "b", "c"]), np.array([3, 2, 1]))
    nothing = pl.DataFrame(schema={"value": pl.String, "count": pl.Int64})
    grown, _ = grow_field(fitted, nothing, nothing, np.array([1]))
    assert grown.values.to_list() == ["a", None, "c"] and grown.size == fitted.size
    codes = grown.codes(pl.Series(["c", "b", None, "a"]))
    assert grown.ids(codes).tolist() == [3, grown.oov, grown.oov, 1]
    again, rare = grow_field(grown, pl.DataFrame({"value": ["x", "y"], "count": [5, 1]}), nothing, NONE)
    assert again.values.to_list() == ["a", "x", "c", "y"] and rare.is_empty()
    assert again.value_of(2) == "x" and again.value_of(5) == "y" and again.oov == 4
