"""The first pass of preparation: each column of the source, as provisional codes in a file.

The source is read once, and every row checked. What a split or a vocabulary needs is known only at the end, so codes
are provisional: values are numbered as they appear.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import polars as pl

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
from recap_ctr.data.split import Split, SplitCodes, read_split_column
from recap_ctr.data.text import as_text
from recap_ctr.errors import InputError
from recap_ctr.jobs.progress import meter
from recap_ctr.schema import Field, Schema
from recap_ctr.storage.files import append_file, new_file

SPOOL_ROWS = 1 << 17
MAX_VALUES = 2_000_000
"""Distinct values of a field that memory holds while rows are read; more are kept on disk."""
Counted = Mapping[str, Literal["cells", "pieces"]]
"""Multi fields whose vocabulary is not counted over the values that a row keeps; see `Preparation.counted`."""


class Spool:
    """One column of the first pass on disk, read back in blocks of `SPOOL_ROWS` rows.

    Its file is open only while it is written to or read: a table may have more columns than a process may have files.
    """

    def __init__(self, path: Path, dtype: npt.DTypeLike, width: int = 1) -> None:
        self.path, self.dtype, self.width = path, np.dtype(dtype), width
        self._bytes = 0
        new_file(path).close()

    def append(self, values: npt.NDArray[Any]) -> None:
        """Write the values of further rows."""
        data = np.ascontiguousarray(values, self.dtype)
        with append_file(self.path) as file:
            file.write(data.data)
        self._bytes += data.nbytes

    def blocks(self) -> Iterator[npt.NDArray[Any]]:
        """Read the column from its beginning; refuse to go on if the disk gives back less than was written."""
        size = SPOOL_ROWS * self.width * self.dtype.itemsize
        for start in range(0, self._bytes, size):
            with self.path.open("rb") as file:
                file.seek(start)
                data = file.read(min(size, self._bytes - start))
            if len(data) < min(size, self._bytes - start):
                raise InputError(
                    f"{self.path} is shorter than it was written: {start + len(data):,} of {self._bytes:,} bytes",
                    fix="check the disk, then run the same command again",
                )
            block = np.frombuffer(data, self.dtype)
            yield block if self.width == 1 else block.reshape(-1, self.width)

    def take(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Return the values of the rows at `positions`."""
        column = np.memmap(self.path, self.dtype, "r")
        return np.array(column[positions] if self.width == 1 else column.reshape(-1, self.width)[positions])


class Dictionary:
    """Text values to codes in no particular order, growing from block to block.

    Memory holds about `max_values` values. Beyond that they go to disk, and the dictionary starts empty again; from
    then on, a value may have several codes.
    """

    def __init__(self, path: Path | None = None, max_values: int | None = None) -> None:
        self.num_values = 0
        """How many codes there are."""
        self._path, self._max_values = path, max_values
        self._spilled: list[Path] = []
        self._clear()

    def _clear(self) -> None:
        self.dtype = pl.Categorical(pl.Categories.random())
        self._first_code = self.num_values
        self._alive: pl.Series | None = None  # polars forgets categories that no series holds

    @property
    def is_spilled(self) -> bool:
        """Whether some values went to disk."""
        return bool(self._spilled)

    def codes(self, categorical: pl.Series) -> Ints:
        """Return the codes of a series that was cast to `dtype`."""
        self._alive = categorical
        codes = categorical.to_physical().cast(pl.Int32) + self._first_code
        if codes.count():
            self.num_values = max(self.num_values, int(codes.max() or 0) + 1)  # type: ignore[arg-type]
        if self._max_values is not None and self.num_values - self._first_code > self._max_values:
            self._spill()
        return codes.fill_null(MISSING_CODE).to_numpy()

    def values(self) -> pl.Series:
        """Return the values in memory, in the order of their codes."""
        if self.num_values == self._first_code:
            return pl.Series("value", [], dtype=pl.String)
        codes = pl.Series("value", np.arange(self.num_values - self._first_code, dtype=np.uint32))
        return codes.cat.to(self.dtype).cast(pl.String)

    def _in_memory(self) -> pl.DataFrame:
        """Return the values in memory with their codes, by rising hash."""
        values = self.values()
        codes = np.arange(self._first_code, self.num_values)
        return pl.DataFrame({"hash": values.hash(0), "code": codes, "value": values}).sort("hash")

    def _spill(self) -> None:
        assert self._path is not None
        path = self._path.with_name(f"{self._path.name}-{len(self._spilled):04d}.arrow")
        with new_file(path) as file:
            self._in_memory().write_ipc(file)
        self._spilled.append(path)
        self._clear()

    def parts(self) -> Iterator[pl.DataFrame]:
        """Yield all values with their codes, columns `value` and `code`, as many at a time as memory may hold."""
        for path in self._spilled:
            yield pl.read_ipc(path, columns=["code", "value"])
        yield self._in_memory().select("code", "value")

    def first_codes(self) -> Ints | None:
        """Return the first code of the value of each code; None if every value has one code only."""
        if not self.is_spilled:
            return None
        first = np.arange(self.num_values, dtype=np.int32)
        for part in self.ranges():
            codes = part["code"].to_numpy()
            first[codes] = part.select(pl.col("code").min().over("value"))["code"].to_numpy()
        return first

    def ranges(self) -> Iterator[pl.DataFrame]:
        """Yield the same so that all codes of a value come together."""
        tables = [pl.scan_ipc(path, glob=False) for path in self._spilled]
        tables.append(self._in_memory().lazy())
        bounds = np.linspace(0, 2.0**64, len(tables) + 1)[1:-1].astype(np.uint64)
        cuts = [
            [0, *np.searchsorted(hashes, bounds).tolist(), len(hashes)]
            for hashes in (table.select("hash").collect()["hash"].to_numpy() for table in tables)
        ]
        for at in range(len(tables)):
            slices = (
                table.slice(cut[at], cut[at + 1] - cut[at]).select("code", "value")
                for table, cut in zip(tables, cuts, strict=True)
            )
            yield pl.concat(part.collect() for part in slices)


class SpooledRows:
    """All rows of the sources in the files of a directory, one `Spool` a column.

    Columns are named after roles (`label`, `split`, `weight`, `time`, `group`) or, with a prefix that no role has,
    after fields: `field:NAME`. A field of `counted` also has `counted:NAME`, what its vocabulary counts, and
    `counted rows:NAME`, the rows these values belong to.
    """

    def __init__(
        self,
        schema: Schema,
        split: Split,
        counted: Counted,
        directory: Path,
        max_values: int = MAX_VALUES,
    ) -> None:
        self.schema, self.counted, self._max_values = schema, counted, max_values
        self._split = split
        self.num_rows = self.num_unlabelled = 0
        self.columns: dict[str, Spool] = {}
        self.dictionaries: dict[str, Dictionary] = {}
        self.time_kind: str | None = None
        """What the time column holds, "dates" or "numbers", if there is one."""
        self._directory = directory

    def read(
        self, sources: Mapping[str, Source], *, labelled_only: bool = False, quiet: bool = False
    ) -> None:
        """Write the rows of the sources, which are named `all` or after the splits, to the directory.

        With `labelled_only` rows without a label are left out and counted; otherwise they are an error.
        """
        total = sum(source.total_bytes for source in sources.values())
        with meter("preparing", total, "rows", quiet=quiet) as shown:
            self._open()
            for name, source in sources.items():
                code = SPLITS.index(name) if name in SPLITS else 0
                for whole, size in source.blocks():
                    block = drop_unlabelled(whole, self.schema.label) if labelled_only else whole
                    if block.frame.height:
                        self._write(block, code)
                    self.num_rows += block.frame.height
                    self.num_unlabelled += whole.frame.height - block.frame.height
                    shown.advance(whole.frame.height, size)
        if self.num_rows == 0:
            raise InputError("the source holds no rows")

    def spilled_fields(self) -> list[str]:
        """Return the fields with more values than memory may hold."""
        spilled = (name.partition(":")[2] for name, values in self.dictionaries.items() if values.is_spilled)
        return list(dict.fromkeys(spilled))

    def _open(self) -> None:
        def add(name: str, dtype: npt.DTypeLike, width: int = 1) -> None:
            self.columns[name] = Spool(self._directory / f"{len(self.columns):04d}", dtype, width)

        def add_dictionary(name: str) -> None:
            self.dictionaries[name] = Dictionary(self.columns[name].path, self._max_values)

        for field in self.schema.fields:
            if field.is_value or field.transform == "quantiles":
                add(f"field:{field.name}", np.float64)
            else:
                add(f"field:{field.name}", np.int32, field.width)
                if not field.hash_buckets:
                    add_dictionary(f"field:{field.name}")
            if field.name in self.counted:
                add(f"counted:{field.name}", np.int32)
                add(f"counted rows:{field.name}", np.int64)
                add_dictionary(f"counted:{field.name}")
        add("label", np.uint8)
        add("split", np.uint8)
        if self.schema.weight:
            add("weight", np.float32)
        if self.schema.time:
            add("time", np.float64)
        if self.schema.group:
            add("group", np.int32)
            self.dictionaries["group"] = Dictionary()

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
        schema = self.schema
        self.columns["label"].append(read_labels(block, schema.label, schema.positive, schema.negative))
        if self.schema.weight:
            self.columns["weight"].append(read_weights(block, self.schema.weight))
        if self.schema.time:
            self._check_time_kind(block, self.schema.time)
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
            self.columns[f"counted rows:{field.name}"].append(rows + self.num_rows)

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
            casts = (pl.col(str(i)).cast(self.dictionaries[name].dtype) for i, name in enumerate(names))
            categorical |= dict(zip(names, frame.select(casts), strict=True))
        for name in texts:
            yield self.dictionaries[name].codes(categorical[name])

    def _check_time_kind(self, block: Block, name: str) -> None:
        kind = time_kind(block, name)
        if self.time_kind not in (None, kind):
            raise InputError(
                f"{block.origin}: from row {block.first_row} on the time {name!r} holds {kind},"
                f" before that {self.time_kind}",
                fix="write all times in one way",
            )
        self.time_kind = kind

    def _split_codes(self, block: Block, code: int) -> SplitCodes:
        if self._split.column is not None:
            return read_split_column(block, self._split.column)
        return np.full(block.frame.height, code, np.uint8)


def training_blocks(spool: Spool, splits: SplitCodes) -> Iterator[npt.NDArray[Any]]:
    """Yield the training rows of a column that has one entry a row, block by block."""
    start = 0
    for block in spool.blocks():
        yield block[splits[start : start + len(block)] == 0]
        start += len(block)


def counted_training_blocks(values: Spool, rows: Spool, splits: SplitCodes) -> Iterator[npt.NDArray[Any]]:
    """Yield the training values of a column of which each entry says its row in the column `rows`."""
    for block, block_rows in zip(values.blocks(), rows.blocks(), strict=True):
        yield block[splits[block_rows] == 0]
