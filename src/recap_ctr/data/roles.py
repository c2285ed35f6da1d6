"""How columns with a role are read: labels, weights, times and groups."""

from contextlib import suppress

import numpy as np
import numpy.typing as npt
import polars as pl

from recap_ctr.config import parse
from recap_ctr.data.encode import as_numbers
from recap_ctr.data.source import Block
from recap_ctr.data.text import as_text
from recap_ctr.errors import InputError
from recap_ctr.schema import Field


def read_labels(block: Block, name: str) -> npt.NDArray[np.uint8]:
    """Return the label column as 0 and 1; any other value is an error that names its row."""
    text = as_text(block.column(name, "label")).alias("")
    labels = text.replace_strict(
        ["0", "1", "false", "true"], [0, 1, 0, 1], default=None, return_dtype=pl.UInt8
    )
    bad = labels.is_null().arg_true()
    if len(bad):
        value = text[bad[0]]
        problem = "is missing" if value is None else f"is {value!r}, neither 0 nor 1"
        raise InputError(
            f"{block.origin}: row {block.first_row + bad[0]}: the label {name!r} {problem}",
            fix="a label is 1 for a click and 0 for none; drop or repair such rows",
        )
    return labels.to_numpy()


def read_weights(block: Block, name: str) -> npt.NDArray[np.float32]:
    """Return the weight column; a weight that is missing, below 0 or too large is an error."""
    numbers = as_numbers(block, parse(Field, {"name": name, "kind": "numeric"}, "weight")).alias("")
    bad = (~numbers.is_between(0, float(np.finfo(np.float32).max)).fill_null(False)).arg_true()
    if len(bad):
        value = numbers[bad[0]]
        raise InputError(
            f"{block.origin}: row {block.first_row + bad[0]}: the weight {name!r} is"
            f" {'missing' if value is None else value}; it must be 0 or more",
            fix="give every row a weight (1 for an ordinary one), or remove weight from the schema",
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
                numbers = raw.str.to_datetime(time_unit="us", strict=False).cast(pl.Int64).cast(pl.Float64)
    else:
        raise InputError(f"{block.origin}: the time {name!r} is of type {raw.dtype}", fix=fix)
    bad = (numbers.is_null() | ~numbers.is_finite().fill_null(False)).arg_true()
    if len(bad):
        value = raw[bad[0]]
        problem = "is missing" if value is None else f"is {value!r}"
        raise InputError(
            f"{block.origin}: row {block.first_row + bad[0]}: the time {name!r} {problem}", fix=fix
        )
    return numbers.to_numpy()
