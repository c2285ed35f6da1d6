"""Encoded rows, counted in a few bins a field: the shape of its values, small enough to keep and to compare.

The commonest values have a bin each and the rest share one; hash buckets and quantiles are joined in order; numbers
are cut at edges. Ids count values by falling frequency, so bins need no table of the vocabulary's size; values that
an update adds come last.
Shape suffixes: B rows, W id columns, P periods, K bins of all fields.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from recap_ctr.data.encode import PAD, Encoder, FittedField, Floats, Ints
from recap_ctr.data.layout import FieldLayout

NUM_BINS = 16
Counts = npt.NDArray[np.int64]


class Bins:
    """The bins of all fields, one after the other; the last of a field holds what has no vector of its own.

    `edges` are those of each field that enters as a number, in raw units; other fields have none.
    """

    def __init__(self, encoder: Encoder, edges: Sequence[Sequence[float]]) -> None:
        layout = encoder.layout
        sizes = [_num_bins(fitted, cuts) + 1 for fitted, cuts in zip(encoder.fields, edges, strict=True)]
        ends = np.cumsum(sizes)
        self.places = [slice(int(end) - size, int(end)) for end, size in zip(ends, sizes, strict=True)]
        """Where the bins of each field are in a vector of counts."""
        self.size = int(ends[-1])
        """How many bins there are in all."""
        columns = [i for i, place in enumerate(layout.fields) for _ in range(place.width)]

        def spread(values: Sequence[int]) -> Ints:
            return np.array([values[i] for i in columns], np.int32)

        pairs = list(zip(encoder.fields, layout.fields, strict=True))
        self._first_W = spread([place.offset + 1 for place in layout.fields])
        self._oov_W = spread([place.offset + fitted.oov for fitted, place in pairs])
        self._start_W = spread([place.start for place in self.places])
        self._last_W = spread([place.stop - 2 for place in self.places])
        self._oov_bin_W = spread([place.stop - 1 for place in self.places])
        self._divisor_W = spread([_divisor(fitted) for fitted in encoder.fields])
        self._quantiles = {
            layout.fields[i].start: _quantile_bins(fitted) + self.places[i].start
            for i, fitted in enumerate(encoder.fields)
            if fitted.edges
        }
        self._numbers = [
            (place.start, place.number_column, _standardised(fitted, cuts), self.places[i].start)
            for i, (place, fitted, cuts) in enumerate(zip(layout.fields, encoder.fields, edges, strict=True))
            if place.is_factor
        ]

    def count(self, ids_BW: Ints, values_BN: Floats) -> Counts:
        """Return how many values of the rows are in each bin; padding is in none."""
        counts = np.bincount(self._find(ids_BW, values_BN).ravel(), minlength=self.size + 1)
        return counts[:-1].astype(np.int64)

    def count_by_period(self, ids_BW: Ints, values_BN: Floats, periods_B: Ints, num_periods: int) -> Counts:
        """Return how many values are in each bin for each period of the rows, periods × bins."""
        width = self.size + 1
        places_BW = self._find(ids_BW, values_BN) + periods_B[:, None].astype(np.int64) * width
        counts = np.bincount(places_BW.ravel(), minlength=num_periods * width)
        return counts.reshape(num_periods, width)[:, :-1].astype(np.int64)

    def _find(self, ids_BW: Ints, values_BN: Floats) -> Ints:
        """Return the bin of each value; `size` for padding."""
        # Ids of values that an update added come after OOV's. Padding is below 0.
        order_BW = (ids_BW - self._first_W - (ids_BW > self._oov_W)) // self._divisor_W
        bins_BW = np.minimum(self._start_W + order_BW, self._last_W)
        bins_BW[order_BW < 0] = self.size
        for column, table in self._quantiles.items():
            bins_BW[:, column] = table[order_BW[:, column]]
        for column, value_column, cuts, start in self._numbers:
            bins_BW[:, column] = np.searchsorted(cuts, values_BN[:, value_column], side="right") + start
        return np.where(ids_BW == self._oov_W, self._oov_bin_W, bins_BW)


@dataclass(frozen=True, eq=False)
class Entries:
    """The values of a field that have a vector of their own, each with its row."""

    codes: Counts
    """Numbers from 0 that are equal for equal values."""
    values: Ints | Floats
    """The id, or the standardised number, that each code stands for."""
    rows: Counts


def field_entries(place: FieldLayout, fitted: FittedField, ids_BW: Ints, values_BN: Floats) -> Entries:
    """Return the values of a field in encoded rows; padding and OOV are left out."""
    ids = ids_BW[:, place.start : place.start + place.width] - place.offset
    rows, columns = np.nonzero((ids != PAD) & (ids != fitted.oov))
    entries = values_BN[rows, place.number_column] if place.is_factor else ids[rows, columns]
    values, codes = np.unique(entries, return_inverse=True)
    return Entries(codes.astype(np.int64), values, rows.astype(np.int64))


def _num_bins(fitted: FittedField, cuts: Sequence[float]) -> int:
    if fitted.field.is_value:
        return len(cuts) + 1
    num_kept = fitted.num_quantiles if fitted.field.transform == "linear" else fitted.num_kept
    return max(min(num_kept, NUM_BINS), 1)


def _divisor(fitted: FittedField) -> int:
    """Return how many hash buckets share a bin; 1 for other fields."""
    return -(-fitted.field.hash_buckets // NUM_BINS) if fitted.field.hash_buckets else 1


def _quantile_bins(fitted: FittedField) -> Ints:
    """Return the bin of each kept quantile: those of similar numbers share one. One more entry serves OOV.

    No row has the id of a linear field's last edge.
    """
    quantiles = fitted.values.cast(int).to_numpy()
    num_bins = _num_bins(fitted, ())
    bins = np.minimum(quantiles * num_bins // fitted.num_quantiles, num_bins - 1)
    return np.append(bins, 0).astype(np.int32)


def _standardised(fitted: FittedField, cuts: Sequence[float]) -> Floats:
    with np.errstate(over="ignore"):
        return ((np.asarray(cuts, np.float64) - fitted.mean) / fitted.scale).astype(np.float32)
