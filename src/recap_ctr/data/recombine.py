"""Recombined rows: sides of different training rows put together, for teachers to score and students to learn from.

A side is fields that say something about the same thing: a user's gender and city go with the user, a film's genres
with the film, and an independent field is a side of its own. So a recombined row is one that might have come, but its
label is not known.

Shape suffixes: N rows, F fields, P pairs of rows.
"""

import numpy as np
import numpy.typing as npt

from recap_ctr.data.layout import FieldLayout, Layout
from recap_ctr.data.shards import Shard

Codes = npt.NDArray[np.uint64]
Bools = npt.NDArray[np.bool_]
Sides = tuple[tuple[str, ...], ...]
"""The names of all fields, side by side."""

MAX_CELLS = 250_000_000
"""Ids and numbers of training and recombined rows together: a gigabyte that every student's process holds in memory."""
SAMPLE = 200_000
MIN_PAIRS = 50
"""With fewer pairs of rows that have the same value of a field, nothing is known of what goes with that field."""
LINKED = 0.5


def num_cells(rows: Shard) -> int:
    """Return how many ids and numbers some rows have."""
    return rows.ids.size + rows.values.size


def sides_of(train: Shard, layout: Layout) -> Sides:
    """Return which fields belong together, as a sample of the training rows shows it."""
    links_FF = link_strengths(train, layout)
    linked_FF = np.maximum(links_FF, links_FF.T) > LINKED
    np.fill_diagonal(linked_FF, True)
    side_F = np.arange(layout.num_fields)
    for _ in range(layout.num_fields):  # Each field joins the first side that any of its links is in.
        side_F = np.where(linked_FF, side_F, layout.num_fields).min(axis=1)
    names = np.array([field.name for field in layout.fields])
    return tuple(tuple(names[side_F == side].tolist()) for side in np.unique(side_F))


def link_strengths(train: Shard, layout: Layout) -> npt.NDArray[np.float64]:
    """Return how much a value of each field (rows of the matrix) decides that of each other field (columns).

    It is how often two random rows with the same value of A have the same value of B, beyond how often any two rows do:
    0 if A says nothing about B, 1 if it decides B. Missing and rare values share an id and decide nothing.
    """
    # In a random order: neighbours in a log may be of one session, which says nothing about a value's other rows.
    drawn = np.random.default_rng(0).permutation(len(train))[:SAMPLE]
    sample = train.take(drawn)
    codes_NF = np.stack([_codes(sample, field) for field in layout.fields], axis=1)
    links_FF = np.zeros((layout.num_fields, layout.num_fields))
    by_chance_F = (codes_NF[1:] == codes_NF[:-1]).mean(axis=0)
    for number, field in enumerate(layout.fields):
        usable = np.flatnonzero(_is_known(sample, field))
        order = usable[np.argsort(codes_NF[usable, number], kind="stable")]
        same_PF = codes_NF[order[1:]] == codes_NF[order[:-1]]
        same_PF = same_PF[same_PF[:, number]]
        if len(same_PF) >= MIN_PAIRS:
            beyond_F = same_PF.mean(axis=0) - by_chance_F
            links_FF[number] = beyond_F / np.maximum(1 - by_chance_F, 1e-12)
    return links_FF


def recombined(train: Shard, layout: Layout, sides: Sides, ratio: int, seed: int) -> Shard:
    """Return `ratio` copies of the rows in which each side but the first comes from another, random row.

    Every value is there as often as in the training rows, `ratio` times over. A row's weight is that of the row of its
    first side. There are no labels: those of the shard are zeros.
    """
    num_rows = len(train)
    ids = np.empty((ratio * num_rows, layout.num_columns), train.ids.dtype)
    values = np.empty((ratio * num_rows, layout.num_values), train.values.dtype)
    for copy in range(ratio):
        rng, place = np.random.default_rng([seed, copy]), slice(copy * num_rows, (copy + 1) * num_rows)
        for number, side in enumerate(sides):
            origin = slice(None) if number == 0 else rng.permutation(num_rows)
            fields = [field for field in layout.fields if field.name in side]
            for field in fields:
                columns = slice(field.start, field.start + field.width)
                ids[place, columns] = train.ids[:, columns][origin]
                if field.value_column is not None:
                    values[place, field.value_column] = train.values[:, field.value_column][origin]
    return Shard(
        ids=ids,
        values=values,
        labels=np.zeros(len(ids), np.uint8),
        rows=np.arange(len(ids)),
        weights=None if train.weights is None else np.tile(train.weights, ratio),
        groups=None,
        times=None,
    )


def _codes(rows: Shard, field: FieldLayout) -> Codes:
    """Return a number for each row, the same for rows with the same value: a multi field's values together are one."""
    columns = [rows.ids[:, field.start + column].astype(np.uint64) for column in range(field.width)]
    if field.value_column is not None:
        columns.append(rows.values[:, field.value_column].view(np.uint32).astype(np.uint64))
    factors = np.random.default_rng(len(columns)).integers(0, 2**64, len(columns), np.uint64) | np.uint64(1)
    codes: Codes = np.stack(columns, axis=1) @ factors
    return codes


def _is_known(rows: Shard, field: FieldLayout) -> Bools:
    """Return which rows have a value with a vector of its own."""
    ids = rows.ids[:, field.start : field.start + field.width] - field.offset
    is_known: Bools = ((ids != 0) & (ids != field.oov)).any(axis=1)
    return is_known
