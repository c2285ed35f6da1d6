"""The quality of prepared data: values without a vector of their own, drift of held-out rows, and repeated rows."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from recap_ctr.config import Record
from recap_ctr.data.encode import Ints
from recap_ctr.data.layout import FieldLayout
from recap_ctr.data.shards import SPLITS, PreparedData, Shard

MAX_ROWS = 1_000_000  # evenly spaced rows of each split: enough for figures with two digits
MAX_COMPARED_ROWS = 10_000_000  # of training, with 8 bytes each, to look for repeated rows
HASHED_ROWS = 1 << 17


class FieldQuality(Record):
    """Unknown values and drift of one field, by split."""

    name: str
    values: int
    """Values that the vocabulary keeps."""
    oov: dict[str, float]
    """Share of a split's values that have no vector of their own: missing, rare or unseen."""
    missing: dict[str, float] | None = None
    """Share of missing values; None, like the next ones, for data prepared before they were counted apart."""
    rare: dict[str, float] | None = None
    """Share of values that are in the training rows, but fewer times than min_count."""
    unseen: dict[str, float] | None = None
    """Share of values that are not in the training rows."""
    drift: dict[str, float]
    """Total variation distance between the values' shares in a split and in the training rows."""


def field_quality(data: PreparedData) -> list[FieldQuality]:
    """Return for each field and split the shares of missing, rare and unseen values, and the drift from training.

    The padding of a multi field does not count as values. Drift is the total variation distance between the values'
    shares in the split and in the training rows: 0 if they are equal, 1 if they have nothing in common. Many rare
    values raise it by chance, so compare splits with each other.
    """
    splits = {name: getattr(data, name) for name in SPLITS}
    shares_by_split = {name: _shares(data, shard) for name, shard in splits.items() if len(shard)}
    train_shares = shares_by_split["train"]
    qualities = []
    for i, field in enumerate(data.layout.fields):
        oov = {name: float(shares[i][field.oov]) for name, shares in shares_by_split.items()}
        drift = {
            name: float(np.abs(shares[i] - train_shares[i]).sum() / 2)
            for name, shares in shares_by_split.items()
            if name != "train"
        }
        parts = _oov_parts(data.manifest["splits"], field.name, oov)
        qualities.append(FieldQuality(name=field.name, values=field.size - 2, oov=oov, **parts, drift=drift))
    return qualities


def _oov_parts(
    entries: Mapping[str, Any], field: str, oov: Mapping[str, float]
) -> dict[str, dict[str, float]]:
    """Divide the shares `oov` of a field into missing, rare and unseen, as the manifest's `entries` count them."""
    parts: dict[str, dict[str, float]] = {"missing": {}, "rare": {}, "unseen": {}}
    for split, share in oov.items():
        entry = entries[split]
        if "rare" not in entry:
            return {}
        total, missing, rare = (entry[kind][field] for kind in ("oov", "missing", "rare"))
        for kind, count in (("missing", missing), ("rare", rare), ("unseen", total - missing - rare)):
            parts[kind][split] = share * count / max(total, 1)
    return parts


def _shares(data: PreparedData, shard: Shard) -> list[np.ndarray[Any, np.dtype[np.float64]]]:
    """Return for each field the shares of its ids among the values of a shard."""
    step = max(len(shard) // MAX_ROWS, 1)
    ids_RW = np.asarray(shard.ids[::step])
    return [_share(ids_RW[:, field.start : field.start + field.width], field) for field in data.layout.fields]


def _share(ids_RW: Ints, field: FieldLayout) -> np.ndarray[Any, np.dtype[np.float64]]:
    counts_V = np.bincount(ids_RW.ravel() - field.offset, minlength=field.size).astype(np.float64)
    counts_V[0] = 0.0  # padding is not a value
    return np.asarray(counts_V / max(counts_V.sum(), 1.0))


def repeated_rows(data: PreparedData) -> dict[str, int] | None:
    """Count the held-out rows, by split, whose ids, numbers and label are those of a training row.

    Rows are compared by 64-bit hashes. None is returned for more than `MAX_COMPARED_ROWS` training rows.
    """
    if len(data.train) > MAX_COMPARED_ROWS:
        return None
    train = _hashes(data.train)
    held_out = {name: getattr(data, name) for name in SPLITS[1:]}
    return {name: int(np.isin(_hashes(shard), train).sum()) for name, shard in held_out.items() if len(shard)}


def _hashes(shard: Shard) -> npt.NDArray[np.uint64]:
    """Return a hash of each row."""
    parts = [np.empty(0, np.uint64)]
    for start in range(0, len(shard), HASHED_ROWS):
        at = slice(start, start + HASHED_ROWS)
        arrays = (shard.ids[at], shard.values[at], shard.labels[at][:, None])
        columns = [np.ascontiguousarray(column) for array in arrays for column in np.asarray(array).T]
        frame = pl.DataFrame({str(i): column for i, column in enumerate(columns)})
        parts.append(frame.hash_rows(0).to_numpy())
    return np.concatenate(parts)


def describe_repeated(repeated: Mapping[str, int], rows: Mapping[str, int]) -> str:
    """Return in a sentence how many of the `rows` of each split repeat a training row; "" if none does.

    >>> describe_repeated({"test": 3}, {"test": 60})
    '3 of 60 test rows (5.0%) have the values and the label of a training row: copies flatter a model, but with few \
fields such rows also come by chance.'
    """
    shares = [
        f"{count:,} of {rows[split]:,} {split} rows ({count / rows[split]:.1%})"
        for split, count in repeated.items()
        if count
    ]
    if not shares:
        return ""
    return (
        f"{' and '.join(shares)} have the values and the label of a training row: copies flatter a model, but with"
        " few fields such rows also come by chance."
    )


def quality_notes(data: PreparedData) -> list[str]:
    """Return what a user should know of prepared data at once: how rows were split, dropped rows, repeated rows."""
    notes = [data.split_note] if data.split_note else []
    if num_unlabelled := data.manifest.get("unlabelled", 0):
        notes.append(f"{num_unlabelled:,} rows without a label were dropped.")
    rows = {name: entry["rows"] for name, entry in data.manifest["splits"].items()}
    if sentence := describe_repeated(repeated_rows(data) or {}, rows):
        notes.append(sentence)
    return notes
