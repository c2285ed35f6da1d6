"""Text tables, read block by block: CSV, TSV and libsvm files, with a header line or with column names given.

Text is cut into blocks at row ends and parsed one block at a time, every column as text, so that memory is bounded,
ids are never cast, and an error can name its row.
"""

import csv
import io
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import polars as pl
from pydantic import NonNegativeInt, PositiveInt

from recap_ctr.config import Frozen
from recap_ctr.errors import InputError
from recap_ctr.schema import first_repeated

BLOCK_BYTES = 16 << 20
MAX_HEADER_BYTES = 16 << 20
MAX_ROW_BYTES = 64 << 20
MAX_VALUE_BYTES = 1 << 20
SCANNED_BYTES = 1 << 20  # The search for row ends looks at this many bytes at a time.
ARROW_STREAM = b"\xff\xff\xff\xff"
SEPARATOR_NAMES = {b",": "commas", b"\t": "tabs", b";": "semicolons", b"|": "bars"}
"""Separators that are noticed in a header line, with what messages call them."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_PACK_AGAIN = "unpack it first, or pack it as .gz or .zst"
_OTHER_FORMATS = {  # the first bytes of files that are not text: the format, and what to do
    b"\x1f\x8b": ("gzip", "end its name in .gz"),
    b"\x28\xb5\x2f\xfd": ("zstd", "end its name in .zst"),
    b"PAR1\x15": ("Parquet", "end its name in .parquet"),
    b"ARROW1\0\0": ("Arrow", "end its name in .arrow"),
    ARROW_STREAM: ("an Arrow stream", "end its name in .arrow"),
    b"BZh91AY&SY": ("bzip2", _PACK_AGAIN),
    b"PK\x03\x04": ("zip", _PACK_AGAIN),
    b"\xfd7zXZ\0": ("xz", _PACK_AGAIN),
    b"Obj\x01": ("Avro", "save it as Parquet, Arrow or CSV"),
}


@dataclass(frozen=True)
class ColumnNames:
    """The column names of text files that need no header line."""

    columns: Sequence[str]
    fields: frozenset[str] = frozenset()
    """A first line that holds all of these is a header nevertheless. If empty, no line is a header."""
    optional: str | None = None
    """The one column that a file may lack: the label, in rows to be scored."""

    def split_header(self, text: bytes, separator: bytes, origin: str) -> tuple[Sequence[str], bytes]:
        """Return the columns of a file that begins with `text`, and `text` without its header line."""
        if not self.fields:
            return self.columns, text
        cells = _first_row(text, separator)
        if self.fields.issubset(cells):
            return _split_header(text, separator, origin)
        if self.optional in self.columns and len(cells) == len(self.columns) - 1:
            return [name for name in self.columns if name != self.optional], text
        return self.columns, text


@dataclass(frozen=True)
class TextOptions:
    """What a user says about text files; `note` is called with what was noticed in them."""

    names: ColumnNames | None = None
    separator: bytes | None = None
    """It applies to files whose first line holds it; the separator of other files is found in their first line."""
    note: Callable[[str], None] = lambda _: None


def parse_separator(text: str) -> str:
    r"""Return a separator as users write it: one character, or \t or tab for a tab.

    >>> parse_separator("tab"), parse_separator(";")
    ('\t', ';')
    """
    separator = "\t" if text.lower() in ("tab", "\\t") else text
    if len(separator) != 1 or not separator.isascii() or separator in '"\r\n\0':
        raise InputError(
            f"--separator {text!r} can't separate columns",
            fix="give one character, such as ';' or '|', or tab",
        )
    return separator


@dataclass(frozen=True)
class _Table:
    """How the rows of one text table are to be parsed, and what errors call it."""

    columns: Sequence[str]
    separator: bytes
    origin: str

    def parse(self, text: bytes, first_row: int) -> pl.DataFrame:
        """Parse whole rows, numbered from `first_row`."""
        schema = dict.fromkeys(self.columns, pl.String)
        try:
            frame = pl.read_csv(text, has_header=False, separator=self.separator.decode(), schema=schema)
        except pl.exceptions.PolarsError as error:
            raise self._diagnose(text, first_row, str(error)) from None
        # polars fills short rows with nulls, so separators outside quotes are counted.
        unquoted = re.sub(rb'"[^"]*"', b"", text) if b'"' in text else text
        if unquoted.count(self.separator) != frame.height * (len(self.columns) - 1):
            raise self._diagnose(text, first_row, "a row has too few fields")
        return frame

    def _diagnose(self, text: bytes, first_row: int, reason: str) -> InputError:
        """Return an error that names the row at which parsing failed."""
        row = first_row
        try:
            decoded = text.decode("utf-8")
        except UnicodeDecodeError as error:
            row += _count_rows(text[: error.start])
            invalid = text[error.start : error.start + 4]
            return InputError(
                f"{self.origin}: row {row} is not valid UTF-8 (bytes {invalid!r})",
                fix="save the file as UTF-8",
            )
        if text.count(b'"') & 1:
            return InputError(
                f"{self.origin}: row {row + _count_rows(text)} opens a quote that is never closed",
                fix='close it, or write "" for a quote inside a quoted value',
            )
        csv.field_size_limit(MAX_ROW_BYTES)
        try:
            for record in csv.reader(io.StringIO(decoded, newline=""), delimiter=self.separator.decode()):
                if len(record) != len(self.columns) and not (len(self.columns) == 1 and not record):
                    return InputError(
                        f"{self.origin}: row {row} has {len(record)} fields, expected {len(self.columns)}",
                        fix="quote values that hold the separator, or repair the row",
                    )
                row += 1
        except csv.Error as error:
            reason = str(error)
        return InputError(
            f"{self.origin}: rows from {first_row} on can't be parsed: {reason.splitlines()[0]}",
            fix='quote values that hold quotes or line ends, and write "" for a quote inside them',
        )


def read_text_blocks(
    stream: BinaryIO,
    file: BinaryIO | None,
    origin: str,
    expected: bytes | None,
    options: TextOptions,
) -> Iterator[tuple[pl.DataFrame, int]]:
    """Yield the rows of a text table in blocks, each with the bytes that it takes in the source.

    `file` is the possibly compressed file behind `stream`; its position tells the bytes. `expected` is the separator
    that the file's name implies; without one the first line decides between tab and comma.
    """
    table, text = _open_table(stream, origin, expected, options)
    yield from _read_rows(stream, file, table, text, 1)


def _read_rows(
    stream: "BinaryIO | _Bytes", file: BinaryIO | None, table: _Table, text: bytes, first_row: int
) -> Iterator[tuple[pl.DataFrame, int]]:
    """Yield the rows in `text` and then in `stream`, numbered from `first_row`."""
    origin, position = table.origin, 0
    at_end = False
    while not at_end:
        following = stream.read(BLOCK_BYTES)
        at_end = not following
        end = _end_of_rows(text, at_end, len(table.columns))
        if end == 0 and at_end:
            return
        if end == 0:  # not one whole row yet
            if len(text) - text.rfind(b'"') > MAX_VALUE_BYTES and text.count(b'"') & 1:
                raise InputError(
                    f"{origin}: row {first_row} opens a quote that is not closed within {MAX_VALUE_BYTES >> 20} MiB",
                    fix='close it, or write "" for a quote inside a quoted value',
                )
            if len(text) > MAX_ROW_BYTES:
                raise InputError(
                    f"{origin}: row {first_row} does not end within {MAX_ROW_BYTES >> 20} MiB",
                    fix="close the quote that opens there, or split the row",
                )
            text += following
            continue
        rows, text = text[:end], text[end:] + following
        frame = table.parse(rows, first_row)
        first_row += frame.height
        new_position = file.tell() if file is not None and not file.closed else 0
        if (
            file is not None and new_position == 0
        ):  # A file without compression is read through `stream` alone.
            new_position = position + len(rows)
        yield frame, max(new_position - position, 0)
        position = max(new_position, position)


class TextSpan(Frozen):
    """Some rows of a text file without compression: where their bytes are, and how they are to be parsed."""

    start: NonNegativeInt
    stop: NonNegativeInt
    first_row: PositiveInt
    columns: tuple[str, ...]
    separator: str


def cut_text(
    path: Path, origin: str, expected: bytes | None, options: TextOptions, size: int
) -> list[TextSpan]:
    """Return the rows of a text file in spans of about `size` bytes, by reading it once without parsing it.

    A span begins after a line end outside quotes, counted from the beginning of the file. No blank line is next to the
    cut, because a blank line is an error within a file but not at its end.
    """
    spans: list[TextSpan] = []
    with path.open("rb") as file:
        table, text = _open_table(file, origin, expected, options)
        begin = position = file.tell() - len(text)
        if len(table.columns) < 2:
            return []
        how = {"columns": tuple(table.columns), "separator": table.separator.decode()}
        first_row, num_rows, num_quotes = 1, 0, 0
        file.seek(begin)
        while chunk := file.read(BLOCK_BYTES):
            has_cut = position + len(chunk) > begin + size
            if not has_cut and num_quotes & 1 == 0 and b'"' not in chunk:
                num_rows += chunk.count(b"\n")
            else:
                ends = _row_ends_between(chunk, 0, len(chunk), num_quotes)
                for end in _cuts(chunk, ends) if has_cut else ():
                    if position + end < begin + size:
                        continue
                    spans.append(TextSpan(start=begin, stop=position + end, first_row=first_row, **how))
                    begin = position + end
                    first_row = 1 + num_rows + int(np.searchsorted(ends, end))
                num_rows += len(ends)
                num_quotes += chunk.count(b'"')
            position += len(chunk)
        return [*spans, TextSpan(start=begin, stop=position, first_row=first_row, **how)]


def _cuts(chunk: bytes, ends: npt.NDArray[np.int64]) -> list[int]:
    """Return the positions after the line ends of a chunk, except those next to a blank line."""
    part = np.frombuffer(chunk, np.uint8)
    ends = ends[(ends >= 2) & (ends < len(part) - 1)]
    follows_blank = (part[ends - 1] == ord("\n")) | (
        (part[ends - 1] == ord("\r")) & (part[ends - 2] == ord("\n"))
    )
    precedes_blank = (part[ends + 1] == ord("\n")) | (part[ends + 1] == ord("\r"))
    return [int(end) + 1 for end in ends[~(follows_blank | precedes_blank)]]


class _Bytes:
    """At most `size` bytes of a file, from its current position on."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._left = file, size

    def read(self, size: int) -> bytes:
        data = self._file.read(min(size, self._left))
        self._left -= len(data)
        return data


def read_span(path: Path, origin: str, span: TextSpan) -> Iterator[tuple[pl.DataFrame, int]]:
    """Yield the rows of a span in blocks, each with the bytes that it takes in the file."""
    table = _Table(span.columns, span.separator.encode(), origin)
    with path.open("rb") as file:
        file.seek(span.start)
        position = span.start
        stream = _Bytes(file, span.stop - span.start)
        for frame, _ in _read_rows(stream, None, table, b"", span.first_row):
            yield frame, file.tell() - position
            position = file.tell()


def _open_table(
    stream: BinaryIO, origin: str, expected: bytes | None, options: TextOptions
) -> tuple[_Table, bytes]:
    """Read the first blocks; return how to parse the table, and its text so far without the header line."""
    text = stream.read(BLOCK_BYTES)
    largest = MAX_ROW_BYTES if options.names is not None else MAX_HEADER_BYTES
    while _first_row_end(text) < 0 and len(text) <= largest and (following := stream.read(BLOCK_BYTES)):
        text += following
    if options.names is None and len(text) > largest and _first_row_end(text) < 0:
        raise InputError(
            f"{origin}: the header line does not end within {largest >> 20} MiB",
            fix="close the quote in it, or name fewer columns",
        )
    for magic, (kind, fix) in _OTHER_FORMATS.items():
        if text.startswith(magic):
            raise InputError(f"{origin} is {kind}, not text", fix=fix)
    text = text.removeprefix(_BYTE_ORDER_MARK)
    separator = _find_separator(text, origin, expected, options)
    if options.names is None:
        columns, text = _split_header(text, separator, origin)
    else:
        columns, text = options.names.split_header(text, separator, origin)
    return _Table(columns, separator, origin), text


def _find_separator(text: bytes, origin: str, expected: bytes | None, options: TextOptions) -> bytes:
    """Return what separates the columns: the user's choice, what the name implies, or what the first line shows.

    Another separator than the expected one is noticed if the first line is a single cell without it.
    """
    first_line = text.partition(b"\n")[0]
    if options.separator is not None and options.separator in first_line:
        return options.separator
    if expected is None:
        expected = b"\t" if b"\t" in first_line else b","
    is_one_column = options.names is not None and len(options.names.columns) == 1
    if is_one_column or len(_first_row(text, expected)) > 1:
        return expected
    counts = {separator: len(_first_row(text, separator)) for separator in SEPARATOR_NAMES}
    noticed = max(counts, key=lambda separator: counts[separator])
    if counts[noticed] < 2:
        return expected
    options.note(f"{origin}: the columns are separated by {SEPARATOR_NAMES[noticed]}, and are read that way")
    return noticed


def _end_of_rows(text: bytes, at_end: bool, num_columns: int) -> int:
    """Return where the last whole row of `text` ends, 0 if there is none."""
    end = len(text) if at_end else max(_last_row_end(text), 0)
    if num_columns > 1 and end:
        # Empty lines at the end of a file are not rows, and only the next block tells whether this is the end.
        filled = len(text[:end].rstrip(b"\r\n"))
        end = filled and (text.find(b"\n", filled) + 1 or filled)
    return end


def _split_header(text: bytes, separator: bytes, origin: str) -> tuple[Sequence[str], bytes]:
    """Return the names in the header line, and the text after it."""
    end = _first_row_end(text)
    if end < 0 and b"\n" in text:
        raise InputError(f"{origin}: a quote in the header line is not closed")
    line, rows = (text, b"") if end < 0 else (text[:end], text[end + 1 :])
    if not line.strip():
        raise InputError(f"{origin} is empty", fix="the first line must name the columns")
    try:
        decoded = io.StringIO(line.rstrip(b"\r").decode("utf-8"), newline="")
        names = next(csv.reader(decoded, delimiter=separator.decode()))
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(
            f"{origin}: the header line can't be read: {error}", fix="save the file as UTF-8"
        ) from None
    if (name := first_repeated(names)) is not None:
        raise InputError(f"{origin}: column {name!r} appears twice in the header", fix="rename one of them")
    return names, rows


def _first_row(text: bytes, separator: bytes) -> list[str]:
    """Return the cells of the first row, none if it can't be parsed."""
    end = _first_row_end(text)
    line = io.StringIO((text if end < 0 else text[:end]).rstrip(b"\r").decode("utf-8", "replace"), newline="")
    try:
        return next(csv.reader(line, delimiter=separator.decode()), [])
    except csv.Error:
        return []


def _first_row_end(text: bytes) -> int:
    """Return the position of the first line end outside quotes, -1 if there is none."""
    return next((int(ends[0]) for ends in _row_ends(text) if len(ends)), -1)


def _last_row_end(text: bytes) -> int:
    """Return the position after the last line end outside quotes, -1 if there is none."""
    end = text.rfind(b"\n") + 1
    num_quotes = text.count(b'"', 0, end)
    if end == 0 or num_quotes & 1 == 0:
        return end or -1
    while end > 0:
        start = max(end - SCANNED_BYTES, 0)
        num_quotes -= text.count(b'"', start, end)
        ends = _row_ends_between(text, start, end, num_quotes)
        if len(ends):
            return int(ends[-1]) + 1
        end = start
    return -1


def _count_rows(text: bytes) -> int:
    """Count the line ends outside quotes."""
    return sum(map(len, _row_ends(text)))


def _row_ends(text: bytes) -> Iterator[npt.NDArray[np.int64]]:
    """Yield the positions of all line ends outside quotes, those of some bytes at a time."""
    num_quotes = 0
    for start in range(0, len(text), SCANNED_BYTES):
        end = min(start + SCANNED_BYTES, len(text))
        yield _row_ends_between(text, start, end, num_quotes)
        num_quotes += text.count(b'"', start, end)


def _row_ends_between(text: bytes, start: int, end: int, num_quotes: int) -> npt.NDArray[np.int64]:
    """Return the positions of line ends outside quotes in a part of `text`, which `num_quotes` quotes precede."""
    part = np.frombuffer(text, np.uint8, end - start, start)
    marks = np.flatnonzero((part == ord("\n")) | (part == ord('"')))
    is_quote = part[marks] == ord('"')
    is_outside = (num_quotes + np.cumsum(is_quote)) & 1 == 0
    return np.asarray(marks[is_outside & ~is_quote] + start, np.int64)
