"""Moments mean the same in every spelling and column type, and what Python's datetime says."""

from datetime import UTC, date, datetime, timedelta, timezone
from typing import Any, get_args

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recap_ctr.data.moments import (
    EPOCH,
    derived_categories,
    find_unit,
    read_seconds,
    seconds_of,
    seconds_or_never,
    write_moments,
)
from recap_ctr.schema import Field, TimeUnit

UNITS: tuple[TimeUnit, ...] = get_args(TimeUnit)
PRECISION = {"yyyymmdd": 86_400, "yymmddhh": 3_600, "yyyymmddhh": 3_600, "yyyymmddhhmm": 60}
YEAR_2000, YEAR_2010 = 946_684_800, 1_262_304_000
MOMENTS = st.integers(EPOCH[0], EPOCH[1])


def derived(values: Any, derive: str, unit: str = "iso", **options: Any) -> list[str | None]:
    field = Field.model_validate(
        {"name": "x", "kind": "categorical", "derive": derive, "unit": unit, **options}
    )
    series = values if isinstance(values, pl.Series) else pl.Series(values)
    return derived_categories(series, field).to_list()


@pytest.mark.parametrize("unit", UNITS)
@settings(derandomize=True, max_examples=50, deadline=None)
@given(seconds=st.lists(st.integers(YEAR_2000, 2**31), min_size=1, max_size=20))
def test_hour_and_weekday_are_those_of_python(unit: TimeUnit, seconds: list[int]) -> None:
    step = PRECISION.get(unit, 1)
    moments = [datetime.fromtimestamp(second // step * step, UTC) for second in seconds]
    text = write_moments(np.array(seconds), unit)
    assert derived(text, "hour", unit) == [str(moment.hour) for moment in moments]
    assert derived(text, "weekday", unit) == [str(moment.weekday()) for moment in moments]
    assert read_seconds(text, unit).to_list() == [second // step * step for second in seconds]


@pytest.mark.slow
@settings(derandomize=True, max_examples=100, deadline=None)
@given(
    moment=st.datetimes(datetime(1, 1, 2), datetime(9999, 12, 30)),
    minutes=st.integers(-14 * 60, 14 * 60) | st.none(),
)
def test_iso_text_and_dates_agree_with_python(moment: datetime, minutes: int | None) -> None:
    zone = UTC if minutes is None else timezone(timedelta(minutes=minutes))
    in_utc = moment.replace(tzinfo=zone).astimezone(UTC)
    text = moment.isoformat() if minutes is None else moment.replace(tzinfo=zone).isoformat(" ")
    columns = (
        pl.Series([text]),
        pl.Series([in_utc]),
        pl.Series([in_utc.replace(tzinfo=None)]).dt.cast_time_unit("ms"),
        pl.Series([in_utc]).dt.convert_time_zone("Asia/Kolkata"),
    )
    for column in columns:
        assert derived(column, "hour") == [str(in_utc.hour)]
        assert derived(column, "weekday") == [str(in_utc.weekday())]


@settings(derandomize=True, max_examples=50, deadline=None)
@given(seconds=MOMENTS, fraction=st.integers(0, 999))
def test_numbers_mean_the_same_in_every_column_type(seconds: int, fraction: int) -> None:
    expected = [datetime.fromtimestamp(seconds, UTC).hour]
    number = 1_000 * seconds + fraction
    for values in ([number], [float(number)], [str(number)], [f" {number}.0 "], [f"{number / 1_000}e3"]):
        assert derived(values, "hour", "ms") == [str(hour) for hour in expected]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2026-01-31", 1_769_817_600),
        ("2026/01/31 23:59", 1_769_903_940),
        ("2026-01-31T23:59:30.999Z", 1_769_903_970),
        ("2026-01-31 23:59:30.5 UTC", 1_769_903_970),
        ("2026-01-31 23:59:30+0130", 1_769_898_570),
        ("1969-12-31 23:59:59.5", -1),
    ],
)
def test_spellings(text: str, seconds: int) -> None:
    assert read_seconds(pl.Series([text]), "iso").to_list() == [seconds]


@pytest.mark.parametrize(
    ("unit", "values"),
    [
        ("iso", [None, "", "yesterday", "2026-02-30", "20260131", "2026-13-01", "2026-01-01 25:00"]),
        ("ms", [None, "", "x", "nan", "inf", "0", "1700000000", "1700000000000000", "9" * 400, "1e400"]),
        ("s", [None, 0.0, float("nan"), 1.7e12, -1.7e9]),
        ("ns", [None, 1_700_000_000, 2**63 - 1]),
        ("yyyymmdd", ["14102100", "2014102", "20141301", "2014-10-21", "２０１４１０２１"]),
        ("yymmddhh", ["14102124", "141021"]),
    ],
)
def test_what_cannot_be_read_is_missing(unit: str, values: list[Any]) -> None:
    assert derived(values, "hour", unit) == [None] * len(values)


def test_values_listed_as_missing_are_moments_not_hours() -> None:
    values = ["2026-01-31 00:10", "2026-01-31 01:10"]
    assert derived(values, "hour", missing=("0", "2026-01-31 01:10")) == ["0", None]
    assert derived([1_700_000_000, 1_700_003_600], "hour", "s", missing=("1700000000",)) == [None, "23"]


def test_dates_need_no_unit() -> None:
    assert derived([date(2026, 1, 31), None], "weekday", "ms") == ["5", None]


@pytest.mark.slow
@pytest.mark.parametrize("unit", UNITS)
def test_units_are_told_apart(unit: TimeUnit) -> None:
    seconds = 1_400_000_000 + 7_919 * np.arange(5_000)
    assert find_unit(write_moments(seconds, unit).unique()) == unit


@pytest.mark.parametrize(
    "values",
    [[], ["a"], ["1", "2"], ["2026-01-31", "soon"], ["20141301"], ["1700000000", "1700000000000"]],
)
def test_other_values_have_no_unit(values: list[str]) -> None:
    assert find_unit(pl.Series(values, dtype=pl.String)) is None


def test_a_few_unreadable_values_do_not_hide_a_unit() -> None:
    moments = write_moments(1_700_000_000 + np.arange(500), "ms")
    assert find_unit(pl.concat([moments, pl.Series(["0", "NA"])])) == "ms"


@pytest.mark.parametrize("unit", UNITS)
def test_stored_times_are_the_moments_that_were_written(unit: TimeUnit) -> None:
    """A shard keeps dates as microseconds since 1970, and all else as the number that it is written as."""
    written = YEAR_2010 + 86_400 * 9_999 * np.arange(3)
    numbers = written * 10**6 if unit == "iso" else write_moments(written, unit).cast(pl.Float64).to_numpy()
    stored = np.asarray(numbers, np.float64)

    seconds = seconds_of(stored, unit)

    assert seconds is not None and seconds.tolist() == written.tolist()
    assert seconds_or_never(stored, unit).tolist() == written.tolist()


@pytest.mark.parametrize("unit", [unit for unit in UNITS if unit != "iso"])
def test_stored_times_that_are_no_moments_are_never(unit: TimeUnit) -> None:
    moment = write_moments(np.array([YEAR_2010]), unit).cast(pl.Float64).item()
    assert seconds_or_never(np.array([moment, 7.0]), unit).tolist() == [YEAR_2010, -np.inf]
    assert seconds_of(np.array([moment, 7.0]), unit) is None


def test_stored_dates_keep_fractions_until_they_are_whole_seconds() -> None:
    stored = np.array([1.5e6, -0.5e6])
    assert seconds_or_never(stored, "iso").tolist() == [1.5, -0.5]
    seconds = seconds_of(stored, "iso")
    assert seconds is not None and seconds.tolist() == [1, -1]
