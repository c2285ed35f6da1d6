"""Raw tables as a stream of blocks: CSV, TSV, JSON lines, Parquet and Arrow files, and data frames.

Text may be compressed. A directory stands for all files below it, and a directory named KEY=VALUE adds the column KEY
to the rows in it. A row's number counts data rows from 1 within its file, header excluded.
"""

import hashlib
import io
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import numpy.typing as npt
import polars as pl

from recap_ctr.data.compression import UNREADABLE, named_errors, unpack
from recap_ctr.data.csv import (
    ARROW_STREAM,
    MAX_VALUE_BYTES,
    ColumnNames,
    TextOptions,
    parse_separator,
    read_text_blocks,
)
from recap_ctr.data.frames import flatten
from recap_ctr.data.input_files import JSON, PARQUET, SEPARATORS, TEXT, InputFile, expand
from recap_ctr.data.jsonl import json_columns, read_json_blocks
from recap_ctr.errors import InputError, did_you_mean
from recap_ctr.storage.hashes import fingerprint, sha256

BLOCK_ROWS = 1 << 17
MAX_SLICE_ROWS, SLICE_CELLS = 1 << 19, 1 << 24  # A Parquet file is decoded this much at a time.


@dataclass(frozen=True)
class Block:
    """Some rows in source order; `first_row` is the number of the first one, counted from 1."""

    frame: pl.DataFrame
    first_row: int
    origin: str
    """What errors call the file or table that the rows come from."""
    numbers: npt.NDArray[np.int64] | None = None
    """The numbers of the rows, where some were dropped; else they follow the first one."""

    def row(self, index: int) -> int:
        """Return the number of the row at `index`, as errors name it."""
        return self.first_row + index if self.numbers is None else int(self.numbers[index])

    def column(self, name: str, role: str) -> pl.Series:
        """Return the named column; if there is none, the error says its `role` and which columns there are."""
        if name not in self._columns:
            present = ", ".join(repr(column) for column in self.frame.columns[:12])
            more = f" and {self.frame.width - 12} more" if self.frame.width > 12 else ""
            suggestion = did_you_mean(name, self.frame.columns)
            fix = "rename the column, or correct the schema or --label"
            if self.frame.width == 1 and name in self.frame.columns[0]:
                fix = "say with --separator what separates the columns"
            raise InputError(
                f"{self.origin} has no column {name!r} ({role}){suggestion}\n  columns present: {present}{more}",
                fix=fix,
            )
        return self._columns[name]

    @cached_property
    def _columns(self) -> dict[str, pl.Series]:
        """Return the columns by name: looking one up in the frame would take time proportional to their number."""
        return {series.name: series for series in self.frame.get_columns()}


@dataclass(frozen=True)
class SourceFile:
    """What identifies a file's content."""

    name: str
    size: int
    modified_ns: int
    sha256: str

    @classmethod
    def of(cls, path: Path, partitions: Mapping[str, str | None] | None = None) -> "SourceFile":
        """Read the file at `path` and return what identifies it; columns that its directories add are content, too."""
        status = path.stat()
        digest = sha256(path)
        if partitions:
            digest = fingerprint({"sha256": digest, "partitions": dict(partitions)})
        return cls(path.name, status.st_size, status.st_mtime_ns, digest)


class Source(Protocol):
    """Where raw rows come from."""

    total_bytes: int
    columns: Sequence[str] | None
    """The user's column names for files without a header line."""
    separator: str | None
    """The user's separator of columns in text files."""
    notes: list[str]
    """What was noticed while reading, for the user to know."""

    def files(self) -> list[SourceFile]:
        """Return what identifies the content of the source."""
        ...

    def blocks(self) -> Iterator[tuple[Block, int]]:
        """Yield the blocks in source order, each with the bytes of the source that it takes."""
        ...


class FrameSource:
    """Rows that are in memory already."""

    def __init__(
        self, frame: pl.DataFrame, files: Sequence[SourceFile] = (), origin: str = "the data frame"
    ) -> None:
        self._frame, self._files, self._origin = frame, list(files), origin
        self.total_bytes = frame.height
        self.columns: Sequence[str] | None = None
        self.separator: str | None = None
        self.notes: list[str] = []

    def files(self) -> list[SourceFile]:
        """Return the files that the rows were made from, or else a hash of the rows under the table's name."""
        if self._files:
            return self._files
        digest = hashlib.sha256(repr(self._frame.schema).encode())
        for block, _ in self.blocks():
            # A category hashes as its code, which differs between frames with the same text.
            text = block.frame.with_columns(pl.col(pl.Categorical, pl.Enum).cast(pl.String))
            digest.update(text.hash_rows(0).to_numpy().tobytes())
        return [SourceFile(self._origin, self._frame.height, 0, digest.hexdigest())]

    def blocks(self) -> Iterator[tuple[Block, int]]:
        """Yield the rows in blocks; a row counts as one byte."""
        for start in range(0, self._frame.height, BLOCK_ROWS):
            part = self._frame.slice(start, BLOCK_ROWS)
            yield Block(part, start + 1, self._origin), part.height


class FileSource:
    """Rows of one or more files, in the order listed; `-` is standard input, a directory all files below it."""

    def __init__(
        self,
        patterns: Sequence[str | Path],
        columns: Sequence[str] | ColumnNames | None = None,
        separator: str | None = None,
    ) -> None:
        self._files = expand(patterns)
        self.paths = [file.path for file in self._files]
        names = columns if isinstance(columns, ColumnNames) or columns is None else ColumnNames(columns)
        self.columns = None if names is None else names.columns
        self.separator = None if separator is None else parse_separator(separator)
        self.notes: list[str] = []
        self.text_options = TextOptions(
            names, self.separator.encode() if self.separator else None, self._note
        )
        self.total_bytes = sum(path.stat().st_size for path in self.paths if path.is_file())

    def _note(self, text: str) -> None:
        """Keep the first note: in a directory of many files all others would say the same."""
        if not self.notes:
            self.notes.append(text)

    @property
    def is_stream(self) -> bool:
        """Return whether some of the rows can be read only once: from standard input or a pipe."""
        return not all(path.is_file() for path in self.paths)

    def files(self) -> list[SourceFile]:
        """Return what identifies each file; standard input and pipes are left out."""
        return [SourceFile.of(file.path, file.partitions) for file in self._files if file.path.is_file()]

    def stamps(self) -> list[tuple[int, int]]:
        """Return the size and modification time of each file, which change when somebody writes to it."""
        return [(path.stat().st_size, path.stat().st_mtime_ns) for path in self.paths if path.is_file()]

    def blocks(self) -> Iterator[tuple[Block, int]]:
        """Yield the rows of all files in blocks; refuse files without rows and values over 1 MiB."""
        for file in self._files:
            num_rows = 0
            for raw, size in self._read(file):
                frame = _add_partitions(flatten(raw, file.origin), file.partitions)
                block = Block(frame, num_rows + 1, file.origin)
                _check_lengths(block)
                num_rows += frame.height
                yield block, size
            if num_rows == 0:
                raise InputError(
                    f"{file.path} holds no rows", fix="check that the file was written completely"
                )

    def _read(self, file: InputFile) -> Iterator[tuple[pl.DataFrame, int]]:
        """Yield the rows of one file in blocks, each with the bytes that it takes in the file."""
        if str(file.path) == "-":
            yield from _read_stream(sys.stdin.buffer, file.origin, self.text_options)
        elif not file.path.is_file():
            with file.path.open("rb") as pipe:
                yield from _read_stream(pipe, file.origin, self.text_options)
        else:
            with named_errors(file.path):
                yield from self._read_file(file)

    def _read_file(self, file: InputFile) -> Iterator[tuple[pl.DataFrame, int]]:
        path, compression = file.path, file.compression
        if file.kind is TEXT:
            with path.open("rb") as packed, unpack(packed, compression, path) as stream:
                expected = SEPARATORS.get(file.suffix)
                yield from read_text_blocks(stream, packed, file.origin, expected, self.text_options)
        elif file.kind is JSON:
            with path.open("rb") as packed, unpack(packed, compression, path) as stream:
                tell = packed.tell if compression else None
                yield from read_json_blocks(stream, tell, file.origin, self._json_columns)
        elif compression:
            raise InputError(
                f"{path}: {file.kind} inside {compression} is not supported",
                fix="unpack it first; these formats compress on their own",
            )
        else:
            read_blocks = _parquet_blocks if file.kind is PARQUET else _table_blocks
            yield from read_blocks(_scan(path, file.kind), path.stat().st_size)

    @cached_property
    def _json_columns(self) -> pl.Schema:
        """Return the columns of all JSON lines: every key that some row has."""
        columns = pl.Schema()
        for file in self._files:
            if file.kind is JSON and file.path.is_file():
                with (
                    named_errors(file.path),
                    file.path.open("rb") as packed,
                    unpack(packed, file.compression, file.path) as stream,
                ):
                    columns = json_columns(stream, file.origin, columns)
        return columns


def _add_partitions(frame: pl.DataFrame, partitions: Mapping[str, str | None]) -> pl.DataFrame:
    """Add the columns of KEY=VALUE directories, as text, unless the file has them itself."""
    return frame.with_columns(
        pl.lit(value, pl.String).alias(name)
        for name, value in partitions.items()
        if name not in frame.columns
    )


RowFunction = Callable[[Block], pl.DataFrame]


class MappedSource(FileSource):
    """Rows of files, each block passed through a function.

    `start` makes that function when reading begins; it may read `lookup_files` first, such as tables to join with,
    which count as files of the source.
    """

    def __init__(
        self, source: FileSource, start: Callable[[], RowFunction], lookup_files: Sequence[Path] = ()
    ) -> None:
        super().__init__(source.paths, source.columns)
        self._start = start
        self._source, self._lookups = source, [FileSource([path]) for path in lookup_files]

    def files(self) -> list[SourceFile]:
        """Return what identifies each file, lookup files included."""
        return [file for source in (self._source, *self._lookups) for file in source.files()]

    def stamps(self) -> list[tuple[int, int]]:
        """Return the size and modification time of each file, lookup files included."""
        return [stamp for source in (self._source, *self._lookups) for stamp in source.stamps()]

    def blocks(self) -> Iterator[tuple[Block, int]]:
        """Yield the blocks of the files after the function was applied."""
        function = self._start()
        for block, size in self._source.blocks():
            yield replace(block, frame=function(block)), size


def _read_stream(source: BinaryIO, origin: str, text: TextOptions) -> Iterator[tuple[pl.DataFrame, int]]:
    """Yield the rows of a stream without a file name; its first bytes tell the format."""
    stream = source if isinstance(source, io.BufferedReader) else io.BufferedReader(source)  # type: ignore[type-var]
    magic = stream.peek(6)[:6]
    try:
        if magic.startswith((b"PAR1", b"ARROW1")):
            data = io.BytesIO(stream.read())
            if magic.startswith(b"PAR1"):
                yield from _parquet_blocks(pl.scan_parquet(data), 0)
            else:
                yield from _table_blocks(pl.scan_ipc(data), 0)
        elif magic.startswith(ARROW_STREAM):
            yield from _table_blocks(pl.read_ipc_stream(io.BytesIO(stream.read())).lazy(), 0)
        elif compression := {b"\x1f\x8b": ".gz", b"\x28\xb5": ".zst"}.get(magic[:2]):
            with unpack(stream, compression, Path(origin)) as unpacked:
                yield from _read_text_stream(unpacked, origin, text)
        else:
            yield from _read_text_stream(stream, origin, text)
    except UNREADABLE as error:
        raise InputError(f"{origin} can't be read: {error}", fix="check that it is complete") from None


def _read_text_stream(stream: Any, origin: str, text: TextOptions) -> Iterator[tuple[pl.DataFrame, int]]:
    """Yield the rows of a buffered stream of text: JSON lines, which are read as a whole, or else CSV or TSV."""
    if re.match(rb'\s*\{\s*["}]', stream.peek(64)):
        data = stream.read()
        columns = json_columns(io.BytesIO(data), origin, pl.Schema())
        yield from read_json_blocks(io.BytesIO(data), None, origin, columns)
    else:
        yield from read_text_blocks(stream, None, origin, None, text)


def _scan(path: Path, kind: str) -> pl.LazyFrame:
    if kind is PARQUET:
        return pl.scan_parquet(path, glob=False)
    with path.open("rb") as file:
        is_stream = file.read(4) == ARROW_STREAM
    # A stream has no table of contents, so it must be read as a whole.
    return pl.read_ipc_stream(path).lazy() if is_stream else pl.scan_ipc(path, glob=False)


def _table_blocks(lazy: pl.LazyFrame, size: int) -> Iterator[tuple[pl.DataFrame, int]]:
    """Yield the rows in blocks, each with its share of the `size` bytes of the file."""
    rows = lazy.select(pl.len()).collect().item()
    for frame in lazy.collect_batches(chunk_size=BLOCK_ROWS, maintain_order=True):
        if frame.height:
            yield frame, size * frame.height // max(rows, 1)


def _parquet_blocks(lazy: pl.LazyFrame, size: int) -> Iterator[tuple[pl.DataFrame, int]]:
    """Yield the blocks of a Parquet file in bounded memory: a batch needs a whole row group, a slice does not."""
    rows = lazy.select(pl.len()).collect().item()
    step = max(BLOCK_ROWS, min(MAX_SLICE_ROWS, SLICE_CELLS // max(len(lazy.collect_schema()), 1)))
    for start in range(0, rows, step):
        for frame in lazy.slice(start, step).collect().iter_slices(BLOCK_ROWS):
            yield frame, size * frame.height // rows


def _check_lengths(block: Block) -> None:
    """Refuse values of more than `MAX_VALUE_BYTES`."""
    text = block.frame.select(pl.col(pl.String))
    if text.width == 0 or text.height == 0:
        return
    longest = text.select(pl.all().str.len_bytes().max()).row(0)
    for name, length in zip(text.columns, longest, strict=True):
        if (length or 0) > MAX_VALUE_BYTES:
            row = block.row(int(text[name].str.len_bytes().arg_max() or 0))
            raise InputError(
                f"{block.origin}: row {row}, column {name!r}: a value of {length:,} bytes"
                f" (at most {MAX_VALUE_BYTES:,} are allowed)",
                fix="drop the column or shorten the value",
            )
