"""JSON lines, read block by block: one object a row, its keys the columns.

A key may be absent from most rows, so all rows are read once for their keys and types before the first block.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import polars as pl

from recap_ctr.errors import InputError

BLOCK_BYTES = 16 << 20
MAX_ROW_BYTES = 64 << 20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
TEXT = "text"
_FIX = "write one JSON object a line, such as {" + '"click": 1, "ad": "a7"' + "}"


def json_columns(stream: BinaryIO, origin: str, columns: pl.Schema) -> pl.Schema:
    """Return `columns` with those of the rows in `stream`; a type is wide enough for the values of both."""
    first_row = 1
    for text in _blocks_of_lines(stream, origin):
        frame = _parse(text, first_row, origin)
        first_row += frame.height
        columns = _merge(columns, frame.schema, origin)
    return columns


def read_json_blocks(
    stream: BinaryIO, tell: Callable[[], int] | None, origin: str, columns: pl.Schema
) -> Iterator[tuple[pl.DataFrame, int]]:
    """Yield rows with these columns in blocks, each with the bytes that it takes in the source.

    `tell` says how far a compressed file was read; without it, the bytes are those of the text.
    """
    first_row, position = 1, 0
    for text in _blocks_of_lines(stream, origin):
        frame = _parse(text, first_row, origin, columns)
        first_row += frame.height
        end = position + len(text) if tell is None else tell()
        yield frame, end - position
        position = end


def _blocks_of_lines(stream: BinaryIO, origin: str) -> Iterator[bytes]:
    """Yield whole lines, about `BLOCK_BYTES` at a time, and nothing for blank ones."""
    text = stream.read(BLOCK_BYTES + len(_BYTE_ORDER_MARK)).removeprefix(_BYTE_ORDER_MARK)
    line = 1
    if text.lstrip().startswith(b"["):
        raise InputError(f"{origin} is a JSON array, which is one value for all rows", fix=_FIX)
    while text:
        following = stream.read(BLOCK_BYTES)
        end = text.rfind(b"\n") + 1 if following else len(text)
        if not end and len(text) > MAX_ROW_BYTES:
            raise InputError(f"{origin}: line {line} does not end within {MAX_ROW_BYTES >> 20} MiB", fix=_FIX)
        if text[:end].strip():
            yield text[:end]
        line += text.count(b"\n", 0, end)
        text = text[end:] + following


def _parse(text: bytes, first_row: int, origin: str, columns: pl.Schema | None = None) -> pl.DataFrame:
    """Parse whole lines, whose rows are numbered from `first_row`; `columns` fixes names and types."""
    try:
        return pl.read_ndjson(text, schema=columns, infer_schema_length=None)
    except pl.exceptions.PolarsError as error:
        raise _diagnose(text, first_row, origin, str(error)) from None


def _merge(columns: pl.Schema, others: pl.Schema, origin: str) -> pl.Schema:
    try:
        empty = [pl.DataFrame(schema=schema) for schema in (columns, others)]
        return pl.concat(empty, how="diagonal_relaxed").schema
    except pl.exceptions.PolarsError as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"{origin}: values of one key differ in kind: {reason}", fix=_FIX) from None


def _diagnose(text: bytes, first_row: int, origin: str, reason: str) -> InputError:
    """Return an error that names the row, and the key, at which parsing failed."""
    kinds: dict[str, str] = {}
    row = first_row
    for line in filter(bytes.strip, text.split(b"\n")):
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            return InputError(f"{origin}: row {row} is not JSON: {error}", fix=_FIX)
        if not isinstance(values, dict):
            return InputError(f"{origin}: row {row} is {_kind(values)}, not an object", fix=_FIX)
        for name, value in _leaves(values):
            kind = _kind(value)
            # Everything can become text, so text fits beside any other kind.
            if value is not None and kinds.setdefault(name, kind) != kind and TEXT not in (kind, kinds[name]):
                return InputError(
                    f"{origin}: row {row}, column {name!r} holds {kind}, but {kinds[name]} before it",
                    fix="write the same kind of value in every row, and null where there is none",
                )
        row += 1
    return InputError(f"{origin}: rows from {first_row} on can't be read: {reason.splitlines()[0]}", fix=_FIX)


def _leaves(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every key with its value, those of nested objects as `outer.inner` after the object itself."""
    for name, value in values.items():
        yield prefix + name, value
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")


def _kind(value: Any) -> str:
    """Return what a JSON value is, in a user's words."""
    if isinstance(value, bool):
        return "true or false"
    names = {dict: "an object", list: "a list", str: TEXT, type(None): "null"}
    return names.get(type(value), "a number")
