"""Make the profile of the training rows, from what preparation has spooled and encoded."""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import polars as pl

from recap_ctr.data.bins import NUM_BINS, Bins, Counts, field_entries
from recap_ctr.data.encode import Encoder, Ints
from recap_ctr.data.grow import Base, row_map
from recap_ctr.data.moments import DAY, HOUR, Seconds, seconds_of
from recap_ctr.data.profile import FieldProfile, Profile, Repeats
from recap_ctr.data.rolling import go_on
from recap_ctr.data.shards import Shard
from recap_ctr.data.split import SplitCodes
from recap_ctr.data.spool import SPOOL_ROWS, Part, PartTables, SpooledRows, training_blocks
from recap_ctr.schema import TimeUnit

MAX_COUNTS = 100_000
MAX_PERIODS, MIN_PERIODS = 96, 8
PERIOD_ROWS = 200  # Where rows have no time, a period has at least as many.
PERIOD_HOURS = (1, 2, 3, 4, 6, 8, 12)
REPEAT_ROWS = tuple(1_000 * 4**power for power in range(6))  # up to about a million
REPEAT_SPANS = 16
EDGE_ROWS = SAMPLE_ROWS = 1 << 18
FREQUENT_ROWS = 10  # of the later half


def build_profile(
    rows: SpooledRows,
    encoder: Encoder,
    splits: SplitCodes,
    train: Shard,
    unit: TimeUnit | None,
    base: Base | None = None,
) -> Profile:
    """Return the profile of the training rows: `train` are those rows, encoded; times are written in `unit`.

    If `base` has a profile, this one goes on from it: in its bins and periods, of which the oldest leave.
    """
    earlier = None if base is None else base.profile
    times = None
    if "time" in rows.columns:
        times = np.concatenate(list(training_blocks(rows.columns["time"], splits)))
    num_fields = len(encoder.fields)
    most = max(min(MAX_PERIODS, MAX_COUNTS // (num_fields * (NUM_BINS + 2))), MIN_PERIODS)
    seconds = None if times is None or unit is None else seconds_of(times, unit)
    periods, starts, length = _periods(times, seconds, len(train), most, earlier)
    num_periods = int(periods.max()) + 1
    if earlier is None:
        edges = [
            _edges(rows, fitted.field.name, splits) if fitted.field.is_value else []
            for fitted in encoder.fields
        ]
    else:
        edges = [field.edges for field in earlier.fields]
    bins = Bins(encoder, edges)
    counts_PK = np.zeros((num_periods, bins.size), np.int64)
    for at, ids_BW in _blocks(train):
        counts_PK += bins.count_by_period(ids_BW, np.asarray(train.values[at]), periods[at], num_periods)
    missing_FP = [_missing(rows, fitted.field.name, splits, periods) for fitted in encoder.fields]
    if base is None or earlier is None:
        unseen_PF, exchanged = _unseen(encoder, train, periods, num_periods)
    else:
        exchanged = [field.exchanged for field in earlier.fields]
        unseen_PF = _added(row_map(base.encoder, encoder).fresh_G, encoder, train, periods, num_periods)
    top_FP = _top_shares(encoder, train, periods, num_periods)
    fields, unseen_FP = [], []
    for i, fitted in enumerate(encoder.fields):
        field_bins = counts_PK[:, bins.places[i]].copy()
        if fitted.field.kind != "multi":  # A multi field without values has no id but padding.
            field_bins[:, -1] -= missing_FP[i]
        unseen_FP.append(unseen_PF[:, i] + field_bins[:, -1])
        fields.append(
            FieldProfile(
                name=fitted.field.name,
                edges=list(edges[i]),
                missing=missing_FP[i].tolist(),
                bins=field_bins.tolist(),
                top=top_FP[i].tolist(),
                unseen=unseen_FP[-1][num_periods // 2 :].tolist(),
                exchanged=exchanged[i],
            )
        )
    profile = Profile(
        starts=starts,
        seconds=length,
        rows=np.bincount(periods, minlength=num_periods).tolist(),
        clicks=_sums(periods, np.asarray(train.labels), num_periods).tolist(),
        fields=fields,
        repeats=_repeats(rows, splits, times),
    )
    if base is None or earlier is None:
        return profile
    return go_on(earlier, base.encoder, profile, unseen_FP, encoder, most)


def _periods(
    times: npt.NDArray[np.float64] | None,
    seconds: Seconds | None,
    num_rows: int,
    most: int,
    earlier: Profile | None,
) -> tuple[Ints, list[int] | None, int | None]:
    """Return the period of each row, and where they are stretches of time, their starts and their length.

    They are as long as those of an earlier profile, or have about as many rows.
    """
    if seconds is not None and (length := _period_length(seconds, most, earlier)) is not None:
        stretches, places = np.unique(seconds // length, return_inverse=True)
        if earlier is not None or len(stretches) >= MIN_PERIODS:
            return places.astype(np.int32), (stretches * length).tolist(), length
    num_periods = int(np.clip(num_rows // PERIOD_ROWS, min(MIN_PERIODS, num_rows), most))
    if earlier is not None:
        usual = sum(earlier.rows) / len(earlier.rows)
        num_periods = int(np.clip(round(num_rows / usual), 1, most))
    in_order: Ints = (np.arange(num_rows) * num_periods // num_rows).astype(np.int32)
    if times is None:
        return in_order, None, None
    order = np.argsort(times, kind="stable")
    periods: Ints = np.empty(num_rows, np.int32)
    periods[order] = in_order
    if seconds is None:
        return periods, None, None
    firsts = np.flatnonzero(np.diff(in_order, prepend=-1))
    return periods, seconds[order[firsts]].tolist(), None


def _period_length(seconds: Seconds, most: int, earlier: Profile | None) -> int | None:
    """Return the seconds of a period of the earlier profile, or of the shortest usual stretch of which `most` cover all
    rows.
    """
    if earlier is not None:
        return earlier.seconds
    first, last = int(seconds.min()), int(seconds.max())
    whole_days = -(-(last - first + 1) // (DAY * (most - 1)))
    lengths = (*(hours * HOUR for hours in PERIOD_HOURS), whole_days * DAY)
    return next((length for length in lengths if last // length - first // length < most), None)


def _edges(rows: SpooledRows, name: str, splits: SplitCodes) -> list[float]:
    """Return the numbers that cut the training rows into bins of equal shares."""
    step = max(rows.num_rows // EDGE_ROWS, 1)
    sample = [block[::step] for block in training_blocks(rows.columns[f"field:{name}"], splits)]
    numbers = np.concatenate([block[~np.isnan(block)] for block in sample])
    if not len(numbers):
        return []
    shares = np.arange(1, NUM_BINS) / NUM_BINS
    return [float(edge) for edge in np.unique(np.quantile(numbers, shares, method="inverted_cdf"))]


def _blocks(train: Shard) -> Iterator[tuple[slice, Ints]]:
    """Yield the training rows in blocks, each with its place."""
    for start in range(0, len(train), SPOOL_ROWS):
        at = slice(start, start + SPOOL_ROWS)
        yield at, np.asarray(train.ids[at])


def _sums(periods: Ints, amounts: npt.NDArray[np.generic], num_periods: int) -> Counts:
    """Return the sum of whole amounts in each period."""
    return np.bincount(periods, amounts, minlength=num_periods).round().astype(np.int64)


def _missing(rows: SpooledRows, name: str, splits: SplitCodes, periods: Ints) -> Counts:
    """Return the training rows of each period that have no value of a field."""
    num_periods = int(periods.max()) + 1
    total, start = np.zeros(num_periods, np.int64), 0
    for block in training_blocks(rows.columns[f"field:{name}"], splits):
        is_missing = np.isnan(block) if block.dtype == np.float64 else block < 0
        per_row = np.asarray(is_missing if block.ndim == 1 else is_missing.all(axis=1))
        total += _sums(periods[start : start + len(block)], per_row, num_periods)
        start += len(block)
    return total


def _unseen(
    encoder: Encoder, train: Shard, periods: Ints, num_periods: int
) -> tuple[Counts, list[float | None]]:
    """Return for the periods of the later half how many kept values the earlier half does not have, by field.

    For each field with a vocabulary, also return the share that such values are of those that the later half has often.
    """
    fields, half = encoder.layout.fields, num_periods // 2
    seen = np.zeros(encoder.layout.num_rows, np.bool_)
    # Fields without a vocabulary have no kept values. They may have billions of buckets, which are left untouched.
    has_vocabulary = [not (fitted.field.is_value or fitted.field.hash_buckets) for fitted in encoder.fields]
    for place, fitted in zip(fields, encoder.fields, strict=True):
        # Padding is no value, and OOV is counted elsewhere.
        seen[[place.offset, place.offset + fitted.oov]] = True
    for at, ids_BW in _blocks(train):
        seen[ids_BW[periods[at] < half]] = True
    unseen_PF = np.zeros((num_periods, len(fields)), np.int64)
    counts_V = np.zeros(encoder.layout.num_rows, np.int32)
    has_vocabulary_W = np.repeat(has_vocabulary, [place.width for place in fields])
    for at, ids_BW in _blocks(train):
        is_late = periods[at] >= half
        np.add.at(counts_V, ids_BW[is_late][:, has_vocabulary_W], 1)
        is_new_BW, late_periods = ~seen[ids_BW[is_late]], periods[at][is_late]
        for i, place in enumerate(fields):
            if not has_vocabulary[i]:
                continue
            new_B = is_new_BW[:, place.start : place.start + place.width].sum(axis=1)
            unseen_PF[:, i] += _sums(late_periods, new_B, num_periods)
    return unseen_PF, [
        _exchanged(place.offset + fitted.ids(np.arange(len(fitted.values), dtype=np.int32)), counts_V, seen)
        if kept
        else None
        for place, fitted, kept in zip(fields, encoder.fields, has_vocabulary, strict=True)
    ]


def _exchanged(ids: Ints, counts_V: Ints, seen_V: npt.NDArray[np.bool_]) -> float:
    """Return the share of new values, and a standard error more, among the frequent ones of `ids`.

    A value that is old would be among so many rows of the earlier half, too.
    """
    frequent = ids[counts_V[ids] >= FREQUENT_ROWS]
    num_new = int((~seen_V[frequent]).sum())
    return min((num_new + math.sqrt(num_new)) / max(len(frequent), 1), 1.0)


def _added(
    fresh: npt.NDArray[np.bool_], encoder: Encoder, train: Shard, periods: Ints, num_periods: int
) -> Counts:
    """Return how many values of each period are those of `fresh` rows of the table, by field."""
    added_PF = np.zeros((num_periods, len(encoder.fields)), np.int64)
    for at, ids_BW in _blocks(train):
        is_fresh_BW = fresh[ids_BW]
        for i, place in enumerate(encoder.layout.fields):
            fresh_B = is_fresh_BW[:, place.start : place.start + place.width].sum(axis=1)
            added_PF[:, i] += _sums(periods[at], fresh_B, num_periods)
    return added_PF


def _top_shares(
    encoder: Encoder, train: Shard, periods: Ints, num_periods: int
) -> list[npt.NDArray[np.float64]]:
    """Return for each field the largest share of one value in each period, from rows at even distances."""
    step = -(-len(train) // SAMPLE_ROWS)
    ids, values, sample = np.asarray(train.ids[::step]), np.asarray(train.values[::step]), periods[::step]
    rows = np.maximum(np.bincount(sample, minlength=num_periods), 1)
    shares = []
    for place, fitted in zip(encoder.layout.fields, encoder.fields, strict=True):
        entries = field_entries(place, fitted, ids, values)
        top, num_values = np.zeros(num_periods, np.int64), max(len(entries.values), 1)
        keys = sample[entries.rows].astype(np.int64) * num_values + entries.codes
        pairs, counts = np.unique(keys, return_counts=True)
        np.maximum.at(top, pairs // num_values, counts)
        shares.append(top / rows)
    return shares


def _repeats(rows: SpooledRows, splits: SplitCodes, times: npt.NDArray[np.float64] | None) -> list[Repeats]:
    """Return which share of the newest training rows repeats an earlier one, for several numbers of neighbours."""
    positions = np.flatnonzero(splits == 0)
    if times is not None:
        positions = positions[np.argsort(times, kind="stable")]
    positions = positions[-REPEAT_ROWS[-1] :]
    names = [name for name in rows.columns if name.startswith("field:")]
    hashes = _hash_spooled(rows, names, positions)
    timed = None if times is None else _hash_spooled(rows, [*names, "time"], positions)
    sizes = [size for size in REPEAT_ROWS if size < len(positions)] + [len(positions)]
    return [
        Repeats(
            rows=size,
            share=_largest_share(hashes, size),
            timed_share=None if timed is None else _largest_share(timed, size),
        )
        for size in sizes
    ]


def _hash_spooled(
    rows: SpooledRows, names: Sequence[str], positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint64]:
    """Return a hash of each row at `positions`, over the spooled columns `names`; of values, of their hashes."""
    hashes = np.zeros(len(positions), np.uint64)
    for name in names:
        column = rows.columns[name]
        tables = PartTables(_value_hashes)
        for number, part, chosen, entries in column.take(positions):
            entries = tables.table(number, part)[entries] if column.has_values else entries
            bits = [np.ascontiguousarray(cells).view(f"i{cells.itemsize}") for cells in entries.T]
            frame = pl.DataFrame(
                [pl.Series(str(i), cells) for i, cells in enumerate([hashes[chosen], *bits])]
            )
            hashes[chosen] = frame.hash_rows(0).to_numpy()
    return hashes


def _value_hashes(_: int, part: Part) -> npt.NDArray[np.uint64]:
    """Return the hash of each value of a part: the same value has other codes in other parts."""
    table = pl.read_ipc(part.dictionary, columns=["hash", "code"])
    hashes = np.empty(part.num_values + 2, np.uint64)
    hashes[table["code"].to_numpy()] = table["hash"].to_numpy()
    hashes[-2:] = 0, 1  # Padding and missing values.
    return hashes


def _largest_share(hashes: npt.NDArray[np.uint64], size: int) -> float:
    """Return the largest share of repeated rows in spans of `size` rows, of which at most `REPEAT_SPANS` are looked at.

    >>> _largest_share(np.array([1, 2, 3, 3, 4, 5], np.uint64), 2)
    0.5
    """
    cuts = range(len(hashes), -1, -size)
    spans = [hashes[start:stop] for stop, start in pairwise(cuts)][:REPEAT_SPANS]
    return max(repeated_share(span) for span in spans)


def repeated_share(hashes: npt.NDArray[np.uint64]) -> float:
    """Return the share of rows whose hash an earlier row has."""
    return 1.0 - len(np.unique(hashes)) / len(hashes)
