"""Prepared data on disk: one memory-mapped shard of rows per split, the vocabularies, and a manifest over all.

Shape suffixes: B rows of a batch, W id columns, N value columns.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from mmap import mmap
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from recap_ctr.data.encode import Encoder, Floats, Ints
from recap_ctr.data.layout import Layout
from recap_ctr.data.profile import PROFILE, Profile, read_profile
from recap_ctr.data.stored_fields import StoredFields
from recap_ctr.errors import InputError
from recap_ctr.schema import Schema, TimeUnit, read_schema
from recap_ctr.storage.files import read_json, read_object, write_json
from recap_ctr.storage.hashes import fingerprint, sha256
from recap_ctr.storage.places import input_directory

FORMAT = 1
MANIFEST = "manifest.json"
SPLITS = ("train", "valid", "test")


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows gathered from a shard."""

    ids_BW: Ints
    values_BN: Floats
    labels_B: Floats
    weights_B: Floats | None

    def part(self, rows: slice) -> "Batch":
        """Return a copy of some of the rows, which does not keep the others in memory."""
        weights = None if self.weights_B is None else self.weights_B[rows].copy()
        return Batch(
            self.ids_BW[rows].copy(), self.values_BN[rows].copy(), self.labels_B[rows].copy(), weights
        )


@dataclass(frozen=True, eq=False)
class Shard:
    """The rows of one split, memory-mapped."""

    ids: Ints
    values: Floats
    labels: npt.NDArray[np.uint8] | Floats
    """0 or 1; of a recombined row that a student learns from, its teachers' probability."""
    rows: npt.NDArray[np.int64]
    """Each row's number in the source, counted from 0: its identity in every logit table."""
    weights: Floats | None
    groups: Ints | None
    times: npt.NDArray[np.float64] | None

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, at: npt.NDArray[np.integer[Any]] | slice) -> Batch:
        """Return a copy of the rows at the positions `at`."""
        weights = None if self.weights is None else np.array(self.weights[at])
        return Batch(
            np.array(self.ids[at]), np.array(self.values[at]), self.labels[at].astype(np.float32), weights
        )

    def read(self, rows: slice) -> Batch:
        """Return a copy of neighbouring rows, read from their files, as pages of a map would stay in memory."""
        weights = None if self.weights is None else _read(self.weights, rows)
        labels = _read(self.labels, rows).astype(np.float32)
        return Batch(_read(self.ids, rows), _read(self.values, rows), labels, weights)

    def take(self, at: npt.NDArray[np.integer[Any]]) -> "Shard":
        """Return a shard of the rows at the positions `at`, in memory."""
        columns: dict[str, Any] = {}
        for field in fields(self):
            column = getattr(self, field.name)
            columns[field.name] = None if column is None else np.array(column[at])
        return Shard(**columns)

    def batches(self, size: int) -> Iterator[Batch]:
        """Yield all rows in order; the last batch may be short."""
        for start in range(0, len(self), size):
            yield self.batch(slice(start, start + size))


def _read(column: npt.NDArray[Any], rows: slice) -> npt.NDArray[Any]:
    """Return a copy of neighbouring rows of a column, from its file if it is the map of a whole one."""
    if not isinstance(column, np.memmap) or not isinstance(column.base, mmap):
        return np.array(column[rows])
    block = np.empty((rows.stop - rows.start, *column.shape[1:]), column.dtype)
    row_bytes = column.strides[0]
    with Path(str(column.filename)).open("rb") as file:
        file.seek(column.offset + rows.start * row_bytes)
        if file.readinto(block.data.cast("B")) != block.nbytes:
            raise InputError(f"{column.filename} is cut short", fix="prepare the data again, with --force")
    return block


class Rows(Protocol):
    """What training reads: rows to learn from, rows to validate on, and their layout."""

    @property
    def layout(self) -> Layout:
        """Return the sizes and positions of the fields."""
        ...

    @property
    def train(self) -> Shard:
        """Return the training rows."""
        ...

    @property
    def valid(self) -> Shard:
        """Return the validation rows."""
        ...


class PreparedData:
    """A finished preparation, checked against its manifest when opened."""

    def __init__(self, path: Path, *, verify: bool = True) -> None:
        self.path = path = input_directory(path)
        self.manifest = read_manifest(path)
        for name, entry in self.manifest["files"].items():
            file = path / name
            if not file.is_file() or file.stat().st_size != entry["bytes"]:
                raise InputError(
                    f"{file} is missing or cut short",
                    fix=f"run `recap prepare` for {path} again, with --force",
                )
            if verify and sha256(file) != entry["sha256"]:
                raise InputError(
                    f"{file} has changed since it was prepared",
                    fix=f"run `recap prepare` for {path} again, with --force",
                )
        self.schema: Schema = read_schema(path / "schema.toml")

    @property
    def fingerprint(self) -> str:
        """Return a hash of all shards and vocabularies, which says what data a logit table belongs to."""
        return str(self.manifest["fingerprint"])

    @property
    def split(self) -> str | None:
        """Return in words how rows were divided, with the dates of a split by time; None in data of older versions."""
        return self.manifest.get("split")

    @property
    def split_note(self) -> str | None:
        """Return what a user should know of how rows were divided; None if there is nothing."""
        return self.manifest.get("split_note")

    @property
    def time_unit(self) -> TimeUnit | None:
        """Return the unit of the time column (dates: microseconds); None without a time column, or if it is unknown."""
        return self.manifest.get("time_unit")

    @property
    def name(self) -> str:
        """Return the name of the public data set, or of the directory without the hash that a recipe adds.

        Rows that were not checked against the public data set are called NAME-unchecked, so that no table compares
        them with published figures.
        """
        public = self.manifest["inputs"].get("dataset")
        if public is None:
            return re.sub(r"-[0-9a-f]{10}$", "", self.path.name)
        return str(public) if self.manifest.get("checked") else f"{public}-unchecked"

    def mark(self, *, checked: bool) -> None:
        """Record whether the data match the published figures; the fingerprint stays the same."""
        if self.manifest.get("checked") != checked:
            self.manifest["checked"] = checked
            write_json(self.path / MANIFEST, self.manifest)

    @cached_property
    def stored_fields(self) -> StoredFields:
        """Return the fitted fields as they are on disk: training needs no values, and vocabularies can be large."""
        return StoredFields(self.path, self.schema, self.manifest["fields"])

    @cached_property
    def encoder(self) -> Encoder:
        """Return the fitted fields, which encode further rows as these rows were encoded."""
        return self.stored_fields.load()

    @property
    def layout(self) -> Layout:
        """Return the sizes and positions of the fields."""
        return self.stored_fields.layout

    @cached_property
    def profile(self) -> Profile | None:
        """Return what is usual in the training rows; None for data that an older version prepared."""
        return read_profile(self.path / PROFILE) if PROFILE in self.manifest["files"] else None

    @cached_property
    def train(self) -> Shard:
        """Return the training rows."""
        return self._open("train")

    @cached_property
    def valid(self) -> Shard:
        """Return the validation rows."""
        return self._open("valid")

    @cached_property
    def test(self) -> Shard:
        """Return the test rows; there may be none."""
        return self._open("test")

    @cached_property
    def is_in_time_order(self) -> bool:
        """Return whether the validation rows are later than nearly all training rows, as the rows to score will be."""
        train, valid = self.train.times, self.valid.times
        if train is None or valid is None or not (len(train) and len(valid)):
            return False
        return bool(np.median(valid) >= np.quantile(train, 0.99))

    def _open(self, split: str) -> Shard:
        return open_shard(self.path, split, self.manifest["splits"][split]["rows"], self.manifest["files"])


def joined(shards: Sequence[Shard]) -> Shard:
    """Return the rows of several shards as one, in memory; groups are of one split only, and left out."""
    columns: dict[str, Any] = {}
    for column in fields(Shard):
        parts = [getattr(shard, column.name) for shard in shards]
        is_lacking = column.name == "groups" or any(part is None for part in parts)
        columns[column.name] = None if is_lacking else np.concatenate(parts)
    return Shard(**columns)


def held_out_shards(data: PreparedData) -> dict[str, Shard]:
    """Return the validation rows and, where there are any, the test rows."""
    return {"valid": data.valid, "test": data.test} if len(data.test) else {"valid": data.valid}


def open_shard(path: Path, split: str, num_rows: int, files: Collection[str]) -> Shard:
    """Return the `num_rows` rows of a split among the `files` of prepared data in `path`."""

    def array(name: str) -> Any:
        file = f"{split}/{name}.npy"
        if file not in files:
            return None
        return np.load(path / file, mmap_mode="r" if num_rows else None, allow_pickle=False)

    labels = array("labels")
    values = array("values")
    return Shard(
        ids=array("ids"),
        values=np.empty((len(labels), 0), np.float32) if values is None else values,
        labels=labels,
        rows=array("rows"),
        weights=array("weights"),
        groups=array("groups"),
        times=array("times"),
    )


def is_prepared(path: Path) -> bool:
    """Return whether `path` holds prepared data, of any format, which we may replace."""
    if not (path / MANIFEST).is_file():
        return False
    manifest = read_json(path / MANIFEST)
    return isinstance(manifest, dict) and manifest.get("kind") == "prepared data"


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of prepared data; refuse other directories and other formats."""
    if not is_prepared(path):
        raise InputError(
            f"{path} holds no prepared data", fix="make it with `recap prepare SOURCE --out DIR`"
        )
    manifest = read_object(path / MANIFEST, "a manifest")
    if manifest.get("format") != FORMAT:
        raise InputError(
            f"{path} is of format {manifest.get('format')!r}; this version reads {FORMAT}",
            fix="prepare it again, with --force",
        )
    # Earlier versions wrote no checksum; what they wrote still says what its files must be.
    try:
        is_whole = manifest["fingerprint"] == files_fingerprint(manifest["files"])
    except (KeyError, TypeError, AttributeError):
        is_whole = False
    if not is_whole or not {"inputs", "fields", "splits"} <= manifest.keys():
        raise InputError(f"{path / MANIFEST} is damaged", fix=f"prepare {path} again, with --force")
    return manifest


def files_fingerprint(files: Mapping[str, dict[str, Any]]) -> str:
    """Return a hash of the manifest's list of files, which names the prepared data.

    No model depends on the counts of rare values or on the profile, so these are not part of the name.
    """
    return fingerprint(
        {
            name: entry["sha256"]
            for name, entry in files.items()
            if name != PROFILE and not name.startswith("rare/")
        }
    )
