"""Rows in memory with all that a trainer reads: each row's first id is its number, so that it can be followed."""

from dataclasses import dataclass

import numpy as np

from recap_ctr.data.layout import Layout
from recap_ctr.data.shards import Shard


@dataclass(frozen=True)
class PlainRows:
    """Training and validation rows with their layout."""

    layout: Layout
    train: Shard
    valid: Shard


def plain_rows(rows: int, values: int = 50, *, num_fields: int = 3, seed: int = 1) -> PlainRows:
    """Draw rows whose first field is the row's number, and whose others have `values` values."""
    rng = np.random.default_rng(seed)
    layout = Layout.of_sizes([rows, *[values] * (num_fields - 1)])
    offsets = np.array([field.offset for field in layout.fields], np.int32)
    drawn = rng.integers(0, values, (rows, num_fields - 1))
    ids = np.concatenate([np.arange(rows)[:, None], drawn], axis=1).astype(np.int32) + offsets
    shard = Shard(
        ids=ids,
        values=np.empty((rows, 0), np.float32),
        labels=(rng.random(rows) < 0.3).astype(np.uint8),
        rows=np.arange(rows),
        weights=None,
        groups=None,
        times=None,
    )
    return PlainRows(layout, shard, shard.take(np.arange(min(rows, 200))))
