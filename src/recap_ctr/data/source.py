"""Raw tables as a stream of blocks: CSV, TSV, Parquet and Arrow files, plain or compressed, and data frames.

Text is cut into blocks at row ends and parsed one block at a time, every column as text, so that memory is bounded,
ids are never cast, and an error can name its row. A row's number counts data rows from 1, header excluded.
"""

import csv
import glob
import gzip
import hashlib
import io
import re
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

from recap_ctr.errors import InputError
from recap_ctr.storage.hashes import sha256

BLOCK_BYTES = 16 << 20
BLOCK_ROWS = 1 << 17
MAX_ROW_BYTES = 64 << 20
MAX_VALUE_BYTES = 1 << 20
TEXT, PARQUET, ARROW = "text", "parquet", "arrow"
FORMATS = {
    ".csv": TEXT, ".tsv": TEXT, ".txt": TEXT, ".tab": TEXT, ".dat": TEXT,
    ".parquet": PARQUET, ".pq": PARQUET,
    ".arrow": ARROW, ".ipc": ARROW, ".feather": ARROW,
}  # fmt: skip
ARROW_STREAM = b"\xff\xff\xff\xff"
FOREIGN = {  # first bytes of what is no text, whatever its name says: what it is, and what to do
    b"\x1f\x8b": ("gzip", "end its name in .gz"),
    b"\x28\xb5\x2f\xfd": ("zstd", "end its name in .zst"),
    b"PAR1\x15": ("Parquet", "end its name in .parquet"),
    b"ARROW1\0\0": ("Arrow", "end its name in .arrow"),
    ARROW_STREAM: ("an Arrow stream", "end its name in .arrow"),
    b"BZh91AY&SY": ("bzip2", "unpack it first, or pack it as .gz or .zst"),
    b"PK\x03\x04": ("zip", "unpack it first, or pack it as .gz or .zst"),
    b"\xfd7zXZ\0": ("xz", "unpack it first, or pack it as .gz or .zst"),
    b"Obj\x01": ("Avro", "save it as Parquet, Arrow or CSV"),
}
UNREADABLE = (
    *(pl.exceptions.PolarsError, pl.exceptions.PanicException),
    *(OSError, EOFError, zlib.error, zstandard.ZstdError),
)


@dataclass(frozen=True)
class Block:
    """Some rows in source order; `first_row` is the number of the first one, counted from 1."""

    frame: pl.DataFrame
    first_row: int
    origin: str


@dataclass(frozen=True)
class SourceFile:
    """What identifies a file's content."""

    name: str
    size: int
    modified_ns: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> "SourceFile":
        status = path.stat()
        return cls(path.name, status.st_size, status.st_mtime_ns, sha256(path))


class Source(Protocol):
    """Where raw rows come from."""

    total_bytes: int
    columns: Sequence[str] | None
    """Names given for files without a header line."""

    def files(self) -> list[SourceFile]: ...

    def blocks(self) -> Iterator[tuple[Block, int]]:
        """Blocks in source order, each with the bytes of the source it took."""
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
        """The files the rows were made of; without any, the rows themselves, lest other rows pass for them."""
        if self._files:
            return self._files
        digest = hashlib.sha256(repr(self._frame.schema).encode())
        for block, _ in self.blocks():
            # Categories hash as the codes that stand for them: the text is what counts.
            text = block.frame.with_columns(pl.col(pl.Categorical, pl.Enum).cast(pl.String))
            digest.update(text.hash_rows(0).to_numpy().tobytes())
        return [SourceFile(self._origin, self._frame.height, 0, digest.hexdigest())]

    def blocks(self) -> Iterator[tuple[Block, int]]:
        for start in range(0, self._frame.height, BLOCK_ROWS):
            part = self._frame.slice(start, BLOCK_ROWS)
            yield Block(part, start + 1, self._origin), part.height


@dataclass(frozen=True)
class Names:
    """The columns of text files that need no header line."""

    columns: Sequence[str]
    fields: frozenset[str] = frozenset()
    """A first line that holds all of them is a header nevertheless; without any, no line is."""
    optional: str | None = None
    """The one column that a file may lack: the label, of rows that wait for theirs."""

    def read(self, text: bytes, separator: bytes, origin: str) -> tuple[Sequence[str], bytes]:
        """The columns of a file that begins so, and its rows."""
        if not self.fields:
            return self.columns, text
        cells = _cells(text, separator)
        if self.fields.issubset(cells):
            return _header(text, separator, origin)
        if self.optional in self.columns and len(cells) == len(self.columns) - 1:
            return [name for name in self.columns if name != self.optional], text
        return self.columns, text


class FileSource:
    """Rows of one or more files, in the order given; `-` is standard input."""

    def __init__(self, patterns: Sequence[str | Path], columns: Sequence[str] | Names | None = None) -> None:
        self.paths = _expand(patterns)
        self._names = columns if isinstance(columns, Names) or columns is None else Names(columns)
        self.columns = None if self._names is None else self._names.columns
        self.total_bytes = sum(path.stat().st_size for path in self.paths if path.is_file())

    @property
    def is_stream(self) -> bool:
        """Whether some of it can be read only once: standard input, or a pipe."""
        return not all(path.is_file() for path in self.paths)

    def files(self) -> list[SourceFile]:
        return [SourceFile.of(path) for path in self.paths if path.is_file()]

    def stamps(self) -> list[tuple[int, int]]:
        """Size and time of each file: what moves when somebody writes to it."""
        return [(path.stat().st_size, path.stat().st_mtime_ns) for path in self.paths if path.is_file()]

    def blocks(self) -> Iterator[tuple[Block, int]]:
        for path in self.paths:
            rows = 0
            for frame, size in _read(path, self._names):
                origin = "standard input" if str(path) == "-" else path.name
                block = Block(frame, rows + 1, origin)
                _check_lengths(block)
                rows += frame.height
                yield block, size
            if rows == 0:
                raise InputError(f"{path} holds no rows", fix="check that the file was written completely")


Rows = Callable[[Block], pl.DataFrame]


class MappedSource(FileSource):
    """Rows of files, each block passed through a function.

    `start` makes that function when reading begins, from what lies `beside` the files if need be.
    """

    def __init__(self, source: FileSource, start: Callable[[], Rows], beside: Sequence[Path] = ()) -> None:
        super().__init__(source.paths, source.columns)
        self._source, self._start, self._beside = source, start, [FileSource([path]) for path in beside]

    def files(self) -> list[SourceFile]:
        return [file for source in (self._source, *self._beside) for file in source.files()]

    def stamps(self) -> list[tuple[int, int]]:
        return [stamp for source in (self._source, *self._beside) for stamp in source.stamps()]

    def blocks(self) -> Iterator[tuple[Block, int]]:
        rows = self._start()
        for block, size in self._source.blocks():
            yield replace(block, frame=rows(block)), size


def _expand(patterns: Sequence[str | Path]) -> list[Path]:
    paths: list[Path] = []
    for pattern in map(str, patterns):
        if pattern == "-":
            paths.append(Path("-"))
            continue
        found = (
            sorted(glob.glob(pattern))
            if glob.has_magic(pattern) and not Path(pattern).exists()
            else [pattern]
        )
        if not found:
            raise InputError(f"no file matches {pattern}")
        for name in found:
            if not Path(name).exists():
                raise InputError(f"no file {name}")
            if Path(name).is_dir():
                raise InputError(f"{name} is a directory", fix=f"give its files, such as '{name}/*.parquet'")
            paths.append(Path(name))
    if not paths:
        raise InputError("no source file given")
    return paths


def _read(path: Path, names: Names | None) -> Iterator[tuple[pl.DataFrame, int]]:
    if str(path) == "-":
        yield from _read_stream(sys.stdin.buffer, "standard input", names)
        return
    if not path.is_file():
        with path.open("rb") as pipe:
            yield from _read_stream(pipe, path.name, names)
        return
    suffixes = [suffix.lower() for suffix in path.suffixes]
    packed = suffixes[-1] if suffixes and suffixes[-1] in (".gz", ".zst") else None
    kind = FORMATS.get(suffixes[-2 if packed else -1] if len(suffixes) > bool(packed) else "", TEXT)
    try:
        if kind is TEXT:
            with path.open("rb") as raw, _unpack(raw, packed, path) as stream:
                yield from _text_blocks(stream, raw, path.name, _separator(path, packed), names)
        elif packed:
            fix = "unpack it first; these formats compress on their own"
            raise InputError(f"{path}: {kind} inside {packed} is not read", fix=fix)
        else:
            yield from _table_blocks(_scan(path, kind), path.stat().st_size)
    except PermissionError:
        raise  # told as such, not as damage
    except UNREADABLE as error:
        detail = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"{path} can't be read: {detail}", fix="check that the file is complete") from None


@contextmanager
def open_text(path: Path, encoding: str = "utf-8") -> Iterator[TextIO]:
    """A text file that is no table, plain or compressed, whatever its line ends."""
    packed = path.suffix if path.suffix in (".gz", ".zst") else None
    try:
        with path.open("rb") as raw, io.TextIOWrapper(_unpack(raw, packed, path), encoding) as text:
            yield text
    except PermissionError:
        raise
    except (UnicodeDecodeError, *UNREADABLE) as error:
        raise InputError(f"{path} can't be read: {error}", fix="check that the file is complete") from None


def _read_stream(source: BinaryIO, origin: str, names: Names | None) -> Iterator[tuple[pl.DataFrame, int]]:
    """What has no name to go by tells its format by its first bytes."""
    stream = source if isinstance(source, io.BufferedReader) else io.BufferedReader(source)  # type: ignore[type-var]
    magic = stream.peek(6)[:6]
    try:
        if magic.startswith((b"PAR1", b"ARROW1")):
            data = io.BytesIO(stream.read())
            lazy = pl.scan_parquet(data) if magic.startswith(b"PAR1") else pl.scan_ipc(data)
            yield from _table_blocks(lazy, 0)
        elif magic.startswith(ARROW_STREAM):
            yield from _table_blocks(pl.read_ipc_stream(io.BytesIO(stream.read())).lazy(), 0)
        elif packed := {b"\x1f\x8b": ".gz", b"\x28\xb5": ".zst"}.get(magic[:2]):
            with _unpack(stream, packed, Path(origin)) as unpacked:
                yield from _text_blocks(unpacked, None, origin, None, names)
        else:
            yield from _text_blocks(stream, None, origin, None, names)
    except UNREADABLE as error:
        raise InputError(f"{origin} can't be read: {error}", fix="check that it is complete") from None


def _scan(path: Path, kind: str) -> pl.LazyFrame:
    if kind is PARQUET:
        return pl.scan_parquet(path, glob=False)
    with path.open("rb") as file:
        stream = file.read(4) == ARROW_STREAM
    # A stream has no table of contents: it is read as a whole.
    return pl.read_ipc_stream(path).lazy() if stream else pl.scan_ipc(path, glob=False)


def _table_blocks(lazy: pl.LazyFrame, size: int) -> Iterator[tuple[pl.DataFrame, int]]:
    rows = lazy.select(pl.len()).collect().item()
    for frame in lazy.collect_batches(chunk_size=BLOCK_ROWS, maintain_order=True):
        if frame.height:
            yield frame, size * frame.height // max(rows, 1)


def _unpack(raw: BinaryIO, packed: str | None, path: Path) -> BinaryIO:
    if packed == ".gz":
        return gzip.GzipFile(fileobj=raw)  # type: ignore[return-value]
    if packed == ".zst":
        return io.BufferedReader(_Unzstd(raw))
    return path.open("rb")


class _Unzstd(io.RawIOBase):
    """A zstd stream, frame after frame; zstandard's own reader takes a file that was cut short for a whole one."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw, self._packed, self._text = raw, b"", b""
        self._frame: zstandard.ZstdDecompressionObj | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._text:
            # In small bites: a block of zstd may unpack to 32,000 times its size.
            packed = self._packed or self._raw.read(2048)
            if not packed:
                if self._frame is not None:
                    raise EOFError("Compressed file ended before the end-of-stream marker was reached")
                return 0
            self._frame = self._frame or zstandard.ZstdDecompressor().decompressobj()
            self._text, self._packed = self._frame.decompress(packed), b""
            if self._frame.eof:
                self._packed, self._frame = self._frame.unused_data, None
        size = min(len(buffer), len(self._text))
        buffer[:size], self._text = self._text[:size], self._text[size:]
        return size


def _separator(path: Path, packed: str | None) -> bytes | None:
    suffix = Path(path.stem).suffix if packed else path.suffix
    return {".csv": b",", ".tsv": b"\t", ".tab": b"\t", ".libsvm": b" "}.get(suffix.lower())


def _text_blocks(
    stream: BinaryIO,
    raw: BinaryIO | None,
    origin: str,
    separator: bytes | None,
    names: Names | None,
) -> Iterator[tuple[pl.DataFrame, int]]:
    rest, row, read_so_far = stream.read(BLOCK_BYTES), 1, 0
    while _first_row_end(rest) < 0 and len(rest) <= MAX_ROW_BYTES and (more := stream.read(BLOCK_BYTES)):
        rest += more
    for magic, (what, fix) in FOREIGN.items():
        if rest.startswith(magic):
            raise InputError(f"{origin} is {what}, not text", fix=fix)
    if rest.startswith(b"\xef\xbb\xbf"):
        rest = rest[3:]
    if separator is None:
        separator = b"\t" if b"\t" in rest.partition(b"\n")[0] else b","
    columns, rest = _header(rest, separator, origin) if names is None else names.read(rest, separator, origin)
    last = False
    while not last:
        more = stream.read(BLOCK_BYTES)
        last = not more
        end = len(rest) if last else max(_last_row_end(rest), 0)
        if len(columns) > 1 and end:
            # Empty lines at the end of a file are no rows, and where that is, only the next block tells.
            filled = len(rest[:end].rstrip(b"\r\n"))
            end = filled and (rest.find(b"\n", filled) + 1 or filled)
        if end == 0 and last:
            return
        if end == 0:  # not one whole row yet
            if len(rest) > MAX_ROW_BYTES:
                raise InputError(
                    f"{origin}: row {row} does not end within {MAX_ROW_BYTES >> 20} MiB",
                    fix="close the quote that opens there, or split the row",
                )
            rest += more
            continue
        text, rest = rest[:end], rest[end:] + more
        frame = _parse(text, columns, separator, origin, row)
        row += frame.height
        position = raw.tell() if raw is not None and not raw.closed else 0
        if raw is not None and position == 0:
            position = read_so_far + len(text)
        yield frame, max(position - read_so_far, 0)
        read_so_far = max(position, read_so_far)


def _header(text: bytes, separator: bytes, origin: str) -> tuple[list[str], bytes]:
    end = _first_row_end(text)
    if end < 0 and b"\n" in text:
        raise InputError(f"{origin}: a quote in the header line is not closed")
    line, rest = (text, b"") if end < 0 else (text[:end], text[end + 1 :])
    if not line.strip():
        raise InputError(f"{origin} is empty", fix="the first line must name the columns")
    try:
        decoded = io.StringIO(line.rstrip(b"\r").decode("utf-8"), newline="")
        names = next(csv.reader(decoded, delimiter=separator.decode()))
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(
            f"{origin}: the header line can't be read: {error}", fix="save the file as UTF-8"
        ) from None
    for other in (";", "|"):
        if len(names) == 1 and other in names[0]:
            raise InputError(
                f"{origin}: the columns seem to be separated by {other!r}",
                fix="separate them by commas or tabs",
            )
    for name in names:
        if names.count(name) > 1:
            raise InputError(
                f"{origin}: column {name!r} stands twice in the header", fix="rename one of them"
            )
    return names, rest


def _cells(text: bytes, separator: bytes) -> list[str]:
    """The first row, as far as it can be read."""
    end = _first_row_end(text)
    line = io.StringIO((text if end < 0 else text[:end]).rstrip(b"\r").decode("utf-8", "replace"), newline="")
    try:
        return next(csv.reader(line, delimiter=separator.decode()), [])
    except csv.Error:
        return []


def _first_row_end(text: bytes) -> int:
    """Where the line end of the first row stands (-1: nowhere): one with an even number of quotes before it."""
    end, odd = -1, 0
    while (after := text.find(b"\n", end + 1)) >= 0:
        odd ^= text.count(b'"', end + 1, after) & 1
        end = after
        if not odd:
            return end
    return -1


def _last_row_end(text: bytes) -> int:
    """Where the last whole row ends (-1: nowhere): a line end with an even number of quotes before it."""
    end = text.rfind(b"\n")
    odd = text.count(b'"', 0, end + 1) & 1
    while end >= 0 and odd:
        before = text.rfind(b"\n", 0, end)
        odd ^= text.count(b'"', before + 1, end + 1) & 1
        end = before
    return end + 1 if end >= 0 else -1


def _parse(
    text: bytes, columns: Sequence[str], separator: bytes, origin: str, first_row: int
) -> pl.DataFrame:
    try:
        frame = pl.read_csv(
            text, has_header=False, separator=separator.decode(), schema=dict.fromkeys(columns, pl.String)
        )
    except pl.exceptions.PolarsError as error:
        raise _diagnosis(text, columns, separator, origin, first_row, str(error)) from None
    # polars fills short rows with nulls; the count of separators outside quotes tells.
    bare = re.sub(rb'"[^"]*"', b"", text) if b'"' in text else text
    if bare.count(separator) != frame.height * (len(columns) - 1):
        raise _diagnosis(text, columns, separator, origin, first_row, "a row has too few fields")
    return frame


def _diagnosis(
    text: bytes, columns: Sequence[str], separator: bytes, origin: str, first_row: int, reason: str
) -> InputError:
    """Find the row that a block's parser stumbled over."""
    row = first_row
    try:
        decoded = text.decode("utf-8")
    except UnicodeDecodeError as error:
        row += _whole_rows(text[: error.start])
        bad = text[error.start : error.start + 4]
        return InputError(
            f"{origin}: row {row} is not valid UTF-8 (bytes {bad!r})", fix="save the file as UTF-8"
        )
    if text.count(b'"') & 1:
        return InputError(
            f"{origin}: row {row + _whole_rows(text)} opens a quote that nothing closes",
            fix='close it, or write "" for a quote inside a quoted value',
        )
    csv.field_size_limit(MAX_ROW_BYTES)
    try:
        for record in csv.reader(io.StringIO(decoded, newline=""), delimiter=separator.decode()):
            if len(record) != len(columns) and not (len(columns) == 1 and not record):
                return InputError(
                    f"{origin}: row {row} has {len(record)} fields, expected {len(columns)}",
                    fix="quote values that hold the separator, or repair the row",
                )
            row += 1
    except csv.Error as error:
        reason = str(error)
    return InputError(
        f"{origin}: rows from {first_row} on can't be parsed: {reason.splitlines()[0]}",
        fix='quote values that hold quotes or line ends, and write "" for a quote inside them',
    )


def _whole_rows(text: bytes) -> int:
    """Line ends with an even number of quotes before them: after the last one, a quote stays open, or no row ends."""
    rows = odd = 0
    for line in io.BytesIO(text):
        odd ^= line.count(b'"') & 1
        rows += line.endswith(b"\n") and not odd
    return rows


def _check_lengths(block: Block) -> None:
    text = block.frame.select(pl.col(pl.String))
    if text.width == 0 or text.height == 0:
        return
    longest = text.select(pl.all().str.len_bytes().max()).row(0)
    for name, length in zip(text.columns, longest, strict=True):
        if (length or 0) > MAX_VALUE_BYTES:
            row = block.first_row + int(text[name].str.len_bytes().arg_max() or 0)
            raise InputError(
                f"{block.origin}: row {row}, column {name!r}: a value of {length:,} bytes"
                f" (at most {MAX_VALUE_BYTES:,} are taken)",
                fix="drop the column or shorten the value",
            )


def as_frame(table: Any, columns: Sequence[str] | None = None) -> pl.DataFrame:
    """A polars frame of any table a Python user holds: polars, pandas, a numpy array, or a mapping of columns."""
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


def _series(name: str, values: Any, absent: Any = None) -> pl.Series:
    if values.dtype.kind in "biuf":
        return pl.Series(name, values)
    if values.dtype.kind == "M":
        return pl.Series(name, values.astype("datetime64[us]"))
    items = values.tolist()
    if absent is None:
        absent = [item is None or item != item for item in items]
    items = [item.tolist() if isinstance(item, np.ndarray) else item for item in items]
    items = [None if gone else item for gone, item in zip(absent, items, strict=True)]
    kinds = {type(item) for item in items if item is not None}
    if len(kinds) > 1 and not kinds <= {int, float, bool}:
        items = [None if item is None else str(item) for item in items]
    return pl.Series(name, items, strict=False)


def _refuse_duplicates(names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"column {name!r} stands twice in the table", fix="rename one of them")
