"""The first pass of preparation: each column of the source, as provisional codes in files.

The source is read once, and every row checked. What a split or a vocabulary needs is known only at the end, so codes
are provisional: values are numbered as they appear, in each part of a column for itself. A part ends when memory holds
as many values as it may; what several processes have read are further parts of the same columns.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
import polars as pl
from pydantic import NonNegativeInt

from recap_ctr.config import Frozen
from recap_ctr.data.encode import MISSING_CODE, Ints, Pieces, as_numbers, categories, hash_codes, pieces
from recap_ctr.data.roles import (
    drop_unlabelled,
    read_groups,
    read_labels,
    read_times,
    read_weights,
    time_kind,
)
from recap_ctr.data.shards import SPLITS
from recap_ctr.data.source import Block, Source
from recap_ctr.data.split import Split, SplitCodes, hash_splits, read_split_column
from recap_ctr.data.text import as_text
from recap_ctr.errors import InputError
from recap_ctr.jobs.progress import meter
from recap_ctr.schema import Field, Schema
from recap_ctr.storage.files import append_file, new_file

SPOOL_ROWS = 1 << 17
MAX_VALUES = 2_000_000
"""Distinct values of a field that memory holds while rows are read and counted."""
Counted = Mapping[str, Literal["cells", "pieces"]]
"""Multi fields whose vocabulary is not counted over the values that a row keeps; see `Preparation.counted`."""


class Part(Frozen):
    """Some consecutive entries of a column in a file of their own; codes are those of the part's own dictionary."""

    path: str
    entries: NonNegativeInt
    num_values: NonNegativeInt = 0
    first_row: NonNegativeInt = 0
    """What to add to entries that are numbers of rows."""

    @property
    def dictionary(self) -> Path:
        """Return the file of a column of values that holds the `hash`, `code` and `value` of each, by rising hash."""
        return Path(f"{self.path}.values")

    def read(self, dtype: np.dtype[Any], width: int, start: int, stop: int) -> npt.NDArray[Any]:
        """Return some entries; refuse to go on if the disk gives back less than was written."""
        size = width * dtype.itemsize
        with Path(self.path).open("rb") as file:
            file.seek(start * size)
            data = file.read((stop - start) * size)
        if len(data) < (stop - start) * size:
            raise InputError(
                f"{self.path} is shorter than it was written:"
                f" {start * size + len(data):,} of {self.entries * size:,} bytes",
                fix="check the disk, then run the same command again",
            )
        entries = np.frombuffer(data, dtype)
        entries = entries if width == 1 else entries.reshape(-1, width)
        return entries + self.first_row if self.first_row else entries


class PartTables:
    """What the codes of a column stand for, by part; only the table of the latest part is kept."""

    def __init__(self, make: Callable[[int, Part], npt.NDArray[Any]]) -> None:
        """Remember `make`, which returns the table of a part, given the part's number and the part."""
        self._make = make
        self._number: int | None = None
        self._table: npt.NDArray[Any] = np.zeros(0)

    def table(self, number: int, part: Part) -> npt.NDArray[Any]:
        """Return the table of a part: an entry for each code, then two for padding and missing values."""
        if number != self._number:
            self._number, self._table = number, self._make(number, part)
        return self._table


class Spool:
    """One column of the first pass on disk, read back in blocks of `SPOOL_ROWS` rows.

    Its files are open only while they are written to or read: a table may have more columns than a process may have
    files. A column with `has_values` numbers text values.
    """

    def __init__(self, path: Path, dtype: npt.DTypeLike, width: int = 1, *, has_values: bool = False) -> None:
        self.path, self.dtype, self.width, self.has_values = path, np.dtype(dtype), width, has_values
        self.parts: list[Part] = []
        self.dictionary = Dictionary()
        self._entries = 0

    def append(self, values: npt.NDArray[Any]) -> None:
        """Write the values of further rows."""
        data = np.ascontiguousarray(values, self.dtype)
        with append_file(self._file) as file:
            file.write(data.data)
        self._entries += len(data)

    @property
    def _file(self) -> Path:
        return self.path.with_name(f"{self.path.name}-{len(self.parts):04d}")

    def end_part(self) -> None:
        """Let what was written since the last part be a part; its values go to disk."""
        if self._entries == 0:
            return
        part = Part(path=str(self._file), entries=self._entries, num_values=self.dictionary.num_values)
        if self.has_values:
            with new_file(part.dictionary) as file:
                self.dictionary.table().write_ipc(file)
        self.parts.append(part)
        self.dictionary, self._entries = Dictionary(), 0

    def starts(self) -> list[int]:
        """Return where each part begins, and where the last one ends."""
        return [0, *accumulate(part.entries for part in self.parts)]

    def blocks(
        self, start: int = 0, stop: int | None = None, tables: PartTables | None = None
    ) -> Iterator[npt.NDArray[Any]]:
        """Read the entries from `start` to `stop`, by default all; with `tables`, what the codes stand for."""
        starts = self.starts()
        stop = starts[-1] if stop is None else stop
        at = 0
        for first in range(start, stop, SPOOL_ROWS):
            last = min(first + SPOOL_ROWS, stop)
            while starts[at + 1] <= first:
                at += 1
            sections, number = [], at
            while number < len(self.parts) and starts[number] < last:
                part, begin = self.parts[number], starts[number]
                place = max(first - begin, 0), min(last - begin, part.entries)
                section = part.read(self.dtype, self.width, *place)
                sections.append(section if tables is None else tables.table(number, part)[section])
                number += 1
            yield sections[0] if len(sections) == 1 else np.concatenate(sections)

    def take(
        self, positions: npt.NDArray[np.int64]
    ) -> Iterator[tuple[int, Part, npt.NDArray[np.int64], npt.NDArray[Any]]]:
        """Yield for some of the `positions` at a time the part they are in, which of them, and their entries."""
        starts = self.starts()
        for number, part in enumerate(self.parts):
            inside = np.flatnonzero((positions >= starts[number]) & (positions < starts[number + 1]))
            column = np.memmap(part.path, self.dtype, "r").reshape(-1, self.width)
            for first in range(0, len(inside), SPOOL_ROWS):
                chosen = inside[first : first + SPOOL_ROWS]
                yield number, part, chosen, np.array(column[positions[chosen] - starts[number]])


class Dictionary:
    """Text values to codes in no particular order, growing from block to block."""

    def __init__(self) -> None:
        self.num_values = 0
        self.dtype = pl.Categorical(pl.Categories.random())
        self._alive: pl.Series | None = None  # polars forgets categories that no series holds

    def codes(self, categorical: pl.Series) -> Ints:
        """Return the codes of a series that was cast to `dtype`."""
        self._alive = categorical
        codes = categorical.to_physical().cast(pl.Int32)
        if codes.count():
            self.num_values = max(self.num_values, int(codes.max() or 0) + 1)  # type: ignore[arg-type]
        return codes.fill_null(MISSING_CODE).to_numpy()

    def table(self) -> pl.DataFrame:
        """Return all values with their hashes and codes, by rising hash."""
        codes = pl.Series("value", np.arange(self.num_values, dtype=np.uint32))
        values = codes.cat.to(self.dtype).cast(pl.String) if self.num_values else codes.cast(pl.String)
        code = np.arange(self.num_values, dtype=np.int32)
        return pl.DataFrame({"hash": values.hash(0), "code": code, "value": values}).sort("hash")


def spooled_columns(schema: Schema, counted: Counted, directory: Path) -> dict[str, Spool]:
    """Return the columns of a spool in `directory`, without rows.

    They are named after roles (`label`, `split`, `weight`, `time`, `group`) or, with a prefix that no role has,
    after fields: `field:NAME`. A field of `counted` also has `counted:NAME`, what its vocabulary counts, and
    `counted rows:NAME`, the rows these values belong to.
    """
    columns: dict[str, Spool] = {}

    def add(name: str, dtype: npt.DTypeLike, width: int = 1, *, has_values: bool = False) -> None:
        columns[name] = Spool(directory / f"{len(columns):04d}", dtype, width, has_values=has_values)

    for field in schema.fields:
        if field.kind == "numeric" and field.transform != "log-square":
            add(f"field:{field.name}", np.float64)
        else:
            add(f"field:{field.name}", np.int32, field.width, has_values=not field.hash_buckets)
        if field.name in counted:
            add(f"counted:{field.name}", np.int32, has_values=True)
            add(f"counted rows:{field.name}", np.int64)
    add("label", np.uint8)
    add("split", np.uint8)
    if schema.weight:
        add("weight", np.float32)
    if schema.time:
        add("time", np.float64)
    if schema.group:
        add("group", np.int32, has_values=True)
    return columns


class SpoolRecord(Frozen):
    """What was spooled by one process: the parts of each column, and what was noticed on the way."""

    num_rows: NonNegativeInt
    num_unlabelled: NonNegativeInt
    time_kind: str | None
    """What the time column holds, "dates" or "numbers", if there is one."""
    origin: str
    """Where the rows begin, as errors name it."""
    parts: dict[str, tuple[Part, ...]]


@dataclass(frozen=True)
class SpooledRows:
    """All rows of the sources in files, one `Spool` a column."""

    schema: Schema
    counted: Counted
    columns: dict[str, Spool]
    max_values: int = MAX_VALUES
    """Distinct values of a column that memory may hold."""
    num_rows: int = 0
    num_unlabelled: int = 0
    time_kind: str | None = None
    starts: tuple[int, ...] = ()
    """The first row of each record, and the number of rows."""

    @classmethod
    def join(
        cls, schema: Schema, counted: Counted, records: Sequence[SpoolRecord], max_values: int = MAX_VALUES
    ) -> Self:
        """Return the rows that were spooled under the `records`, one after the other."""
        columns = spooled_columns(schema, counted, Path())
        starts, first_row = [0], 0
        kinds = [record for record in records if record.time_kind is not None]
        for record in kinds[1:]:
            _check_time_kind(record.origin, schema.time, record.time_kind, kinds[0].time_kind)
        for record in records:
            for name, column in columns.items():
                is_rows = name.startswith("counted rows:")
                parts = record.parts.get(name, ())
                column.parts += [
                    part.model_copy(update={"first_row": first_row}) if is_rows else part for part in parts
                ]
            first_row += record.num_rows
            starts += [first_row] if record.num_rows else []
        if first_row == 0:
            raise InputError("the source holds no rows")
        num_unlabelled = sum(record.num_unlabelled for record in records)
        kind = kinds[0].time_kind if kinds else None
        return cls(schema, counted, columns, max_values, first_row, num_unlabelled, kind, tuple(starts))

    def spilled_fields(self) -> list[str]:
        """Return the fields with more values than memory may hold."""
        spilled = (
            name.partition(":")[2]
            for name, column in self.columns.items()
            if name != "group" and any(part.num_values > self.max_values for part in column.parts)
        )
        return list(dict.fromkeys(spilled))


def _check_time_kind(origin: str, name: str | None, kind: str | None, before: str | None) -> None:
    """Refuse times that can't be ordered against those before them."""
    if kind != before:
        raise InputError(
            f"{origin} on the time {name!r} holds {kind}, before that {before}",
            fix="write all times in one way",
        )


class Spooler:
    """Reads sources, checks every row, and writes it to the files of a directory."""

    def __init__(
        self,
        schema: Schema,
        split: Split,
        counted: Counted,
        directory: Path,
        max_values: int = MAX_VALUES,
    ) -> None:
        self.schema, self.split, self.counted, self.max_values = schema, split, counted, max_values
        self.columns = spooled_columns(schema, counted, directory)
        self._num_rows = self._num_unlabelled = 0
        self._time_kind: str | None = None
        self._origin = ""

    def read(
        self, sources: Mapping[str, Source], *, labelled_only: bool = False, quiet: bool = False
    ) -> SpoolRecord:
        """Write the rows of the sources, which are named `all` or after the splits; return the record of them.

        With `labelled_only` rows without a label are left out and counted; otherwise they are an error.
        """
        total = sum(source.total_bytes for source in sources.values())
        with meter("preparing", total, "rows", quiet=quiet) as shown:
            for name, source in sources.items():
                code = SPLITS.index(name) if name in SPLITS else 0
                for whole, size in source.blocks():
                    block = drop_unlabelled(whole, self.schema.label) if labelled_only else whole
                    if block.frame.height:
                        self._write(block, code)
                    self._num_rows += block.frame.height
                    self._num_unlabelled += whole.frame.height - block.frame.height
                    shown.advance(whole.frame.height, size)
        for column in self.columns.values():
            column.end_part()
        return SpoolRecord(
            num_rows=self._num_rows,
            num_unlabelled=self._num_unlabelled,
            time_kind=self._time_kind,
            origin=self._origin,
            parts={name: tuple(column.parts) for name, column in self.columns.items()},
        )

    def _write(self, block: Block, split_code: int) -> None:
        texts: dict[str, pl.Series] = {}  # by column, to be numbered by dictionaries
        multi: dict[str, Pieces] = {}
        for field in self.schema.fields:
            self._write_field(block, field, texts, multi)
        if self.schema.group:
            texts["group"] = read_groups(block, self.schema.group)
        for name, codes in zip(texts, self._codes(texts), strict=True):
            spool = self.columns[name]
            spool.append(multi[name].matrix(codes, spool.width) if name in multi else codes)
            # The order of groups is part of the result, so their values are compared in memory anyway.
            if spool.dictionary.num_values > self.max_values and name != "group":
                spool.end_part()
        schema = self.schema
        self.columns["label"].append(read_labels(block, schema.label, schema.positive, schema.negative))
        if self.schema.weight:
            self.columns["weight"].append(read_weights(block, self.schema.weight))
        if self.schema.time:
            self._note_time_kind(block, self.schema.time)
            self.columns["time"].append(read_times(block, self.schema.time))
        self.columns["split"].append(self._split_codes(block, split_code))

    def _write_field(
        self, block: Block, field: Field, texts: dict[str, pl.Series], multi: dict[str, Pieces]
    ) -> None:
        """Write numbers and hash codes at once; leave values for a dictionary in `texts` and `multi`."""
        name = f"field:{field.name}"
        spool = self.columns[name]
        if spool.dtype == np.float64:
            spool.append(as_numbers(block, field).alias("").fill_null(np.nan).to_numpy())
            return
        flat = pieces(block, field) if field.kind == "multi" else None
        values = categories(block, field) if flat is None else flat.values
        if field.hash_buckets:
            codes = hash_codes(values, field.hash_buckets)
            spool.append(codes if flat is None else flat.matrix(codes, field.width))
        else:
            texts[name] = values
            if flat is not None:
                multi[name] = flat
        if field.name in self.counted:
            texts[f"counted:{field.name}"], rows = self._counted_values(block, field)
            self.columns[f"counted rows:{field.name}"].append(rows + self._num_rows)

    def _counted_values(self, block: Block, field: Field) -> tuple[pl.Series, npt.NDArray[np.int64]]:
        """Return what the vocabulary of a field in `counted` counts, each value with its row in the block."""
        if self.counted[field.name] == "pieces":
            flat = pieces(block, field.model_copy(update={"max_len": 2**31}))
            return flat.values, flat.rows
        cells = as_text(block.column(field.name, "multi field"), field.missing).alias("")
        return cells.drop_nulls(), cells.is_not_null().arg_true().cast(pl.Int64).to_numpy()

    def _codes(self, texts: Mapping[str, pl.Series]) -> Iterator[Ints]:
        """Yield the codes of each column; polars casts the columns of one frame in parallel."""
        by_length: dict[int, list[str]] = {}
        for name, values in texts.items():
            by_length.setdefault(len(values), []).append(name)
        categorical: dict[str, pl.Series] = {}
        for names in by_length.values():
            frame = pl.DataFrame([texts[name].alias(str(i)) for i, name in enumerate(names)])
            casts = (pl.col(str(i)).cast(self.columns[name].dictionary.dtype) for i, name in enumerate(names))
            categorical |= dict(zip(names, frame.select(casts), strict=True))
        for name in texts:
            yield self.columns[name].dictionary.codes(categorical[name])

    def _note_time_kind(self, block: Block, name: str) -> None:
        kind, origin = time_kind(block, name), f"{block.origin}: from row {block.first_row}"
        if self._time_kind is None:
            self._time_kind, self._origin = kind, origin
        _check_time_kind(origin, name, kind, self._time_kind)

    def _split_codes(self, block: Block, code: int) -> SplitCodes:
        if self.split.kind == "hash":
            return hash_splits(block, self.split)
        if self.split.column is not None:
            return read_split_column(block, self.split.column)
        return np.full(block.frame.height, code, np.uint8)


def training_blocks(spool: Spool, splits: SplitCodes) -> Iterator[npt.NDArray[Any]]:
    """Yield the training rows of a column that has one entry a row, block by block."""
    start = 0
    for block in spool.blocks():
        yield block[splits[start : start + len(block)] == 0]
        start += len(block)
