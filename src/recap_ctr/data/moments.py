"""Moments in time: the ways to write one, and the hour and the weekday that it falls on.

Everything is in UTC: a moment with an offset is converted, one without is taken to be in UTC already.
"""

from datetime import datetime, timedelta
from typing import TypeVar, get_args

import numpy as np
import numpy.typing as npt
import polars as pl

from recap_ctr.data.text import as_text, canonical
from recap_ctr.schema import Field, TimeUnit

Seconds = npt.NDArray[np.int64]
Whole = TypeVar("Whole", Seconds, int)
HOUR, DAY = 3_600, 86_400  # seconds
EPOCH = (600_000_000, 4_200_000_000)  # seconds: 1989 to 2103
MAX_UNREADABLE = 0.01  # of the distinct values, in a column of moments
UTC_SUFFIX = " UTC"  # After a date, as BigQuery writes it; all other names of zones are refused.
_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
EPOCH_UNITS = tuple(_PER_SECOND)  # Numbers since 1970.
_FORMATS = {
    "iso": "%Y-%m-%d %H:%M:%S",
    "yyyymmdd": "%Y%m%d",
    "yymmddhh": "%y%m%d%H",
    "yyyymmddhh": "%Y%m%d%H",
    "yyyymmddhhmm": "%Y%m%d%H%M",
    "yyyymmddhhmmss": "%Y%m%d%H%M%S",
}
_ORIGIN, _SECOND = datetime(1970, 1, 1), timedelta(seconds=1)


def derived_categories(raw: pl.Series, field: Field) -> pl.Series:
    """Return the hour or weekday of each moment as text, null where it is missing or can't be read.

    >>> field = Field(name="ts_hour", kind="categorical", derive="hour", source="ts", unit="s")
    >>> derived_categories(pl.Series([1_700_000_000, None]), field).to_list()
    ['22', None]
    """
    seconds = read_seconds(raw, field.unit, field.missing)
    # Numpy's remainder is never negative, so that moments before 1970 need no rule of their own.
    numbers = seconds.fill_null(0).to_numpy()
    categories = pl.Series(hours(numbers) if field.derive == "hour" else weekdays(numbers)).cast(pl.String)
    return categories.set(seconds.is_null(), None) if seconds.has_nulls() else categories


def derive_category(text: str | None, field: Field, missing: frozenset[str]) -> str | None:
    """Return the hour or weekday of one moment, written as text; `missing` are the canonical texts that mean none.

    >>> field = Field(name="ts_hour", kind="categorical", derive="hour", source="ts", unit="s")
    >>> derive_category("1700000000", field, frozenset())
    '22'
    """
    if text is None or (missing and canonical(text) in missing):
        return None
    text = canonical(text) if missing else text
    if field.unit in _PER_SECOND:
        seconds = _whole_number(text, _PER_SECOND[field.unit])
        seconds = seconds if seconds is not None and EPOCH[0] <= seconds <= EPOCH[1] else None
    else:
        seconds = _seconds_of(text, field.unit)
    if seconds is None:
        return None
    return str(hours(seconds) if field.derive == "hour" else weekdays(seconds))


def hours(seconds: Whole) -> Whole:
    """Return the hour of the day, 0 to 23."""
    return seconds // HOUR % 24


def weekdays(seconds: Whole) -> Whole:
    """Return the day of the week, from 0 for Monday; 1970 began on a Thursday."""
    return (seconds // DAY + 3) % 7


def read_seconds(raw: pl.Series, unit: TimeUnit, missing: tuple[str, ...] = ()) -> pl.Series:
    """Return moments as whole seconds since 1970, null where one is missing or can't be read.

    A column of dates is read as such, whatever the `unit` of text and numbers. Numbers outside `EPOCH` are in another
    unit, or stand for no moment at all.
    """
    if raw.dtype in (pl.Date, pl.Datetime):
        # Milliseconds hold every date that polars can write; a day has a whole number of them.
        return raw.cast(pl.Datetime("ms")).to_physical() // 1_000
    if unit in _PER_SECOND and raw.dtype.is_integer() and not missing:
        return _plausible(raw.cast(pl.Int64, strict=False) // _PER_SECOND[unit])
    text = raw if raw.dtype == pl.String and not missing else as_text(raw, missing)
    if unit in _PER_SECOND:
        numbers = [_whole_number(value, _PER_SECOND[unit]) for value in text.to_list()]
        return _plausible(pl.Series(numbers, dtype=pl.Int64))
    # Python's reader is as fast as that of polars on many rows, and far faster on one.
    return pl.Series([_seconds_of(value, unit) for value in text.to_list()], dtype=pl.Int64)


def seconds_of(times: npt.NDArray[np.float64], unit: TimeUnit) -> Seconds | None:
    """Return the times of a split as whole seconds since 1970; None if some are no moments."""
    seconds = seconds_or_never(times, unit)
    return np.floor(seconds).astype(np.int64) if np.isfinite(seconds).all() else None


def seconds_or_never(times: npt.NDArray[np.float64], unit: TimeUnit) -> npt.NDArray[np.float64]:
    """Return times as a shard keeps them as seconds since 1970; minus infinity for what can't be a moment.

    Dates (`iso`) were read as microseconds since 1970, and all else as the numbers that they are written as.

    >>> seconds_or_never(np.array([20260105.0, 20260199.0]), "yyyymmdd").tolist()
    [1767571200.0, -inf]
    """
    if unit == "iso":
        return times / _PER_SECOND["us"]
    if unit in _PER_SECOND:
        seconds = times // _PER_SECOND[unit]
        return np.where((seconds >= EPOCH[0]) & (seconds <= EPOCH[1]), seconds, -np.inf)
    distinct, places = np.unique(times, return_inverse=True)
    moments = read_seconds(as_text(pl.Series(distinct)), unit)
    return moments.cast(pl.Float64).fill_null(-np.inf).to_numpy()[places]


def _plausible(seconds: pl.Series) -> pl.Series:
    is_plausible = seconds.is_between(*EPOCH).fill_null(False)
    return seconds if is_plausible.all() else seconds.set(~is_plausible, None)


def _whole_number(value: str | None, per_second: int) -> int | None:
    """Return text that holds a number as whole seconds; None for anything else, and for absurd numbers."""
    try:
        seconds = int(value or "") // per_second
    except ValueError:
        try:
            seconds = int(float(value or "") // per_second)
        except (ValueError, OverflowError):
            return None
    return seconds if abs(seconds) < 2**63 else None


def _seconds_of(value: str | None, unit: str) -> int | None:
    """Return the seconds since 1970 of a date in text; None if it is none."""
    text = (value or "").strip()
    if unit == "iso":
        if text[4:5] not in ("-", "/"):  # Python also reads 20260131 and 2026W051.
            return None
        text = text.removesuffix(UTC_SUFFIX).replace("/", "-")
    else:
        if len(text) != len(unit) or not text.isdigit():
            return None
        text = f"20{text}" if unit == "yymmddhh" else text
        if text[:2] not in ("19", "20"):
            return None
        text = f"{text[:8]}T{text[8:]}" if len(text) > 8 else text
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    since_1970 = moment.replace(tzinfo=None) - _ORIGIN
    return (since_1970 - (moment.utcoffset() or timedelta())) // _SECOND


def write_moments(seconds: Seconds, unit: TimeUnit) -> pl.Series:
    """Return moments as text in a unit, which `read_seconds` reads, to the precision of the unit."""
    if unit in _PER_SECOND:
        return pl.Series(seconds * _PER_SECOND[unit]).cast(pl.String)
    return pl.from_epoch(pl.Series(seconds), "s").dt.strftime(_FORMATS[unit])


def find_unit(text: pl.Series) -> TimeUnit | None:
    """Return how the distinct values of a column write moments; None if they don't.

    Dates made of digits come first, since 2014102100 is also a number of seconds.

    >>> find_unit(pl.Series(["14102100", "14102101"])), find_unit(pl.Series(["1700000000000"]))
    ('yymmddhh', 'ms')
    """
    dates_first: list[TimeUnit] = sorted(get_args(TimeUnit), key=lambda unit: unit in _PER_SECOND)
    for unit in dates_first:
        # The first values rule out most units, so that few of them are tried on all values.
        if all(_reads_as(part, unit) for part in (text.head(1_000), text)):
            return unit
    return None


def _reads_as(text: pl.Series, unit: TimeUnit) -> bool:
    return bool(len(text)) and read_seconds(text, unit).null_count() <= MAX_UNREADABLE * len(text)
