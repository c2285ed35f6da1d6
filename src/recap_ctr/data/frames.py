"""Tables in memory, of several libraries and with nested columns, as flat polars frames."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl

from recap_ctr.errors import InputError
from recap_ctr.schema import first_repeated


def flatten(frame: pl.DataFrame, origin: str) -> pl.DataFrame:
    """Return a frame in which the parts of a struct are columns of their own: `b` inside `a` becomes `a.b`."""
    while any(isinstance(kind, pl.Struct) for kind in frame.dtypes):
        columns: list[pl.Series] = []
        for series in frame:
            if isinstance(series.dtype, pl.Struct):
                columns += [part.alias(f"{series.name}.{part.name}") for part in series.struct.unnest()]
            else:
                columns.append(series)
        if (name := first_repeated(series.name for series in columns)) is not None:
            raise InputError(
                f"{origin}: column {name!r} is there twice once structs are flattened",
                fix="rename one of them",
            )
        frame = pl.DataFrame(columns)
    return frame


def as_frame(table: Any, columns: Sequence[str] | None = None) -> pl.DataFrame:
    """Return a table as a polars frame: a polars or pandas frame, a numpy array, or a mapping of columns.

    `columns` names the columns of an array. Structs are flattened.
    """
    return flatten(_as_frame(table, columns), "the data frame")


def _as_frame(table: Any, columns: Sequence[str] | None) -> pl.DataFrame:
    if isinstance(table, pl.DataFrame):
        return table
    if isinstance(table, pl.LazyFrame):
        return table.collect()
    if hasattr(table, "iloc") and hasattr(table, "columns"):  # pandas, without importing it
        names = [str(name) for name in table.columns]
        _refuse_duplicates(names)
        return pl.DataFrame([_pandas_series(name, table.iloc[:, i]) for i, name in enumerate(names)])
    if isinstance(table, dict):
        return pl.DataFrame(table)
    if hasattr(table, "ndim") and hasattr(table, "dtype"):
        if table.ndim != 2:
            raise InputError(
                f"Expected 2D array, got {table.ndim}D array instead", fix="reshape it to rows × columns"
            )
        names = list(columns) if columns is not None else [f"x{i}" for i in range(table.shape[1])]
        return pl.DataFrame([_series(name, table[:, i]) for i, name in enumerate(names)])
    raise InputError(f"can't read rows from {type(table).__name__}", fix="pass a polars or pandas data frame")


def _pandas_series(name: str, column: Any) -> pl.Series:
    # Of pandas' own types (nullable integers, strings, categories) only objects keep every value exact.
    values = column.to_numpy(dtype=None if isinstance(column.dtype, np.dtype) else object)
    return _series(name, values, column.isna().to_numpy())


def _series(name: str, values: Any, is_missing: Any = None) -> pl.Series:
    """Return a numpy array as a series; objects of different types become text."""
    if values.dtype.kind in "biuf":
        return pl.Series(name, values)
    if values.dtype.kind == "M":
        return pl.Series(name, values.astype("datetime64[us]"))
    items = values.tolist()
    if is_missing is None:
        is_missing = [item is None or item != item for item in items]
    items = [item.tolist() if isinstance(item, np.ndarray) else item for item in items]
    items = [None if missing else item for missing, item in zip(is_missing, items, strict=True)]
    kinds = {type(item) for item in items if item is not None}
    if len(kinds) > 1 and not kinds <= {int, float, bool}:
        items = [None if item is None else str(item) for item in items]
    return pl.Series(name, items, strict=False)


def _refuse_duplicates(names: Sequence[str]) -> None:
    if (name := first_repeated(names)) is not None:
        raise InputError(f"column {name!r} appears twice in the table", fix="rename one of them")
