"""Raw tables as a stream of blocks: CSV, TSV, Parquet and Arrow files, plain or compressed, and data frames.

A row's number counts data rows from 1 within its file, header excluded.
"""

import glob
import gzip
import hashlib
import io
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TextIO

import numpy as np
import polars as pl
import zstandard

from recap_ctr.data.csv import ARROW_STREAM, ColumnNames, read_text_blocks
from recap_ctr.errors import InputError, did_you_mean
from recap_ctr.storage.hashes import sha256

BLOCK_ROWS = 1 << 17
MAX_VALUE_BYTES = 1 << 20
TEXT, PARQUET, ARROW = "text", "parquet", "arrow"
FORMATS = {
    **dict.fromkeys((".csv", ".tsv", ".txt", ".tab", ".dat"), TEXT),
    **dict.fromkeys((".parquet", ".pq"), PARQUET),
    **dict.fromkeys((".arrow", ".ipc", ".feather"), ARROW),
}
COMPRESSIONS = (".gz", ".zst")
SEPARATORS = {".csv": b",", ".tsv": b"\t", ".tab": b"\t", ".libsvm": b" "}
UNREADABLE = (
    *(pl.exceptions.PolarsError, pl.exceptions.PanicException),
    *(OSError, EOFError, zlib.error, zstandard.ZstdError),
)
"""What reading a damaged file may raise."""


@dataclass(frozen=True)
class Block:
    """Some rows in source order; `first_row` is the number of the first one, counted from 1."""

    frame: pl.DataFrame
    first_row: int
    origin: str
    """What errors call the file or table that the rows come from."""

    def column(self, name: str, role: str) -> pl.Series:
        """Return the named column; if there is none, the error says its `role` and which columns there are."""
        if name not in self.frame.columns:
            present = ", ".join(repr(column) for column in self.frame.columns[:12])
            more = f" and {self.frame.width - 12} more" if self.frame.width > 12 else ""
            suggestion = did_you_mean(name, self.frame.columns)
            raise InputError(
                f"{self.origin} has no column {name!r} ({role}){suggestion}\n  columns present: {present}{more}",
                fix="rename the column, or correct the schema or --label",
            )
        return self.frame[name]


@dataclass(frozen=True)
class SourceFile:
    """What identifies a file's content."""

    name: str
    size: int
    modified_ns: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> "SourceFile":
        """Read the file at `path` and return what identifies it."""
        status = path.stat()
        return cls(path.name, status.st_size, status.st_mtime_ns, sha256(path))


class Source(Protocol):
    """Where raw rows come from."""

    total_bytes: int
    columns: Sequence[str] | None
    """The user's column names for files without a header line."""

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
    """Rows of one or more files, in the order listed; `-` is standard input."""

    def __init__(
        self, patterns: Sequence[str | Path], columns: Sequence[str] | ColumnNames | None = None
    ) -> None:
        self.paths = _expand(patterns)
        self._names = columns if isinstance(columns, ColumnNames) or columns is None else ColumnNames(columns)
        self.columns = None if self._names is None else self._names.columns
        self.total_bytes = sum(path.stat().st_size for path in self.paths if path.is_file())

    @property
    def is_stream(self) -> bool:
        """Whether some of the rows can be read only once: from standard input or a pipe."""
        return not all(path.is_file() for path in self.paths)

    def files(self) -> list[SourceFile]:
        """Return what identifies each file; standard input and pipes are left out."""
        return [SourceFile.of(path) for path in self.paths if path.is_file()]

    def stamps(self) -> list[tuple[int, int]]:
        """Return the size and modification time of each file, which change when somebody writes to it."""
        return [(path.stat().st_size, path.stat().st_mtime_ns) for path in self.paths if path.is_file()]

    def blocks(self) -> Iterator[tuple[Block, int]]:
        """Yield the rows of all files in blocks; refuse files without rows and values over 1 MiB."""
        for path in self.paths:
            num_rows = 0
            for frame, size in _read(path, self._names):
                origin = "standard input" if str(path) == "-" else path.name
                block = Block(frame, num_rows + 1, origin)
                _check_lengths(block)
                num_rows += frame.height
                yield block, size
            if num_rows == 0:
                raise InputError(f"{path} holds no rows", fix="check that the file was written completely")


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


def _expand(patterns: Sequence[str | Path]) -> list[Path]:
    """Return the files that the patterns name, those of one pattern sorted."""
    paths: list[Path] = []
    for pattern in map(str, patterns):
        if pattern == "-":
            paths.append(Path("-"))
            continue
        is_pattern = glob.has_magic(pattern) and not Path(pattern).exists()
        names = sorted(glob.glob(pattern)) if is_pattern else [pattern]
        if not names:
            raise InputError(f"no file matches {pattern}")
        for name in names:
            if not Path(name).exists():
                raise InputError(f"no file {name}")
            if Path(name).is_dir():
                raise InputError(f"{name} is a directory", fix=f"name its files, such as '{name}/*.parquet'")
            paths.append(Path(name))
    if not paths:
        raise InputError("no source file given")
    return paths


def _read(path: Path, names: ColumnNames | None) -> Iterator[tuple[pl.DataFrame, int]]:
    """Yield the rows of one file in blocks, each with the bytes that it takes in the file."""
    if str(path) == "-":
        yield from _read_stream(sys.stdin.buffer, "standard input", names)
        return
    if not path.is_file():
        with path.open("rb") as pipe:
            yield from _read_stream(pipe, path.name, names)
        return
    *_, suffix, last = ("", "", *(suffix.lower() for suffix in path.suffixes))
    compression = last if last in COMPRESSIONS else None
    suffix = suffix if compression else last
    kind = FORMATS.get(suffix, TEXT)
    try:
        if kind is TEXT:
            with path.open("rb") as file, _unpack(file, compression, path) as stream:
                yield from read_text_blocks(stream, file, path.name, SEPARATORS.get(suffix), names)
        elif compression:
            raise InputError(
                f"{path}: {kind} inside {compression} is not supported",
                fix="unpack it first; these formats compress on their own",
            )
        else:
            yield from _table_blocks(_scan(path, kind), path.stat().st_size)
    except PermissionError:
        raise  # not a damaged file
    except UNREADABLE as error:
        detail = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"{path} can't be read: {detail}", fix="check that the file is complete") from None


@contextmanager
def open_text(path: Path, encoding: str = "utf-8") -> Iterator[TextIO]:
    """Open a text file that is not a table, plain or compressed, with any line ends."""
    compression = path.suffix if path.suffix in COMPRESSIONS else None
    try:
        with path.open("rb") as file, io.TextIOWrapper(_unpack(file, compression, path), encoding) as text:
            yield text
    except PermissionError:
        raise
    except (UnicodeDecodeError, *UNREADABLE) as error:
        raise InputError(f"{path} can't be read: {error}", fix="check that the file is complete") from None


def _read_stream(
    source: BinaryIO, origin: str, names: ColumnNames | None
) -> Iterator[tuple[pl.DataFrame, int]]:
    """Yield the rows of a stream without a file name; its first bytes tell the format."""
    stream = source if isinstance(source, io.BufferedReader) else io.BufferedReader(source)  # type: ignore[type-var]
    magic = stream.peek(6)[:6]
    try:
        if magic.startswith((b"PAR1", b"ARROW1")):
            data = io.BytesIO(stream.read())
            lazy = pl.scan_parquet(data) if magic.startswith(b"PAR1") else pl.scan_ipc(data)
            yield from _table_blocks(lazy, 0)
        elif magic.startswith(ARROW_STREAM):
            yield from _table_blocks(pl.read_ipc_stream(io.BytesIO(stream.read())).lazy(), 0)
        elif compression := {b"\x1f\x8b": ".gz", b"\x28\xb5": ".zst"}.get(magic[:2]):
            with _unpack(stream, compression, Path(origin)) as unpacked:
                yield from read_text_blocks(unpacked, None, origin, None, names)
        else:
            yield from read_text_blocks(stream, None, origin, None, names)
    except UNREADABLE as error:
        raise InputError(f"{origin} can't be read: {error}", fix="check that it is complete") from None


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


def _unpack(file: BinaryIO, compression: str | None, path: Path) -> BinaryIO:
    """Return a stream of the bytes inside `file`, which lies at `path`."""
    if compression == ".gz":
        return gzip.GzipFile(fileobj=file)  # type: ignore[return-value]
    if compression == ".zst":
        return io.BufferedReader(_ZstdStream(file))
    return path.open("rb")


class _ZstdStream(io.RawIOBase):
    """A zstd stream, frame after frame; zstandard's own reader does not notice that a file was cut short."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw, self._packed, self._unpacked = raw, b"", b""
        self._frame: zstandard.ZstdDecompressionObj | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._unpacked:
            # Small reads bound memory, for a block of zstd may unpack to 32,000 times its size.
            packed = self._packed or self._raw.read(2048)
            if not packed:
                if self._frame is not None:
                    raise EOFError("Compressed file ended before the end-of-stream marker was reached")
                return 0
            self._frame = self._frame or zstandard.ZstdDecompressor().decompressobj()
            self._unpacked, self._packed = self._frame.decompress(packed), b""
            if self._frame.eof:
                self._packed, self._frame = self._frame.unused_data, None
        size = min(len(buffer), len(self._unpacked))
        buffer[:size], self._unpacked = self._unpacked[:size], self._unpacked[size:]
        return size


def _check_lengths(block: Block) -> None:
    """Refuse values of more than `MAX_VALUE_BYTES`."""
    text = block.frame.select(pl.col(pl.String))
    if text.width == 0 or text.height == 0:
        return
    longest = text.select(pl.all().str.len_bytes().max()).row(0)
    for name, length in zip(text.columns, longest, strict=True):
        if (length or 0) > MAX_VALUE_BYTES:
            row = block.first_row + int(text[name].str.len_bytes().arg_max() or 0)
            raise InputError(
                f"{block.origin}: row {row}, column {name!r}: a value of {length:,} bytes"
                f" (at most {MAX_VALUE_BYTES:,} are allowed)",
                fix="drop the column or shorten the value",
            )


def as_frame(table: Any, columns: Sequence[str] | None = None) -> pl.DataFrame:
    """Return a table as a polars frame: a polars or pandas frame, a numpy array, or a mapping of columns.

    `columns` names the columns of an array.
    """
    if isinstance(table, pl.DataFrame):
        return table
    if isinstance(table, pl.LazyFrame):
        return table.collect()
    if hasattr(table, "iloc") and hasattr(table, "columns"):  # pandas, without importing it
        names = [str(name) for name in table.columns]
        _refuse_duplicates(names)
        return pl.DataFrame([_pandas_series(name, table.iloc[:, i]) for i, name in enumerate(names)])
    if isinstance(table, dict):
        return pl.DataFrame(table)
    if hasattr(table, "ndim") and hasattr(table, "dtype"):
        if table.ndim != 2:
            raise InputError(
                f"Expected 2D array, got {table.ndim}D array instead", fix="reshape it to rows × columns"
            )
        names = list(columns) if columns is not None else [f"x{i}" for i in range(table.shape[1])]
        return pl.DataFrame([_series(name, table[:, i]) for i, name in enumerate(names)])
    raise InputError(f"can't read rows from {type(table).__name__}", fix="pass a polars or pandas data frame")


def _pandas_series(name: str, column: Any) -> pl.Series:
    # Of pandas' own types (nullable integers, strings, categories) only objects keep every value exact.
    values = column.to_numpy(dtype=None if isinstance(column.dtype, np.dtype) else object)
    return _series(name, values, column.isna().to_numpy())


def _series(name: str, values: Any, is_missing: Any = None) -> pl.Series:
    """Return a numpy array as a series; objects of different types become text."""
    if values.dtype.kind in "biuf":
        return pl.Series(name, values)
    if values.dtype.kind == "M":
        return pl.Series(name, values.astype("datetime64[us]"))
    items = values.tolist()
    if is_missing is None:
        is_missing = [item is None or item != item for item in items]
    items = [item.tolist() if isinstance(item, np.ndarray) else item for item in items]
    items = [None if missing else item for missing, item in zip(is_missing, items, strict=True)]
    kinds = {type(item) for item in items if item is not None}
    if len(kinds) > 1 and not kinds <= {int, float, bool}:
        items = [None if item is None else str(item) for item in items]
    return pl.Series(name, items, strict=False)


def _refuse_duplicates(names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"column {name!r} appears twice in the table", fix="rename one of them")
