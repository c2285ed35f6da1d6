"""The second pass of preparation: from spooled codes to the arrays of each split.

Shape suffixes: B rows, W id columns, N value columns, S splits, F fields.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt
import polars as pl

from recap_ctr.data.count import may_lack_values, seen_file
from recap_ctr.data.encode import MISSING_CODE, PAD, Encoder, FittedField, Ints, interpolate, standardise
from recap_ctr.data.layout import FieldLayout
from recap_ctr.data.shards import SPLITS
from recap_ctr.data.split import SplitCodes
from recap_ctr.data.spool import SPOOL_ROWS, Part, PartTables, SpooledRows
from recap_ctr.storage.arrays import NpyFile
from recap_ctr.storage.files import append_file, make_directory, new_file

Array = npt.NDArray[Any]
UNSEEN, RARE, MISSING = -1, -2, -3
"""Instead of ids: no training row has the value, too few of them have it, or there is none."""
COPIED_BYTES = 1 << 24


@dataclass(frozen=True, eq=False)
class Tally:
    """What is counted while rows are encoded, by split: rows and positives, and by field too what lacks a vector."""

    rows_S: npt.NDArray[np.int64]
    positives_S: npt.NDArray[np.int64]
    oov_SF: npt.NDArray[np.int64]
    missing_SF: npt.NDArray[np.int64]
    rare_SF: npt.NDArray[np.int64]

    @classmethod
    def empty(cls, num_fields: int) -> Self:
        """Return a tally of no rows."""
        counts = (
            np.zeros(shape, np.int64) for shape in [(len(SPLITS),)] * 2 + [(len(SPLITS), num_fields)] * 3
        )
        return cls(*counts)

    def add(self, other: Mapping[str, Any]) -> None:
        """Add what `as_json` returned for further rows."""
        for name, counts in vars(self).items():
            counts += np.array(other[name], np.int64)

    def as_json(self) -> dict[str, Any]:
        """Return the counts as plain JSON values."""
        return {name: counts.tolist() for name, counts in vars(self).items()}

    def entries(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the manifest's entries of the splits; `names` are those of the fields."""
        kinds = {"oov": self.oov_SF, "missing": self.missing_SF, "rare": self.rare_SF}
        return {
            split: {
                "rows": int(self.rows_S[code]),
                "positives": int(self.positives_S[code]),
                **{
                    kind: dict(zip(names, counts_SF[code].tolist(), strict=True))
                    for kind, counts_SF in kinds.items()
                },
            }
            for code, split in enumerate(SPLITS)
        }


class RowEncoder:
    """Encodes spooled rows.

    `counts` has for each field the directory that `fit_field` got, `groups` is the one that `rank_groups` got.
    """

    def __init__(
        self, rows: SpooledRows, encoder: Encoder, splits: SplitCodes, counts: Sequence[Path], groups: Path
    ) -> None:
        self._rows, self._encoder, self._splits, self._layout = rows, encoder, splits, encoder.layout
        self.tally = Tally.empty(self._layout.num_fields)
        self._tables: dict[str, PartTables] = {}
        for fitted, directory in zip(encoder.fields, counts, strict=True):
            name = f"field:{fitted.field.name}"
            if rows.columns[name].has_values:
                self._tables[name] = self._id_tables(fitted, directory)
        if "group" in rows.columns:
            self._tables["group"] = PartTables(
                lambda number, _: np.fromfile(_ranks_file(groups, number), np.int32)
            )

    def _id_tables(self, fitted: FittedField, directory: Path) -> PartTables:
        """Return the ids of codes, or why a code has none."""
        has_rare = may_lack_values(self._rows, fitted.field)

        def make(number: int, part: Part) -> Ints:
            dictionary = pl.read_ipc(part.dictionary, columns=["code", "value"])
            codes = fitted.codes(dictionary["value"])
            outcomes = np.where(codes < 0, UNSEEN, fitted.ids(codes))
            if has_rare:
                is_seen = np.fromfile(seen_file(directory, number), np.uint8) == 1
                outcomes[(codes < 0) & is_seen] = RARE
            table = np.empty(part.num_values + 2, np.int32)
            table[dictionary["code"].to_numpy()] = outcomes
            table[-2:] = PAD, MISSING
            return table

        return PartTables(make)

    def kinds(self) -> dict[str, tuple[npt.DTypeLike, tuple[int, ...]]]:
        """Return type and width of each array of a shard."""
        kinds: dict[str, tuple[npt.DTypeLike, tuple[int, ...]]] = {
            "ids": (np.int32, (self._layout.num_columns,)),
            "labels": (np.uint8, ()),
            "rows": (np.int64, ()),
        }
        if self._layout.num_values:
            kinds["values"] = (np.float32, (self._layout.num_values,))
        for role, dtype in (("weight", np.float32), ("group", np.int32), ("time", np.float64)):
            if role in self._rows.columns:
                kinds[f"{role}s"] = (dtype, ())
        return kinds

    def write(self, start: int, stop: int, shards: Sequence[Mapping[str, "ArrayFile"]]) -> Iterator[int]:
        """Write the rows from `start` to `stop` to the files of each split; yield how many at a time."""
        streams = {
            name: column.blocks(start, stop, self._tables.get(name))
            for name, column in self._rows.columns.items()
            if not name.startswith("counted") and name != "split"  # The first do not have one entry a row.
        }
        for columns in zip(*streams.values(), strict=True):
            arrays = self._encode(dict(zip(streams, columns, strict=True)), start)
            height = len(arrays["labels"])
            codes = self._splits[start : start + height]
            for code, shard in enumerate(shards):
                chosen = codes == code
                for name, file in shard.items():
                    file.write(arrays[name][chosen])
                self.tally.rows_S[code] += np.count_nonzero(chosen)
                self.tally.positives_S[code] += int(arrays["labels"][chosen].sum())
            start += height
            yield height

    def _encode(self, block: dict[str, Array], start: int) -> dict[str, Array]:
        """Return the arrays of a shard for a block of spooled rows, numbered from `start`."""
        height = len(block["label"])
        ids_BW = np.empty((height, self._layout.num_columns), np.int32)
        values_BN = np.empty((height, self._layout.num_values), np.float32)
        codes = self._splits[start : start + height]
        for i, place in enumerate(self._layout.fields):
            outcomes = self._outcomes(i, place, block[f"field:{place.name}"], values_BN)
            self._count(i, outcomes, codes)
            ids = np.where(outcomes < 0, self._encoder.fields[i].oov, outcomes) + place.offset
            ids_BW[:, place.start : place.start + place.width] = ids.reshape(height, place.width)
        arrays: dict[str, Array] = {
            "ids": ids_BW,
            "values": values_BN,
            "labels": block["label"],
            "rows": np.arange(start, start + height),
        }
        return arrays | {f"{role}s": block[role] for role in ("weight", "time", "group") if role in block}

    def _outcomes(
        self, index: int, place: FieldLayout, column: Array, values_BN: npt.NDArray[np.float32]
    ) -> Array:
        """Return the ids of one field, or why there is none; write its numbers, if it has any, to `values_BN`."""
        fitted = self._encoder.fields[index]
        if place.value_column is not None:
            is_missing = np.isnan(column)
            read = interpolate if place.is_linear else standardise
            ids = read(np.nan_to_num(column), is_missing, fitted, values_BN[:, place.value_column])
            is_unseen = place.is_linear and not fitted.edges
            return np.where(is_missing, MISSING, UNSEEN if is_unseen else ids)
        if fitted.field.transform == "quantiles":
            names = pl.Series(np.arange(len(fitted.edges) + 1)).cast(pl.String)
            codes = fitted.codes(names)
            # A quantile has training rows by its nature.
            table = np.append(
                np.where(codes < 0, RARE if fitted.edges else UNSEEN, fitted.ids(codes)), MISSING
            )
            buckets = np.searchsorted(np.asarray(fitted.edges), column, side="right")
            return np.asarray(table[np.where(np.isnan(column), MISSING_CODE, buckets)])
        if fitted.field.hash_buckets:
            return np.where(column == MISSING_CODE, MISSING, fitted.ids(column))
        return column

    def _count(self, index: int, outcomes: Array, codes: SplitCodes) -> None:
        """Count the values of a field without a vector of their own, by the split of their row."""
        tally = self.tally
        if not (outcomes < 0).any():
            return
        counted = ((tally.oov_SF, outcomes < 0), (tally.missing_SF, outcomes == MISSING))
        for counts_SF, mask in (*counted, (tally.rare_SF, outcomes == RARE)):
            per_row = mask.reshape(len(codes), -1).sum(axis=1)
            counts_SF[:, index] += np.bincount(codes, per_row, minlength=len(SPLITS)).astype(np.int64)


class ArrayFile(Protocol):
    """A file that takes rows of an array."""

    def write(self, rows: Array) -> None:
        """Append rows of the array."""
        ...


@dataclass(frozen=True)
class RawFile:
    """An array without a header, open only while it is written to."""

    path: Path
    dtype: npt.DTypeLike

    def write(self, rows: Array) -> None:
        """Append rows of the array."""
        with append_file(self.path) as file:
            file.write(np.ascontiguousarray(rows, self.dtype).data)


def raw_files(encoder: RowEncoder, directory: Path) -> list[dict[str, RawFile]]:
    """Return files below `directory` for rows that another process will put into shards, for each split by array."""
    return [
        {
            name: RawFile(raw_file(directory, split, name), dtype)
            for name, (dtype, _) in encoder.kinds().items()
        }
        for split in SPLITS
    ]


def raw_file(directory: Path, split: str, name: str) -> Path:
    """Return where one array of a split is below `directory`."""
    return directory / f"{split}-{name}"


def open_shards(
    stack: ExitStack, encoder: RowEncoder, counts_S: Sequence[int], out: Path
) -> list[dict[str, NpyFile]]:
    """Open the files of each split's shard in `out`, by the name of their array, for a known number of rows."""
    return [
        {
            name: stack.enter_context(NpyFile(out / shard_file(split, name), dtype, (count, *width)))
            for name, (dtype, width) in encoder.kinds().items()
        }
        for split, count in zip(SPLITS, counts_S, strict=True)
    ]


def shard_file(split: str, name: str) -> str:
    """Return where an array of one split is stored, relative to the prepared data."""
    return f"{split}/{name}.npy"


def append_raw(shards: Sequence[Mapping[str, NpyFile]], directory: Path) -> None:
    """Append what was written to the `raw_files` of a directory to the shards."""
    for split, shard in zip(SPLITS, shards, strict=True):
        for name, target in shard.items():
            with raw_file(directory, split, name).open("rb") as file:
                while data := file.read(COPIED_BYTES):
                    target.write(np.frombuffer(data, target.dtype))


def count_splits(splits: SplitCodes) -> list[int]:
    """Return how many rows each split has."""
    counts = np.zeros(len(SPLITS), np.int64)
    for start in range(0, len(splits), SPOOL_ROWS):
        counts += np.bincount(splits[start : start + SPOOL_ROWS], minlength=len(SPLITS))
    return [int(count) for count in counts]


def rank_groups(rows: SpooledRows, directory: Path) -> None:
    """Write for each spooled group its place among all in order of value; one more entry serves missing groups.

    polars casts the chunks of a column in parallel, so the spooled codes differ from run to run.
    """
    parts = rows.columns["group"].parts
    make_directory(directory)
    values = pl.concat(pl.read_ipc(part.dictionary, columns=["value"]) for part in parts).unique()
    places = values.sort("value").with_row_index("place")
    for number, part in enumerate(parts):
        table = pl.read_ipc(part.dictionary, columns=["code", "value"]).join(places, on="value")
        ranks = np.full(part.num_values + 1, MISSING_CODE, np.int32)
        ranks[table["code"].to_numpy()] = table["place"].to_numpy()
        with new_file(_ranks_file(directory, number)) as file:
            file.write(ranks.data)


def _ranks_file(directory: Path, number: int) -> Path:
    return directory / f"groups-{number:04d}"
