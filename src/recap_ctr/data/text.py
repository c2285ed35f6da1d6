"""The one spelling of a value, whatever type or file format it came from."""

import re
from collections.abc import Sequence
from functools import cache

import polars as pl

from recap_ctr.errors import InputError

NO_CATEGORIES = (pl.Binary, pl.Duration, pl.Object, pl.Struct, pl.List, pl.Array)
"""Column types whose values can't serve as categories."""
MAX_DAYS = 95_000_000  # from 1970, either way: 260,000 years, beyond which polars can't write a date
_UNITS_PER_DAY = {"ms": 86_400 * 10**3, "us": 86_400 * 10**6, "ns": 86_400 * 10**9}
# Whole numbers that passed through a float, which is exact to 15 digits, or a decimal on their way to a text file.
_WHOLE_NUMBER = r"^(-?[0-9]{1,15})\.0$|^(-?[0-9]+)\.00+$"
_MOMENT = (
    r"^([0-9]{4}-[0-9]{2}-[0-9]{2})[T ]([0-9]{2}:[0-9]{2}:[0-9]{2})(?:(\.[0-9]*[1-9])0*|\.0+)?"
    r"(Z|[+-][0-9]{2}:?[0-9]{2})?$"
)
_SHORTEST_MOMENT = 19  # bytes
_ONE_WHOLE_NUMBER, _ONE_MOMENT = re.compile(_WHOLE_NUMBER), re.compile(_MOMENT)


def as_text(series: pl.Series, missing: Sequence[str] = ()) -> pl.Series:
    """Return the values as canonical text, null where they are missing or listed in `missing`.

    Equal values are spelled alike in every type and file format: 7, 7.0 and "7" are all "7". A moment equals its
    ISO 8601 spelling, with a T or without, and midnight equals the date.

    >>> as_text(pl.Series([7.0, None, 0.5])).to_list(), as_text(pl.Series(["7.0", "NA"]), ["NA"]).to_list()
    (['7', None, '0.5'], ['7', None])
    """
    name, series = series.name, series.alias("")  # polars takes names such as ^x$ for patterns
    if series.dtype.is_float():
        text = _spell_floats(series)
    elif series.dtype in NO_CATEGORIES:
        raise InputError(f"column {name!r} is of type {series.dtype}, which holds no categories")
    elif series.dtype.is_integer():
        text = series.cast(pl.String)
    else:
        check_dates(series, name)
        text = _spell(series.cast(pl.String))
    for value in ("", *spell_missing(tuple(missing))):
        is_missing = text == value
        if is_missing.any():
            text = text.set(is_missing, None)
    return text.alias(name)


def _spell_floats(series: pl.Series) -> pl.Series:
    """Write whole numbers without a fraction, as a column of integers would."""
    series = series.fill_nan(None)
    whole = ((series == series.floor()) & (series.abs() < 2**53)).fill_null(False)
    integers = series.zip_with(whole, pl.Series([None], dtype=series.dtype)).cast(pl.Int64).cast(pl.String)
    return integers.zip_with(whole, series.cast(pl.String))


def _spell(text: pl.Series) -> pl.Series:
    """Return text in its canonical spelling; each rule runs only if some value could need it."""
    if (ends := text.str.ends_with("0")).any() and text.filter(ends).str.contains(".", literal=True).any():
        text = text.str.replace(_WHOLE_NUMBER, "$1$2")
    if (python_bool := (text == "True") | (text == "False")).any():
        text = text.zip_with(~python_bool.fill_null(False), text.str.to_lowercase())
    longest = text.str.len_bytes().max()
    if longest is not None and longest >= _SHORTEST_MOMENT:  # type: ignore[operator]
        moments = text.str.contains(_MOMENT).fill_null(False)
        if moments.any():
            spelled = text.str.replace(_MOMENT, "$1 $2$3$4").str.replace("Z$", "+00:00")
            spelled = spelled.str.replace("([+-][0-9]{2})([0-9]{2})$", "$1:$2").str.replace(" 00:00:00$", "")
            text = spelled.zip_with(moments, text)
    return text


def canonical(text: str) -> str:
    """Return one value in its canonical spelling: what `as_text` does to a column, without the cost of its calls.

    >>> canonical("7.0"), canonical("True"), canonical("2026-01-31T00:00:00Z")
    ('7', 'true', '2026-01-31 00:00:00+00:00')
    """
    if text[-1:] == "0" and (number := _ONE_WHOLE_NUMBER.fullmatch(text)):
        return number[1] or number[2]
    if text in ("True", "False"):
        return text.lower()
    if len(text) >= _SHORTEST_MOMENT and (moment := _ONE_MOMENT.fullmatch(text)):
        day, time, fraction, zone = moment.groups(default="")
        zone = "+00:00" if zone == "Z" else zone
        zone = f"{zone[:3]}:{zone[3:]}" if len(zone) == 5 else zone
        is_midnight = time == "00:00:00" and not fraction and not zone
        return day if is_midnight else f"{day} {time}{fraction}{zone}"
    return text


@cache
def spell_missing(missing: tuple[str, ...]) -> tuple[str, ...]:
    """Return texts that mean a missing value in their canonical spelling."""
    return tuple(_spell(pl.Series(missing, dtype=pl.String))) if missing else ()


@cache
def missing_texts(missing: tuple[str, ...]) -> frozenset[str]:
    """Return all canonical texts that mean a missing value, the empty one among them."""
    return frozenset(("", *spell_missing(missing)))


def check_dates(series: pl.Series, name: str) -> None:
    """Refuse dates too far off to be written; polars would panic on them instead of raising an exception."""
    kind = series.dtype
    if kind != pl.Date and not isinstance(kind, pl.Datetime):
        return
    unit = kind.time_unit if isinstance(kind, pl.Datetime) else "days"
    limit = min(MAX_DAYS * _UNITS_PER_DAY.get(unit, 1), 2**63 - 1)
    since_1970 = series.to_physical()
    beyond = since_1970.filter((since_1970 > limit) | (since_1970 < -limit))
    if len(beyond):
        raise InputError(
            f"column {name!r} holds an impossible date: {beyond[0]} {unit} since 1970",
            fix="repair the value, or leave the cell empty (missing)",
        )
