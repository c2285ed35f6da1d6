"""Columns of values on their way from a request to the encoder: brought to one type, cut to what the encoder takes,
and repeated where a request gives a value for all of its rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, islice
from typing import Any

import numpy as np
import polars as pl

from recap_ctr.data.encode import as_numbers
from recap_ctr.data.source import Block
from recap_ctr.data.text import NO_CATEGORIES, as_text, canonical, check_dates, missing_texts
from recap_ctr.errors import InputError
from recap_ctr.schema import Field
from recap_ctr.serve.problem import Problem

ORIGIN = "the request"
# Characters of a multi field's column, and of it for each value that the encoder takes, beyond which it is cut.
_LONG_COLUMN, _LONG_VALUE = 1 << 20, 64
Values = Sequence[Any] | pl.Series


@dataclass(frozen=True, eq=False)
class Table:
    """The rows of one request.

    A column holds text (str), numbers (float) or, for a multi field, lists of text. None is a missing value; a field
    without a column is missing in all rows.
    """

    height: int
    columns: dict[str, Values]


def uniform(field: Field, values: Sequence[Any]) -> Values | None:
    """Return JSON values in the one type that a column has; None if all are missing."""
    kinds = set(map(type, values))
    kinds.discard(type(None))
    if not kinds:
        return None
    if field.kind == "numeric":
        if kinds == {float}:
            return values
        text = [repr(value) if type(value) is float else value for value in values]
        block = Block(pl.DataFrame([pl.Series(field.name, text, dtype=pl.String)]), 1, ORIGIN)
        try:
            return as_numbers(block, field)
        except InputError as error:
            raise Problem(400, error.message, fix=error.fix) from None
    if list not in kinds:
        return values if kinds == {str} else _texts(values)
    parts = [_cut(field, value) if type(value) is list else [value] for value in values]
    texts = iter(_texts([*chain.from_iterable(parts)]))
    text_parts = [list(islice(texts, len(part))) for part in parts]
    # A value that is not a list is text joined by the field's separator, or missing.
    joined = [part[0] for value, part in zip(values, text_parts, strict=True) if type(value) is not list]
    split = iter(
        as_text(pl.Series(joined, dtype=pl.String), field.missing).str.split(field.separator).to_list()
    )
    return [
        part if type(value) is list else next(split) for value, part in zip(values, text_parts, strict=True)
    ]


def _cut(field: Field, values: list[Any]) -> list[Any]:
    """Return the first `max_len` values of a list that are not missing: what the encoder takes of it.

    A request may hold a thousand values for each of ten thousand rows, or once for all of them.
    """
    missing, numbers = missing_texts(field.missing), _missing_floats(field.missing)
    kept: list[Any] = []
    for value in values:
        # Most missing values are spelled as usual, and a body may hold millions of them.
        if value is None or value in (numbers if type(value) is float else missing):
            continue
        if type(value) is float or canonical(_text(value) or "") not in missing:
            kept.append(value)
            if len(kept) == field.max_len:
                break
    return kept


@cache
def _missing_floats(missing: tuple[str, ...]) -> frozenset[float]:
    """Return the floats whose text means a missing value."""
    texts = missing_texts(missing)
    floats = pl.Series(sorted(texts), dtype=pl.String).cast(pl.Float64, strict=False).drop_nulls()
    spelled = zip(floats, as_text(floats), strict=True)
    return frozenset(number for number, text in spelled if text in texts)


def cut_long(field: Field, part: Values) -> Values:
    """Return a column of a multi field without the values that the encoder would not take, if it holds many."""
    if _count_characters(part) <= min(_LONG_COLUMN, _LONG_VALUE * field.max_len * len(part)):
        return part
    cells = part.to_list() if isinstance(part, pl.Series) else part
    return [as_list(field, cell) for cell in cells]


def _count_characters(part: Values) -> int:
    """Return about how much text a column holds; a value in a list has a separator, too."""
    if not isinstance(part, pl.Series):
        return sum(map(text_length, part))
    flat = part.explode() if part.dtype == pl.List else part
    return len(flat) + int(flat.str.len_bytes().sum())


def as_list(field: Field, value: str | list[Any] | None) -> list[Any] | None:
    """Return the values of one cell of a multi field, as many as the encoder takes; None if it is missing."""
    if type(value) is str:
        text = canonical(value)
        value = None if text in missing_texts(field.missing) else text.split(field.separator)
    return _cut(field, value) if type(value) is list else None


def plain(field: Field, series: pl.Series) -> pl.Series:
    """Return an Arrow column as text, floats, or lists of text."""
    kind = series.dtype
    if field.kind == "numeric":
        if kind.is_numeric() or kind in (pl.Boolean, pl.Null):
            return series.cast(pl.Float64)
        return as_numbers(Block(series.to_frame(), 1, ORIGIN), field).alias(field.name)
    if field.kind == "multi" and isinstance(kind, pl.List):
        if kind.inner == pl.String:
            return series
        check_dates(series.explode(), series.name)
        return series.list.eval(pl.element().map_batches(as_text, return_dtype=pl.String))
    if kind.is_float() or kind == pl.String:
        return series
    return as_text(series) if kind in NO_CATEGORIES or kind.is_temporal() else series.cast(pl.String)


def spelled(series: pl.Series) -> pl.Series:
    """Return floats as the encoder spells them, and anything else as it is."""
    return as_text(series) if series.dtype.is_float() else series


def _texts(values: Sequence[Any]) -> list[str | None]:
    """Return values as the encoder spells them; all floats in one call, since calls into polars are slow."""
    floats = pl.Series([value for value in values if type(value) is float], dtype=pl.Float64)
    spelled = iter(as_text(floats).to_list() if len(floats) else ())
    return [next(spelled) if type(value) is float else _text(value) for value in values]


def _text(value: str | int | None) -> str | None:
    if value is None or type(value) is str:
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def text_length(value: object) -> int:
    """Return the characters of a value, or of all values in a list."""
    if type(value) is list:
        return sum(map(text_length, value))
    return len(value) if type(value) is str else 0


def cells(table: Table, field: Field) -> Sequence[Any]:
    """Return the values of one column as a plain sequence."""
    values = table.columns.get(field.name)
    if values is None:
        return [None] * table.height
    if field.kind == "multi":
        values = cut_long(field, values)
    return values.to_list() if isinstance(values, pl.Series) else values


def holds_lists(part: Values | None) -> bool:
    """Return whether a cell of the column is a list."""
    if isinstance(part, pl.Series):
        return part.dtype == pl.List
    return part is not None and any(type(value) is list for value in part)


def length_of(name: str, kind: pl.DataType) -> pl.Expr | None:
    """Return the bytes of all text in a column; None if it holds none."""
    column = pl.col(name)
    if isinstance(kind, pl.List):
        column, kind = column.explode(), kind.inner  # type: ignore[assignment]
    if kind not in (pl.String, pl.Categorical, pl.Enum):
        return None
    return column.cast(pl.String).str.len_bytes().sum()


def common_cell(part: Values | None) -> Any:
    """Return what every row of a column holds, if it is one object: the value of a context; otherwise None."""
    if part is None or isinstance(part, pl.Series) or len(part) < 2:
        return None
    return part[0] if all(cell is part[0] for cell in part) else None


def repeat(name: str, cell: Any, height: int, kind: pl.DataType) -> pl.Series:
    """Return a column with one value in all rows, whose text is in memory only once."""
    if type(cell) is not list:
        return pl.Series(name, [cell], dtype=kind).new_from_index(0, height)
    if not cell:
        return pl.Series(name, [cell], dtype=pl.List(kind)).new_from_index(0, height)
    # A list that is repeated by `new_from_index` copies the text of its values.
    places = np.tile(np.arange(len(cell), dtype=np.uint32), height)
    flat = pl.Series(name, cell, dtype=kind).gather(places)
    return flat.reshape((height, len(cell))).cast(pl.List(kind))


def as_lists(field: Field, part: Values | None, height: int) -> pl.Series:
    """Return the column of a multi field as lists of text; text is split at the field's separator."""
    if part is not None and holds_lists(part):
        return pl.Series(field.name, part, dtype=pl.List(pl.String))
    text = pl.Series(field.name, [None] * height if part is None else part, dtype=pl.String)
    return as_text(text, field.missing).str.split(field.separator)
