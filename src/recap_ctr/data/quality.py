"""What a practitioner should know of her fields: how much is unknown, and how far held-out rows have drifted."""

from typing import Any

import numpy as np

from recap_ctr.data.encode import Ints
from recap_ctr.data.layout import FieldLayout
from recap_ctr.data.shards import PreparedData, Shard

ROWS = 1_000_000  # of each split, evenly spaced: enough for figures with two digits


def field_quality(data: PreparedData) -> list[dict[str, Any]]:
    """For each field and split: the share of values that training rows don't know, and the drift from them.

    Values are what a row holds: of a multi field with few pieces the padding does not count.
    Drift is the total variation distance between the values' shares in the split and in training rows: 0 where they
    are equal, 1 where nothing is in common. Many rare values raise it by chance; compare splits with each other.
    """
    splits = {name: getattr(data, name) for name in ("train", "valid", "test")}
    known = {name: _shares(data, shard) for name, shard in splits.items() if len(shard)}
    found = []
    for at, field in enumerate(data.layout.fields):
        oov = {name: float(shares[at][-1]) for name, shares in known.items()}
        drift = {
            name: float(np.abs(shares[at] - known["train"][at]).sum() / 2)
            for name, shares in known.items()
            if name != "train"
        }
        found.append({"name": field.name, "values": field.size - 2, "oov": oov, "drift": drift})
    return found


def _shares(data: PreparedData, shard: Shard) -> list[np.ndarray[Any, np.dtype[np.float64]]]:
    step = max(len(shard) // ROWS, 1)
    ids_RW = np.asarray(shard.ids[::step])
    return [_share(ids_RW[:, field.start : field.start + field.width], field) for field in data.layout.fields]


def _share(ids_RW: Ints, field: FieldLayout) -> np.ndarray[Any, np.dtype[np.float64]]:
    counts_V = np.bincount(ids_RW.ravel() - field.offset, minlength=field.size).astype(np.float64)
    counts_V[0] = 0.0  # padding is no value
    return np.asarray(counts_V / max(counts_V.sum(), 1.0))
