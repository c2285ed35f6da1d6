"""How columns with a role are read: labels, weights, times and groups."""

from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from functools import cache

import numpy as np
import numpy.typing as npt
import polars as pl

from recap_ctr.config import parse
from recap_ctr.data.encode import as_numbers
from recap_ctr.data.moments import UTC_SUFFIX, Seconds, find_unit, seconds_of
from recap_ctr.data.source import Block
from recap_ctr.data.text import as_text
from recap_ctr.errors import InputError
from recap_ctr.schema import Field, Schema

CLICK_WORDS = {"1", "true", "t", "yes", "y", "click", "clicked", "clicks", "positive", "pos"}
NO_CLICK_WORDS = {
    *("-1", "0", "false", "f", "no", "n", "skip", "skipped", "negative", "neg", "view", "impression"),
    *(
        f"{no}{joint}{click}"
        for no in ("no", "not", "non", "un")
        for joint in ("", " ", "-", "_")
        for click in ("click", "clicked")
    ),
}

NO_LABELS = ("na", "n/a", "nan", "null", r"\n")  # What tables write where there is no label, in lower case.


def read_labels(
    block: Block, name: str, positive: str | None = None, negative: str | None = None
) -> npt.NDArray[np.uint8]:
    """Return the label column as 0 and 1; any other value is an error that names its row.

    `positive` is the value that means a click; every other value means none, or only `negative` if that is named.
    Without them, 1 and true are clicks, 0 and false are not. Case does not matter.
    """
    text = label_text(block, name)
    if positive is None:
        labels = text.replace_strict(
            ["0", "1", "false", "true"], [0, 1, 0, 1], default=None, return_dtype=pl.UInt8
        )
    else:
        labels = (text == spell_label(positive)).cast(pl.UInt8)
        if negative is not None:
            labels = labels.set((labels == 0) & (text != spell_label(negative)), None)
    bad = labels.is_null().arg_true()
    if len(bad):
        raise _label_error(block, name, int(bad[0]), positive, negative)
    return labels.to_numpy()


def _label_error(
    block: Block, name: str, index: int, positive: str | None, negative: str | None
) -> InputError:
    value = as_text(block.column(name, "label"))[index]
    meaning = "a label is 1 for a click and 0 for none"
    neither = "neither 0 nor 1"
    if positive is not None:
        meaning = f"a label is {positive!r} for a click" + (f" and {negative!r} for none" if negative else "")
        neither = f"neither {positive!r} nor {negative!r}"
    if value is None or value.strip().lower() in NO_LABELS:
        written = "" if value is None else f" ({value!r})"
        return InputError(
            f"{block.origin}: row {block.row(index)}: the label {name!r} is missing{written}",
            fix=f"{meaning}; drop or repair such rows, or pass --drop-unlabelled (to fit, prepare or schema infer)",
        )
    return InputError(
        f"{block.origin}: row {block.row(index)}: the label {name!r} is {value!r}, {neither}",
        fix=f"{meaning}; drop or repair such rows, or say with --positive (in a schema: positive) which value"
        " is a click, and all others are none",
    )


def label_text(block: Block, name: str) -> pl.Series:
    """Return the label column as text in lower case, null where missing."""
    raw = block.column(name, "label").alias("")
    stripped = raw.str.strip_chars() if raw.dtype == pl.String else raw
    return as_text(stripped.alias(name)).alias("").str.to_lowercase()


@cache
def spell_label(value: str) -> str:
    """Return a label's value as `label_text` spells it.

    >>> spell_label("Click"), spell_label("1.0")
    ('click', '1')
    """
    return str(label_text(Block(pl.DataFrame({"label": [value]}), 1, "the label"), "label")[0])


def recognise_labels(values: Collection[str], name: str) -> tuple[str, str | None] | None:
    """Return which of a label's values is a click and which is none, by what the words mean.

    None is returned for labels that need no such rule: 0, 1, true and false; and for those that `read_labels` refuses
    with the row: more than two values, or 0 beside something odd. Two other values are an error that names both.

    >>> recognise_labels(["skip", "click"], "y"), recognise_labels(["-1", "1"], "y")
    (('click', 'skip'), ('1', '-1'))
    """
    present = set(values)
    if len(present) > 2 or present <= {"0", "1", "false", "true"}:
        return None
    clicks, others = present & CLICK_WORDS, present & NO_CLICK_WORDS
    if len(clicks) == 1 and len(clicks | others) == len(present):
        return clicks.pop(), others.pop() if others else None
    if present & {"0", "false"}:
        return None
    listed = " and ".join(map(repr, sorted(present)))
    holds = f"the values {listed}" if len(present) == 2 else f"one value only, {listed}"
    raise InputError(
        f"the label {name!r} has {holds}, which do not say what a click is",
        fix=" or ".join(f"--positive {value}" for value in sorted(present)),
    )


def drop_unlabelled(block: Block, name: str) -> Block:
    """Return the rows that have a label, which NA, NaN and NULL are not; they keep their numbers."""
    text = label_text(block, name)
    is_labelled = text.is_not_null() & ~text.is_in(NO_LABELS).fill_null(False)
    if is_labelled.all():
        return block
    numbers = block.first_row + is_labelled.arg_true().to_numpy().astype(np.int64)
    return replace(block, frame=block.frame.filter(is_labelled), numbers=numbers)


def read_weights(block: Block, name: str) -> npt.NDArray[np.float32]:
    """Return the weight column; a weight that is missing, below 0 or too large is an error."""
    raw = block.column(name, "weight").alias("")
    if raw.dtype == pl.String:
        numbers = as_text(raw.str.strip_chars()).cast(pl.Float64, strict=False)
    else:
        numbers = as_numbers(block, parse(Field, {"name": name, "kind": "numeric"}, "weight")).alias("")
    bad = (~numbers.is_between(0, float(np.finfo(np.float32).max)).fill_null(False)).arg_true()
    if len(bad):
        value = raw[bad[0]]
        raise InputError(
            f"{block.origin}: row {block.row(bad[0])}: the weight {name!r} is"
            f" {'missing' if value is None else repr(value)}; it must be 0 or more",
            fix="give every row a weight (1 for an ordinary one), or name another column as the weight, or none",
        )
    return numbers.cast(pl.Float32).to_numpy()


def read_groups(block: Block, name: str) -> pl.Series:
    """Return the group column as text, null where missing."""
    return as_text(block.column(name, "group")).alias("")


def time_kind(block: Block, name: str) -> str:
    """Return whether a time column holds "numbers" or "dates", which can't be ordered against each other."""
    raw = block.column(name, "time").alias("")
    is_text = raw.dtype == pl.String and raw.cast(pl.Float64, strict=False).null_count()
    return "dates" if is_text or raw.dtype in (pl.Date, pl.Datetime) else "numbers"


def read_times(block: Block, name: str) -> npt.NDArray[np.float64]:
    """Return a time column as numbers to order it by: numbers as they are, dates as microseconds since 1970."""
    raw = block.column(name, "time").alias("")
    fix = "use a number, or a date such as 2026-01-31 23:59:00"
    if raw.dtype in (pl.Date, pl.Datetime):
        numbers = raw.cast(pl.Datetime("us")).cast(pl.Int64).cast(pl.Float64)
    elif raw.dtype in (pl.String, pl.Null) or raw.dtype.is_numeric():
        numbers = raw.cast(pl.Float64, strict=False)
        if raw.dtype == pl.String and numbers.null_count():
            # If no date format fits, the values that are not numbers are reported below.
            with suppress(pl.exceptions.ComputeError):
                dates = raw.str.strip_suffix(UTC_SUFFIX).str.to_datetime(time_unit="us", strict=False)
                numbers = dates.cast(pl.Int64).cast(pl.Float64)
    else:
        raise InputError(f"{block.origin}: the time {name!r} is of type {raw.dtype}", fix=fix)
    bad = (numbers.is_null() | ~numbers.is_finite().fill_null(False)).arg_true()
    if len(bad):
        value = raw[bad[0]]
        problem = "is missing" if value is None else f"is {value!r}"
        raise InputError(f"{block.origin}: row {block.row(bad[0])}: the time {name!r} {problem}", fix=fix)
    return numbers.to_numpy()


def read_moments(block: Block, schema: Schema) -> Seconds | None:
    """Return when each row was, in whole seconds since 1970; None without a time, or if it holds no moments."""
    name = schema.time
    if name is None or name not in block.frame.columns:
        return None
    times = read_times(block, name)
    if time_kind(block, name) == "dates":
        return seconds_of(times, "iso")
    derived = (field.unit for field in schema.fields if field.source == name)
    unit = next(derived, None) or find_unit(as_text(pl.Series(np.unique(times))))
    return None if unit is None else seconds_of(times, unit)
