"""Prepared data on disk: one memory-mapped shard of rows per split, the vocabularies, and a manifest over all.

Shape suffixes: B rows of a batch, W id columns, N value columns.
"""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from recap_ctr.data.encode import Encoder, Floats, Ints
from recap_ctr.data.layout import Layout
from recap_ctr.errors import InputError
from recap_ctr.schema import Schema, read_schema
from recap_ctr.storage.files import read_json, write_json
from recap_ctr.storage.hashes import sha256

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


@dataclass(frozen=True, eq=False)
class Shard:
    """The rows of one split, memory-mapped."""

    ids: Ints
    values: Floats
    labels: npt.NDArray[np.uint8]
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


class Rows(Protocol):
    """What training reads: rows to learn from, rows to validate on, and their layout."""

    @property
    def layout(self) -> Layout:
        """The sizes and positions of the fields."""
        ...

    @property
    def train(self) -> Shard:
        """The training rows."""
        ...

    @property
    def valid(self) -> Shard:
        """The validation rows."""
        ...


class PreparedData:
    """A finished preparation, checked against its manifest when opened."""

    def __init__(self, path: Path, *, verify: bool = True) -> None:
        self.path = path
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
        """A hash of all shards and vocabularies, which says what data a logit table belongs to."""
        return str(self.manifest["fingerprint"])

    @property
    def split(self) -> str | None:
        """How the rows were divided, in words, with the dates of a split by time; None in data of older versions."""
        return self.manifest.get("split")

    @property
    def name(self) -> str:
        """The name of the public data set, or of the directory without the hash that a recipe adds.

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
    def encoder(self) -> Encoder:
        """The fitted fields, to encode further rows as these were."""
        return Encoder.load(self.path, self.schema, self.manifest["fields"])

    @property
    def layout(self) -> Layout:
        """The sizes and positions of the fields."""
        return self.encoder.layout

    @cached_property
    def train(self) -> Shard:
        """The training rows."""
        return self._open("train")

    @cached_property
    def valid(self) -> Shard:
        """The validation rows."""
        return self._open("valid")

    @cached_property
    def test(self) -> Shard:
        """The test rows; there may be none."""
        return self._open("test")

    def _open(self, split: str) -> Shard:
        def array(name: str) -> Any:
            file = f"{split}/{name}.npy"
            if file not in self.manifest["files"]:
                return None
            rows = self.manifest["splits"][split]["rows"]
            return np.load(self.path / file, mmap_mode="r" if rows else None, allow_pickle=False)

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
    manifest: dict[str, Any] = read_json(path / MANIFEST)
    if manifest.get("format") != FORMAT:
        raise InputError(
            f"{path} is of format {manifest.get('format')!r}; this version reads {FORMAT}",
            fix="prepare it again, with --force",
        )
    return manifest


class ShardFile:
    """A `.npy` file, hashed while it is written.

    It is written by ordinary writes, so that a full disk raises an error; writing to a memory map would crash.
    """

    def __init__(self, out: Path, name: str, dtype: npt.DTypeLike, rows: int, width: int | None) -> None:
        self.name, self._dtype = name, np.dtype(dtype)
        path = out / name
        path.parent.mkdir(exist_ok=True)
        self._file = path.open("wb")
        self._digest, self._bytes = hashlib.sha256(), 0
        self._header = {
            "descr": np.lib.format.dtype_to_descr(self._dtype),
            "fortran_order": False,
            "shape": (rows,) if width is None else (rows, width),
        }

    def write_bytes(self, data: Any) -> None:
        """Append bytes as they are."""
        self._file.write(data)
        self._digest.update(data)
        self._bytes += memoryview(data).nbytes

    def write(self, rows: npt.NDArray[Any]) -> None:
        """Append rows of the array."""
        if rows.size:
            self.write_bytes(np.ascontiguousarray(rows, self._dtype).data)

    @property
    def entry(self) -> dict[str, Any]:
        """The file's size and hash, as the manifest lists them."""
        return {"bytes": self._bytes, "sha256": self._digest.hexdigest()}

    def __enter__(self) -> "ShardFile":
        try:
            np.lib.format.write_array_header_1_0(_HeaderTarget(self), self._header)
        except BaseException:  # a full disk: nobody else would close the file
            self._file.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


class _HeaderTarget:
    """A file as numpy's header function wants it: with `write`."""

    def __init__(self, file: ShardFile) -> None:
        self._file = file

    def write(self, data: bytes) -> None:
        self._file.write_bytes(data)
