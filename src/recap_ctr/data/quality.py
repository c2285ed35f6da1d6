"""The quality of each field: how many values are unknown, and how far held-out rows have drifted."""

from typing import Any

import numpy as np

from recap_ctr.config import Record
from recap_ctr.data.encode import Ints
from recap_ctr.data.layout import FieldLayout
from recap_ctr.data.shards import PreparedData, Shard

MAX_ROWS = 1_000_000  # evenly spaced rows of each split: enough for figures with two digits


class FieldQuality(Record):
    """Unknown values and drift of one field, by split."""

    name: str
    values: int
    """Values that the vocabulary keeps."""
    oov: dict[str, float]
    """Share of a split's values that are too rare in, or absent from, the training rows."""
    drift: dict[str, float]
    """Total variation distance between the values' shares in a split and in the training rows."""


def field_quality(data: PreparedData) -> list[FieldQuality]:
    """Return for each field and split the share of OOV values, and the drift from the training rows.

    The padding of a multi field does not count as values. Drift is the total variation distance between the values'
    shares in the split and in the training rows: 0 if they are equal, 1 if they have nothing in common. Many rare
    values raise it by chance, so compare splits with each other.
    """
    splits = {name: getattr(data, name) for name in ("train", "valid", "test")}
    shares_by_split = {name: _shares(data, shard) for name, shard in splits.items() if len(shard)}
    train_shares = shares_by_split["train"]
    qualities = []
    for i, field in enumerate(data.layout.fields):
        oov = {name: float(shares[i][-1]) for name, shares in shares_by_split.items()}
        drift = {
            name: float(np.abs(shares[i] - train_shares[i]).sum() / 2)
            for name, shares in shares_by_split.items()
            if name != "train"
        }
        qualities.append(FieldQuality(name=field.name, values=field.size - 2, oov=oov, drift=drift))
    return qualities


def _shares(data: PreparedData, shard: Shard) -> list[np.ndarray[Any, np.dtype[np.float64]]]:
    """Return for each field the shares of its ids among the values of a shard."""
    step = max(len(shard) // MAX_ROWS, 1)
    ids_RW = np.asarray(shard.ids[::step])
    return [_share(ids_RW[:, field.start : field.start + field.width], field) for field in data.layout.fields]


def _share(ids_RW: Ints, field: FieldLayout) -> np.ndarray[Any, np.dtype[np.float64]]:
    counts_V = np.bincount(ids_RW.ravel() - field.offset, minlength=field.size).astype(np.float64)
    counts_V[0] = 0.0  # padding is not a value
    return np.asarray(counts_V / max(counts_V.sum(), 1.0))
