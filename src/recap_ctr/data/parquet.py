"""How much a Parquet file unpacks to, read from its table of contents and its pages before anything is unpacked.

A page of a few bytes may stand for a gigabyte. The descriptions are in Thrift's compact protocol, of which a few fields
are enough; see the format's parquet.thrift.
"""

import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_CONTENTS_BYTES = 1 << 20
MAX_PAGES = 100_000
_MAX_DEPTH = 12
_MAGIC = b"PAR1"
# Fields, by their numbers.
_ROW_GROUPS = 4  # of FileMetaData
_COLUMNS = 1  # of RowGroup
_OTHER_FILE, _METADATA = 1, 3  # of ColumnChunk
_PACKED_BYTES, _FIRST_DATA_PAGE, _DICTIONARY_PAGE = 7, 9, 11  # of ColumnMetaData
_PAGE_UNPACKED, _PAGE_PACKED, _DATA_PAGE, _DATA_PAGE_V2 = 2, 3, 5, 8  # of PageHeader
_NUM_VALUES = 1  # of both kinds of data pages


@dataclass(frozen=True)
class Unpacked:
    """What the pages of a file say they hold."""

    values: int
    """Entries of all columns together."""
    bytes: int


def unpacked_size(path: Path) -> Unpacked:
    """Return what the pages of a small Parquet file hold; raise a ValueError if it is no such file."""
    with path.open("rb") as file:
        if path.stat().st_size < 12:
            raise ValueError("no Parquet file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _unpacked_size(data)


def _unpacked_size(data: mmap.mmap) -> Unpacked:
    length = int.from_bytes(data[-8:-4], "little")
    if data[:4] != _MAGIC or data[-4:] != _MAGIC or length > min(len(data) - 12, MAX_CONTENTS_BYTES):
        raise ValueError("no Parquet file, or one with a huge table of contents")
    contents, _ = _struct(data, len(data) - 8 - length)
    values = size = pages = 0
    try:
        for group in contents[_ROW_GROUPS]:
            for column in group[_COLUMNS]:
                if _OTHER_FILE in column:
                    raise ValueError("a Parquet file refers to another file")
                chunk = column[_METADATA]
                starts = (chunk.get(_DICTIONARY_PAGE, 0), chunk[_FIRST_DATA_PAGE])
                at = min(start for start in starts if start > 0)
                end = at + chunk[_PACKED_BYTES]
                while at < end:
                    page, at = _struct(data, at)
                    at += max(page[_PAGE_PACKED], 0)
                    size += page[_PAGE_UNPACKED]
                    pages += 1
                    header = page.get(_DATA_PAGE) or page.get(_DATA_PAGE_V2) or {_NUM_VALUES: 0}
                    values += header[_NUM_VALUES]
                    if pages > MAX_PAGES or page[_PAGE_UNPACKED] < 0 or header[_NUM_VALUES] < 0:
                        raise ValueError("no sound Parquet file")
    except (KeyError, TypeError, AttributeError):
        raise ValueError("no sound Parquet file") from None
    return Unpacked(values, size)


def _struct(data: mmap.mmap, at: int, depth: int = 0) -> tuple[dict[int, Any], int]:
    """Return the fields of a structure by their numbers, and the place after it."""
    if depth > _MAX_DEPTH:
        raise ValueError("no sound Parquet file")
    fields: dict[int, Any] = {}
    number = 0
    while (header := _byte(data, at)) != 0:
        at += 1
        if header >> 4:
            number += header >> 4
        else:
            number, at = _integer(data, at)
        fields[number], at = _value(data, at, header & 15, depth)
    return fields, at + 1


def _value(data: mmap.mmap, at: int, kind: int, depth: int) -> tuple[Any, int]:
    """Return a value of some kind, and the place after it."""
    match kind:
        case 1 | 2:  # true and false
            return kind == 1, at
        case 3:
            return _byte(data, at), at + 1
        case 4 | 5 | 6:
            return _integer(data, at)
        case 7:
            return None, at + 8
        case 8:  # text, which no one here needs
            length, at = _varint(data, at)
            return None, at + length
        case 9 | 10:
            return _list(data, at, depth)
        case 12:
            return _struct(data, at, depth + 1)
    raise ValueError("no sound Parquet file")


def _list(data: mmap.mmap, at: int, depth: int) -> tuple[list[Any], int]:
    header, at = _byte(data, at), at + 1
    size = header >> 4
    if size == 15:
        size, at = _varint(data, at)
    if depth > _MAX_DEPTH or size > len(data) - at:  # Every entry takes a byte at least.
        raise ValueError("no sound Parquet file")
    entries = []
    for _ in range(size):
        kind = 3 if header & 15 in (1, 2) else header & 15  # In a list, true and false are bytes.
        entry, at = _value(data, at, kind, depth + 1)
        entries.append(entry)
    return entries, at


def _integer(data: mmap.mmap, at: int) -> tuple[int, int]:
    value, at = _varint(data, at)
    return (value >> 1) ^ -(value & 1), at


def _varint(data: mmap.mmap, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte, at = _byte(data, at), at + 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError("no sound Parquet file")


def _byte(data: mmap.mmap, at: int) -> int:
    if not 0 <= at < len(data):
        raise ValueError("no sound Parquet file")
    return data[at]
