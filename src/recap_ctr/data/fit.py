"""What preparation learns about each field from the training rows: vocabularies, scales and quantiles."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl

from recap_ctr.data.count import CountedValues, may_lack_values
from recap_ctr.data.encode import FittedField
from recap_ctr.data.rare import NO_VALUES, most_frequent
from recap_ctr.data.split import SplitCodes
from recap_ctr.data.spool import Spool, SpooledRows, training_blocks
from recap_ctr.errors import InputError
from recap_ctr.schema import Field

QUANTILE_ROWS = 1 << 20
_NO_VALUES = pl.Series("value", [], dtype=pl.String)
_NO_COUNTS = np.zeros(0, np.int64)


@dataclass(frozen=True, eq=False)
class Fit:
    """What was learnt about a field, and the counts of values that its vocabulary lacks, if it can grow."""

    fitted: FittedField
    rare: pl.DataFrame | None = None


def fit_field(rows: SpooledRows, field: Field, splits: SplitCodes, directory: Path) -> Fit:
    """Learn a field from the training rows of the spool; `splits` has the split code of each row.

    `directory` is where counts go meanwhile, and what `UnknownValues` needs of them.
    """
    spool = rows.columns[f"field:{field.name}"]
    if field.is_value:
        return Fit(_fit_scale(field, spool, splits))
    if field.transform == "linear":
        return Fit(_fit_edges(field, spool, splits, rows.num_rows))
    if field.transform == "quantiles":
        return Fit(_fit_quantiles(field, spool, splits, rows.num_rows))
    if field.hash_buckets:
        return Fit(FittedField(field, _NO_VALUES, _NO_COUNTS))
    is_counted = field.name in rows.counted
    values = count_field(rows, field, splits, directory)
    if is_counted:
        values = CountedValues(rows, f"counted:{field.name}", splits, directory / "counted")
    kept, rare = [NO_VALUES], NO_VALUES
    for counts in values.ranges():
        is_kept = pl.col("train") >= field.min_count
        kept.append(counts.filter(is_kept).select("value", count="train"))
        lacking = counts.filter(~is_kept & (pl.col("total") > 0)).select("value", count="total")
        rare = most_frequent(pl.concat([rare, lacking]))
    frequent = pl.concat(kept)
    fitted = _keep_frequent(field, frequent["value"], frequent["count"].to_numpy())
    return Fit(fitted, None if is_counted else rare)


def count_field(rows: SpooledRows, field: Field, splits: SplitCodes, directory: Path) -> CountedValues:
    """Count the values of a field, and write which of them training rows have if its vocabulary may lack some."""
    values = CountedValues(rows, f"field:{field.name}", splits, directory)
    if may_lack_values(rows, field):
        values.write_seen()
    return values


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
            fix='set transform = "linear", or repair the values',
        )
    mean = moments.total / moments.count
    deviation = float(np.sqrt(max(moments.square / moments.count - mean * mean, 0.0)))
    return FittedField(
        field, _NO_VALUES, _NO_COUNTS, mean + moments.shift, deviation if deviation > 0 else 1.0
    )


def _fit_quantiles(field: Field, spool: Spool, splits: SplitCodes, num_rows: int) -> FittedField:
    """Learn the bounds of buckets that hold equal shares of the rows, and count the buckets."""
    sample = _sample(spool, splits, num_rows)
    if sample is None:
        return FittedField(field, _NO_VALUES, _NO_COUNTS)
    edges = np.unique(_quantiles(sample, np.arange(1, field.num_buckets) / field.num_buckets))
    counts = np.zeros(len(edges) + 1, np.int64)
    for numbers in _training_numbers(spool, splits):
        counts += np.bincount(np.searchsorted(edges, numbers, side="right"), minlength=len(counts))
    buckets = pl.Series(np.arange(len(counts))).cast(pl.String)
    return _keep_frequent(field, buckets, counts, tuple(edges.tolist()))


def _fit_edges(field: Field, spool: Spool, splits: SplitCodes, num_rows: int) -> FittedField:
    """Learn the edges between which vectors are interpolated, in order, and count the rows from each to the next.

    Where there are few numbers, each of them is an edge, and so has a vector of its own.
    """
    sample = _sample(spool, splits, num_rows)
    if sample is None:
        return FittedField(field, _NO_VALUES, _NO_COUNTS)
    quantiles = np.unique(sample)
    is_full_at_the_top = len(quantiles) <= field.num_buckets
    if not is_full_at_the_top:
        quantiles = _quantiles(sample, np.arange(field.num_buckets + 1) / field.num_buckets)
        is_full_at_the_top = quantiles[-2] == quantiles[-1]
    edges = np.unique(quantiles)
    if is_full_at_the_top:  # So many rows at the top are told from those below by their id, too.
        edges = np.append(edges, edges[-1])
    counts = np.zeros(len(edges), np.int64)
    for numbers in _training_numbers(spool, splits):
        below = np.clip(np.searchsorted(edges, numbers, side="right") - 1, 0, len(edges) - 2)
        counts += np.bincount(below, minlength=len(counts))
    names = pl.Series(np.arange(len(edges))).cast(pl.String)
    return FittedField(field, names, counts, edges=tuple(edges.tolist()))


def _sample(spool: Spool, splits: SplitCodes, num_rows: int) -> npt.NDArray[np.float64] | None:
    """Return the numbers of evenly spaced training rows, which are enough for quantiles; None if there is none."""
    step = max(num_rows // QUANTILE_ROWS, 1)
    sample = [numbers[::step] for numbers in _training_numbers(spool, splits)]
    return np.concatenate(sample) if sample else None


def _quantiles(sample: npt.NDArray[np.float64], shares: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the numbers below which these shares of a sample are."""
    # Of halves, because the difference of two large numbers may be too large.
    return 2 * np.asarray(np.quantile(sample / 2, shares))
