"""Logit tables: rows × estimators on disk, which every axis produces and the diagnosis reads.

Shape suffixes: N rows, M estimators.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from recap_ctr.data.shards import PreparedData, Shard
from recap_ctr.errors import InputError
from recap_ctr.storage.arrays import NpyFile
from recap_ctr.storage.files import atomic_directory, read_json, write_json
from recap_ctr.storage.hashes import sha256

FORMAT = 1
MANIFEST, LOGITS, ROWS = "manifest.json", "logits.npy", "rows.npy"
BLOCK_ROWS = 1 << 16
ALL = slice(None)
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Estimator:
    """Where a column comes from: its point on each axis, and the depth it was read at. None means that there is no
    choice."""

    run: str
    step: int | None = None
    route: str | None = None
    depth: int | None = None


def is_table(path: Path) -> bool:
    """Return whether `path` holds a finished table."""
    return (path / MANIFEST).is_file()


class LogitTable:
    """A finished table, memory-mapped; readable without torch."""

    def __init__(self, path: Path) -> None:
        manifest = read_json(path / MANIFEST) if is_table(path) else None
        if not isinstance(manifest, dict) or manifest.get("kind") != "logit table":
            raise InputError(f"{path} does not hold a logit table")
        if manifest.get("format") != FORMAT:
            raise InputError(
                f"{path} is a logit table of format {manifest.get('format')!r}; this version reads {FORMAT}"
            )
        for name, checksum in manifest["files"].items():
            if not (path / name).is_file() or sha256(path / name) != checksum:
                raise InputError(f"{path / name} is damaged or missing", fix="write the logit table again")
        self.path = path
        self.data: str = manifest["data"]
        self.split: str = manifest["split"]
        self.inputs: str | None = manifest.get("inputs")
        self.checksum: str = manifest["files"][LOGITS]
        self.estimators = tuple(Estimator(**entry) for entry in manifest["estimators"])
        self.logits_NM: Floats = np.load(path / LOGITS, mmap_mode="r", allow_pickle=False)
        self.rows_N: npt.NDArray[np.int64] = np.load(path / ROWS, mmap_mode="r", allow_pickle=False)

    def __len__(self) -> int:
        return len(self.rows_N)

    def check(self, data: PreparedData) -> None:
        """Refuse data other than those that the logits belong to, because rows are matched by their position."""
        if self.data != data.fingerprint:
            raise InputError(
                f"{self.path} was made on other data (fingerprint {self.data}, not {data.fingerprint})",
                fix="write the logit table again, on these data",
            )


class LogitWriter:
    """Write a table batch by batch. The table appears at `path` only when all rows are written.

    `inputs` is a fingerprint of what the table is made from, which `storage.claims.is_made` compares. `rows` are the
    rows that are scored, if they are not those of a split of the data.
    """

    def __init__(
        self,
        path: Path,
        data: PreparedData,
        split: str,
        estimators: Sequence[Estimator],
        inputs: str | None = None,
        rows: Shard | None = None,
    ) -> None:
        if len(set(estimators)) < len(estimators):
            raise InputError(f"{path}: an estimator is listed twice")
        self._data, self._split, self._estimators = data, split, tuple(estimators)
        self._shard: Shard = getattr(data, split) if rows is None else rows
        self._inputs, self._directory = inputs, atomic_directory(path)
        self._written = 0

    def __enter__(self) -> Self:
        self._partial = self._directory.__enter__()
        shape = (len(self._shard), len(self._estimators))
        self._file = NpyFile(self._partial / LOGITS, np.float32, shape).__enter__()
        return self

    def write(self, logits_NM: npt.NDArray[Any]) -> None:
        """Append the next rows, in the shard's order, with one column per estimator."""
        if logits_NM.ndim != 2 or logits_NM.shape[1] != len(self._estimators):
            raise ValueError(f"logits of shape {logits_NM.shape} for {len(self._estimators)} estimators")
        if not np.isfinite(logits_NM).all():
            row = self._written + int(np.argmin(np.isfinite(logits_NM).all(axis=1)))
            raise InputError(f"a logit of row {row} is not finite")
        self._file.write(logits_NM)
        self._written += len(logits_NM)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.__exit__()
        if error is None:
            try:
                self._finish()
            except BaseException as failure:
                self._directory.__exit__(type(failure), failure, failure.__traceback__)
                raise
        self._directory.__exit__(kind, error, trace)

    def _finish(self) -> None:
        if self._written != len(self._shard):
            raise ValueError(f"only {self._written:,} of {len(self._shard):,} rows were written")
        rows_N = np.asarray(self._shard.rows)
        with NpyFile(self._partial / ROWS, rows_N.dtype, rows_N.shape) as rows_file:
            rows_file.write(rows_N)
        write_json(
            self._partial / MANIFEST,
            {
                "kind": "logit table",
                "format": FORMAT,
                "data": self._data.fingerprint,
                "split": self._split,
                "estimators": [asdict(estimator) for estimator in self._estimators],
                **({} if self._inputs is None else {"inputs": self._inputs}),
                "files": {LOGITS: self._file.entry["sha256"], ROWS: rows_file.entry["sha256"]},
            },
        )


def blocks(
    tables: Sequence[LogitTable], size: int = BLOCK_ROWS, rows: slice = ALL
) -> Iterator[npt.NDArray[np.float64]]:
    """Yield the columns of several tables side by side, `size` rows at a time; refuse tables of other rows."""
    first = tables[0]
    for other in tables[1:]:
        if (other.data, other.split) != (first.data, first.split):
            raise InputError(
                f"{other.path} and {first.path} hold different rows",
                fix="join only logit tables of the same data and split",
            )
    first_row, end, _ = rows.indices(len(first))
    for start in range(first_row, end, size):
        parts = [np.asarray(table.logits_NM[start : min(start + size, end)], np.float64) for table in tables]
        yield np.concatenate(parts, axis=1)


def mean_logit(tables: Sequence[LogitTable], rows: slice = ALL) -> Floats:
    """Return the mean over all estimators of all tables, per row (Eqs. 2, 12 and 15)."""
    means = [block.mean(axis=1) for block in blocks(tables, rows=rows)]
    return np.concatenate(means).astype(np.float32)


def table_checksum(path: Path) -> str:
    """Return the checksum of the logits in the table at `path`, which names what is learnt from them."""
    return LogitTable(path).checksum
