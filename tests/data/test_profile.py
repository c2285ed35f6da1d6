"""The profile of the training rows: equal to a count by hand, bounded, and refused where it does not fit."""

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from recap_ctr.data import profiling
from recap_ctr.data.bins import NUM_BINS
from recap_ctr.data.grow import Base
from recap_ctr.data.prepare import Preparation, write_prepared_data
from recap_ctr.data.profile import PROFILE, read_profile
from recap_ctr.data.rare import load_rare
from recap_ctr.data.shards import PreparedData
from recap_ctr.data.source import Block, FrameSource
from recap_ctr.data.split import Split
from recap_ctr.errors import InputError
from recap_ctr.inference.window import RARE_ROWS, Window
from recap_ctr.schema import Field, Schema
from tests.support.daily_log import DAY, SCHEMA, START, daily_log, prepared_log
from tests.support.preparing import prepared, simple


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    return prepared_log(tmp_path_factory.mktemp("data") / "log")


def test_periods_are_stretches_of_time(data: PreparedData) -> None:
    profile = data.profile
    assert profile is not None and profile.starts is not None
    assert profile.seconds == 3 * 3600  # Eleven days of 96 periods or fewer.
    assert profile.starts[0] == START
    assert np.diff(profile.starts).tolist() == [profile.seconds] * (len(profile.starts) - 1)
    assert sum(profile.rows) == len(data.train)
    assert sum(profile.clicks) == int(np.sum(data.train.labels))


def test_counts_are_those_of_the_rows(data: PreparedData) -> None:
    profile = data.profile
    assert profile is not None and profile.seconds is not None
    train = daily_log(14).head(len(data.train))
    periods = ((train["ts"] - START) // profile.seconds).to_numpy()
    for field in profile.fields:
        assert len(field.bins[0]) <= NUM_BINS + 1
    fields = {field.name: field for field in profile.fields}
    missing = np.bincount(periods, train["price"].is_null().to_numpy())
    assert fields["price"].missing == missing.astype(int).tolist()
    top = train["site"].value_counts(sort=True)["site"][0]
    assert [counts[0] for counts in fields["site"].bins] == np.bincount(
        periods, train["site"] == top
    ).tolist()
    assert [sum(counts) for counts in fields["tags"].bins] == [2 * rows for rows in profile.rows]
    assert (
        sum(counts[-1] for counts in fields["user"].bins) == data.manifest["splits"]["train"]["rare"]["user"]
    )
    share = (
        max(np.bincount(periods, train["site"] == site)[0] for site in train["site"].unique())
        / profile.rows[0]
    )
    assert fields["site"].top[0] == pytest.approx(share)


def test_numbers_are_cut_into_equal_shares(data: PreparedData) -> None:
    profile = data.profile
    assert profile is not None
    price = next(field for field in profile.fields if field.name == "price")
    shares = np.sum(price.bins, axis=0)[:-1] / np.sum(price.bins)
    assert np.abs(shares - 1 / NUM_BINS).max() < 0.01


def test_quantiles_of_a_linear_field_are_joined_in_order(data: PreparedData) -> None:
    profile, train = data.profile, daily_log(14).head(len(data.train))
    assert profile is not None and profile.seconds is not None
    number = [field.name for field in profile.fields].index("stay")
    fitted, field = data.encoder.fields[number], profile.fields[number]
    assert len(fitted.edges) == 33 and np.shape(field.bins)[1] == NUM_BINS + 1 and field.edges == []
    periods = ((train["ts"] - START) // profile.seconds).to_numpy()
    places = np.searchsorted(fitted.edges[2:-1:2], train["stay"].to_numpy(), side="right")
    expected = np.zeros_like(field.bins)
    np.add.at(expected, (periods, places), 1)
    np.testing.assert_array_equal(field.bins, expected)


def test_rows_at_the_top_have_a_bin_of_their_own(tmp_path: Path) -> None:
    """A column of zeros and ones has two edges."""
    flags = [float(row % 5 == 0) for row in range(2_000)]
    schema = Schema(label="y", fields=(Field(name="flag", kind="numeric", transform="linear"),))
    data = prepared(simple(2_000, flag=flags), tmp_path / "data", schema)
    assert data.profile is not None
    (field,) = data.profile.fields
    assert np.shape(field.bins)[1] == 2 + 1
    ones = sum(flags[row] == 1.0 for row in data.train.rows)
    assert np.sum(field.bins, axis=0).tolist() == [len(data.train) - ones, ones, 0]
    assert np.mean(field.top) == pytest.approx(0.8, abs=0.03)


def test_unseen_values_are_those_that_the_earlier_half_lacks(tmp_path: Path) -> None:
    rows = 4_000
    values = ["new" if i >= 3_000 and i % 4 == 0 else f"v{i % 7}" for i in range(rows)]
    table = simple(rows, c=values, of=["train"] * (rows - 4) + ["valid"] * 2 + ["test"] * 2)
    profile = prepared(table, tmp_path / "data", split=Split(kind="column", column="of")).profile
    assert profile is not None and profile.starts is None
    later = profile.fields[0].unseen
    assert len(later) == len(profile.rows) - len(profile.rows) // 2
    assert later[: len(later) // 2 - 1] == [0] * (len(later) // 2 - 1)
    assert sum(later) == values[:-4].count("new")
    # One of eight values is new, and one standard error more is told.
    assert profile.fields[0].exchanged == pytest.approx(2 / 8)


def go_on(data: PreparedData, rows: pl.DataFrame, out: Path, **forgetting: Any) -> PreparedData:
    """Return an update's rows, prepared with the vocabularies and the profile of `data`."""
    rare = load_rare(data.path, data.encoder)
    base = Base(data.fingerprint, data.encoder, rare, profile=data.profile, **forgetting)
    rule = Split(kind="time", ratio=(4, 1, 0))
    preparation = Preparation(data.schema, {"all": FrameSource(rows)}, rule, base=base)
    return write_prepared_data(preparation, out, quiet=True)[0]


def test_it_goes_on_with_the_rows_of_an_update(
    data: PreparedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiling, "MAX_PERIODS", 200)
    later = daily_log(3, first_day=14).with_columns(
        site=pl.when(pl.col("ts") % 4 == 0).then(pl.lit("fresh")).otherwise("site")
    )
    grown = go_on(data, later, tmp_path / "grown")
    old, new = data.profile, grown.profile
    assert old is not None and old.starts is not None and new is not None and new.starts is not None
    assert new.seconds == old.seconds and new.starts[: len(old.starts)] == old.starts
    assert len(new.rows) == len(old.rows) + 3 * DAY // (old.seconds or 1)
    # Rows that only judge the update count, too: its evening belongs to what is usual.
    assert sum(new.rows[len(old.rows) :]) == later.height
    assert sum(new.clicks) == sum(old.clicks) + int(later["click"].sum())
    price, site = (next(field for field in new.fields if field.name == name) for name in ("price", "site"))
    assert sum(price.missing[len(old.rows) :]) == later["price"].null_count()
    assert price.edges == next(field.edges for field in old.fields if field.name == "price")
    # What the shipped model did not know was unseen, though it has a vector by now.
    known = data.encoder.fields[1].values
    assert sum(site.unseen[-24:]) == (~later["site"].is_in(known.implode())).sum()
    top = data.encoder.fields[1].values[0]
    assert sum(counts[0] for counts in site.bins[-24:]) == (later["site"] == top).sum()
    assert sum(counts[-1] for counts in site.bins[-24:]) == 0
    window = Window(grown.encoder, new)
    window.add(grown.encoder.encode(Block(later, 1, "rows")))
    assert window.unseen(1).share == 0.0 and not window.unseen(1).is_beyond
    few = grown.encoder.fields[1].values.filter(pl.Series(grown.encoder.fields[1].counts < RARE_ROWS))
    assert window.rare(1) == pytest.approx(later["site"].is_in(few.implode()).mean())
    assert 0 < window.rare(1) < 0.1


def test_the_oldest_periods_leave_and_forgotten_values_are_unseen(
    data: PreparedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiling, "MAX_PERIODS", 100)
    later = daily_log(4, first_day=14).with_columns(zip=pl.lit("new zip"))
    never = np.full(data.layout.num_rows, -np.inf)
    grown = go_on(data, later, tmp_path / "grown", last_V=never, forget_after=1.0 * DAY)
    old, new = data.profile, grown.profile
    assert old is not None and new is not None and new.starts is not None and old.starts is not None
    assert len(new.rows) == 100 and new.starts[-1] > old.starts[-1]
    field = new.fields[2]
    assert grown.encoder.fields[2].values.null_count() > 0
    assert sum(counts[-1] for counts in field.bins[:60]) > sum(counts[-1] for counts in old.fields[2].bins)
    assert all(sum(counts) == rows for counts, rows in zip(field.bins, new.rows, strict=True))
    Window(grown.encoder, new)


def test_periods_of_rows_go_on_without_times(tmp_path: Path) -> None:
    table = simple(2_000, c=[f"v{i % 7}" for i in range(2_000)])
    first = prepared(table, tmp_path / "first")
    rare = load_rare(first.path, first.encoder)
    base = Base(first.fingerprint, first.encoder, rare, profile=first.profile)
    more = Preparation(first.schema, {"all": FrameSource(table)}, Split(ratio=(4, 1, 0)), base=base)
    second = write_prepared_data(more, tmp_path / "second", quiet=True)[0].profile
    assert first.profile is not None and second is not None and second.starts is None
    assert sum(second.rows) == sum(first.profile.rows) + 2_000
    assert len(second.rows) == len(first.profile.rows) + round(2_000 / np.mean(first.profile.rows))


@pytest.mark.slow
def test_size_is_bounded(tmp_path: Path) -> None:
    columns = {f"c{i}": [str(k % (i + 2)) for k in range(2_000)] for i in range(100)}
    fields = tuple(Field(name=name, kind="categorical") for name in columns)
    table = pl.DataFrame({"y": [i % 2 for i in range(2_000)], **columns})
    data = prepared(table, tmp_path / "data", Schema(label="y", fields=fields))
    counts = sum(len(period) for field in read_profile(data.path / PROFILE).fields for period in field.bins)
    assert counts <= profiling.MAX_COUNTS


def test_repeated_rows_are_counted_among_neighbours(tmp_path: Path) -> None:
    log = daily_log(6, 400)
    doubled = pl.concat([log, log]).sort("ts")
    data = prepared(doubled, tmp_path / "data", SCHEMA, Split(kind="time"))
    assert data.profile is not None
    for repeats in data.profile.repeats:
        assert repeats.timed_share == pytest.approx(0.5, abs=0.02)
        assert repeats.share >= (repeats.timed_share or 0)


def test_profiles_of_other_fields_and_damaged_ones_are_refused(data: PreparedData, tmp_path: Path) -> None:
    profile = data.profile
    assert profile is not None
    renamed = profile.model_copy(update={"fields": profile.fields[1:]})
    with pytest.raises(InputError, match="other fields"):
        renamed.bins(data.encoder)
    broken = profile.model_copy(update={"clicks": profile.clicks[1:]})
    broken.write(tmp_path / PROFILE)
    with pytest.raises(InputError, match="clicks has not one entry a period"):
        read_profile(tmp_path / PROFILE)


def test_data_of_older_versions_have_none(data: PreparedData) -> None:
    older = PreparedData(data.path, verify=False)
    del older.manifest["files"][PROFILE]
    assert older.profile is None


def test_time_in_other_units(tmp_path: Path) -> None:
    log = daily_log(10, 100)
    dates = log.with_columns(pl.from_epoch("ts", "s").dt.strftime("%Y%m%d%H").cast(pl.Int64).alias("ts"))
    hour = SCHEMA.fields[-1].model_copy(update={"unit": "yyyymmddhh"})
    schema = SCHEMA.model_copy(update={"fields": (*SCHEMA.fields[:-1], hour)})
    profile = prepared(dates, tmp_path / "data", schema, Split(kind="time")).profile
    assert profile is not None and profile.starts is not None
    assert profile.starts[0] == START and profile.starts[-1] < START + 10 * DAY
