"""What preparation learns about each field from the training rows: vocabularies, scales and quantiles."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from recap_ctr.data.encode import FittedField
from recap_ctr.data.split import SplitCodes
from recap_ctr.data.spool import Spool, SpooledRows, counted_training_blocks, training_blocks
from recap_ctr.errors import InputError
from recap_ctr.schema import Field

QUANTILE_ROWS = 1 << 20
_NO_VALUES = pl.Series("value", [], dtype=pl.String)
_NO_COUNTS = np.zeros(0, np.int64)


def fit_field(rows: SpooledRows, field: Field, splits: SplitCodes) -> FittedField:
    """Learn a field from the training rows of the spool; `splits` has the split code of each row."""
    spool = rows.columns[f"field:{field.name}"]
    if field.is_value:
        return _fit_scale(field, spool, splits)
    if field.transform == "quantiles":
        return _fit_quantiles(field, spool, splits, rows.num_rows)
    if field.hash_buckets:
        return FittedField(field, _NO_VALUES, _NO_COUNTS)
    name, blocks = f"field:{field.name}", training_blocks(spool, splits)
    if field.name in rows.counted:
        name = f"counted:{field.name}"
        blocks = counted_training_blocks(
            rows.columns[name], rows.columns[f"counted rows:{field.name}"], splits
        )
    dictionary = rows.dictionaries[name]
    counts = np.zeros(dictionary.num_values, np.int64)
    for codes in blocks:
        counts += np.bincount(codes[codes >= 0], minlength=len(counts))
    if not dictionary.is_spilled:
        return _keep_frequent(field, dictionary.values(), counts)
    totals = pl.concat(_frequent(part, counts, field.min_count) for part in dictionary.ranges())
    return _keep_frequent(field, totals["value"], totals["count"].to_numpy())


def _frequent(values: pl.DataFrame, counts: npt.NDArray[np.int64], min_count: int) -> pl.DataFrame:
    """Return the frequent ones of some values, which may have several codes each, with their counts."""
    counted = values.select("value", count=pl.Series(counts[values["code"].to_numpy()]))
    return counted.group_by("value").agg(pl.col("count").sum()).filter(pl.col("count") >= min_count)


def _keep_frequent(
    field: Field, values: pl.Series, counts: npt.NDArray[np.int64], edges: tuple[float, ...] = ()
) -> FittedField:
    """Keep the values that occur often enough, ordered by falling count, then by value."""
    frame = pl.DataFrame({"value": values, "count": counts}).filter(pl.col("count") >= field.min_count)
    frame = frame.sort(["count", "value"], descending=[True, False])
    return FittedField(field, frame["value"], frame["count"].to_numpy(), edges=edges)


def _training_numbers(spool: Spool, splits: SplitCodes) -> Iterator[npt.NDArray[np.float64]]:
    """Yield the numbers of the training rows, missing ones left out, in blocks that are not empty."""
    for block in training_blocks(spool, splits):
        numbers = block[~np.isnan(block)]
        if len(numbers):
            yield numbers


@dataclass
class _Moments:
    """Count, mean and variance of numbers, summed up relative to the first one to keep precision."""

    count: int = 0
    shift: float = 0.0
    total: float = 0.0
    square: float = 0.0

    def add(self, numbers: npt.NDArray[np.float64]) -> None:
        if self.count == 0:
            self.shift = float(numbers[0])
        with np.errstate(over="ignore"):
            self.count += len(numbers)
            self.total += float((numbers - self.shift).sum())
            self.square += float(((numbers - self.shift) ** 2).sum())


def _fit_scale(field: Field, spool: Spool, splits: SplitCodes) -> FittedField:
    """Learn mean and standard deviation; a constant has scale 1."""
    moments = _Moments()
    for numbers in _training_numbers(spool, splits):
        moments.add(numbers)
    if moments.count == 0:
        return FittedField(field, _NO_VALUES, _NO_COUNTS)
    if not np.isfinite(moments.square):
        raise InputError(
            f"field {field.name!r}: its numbers are too large to standardise",
            fix='set transform = "quantiles", or repair the values',
        )
    mean = moments.total / moments.count
    deviation = float(np.sqrt(max(moments.square / moments.count - mean * mean, 0.0)))
    return FittedField(
        field, _NO_VALUES, _NO_COUNTS, mean + moments.shift, deviation if deviation > 0 else 1.0
    )


def _fit_quantiles(field: Field, spool: Spool, splits: SplitCodes, num_rows: int) -> FittedField:
    """Learn the bounds of buckets that hold equal shares of the rows, and count the buckets."""
    step = max(num_rows // QUANTILE_ROWS, 1)  # evenly spaced rows are enough for a quantile
    sample = [numbers[::step] for numbers in _training_numbers(spool, splits)]
    if not sample:
        return FittedField(field, _NO_VALUES, _NO_COUNTS)
    shares = np.arange(1, field.num_buckets) / field.num_buckets
    edges = np.unique(np.quantile(np.concatenate(sample), shares))
    counts = np.zeros(len(edges) + 1, np.int64)
    for numbers in _training_numbers(spool, splits):
        counts += np.bincount(np.searchsorted(edges, numbers, side="right"), minlength=len(counts))
    buckets = pl.Series(np.arange(len(counts))).cast(pl.String)
    return _keep_frequent(field, buckets, counts, tuple(edges.tolist()))
