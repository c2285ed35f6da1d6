"""A vocabulary that grows: ids stay, values that have become frequent are added, forgotten ones leave their row.

A value is added once it has occurred `min_count` times in all rows seen so far, so the counts of values that are still
too rare are kept (`rare`). An added value takes the id of a
forgotten one, or else the next id after all others; in the table it starts from its field's OOV vector.

Shapes: V rows of the table before, G rows of the grown table.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from recap_ctr.data.count import field_directory
from recap_ctr.data.encode import Encoder, FittedField
from recap_ctr.data.fit import count_field
from recap_ctr.data.moments import seconds_or_never
from recap_ctr.data.profile import Profile
from recap_ctr.data.rare import NO_VALUES, Rare, most_frequent
from recap_ctr.data.split import SplitCodes
from recap_ctr.data.spool import SpooledRows
from recap_ctr.errors import InputError
from recap_ctr.schema import TimeUnit

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Base:
    """What rows are encoded with if not with a vocabulary of their own: that of an earlier model, which grows."""

    name: str
    """The checksum of that model's weights."""
    encoder: Encoder
    rare: Rare = field(default_factory=dict)
    last_V: npt.NDArray[np.float64] | None = None
    """When each row of the table was last seen, in seconds since 1970."""
    forget_after: float | None = None
    """Seconds after which a value that was not seen again is forgotten."""
    profile: Profile | None = None
    """What was usual in the rows before; that of these rows goes on from it."""

    def grown(
        self, rows: SpooledRows, unit: TimeUnit | None, splits: SplitCodes, directory: Path
    ) -> tuple[Encoder, Rare]:
        """Return the encoder with the values that have become frequent, and the counts of all others.

        `unit` says how the time column of the rows writes moments, `splits` the split of each row. What is needed to
        encode the rows is left below `directory`, for each field as by `fit_field`.
        """
        limit = -np.inf
        if self.forget_after is not None and unit is not None:
            latest = max(float(block.max()) for block in rows.columns["time"].blocks())
            limit = float(seconds_or_never(np.array([latest]), unit)[0]) - self.forget_after
        fields, rare = [], {}
        for number, fitted in enumerate(self.encoder.fields):
            if not fitted.grows:
                fields.append(fitted)
                continue
            values = count_field(rows, fitted.field, splits, field_directory(directory, number))
            ranges = (
                part.filter(pl.col("total") > 0).select("value", count="total") for part in values.ranges()
            )
            seen, lacking = pl.concat(ranges), self.rare.get(number, NO_VALUES)
            is_old = np.zeros(len(fitted.values), np.bool_)
            if self.last_V is not None:
                ids = fitted.ids(np.arange(len(fitted.values), dtype=np.int32))
                is_old = self.last_V[ids + self.encoder.layout.fields[number].offset] < limit
                is_old &= ~fitted.values.is_in(seen["value"].implode()).fill_null(True).to_numpy()
            grown, rare[number] = grow_field(fitted, seen, lacking, np.flatnonzero(is_old))
            fields.append(grown)
        return Encoder(self.encoder.schema, fields), rare


def grow_field(
    fitted: FittedField, seen: pl.DataFrame, rare: pl.DataFrame, forgotten: npt.NDArray[np.int64]
) -> tuple[FittedField, pl.DataFrame]:
    """Return a field with the values that are frequent enough by now, and the counts of those that are not.

    `seen` are the values of the new rows with their counts, `rare` those that the vocabulary lacked before,
    `forgotten` the places of the values to forget.

    >>> from recap_ctr.schema import Field
    >>> ad = FittedField(Field(name="ad", kind="categorical", min_count=2), pl.Series(["a"]), np.array([5]))
    >>> new = pl.DataFrame({"value": ["a", "b", "c"], "count": [1, 1, 1]})
    >>> grown, rare = grow_field(ad, new, pl.DataFrame({"value": ["c"], "count": [1]}), np.zeros(0, np.int64))
    >>> grown.values.to_list(), grown.counts.tolist(), grown.oov, rare.rows()
    (['a', 'c'], [6, 2], 2, [('b', 1)])
    """
    values, counts = fitted.values.to_list(), fitted.counts.tolist()
    for at in forgotten.tolist():
        values[at], counts[at] = None, 0
    living = FittedField(
        fitted.field,
        pl.Series("value", values, dtype=pl.String),
        np.array(counts, np.int64),
        num_added=fitted.num_added,
    )
    codes = living.codes(seen["value"])
    increments = seen["count"].to_numpy()
    grown_counts = living.counts.copy()
    grown_counts[codes[codes >= 0]] += increments[codes >= 0]
    others = pl.concat([rare, seen.filter(pl.Series(codes < 0)).cast({"count": pl.Int64})])
    others = (
        others.group_by("value").agg(pl.col("count").sum()).sort(["count", "value"], descending=[True, False])
    )
    is_frequent = pl.col("count") >= fitted.field.min_count
    added = others.filter(is_frequent)
    counts = grown_counts.tolist()
    gaps = [at for at, value in enumerate(values) if value is None]
    for value, count in added.rows():
        if gaps:
            at = gaps.pop(0)
            values[at], counts[at] = value, count
        else:
            values.append(value)
            counts.append(count)
    grown = FittedField(
        fitted.field,
        pl.Series("value", values, dtype=pl.String),
        np.array(counts, np.int64),
        num_added=fitted.num_added + len(values) - len(fitted.values),
    )
    return grown, most_frequent(others.filter(~is_frequent))


@dataclass(frozen=True, eq=False)
class RowMap:
    """Where the rows of a table are after its vocabularies have grown."""

    source_G: npt.NDArray[np.int64]
    """The row before that each row starts from: its own, or its field's OOV for an added or a forgotten value."""
    fresh_G: npt.NDArray[np.bool_]
    """Which rows start from OOV."""
    target_V: npt.NDArray[np.int32]
    """The row that each row before becomes; OOV's for a forgotten value."""

    def grow(self, table_V: Array) -> Array:
        """Return the grown table of weights; fresh rows are copies of OOV's."""
        return np.asarray(table_V[self.source_G])

    def grow_counters(self, table_V: Array, fill: float = 0) -> Array:
        """Return a grown table of moments or counts, in which fresh rows start at `fill`."""
        grown = self.grow(table_V)
        grown[self.fresh_G] = fill
        return grown


def row_map(old: Encoder, new: Encoder) -> RowMap:
    """Return where the rows of the old encoder's table are in the new one's, which must have grown out of it."""
    sources, fresh = [], []
    target_V = np.zeros(old.layout.num_rows, np.int32)
    places = zip(old.fields, old.layout.fields, new.fields, new.layout.fields, strict=True)
    for before, place, after, grown_place in places:
        if before.field != after.field or before.oov != after.oov or before.size > after.size:
            raise InputError(
                f"the vocabulary of field {before.field.name!r} is not one that grew out of the other"
            )
        is_fresh = np.zeros(after.size, np.bool_)
        is_fresh[before.size :] = True
        if before.grows:
            common = after.values[: len(before.values)]
            is_gone = ~(before.values == common).fill_null(False).to_numpy()
            ids = before.ids(np.arange(len(before.values), dtype=np.int32))
            is_fresh[ids[is_gone]] = True
        local = np.arange(after.size)
        sources.append(np.where(is_fresh, before.oov, np.minimum(local, before.size - 1)) + place.offset)
        fresh.append(is_fresh)
        kept = np.where(is_fresh[: before.size], after.oov, local[: before.size])
        target_V[place.offset : place.offset + before.size] = kept + grown_place.offset
    return RowMap(np.concatenate(sources), np.concatenate(fresh), target_V)


def changes(old: Encoder, new: Encoder) -> tuple[dict[str, int], dict[str, int]]:
    """Return how many values each field has gained, and how many it has forgotten; fields without any are left out."""
    added, forgotten = {}, {}
    for before, after in zip(old.fields, new.fields, strict=True):
        if before.grows:
            first = before.values.drop_nulls()
            common = int(first.is_in(after.values.drop_nulls().implode()).sum())
            added[after.field.name] = after.values.count() - common
            forgotten[after.field.name] = first.len() - common
    return (
        {name: count for name, count in added.items() if count},
        {name: count for name, count in forgotten.items() if count},
    )
