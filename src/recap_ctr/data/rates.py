"""Click rates of values and of pairs of values: which pairs are worth it, what each row may know, and a packed table.

A training row's own click must not be part of the rates that it is explained by. So the rows are divided into folds,
and a row sees the rates of the other folds. Later rows see the rates of all training rows. Where a model is for rows
to come, the folds are stretches of time: rows of the same hour have more in common than later ones will have with them.

An entry of the table has 32 bits: 15 for a mark that distinguishes it from others in its bucket, 8 for the rate's log
odds, 8 for the logarithm of the number of rows. Numpy fills the table; torch and ONNX read it by the same arithmetic.

Shapes: N rows, P crosses (fields or pairs of fields), C candidates.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from recap_ctr.data.layout import FieldLayout, Layout
from recap_ctr.data.shards import Shard
from recap_ctr.errors import InputError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Codes = npt.NDArray[np.uint8]
Numbers = TypeVar("Numbers", bound=Any)
Cross = tuple[str, ...]
"""The names of one field, or of two."""

FOLDS = 5
PRIOR = 3.0  # Every entry gets this many rows with the mean rate in addition to its own.
MAX_PAIRS, MAX_PAIRED_FIELDS = 8, 12
MIN_GAIN = 0.002
"""A pair must add this share of the variance that is explained already, or it is not worth its entries."""
ENTRIES_PER_VALUE = 4.8
"""Entries for each value of a field: the table then takes half the bytes of 16 numbers a value."""
MIN_ENTRIES = 100_000
CHOICE_ROWS = 300_000  # The choice of pairs looks at this many rows.
SLOTS = 8
FILL = (
    0.6  # With this share of slots in use, one entry in fifty finds its bucket full; the rarest are left out.
)
LEVELS = 256
NEUTRAL = 128  # The code of the log odds of all rows.
ODDS_STEPS, COUNT_STEPS = 32.0, 16.0  # Codes per unit of log odds, and of log(1 + rows).
PRIME, MARKS = 2**31 - 1, 2**15 - 1


def place(left: Numbers, right: Numbers, cross: Numbers, buckets: int) -> tuple[Numbers, Numbers]:
    """Return the bucket of a pair of values, and the mark that distinguishes it from other pairs in that bucket.

    The arguments are arrays or tensors of whole numbers below 2³¹.
    """

    def mixed(a: int, b: int, c: int) -> Any:
        return (left * a % PRIME + right * b % PRIME + cross * c) % PRIME

    bucket = mixed(1_640_531_513, 805_459_861, 374_761_393) % buckets
    return bucket, mixed(1_223_845_631, 1_901_234_869, 668_265_263) % MARKS + 1


def encode_rates(clicks: Floats, rows: Floats, rate: float, count: Floats | None = None) -> Codes:
    """Return two codes for each entry: its log odds against those of all rows, and how many rows it has.

    Without rows both are 0, as for a value that has no entry. `count` is the number of rows if the rates are of fewer.
    """
    odds = np.log((clicks + PRIOR * rate) / (rows - clicks + PRIOR * (1 - rate))) - np.log(rate / (1 - rate))
    odds_codes = np.clip(np.rint(odds * ODDS_STEPS) + NEUTRAL, 0, LEVELS - 1)
    count_codes = np.clip(np.rint(np.log1p(rows if count is None else count) * COUNT_STEPS), 0, LEVELS - 1)
    return np.stack([np.where(count_codes > 0, odds_codes, 0), count_codes], axis=-1).astype(np.uint8)


def neutral_where_unseen(codes: Codes) -> Codes:
    """Return codes with the odds of all rows for a value without rows, for those who look at the order of odds."""
    pairs = codes.reshape(len(codes), -1, 2).copy()
    pairs[..., 0] = np.where(pairs[..., 1] > 0, pairs[..., 0], NEUTRAL)
    return pairs.reshape(codes.shape)


def _inner_rate(rate: float) -> float:
    """Return a share of clicks that has log odds."""
    return min(max(rate, 1e-6), 1 - 1e-6)


def _stretches(rows: Shard) -> Ints:
    """Return the stretch of time of each row; all have the same number of rows."""
    assert rows.times is not None
    folds = np.empty(len(rows), np.int64)
    folds[np.argsort(rows.times, kind="stable")] = np.arange(len(rows)) * FOLDS // len(rows)
    return folds


def crossable(layout: Layout) -> list[FieldLayout]:
    """Return the fields that have one value a row out of a vocabulary."""
    return [field for field in layout.fields if field.pooling is None and not field.is_factor]


def fields_of(crosses: Sequence[Cross], layout: Layout) -> list[tuple[FieldLayout, FieldLayout | None]]:
    """Return the fields of each cross; the second is None for a field alone."""
    fields = {field.name: field for field in crossable(layout)}
    for name in (name for cross in crosses for name in cross):
        if name not in fields:
            raise InputError(f"no click rates of {name!r}: it is not a field with one value a row")
    return [(fields[cross[0]], fields[cross[1]] if len(cross) > 1 else None) for cross in crosses]


@dataclass(frozen=True, eq=False)
class _Counts:
    """The distinct pairs of a cross in the training rows, in ascending order, and the rows and clicks of each."""

    keys: Ints
    rows: Floats
    clicks: Floats
    place_N: npt.NDArray[np.intp]
    """The place of each training row's pair in `keys`."""


@dataclass(frozen=True, eq=False)
class Entries:
    """The rows and clicks of pairs of values, by the values' ids in their fields and the number of the cross."""

    left: Ints
    right: Ints
    cross: Ints
    rows: Floats
    clicks: Floats

    @property
    def rate(self) -> float:
        """Return the share of clicks: every row is counted once in the first cross."""
        first = self.cross == 0
        return _inner_rate(float(self.clicks[first].sum()) / max(float(self.rows[first].sum()), 1e-9))

    def take(self, chosen: npt.NDArray[np.bool_]) -> "Entries":
        """Return the chosen entries."""
        return Entries(*(column[chosen] for column in vars(self).values()))

    def only(self, wanted: Sequence[Cross], crosses: Sequence[Cross]) -> "Entries":
        """Return the entries of the wanted crosses, numbered in their order; `crosses` are all that these are of."""
        numbers = np.full(len(crosses), -1)
        numbers[[crosses.index(cross) for cross in wanted]] = np.arange(len(wanted))
        cross = numbers[self.cross]
        return replace(self, cross=cross).take(cross >= 0)

    def plus(self, others: "Entries", most: int) -> "Entries":
        """Return the sums of both, of the `most` pairs with most rows."""
        keys = [
            np.concatenate([getattr(self, key), getattr(others, key)]) for key in ("cross", "left", "right")
        ]
        order = np.lexsort(keys[::-1])
        keys = [key[order] for key in keys]
        is_first = np.ones(len(order), np.bool_)
        is_first[1:] = np.logical_or.reduce([key[1:] != key[:-1] for key in keys])
        starts = np.flatnonzero(is_first)
        rows, clicks = (
            np.add.reduceat(np.concatenate([getattr(self, name), getattr(others, name)])[order], starts)
            for name in ("rows", "clicks")
        )
        chosen = np.sort(np.argsort(-rows, kind="stable")[:most])
        cross, left, right = (key[starts][chosen] for key in keys)
        return Entries(left, right, cross, rows[chosen], clicks[chosen])

    def fill(
        self,
        figures: npt.NDArray[np.float32],
        wanted: Sequence[Cross],
        crosses: Sequence[Cross],
        layout: Layout,
    ) -> None:
        """Write the two codes of each value of the wanted fields to its row, NEUTRAL and 0 for a value without rows.

        `crosses` are all that the entries are of.
        """
        for cross, (field, _) in zip(wanted, fields_of(wanted, layout), strict=True):
            entries = self.take(self.cross == crosses.index(cross))
            figures[field.offset : field.offset + field.size] = (NEUTRAL, 0)
            codes = encode_rates(entries.clicks, entries.rows, self.rate)
            figures[field.offset + entries.left] = neutral_where_unseen(codes)

    def table(self, rate: float) -> npt.NDArray[np.int32]:
        """Return the packed table, buckets × slots; where a bucket is full, the rarest are left out.

        `rate` is the share of clicks in all rows.
        """
        order = np.argsort(-self.rows.astype(np.int64), kind="stable")
        codes = encode_rates(self.clicks, self.rows, rate).astype(np.int64)
        return pack_table(self.left[order], self.right[order], self.cross[order], codes[order])


@dataclass(frozen=True, eq=False)
class Measured:
    """The rates of crosses as training and the model take them; codes are rows × 2 crosses."""

    training: Codes
    later: Codes
    table: npt.NDArray[np.int32]
    """The packed table of all entries, buckets × slots."""


def choose_crosses(train: Shard, layout: Layout, *, by_time: bool = False) -> list[Cross]:
    """Return the fields and pairs of fields whose rates are worth their entries, by a sample of the training rows."""
    room = max(ENTRIES_PER_VALUE * layout.num_rows, MIN_ENTRIES) - layout.num_rows
    share = min(CHOICE_ROWS / len(train), 1.0)
    if share < 1.0:
        positions = np.random.default_rng(2).choice(len(train), CHOICE_ROWS, replace=False)
        train = train.take(np.sort(positions))
    return Rates(train, layout, by_time=by_time).choose(share * room)


class Rates:
    """The rates of crosses over training rows."""

    def __init__(self, train: Shard, layout: Layout, *, by_time: bool = False, seed: int = 1) -> None:
        """Divide the rows into folds, at random or by their times; nothing is counted yet."""
        self._train, self._layout = train, layout
        self._labels_N = np.asarray(train.labels, np.float64)
        self._masses_N = (
            np.ones(len(train)) if train.weights is None else np.asarray(train.weights, np.float64)
        )
        self._fold_N = (
            _stretches(train) if by_time else np.random.default_rng(seed).integers(0, FOLDS, len(train))
        )
        self.rate = _inner_rate(float(np.average(self._labels_N, weights=self._masses_N)))

    def keys(self, shard: Shard, cross: Cross) -> Ints:
        """Return one number per row that names the row's pair of values."""
        ((left, right),) = fields_of([cross], self._layout)
        keys = np.asarray(shard.ids)[:, left.start].astype(np.int64) - left.offset
        if right is not None:
            keys = keys * right.size + np.asarray(shard.ids)[:, right.start] - right.offset
        return keys

    def _count(self, cross: Cross) -> _Counts:
        keys_N = self.keys(self._train, cross)
        size = math.prod(field.size for field in fields_of([cross], self._layout)[0] if field is not None)
        if size <= 4 * len(keys_N):  # Count in place; sorting would take longer.
            present = np.bincount(keys_N, minlength=size) > 0
            keys, place_N = np.flatnonzero(present), (np.cumsum(present) - 1)[keys_N]
        else:
            keys, place_N = np.unique(keys_N, return_inverse=True)
        rows, clicks = (
            np.asarray(np.bincount(place_N, masses_N, len(keys)), np.float64)
            for masses_N in (self._masses_N, self._masses_N * self._labels_N)
        )
        return _Counts(keys, rows, clicks, place_N)

    def _of_other_folds(self, counts: _Counts) -> tuple[Floats, Floats]:
        """Return, for each training row, the clicks and rows of its pair in the other folds."""
        cell_N = counts.place_N * FOLDS + self._fold_N
        size = len(counts.keys) * FOLDS
        rows_N = counts.rows[counts.place_N] - np.bincount(cell_N, self._masses_N, size)[cell_N]
        own_clicks = np.bincount(cell_N, self._masses_N * self._labels_N, size)
        clicks_N = counts.clicks[counts.place_N] - own_clicks[cell_N]
        return np.clip(clicks_N, 0.0, rows_N), np.maximum(rows_N, 0.0)

    def _training_codes(self, counts: _Counts) -> Codes:
        others_N = np.maximum(counts.rows[counts.place_N] - self._masses_N, 0.0)
        return encode_rates(*self._of_other_folds(counts), self.rate, others_N)

    def training_codes(self, crosses: Sequence[Cross]) -> Codes:
        """Return what each training row may know of its rates, rows × 2 crosses.

        The number of rows says nothing about clicks; it is that of all other rows, as later rows see it.
        """
        return np.concatenate([self._training_codes(self._count(cross)) for cross in crosses], axis=1)

    def entries(self, crosses: Sequence[Cross]) -> Entries:
        """Return the counts of every pair in the training rows."""
        parts = []
        for index, cross in enumerate(crosses):
            counts = self._count(cross)
            ((_, second),) = fields_of([cross], self._layout)
            size = 1 if second is None else second.size
            numbers = [counts.keys // size, counts.keys % size, np.full(len(counts.keys), index)]
            parts.append((*numbers, counts.rows, counts.clicks))
        return Entries(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))

    def measure(self, crosses: Sequence[Cross], later: Shard) -> Measured:
        """Count every cross once, and return all that training and the model need of it."""
        training, held_out, entries = [], [], []
        for index, cross in enumerate(crosses):
            counts = self._count(cross)
            training.append(self._training_codes(counts))
            codes = encode_rates(counts.clicks, counts.rows, self.rate)
            keys = self.keys(later, cross)
            at = np.minimum(np.searchsorted(counts.keys, keys), len(counts.keys) - 1)
            with_unseen = np.append(codes, np.zeros((1, 2), np.uint8), axis=0)
            held_out.append(with_unseen[np.where(counts.keys[at] == keys, at, len(counts.keys))])
            ((_, second),) = fields_of([cross], self._layout)
            size = 1 if second is None else second.size
            entry = [counts.keys // size, counts.keys % size, np.full(len(counts.keys), index), *codes.T]
            entries.append(np.stack([counts.rows, *entry]).astype(np.int64))
        columns = np.concatenate(entries, axis=1)
        # Frequent entries come first: where a bucket is full, the rarest are left out.
        columns = columns[:, np.argsort(-columns[0], kind="stable")]
        table = pack_table(columns[1], columns[2], columns[3], columns[4:].T)
        return Measured(np.concatenate(training, axis=1), np.concatenate(held_out, axis=1), table)

    def _log_odds(self, cross: Cross) -> tuple[Floats, int]:
        """Return the log odds that each row may know, standardised, and the number of entries."""
        counts = self._count(cross)
        clicks_N, rows_N = self._of_other_folds(counts)
        odds_N = np.log((clicks_N + PRIOR * self.rate) / (rows_N - clicks_N + PRIOR * (1 - self.rate)))
        return (odds_N - odds_N.mean()) / max(odds_N.std(), 1e-9), len(counts.keys)

    def choose(self, room: float) -> list[Cross]:
        """Return all fields, and the pairs that explain most of what is left, one after the other.

        What a pair adds is how much more of the labels' variance a linear model of log odds explains with it. Pairs are
        looked for among the fields that explain most alone. They have `room` entries together, at most.
        """
        fields = [field.name for field in crossable(self._layout)]
        singles: list[Cross] = [(name,) for name in fields]
        if not singles:
            return []
        search = _Search(self._labels_N, [self._log_odds(cross)[0] for cross in singles])
        best = search.order(MAX_PAIRED_FIELDS)
        search.take_all()
        pairs: list[Cross] = [(fields[i], fields[j]) for i, j in combinations(sorted(best), 2)]
        columns, entries = [], []
        for pair in pairs:
            odds_N, size = self._log_odds(pair)
            columns.append(odds_N)
            entries.append(size)
        return singles + [pairs[at] for at in search.add(columns, entries, room)]


class _Search:
    """Greedy choice of the columns that explain most of the labels together, by least squares."""

    def __init__(self, labels_N: Floats, columns: list[Floats]) -> None:
        self._centred_N = labels_N - labels_N.mean()
        self._matrix_NC = np.stack(columns, axis=1)
        self._taken: list[int] = []
        self._measure()

    def _measure(self) -> None:
        rows = len(self._centred_N)
        self._gram_CC = self._matrix_NC.T @ self._matrix_NC / rows
        self._target_C = self._matrix_NC.T @ self._centred_N / rows

    def _explained(self, columns: list[int]) -> float:
        gram = self._gram_CC[np.ix_(columns, columns)] + 1e-3 * np.eye(len(columns))
        target = self._target_C[columns]
        return float(target @ np.linalg.solve(gram, target))

    def order(self, count: int) -> list[int]:
        """Return the columns that are taken first, `count` at most."""
        taken: list[int] = []
        left = list(range(self._matrix_NC.shape[1]))
        while left and len(taken) < count:
            taken.append(max(left, key=lambda column: self._explained([*taken, column])))
            left.remove(taken[-1])
        return taken

    def take_all(self) -> None:
        """Take all columns so far."""
        self._taken = list(range(self._matrix_NC.shape[1]))

    def add(self, columns: list[Floats], sizes: list[int], room: float) -> list[int]:
        """Return which of further columns are worth taking, the best first; their sizes sum to `room` at most."""
        if not columns:
            return []
        first = self._matrix_NC.shape[1]
        self._matrix_NC = np.column_stack([self._matrix_NC, *columns])
        self._measure()
        chosen: list[int] = []
        explained = self._explained(self._taken)
        while len(chosen) < MAX_PAIRS:
            fitting = [at for at in range(len(columns)) if at not in chosen and sizes[at] <= room]
            if not fitting:
                break
            gains = {at: self._explained([*self._taken, first + at]) - explained for at in fitting}
            best = max(gains, key=lambda at: gains[at])
            if gains[best] < MIN_GAIN * explained:
                break
            chosen.append(best)
            self._taken.append(first + best)
            explained += gains[best]
            room -= sizes[best]
        return chosen


def pack_table(left: Ints, right: Ints, cross: Ints, codes: Ints) -> npt.NDArray[np.int32]:
    """Return the table of these entries, buckets × slots; entries that find their bucket full are left out."""
    buckets = max(round(len(left) / (FILL * SLOTS)), 1)
    bucket, mark = place(left, right, cross, buckets)
    _, first = np.unique(bucket * (MARKS + 1) + mark, return_index=True)  # The first of two that look alike.
    order = np.sort(first)
    order = order[np.argsort(bucket[order], kind="stable")]
    sorted_buckets = bucket[order]
    slot = np.arange(len(order)) - np.searchsorted(sorted_buckets, np.arange(buckets))[sorted_buckets]
    order, slot = order[slot < SLOTS], slot[slot < SLOTS]
    table = np.zeros((buckets, SLOTS), np.int32)
    table[bucket[order], slot] = (mark[order] * LEVELS + codes[order, 0]) * LEVELS + codes[order, 1]
    return table
