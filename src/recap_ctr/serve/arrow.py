"""Arrow bodies, whose envelope is checked before a native parser sees a byte of them.

An IPC stream is a sequence of messages, each a flatbuffer (the metadata) and a body. What the metadata claim (types,
nesting, rows, buffers, compression) is compared with what was sent, so that no claim costs more memory than the body
itself. A file holds the same messages between two marks, with a footer that says where they are.
The tables are described in the Arrow project's Message.fbs and Schema.fbs; the numbers of their fields are used below.
"""

import io
import struct
from typing import NamedTuple

import polars as pl

from recap_ctr.data.compression import UNREADABLE
from recap_ctr.serve.config import Limits
from recap_ctr.serve.problem import Problem

STREAM, FILE = "application/vnd.apache.arrow.stream", "application/vnd.apache.arrow.file"
MAGIC = b"ARROW1"
_CONTINUATION = b"\xff\xff\xff\xff"
_SCHEMA, _DICTIONARY, _RECORDS = 1, 2, 3
_LISTS = (12, 21)
# null, integers, floats, text, Boolean, dates and times, and lists of these
_TYPES = (1, 2, 3, 5, 6, 8, 10, *_LISTS, 20, 24)
_MAX_METADATA = 1 << 20
_MAX_COLUMNS = 4096
_MAX_MESSAGES = 4096  # Each costs a walk through its metadata, however few rows it has.


class _BrokenError(Exception):
    pass


def read(body: bytes, content_type: str, limits: Limits) -> pl.DataFrame:
    """Return the rows of a stream or a file; raise Problem 400 or 413 if it is damaged or beyond the limits."""
    try:
        if content_type == FILE:
            _check_file(body, limits)
            return pl.read_ipc(io.BytesIO(body))
        return pl.read_ipc_stream(io.BytesIO(body[: _check_stream(body, limits)]))
    except _BrokenError as error:
        reason = str(error)
    except (struct.error, *UNREADABLE):  # Their messages tell a client nothing.
        reason = "it is damaged"
    raise Problem(
        400,
        f"the body can't be read as {content_type}: {reason}",
        fix="send plain columns, uncompressed, as polars' write_ipc_stream or write_ipc makes them",
    )


def write(frame: pl.DataFrame, content_type: str) -> bytes:
    """Return the rows as a stream or a file."""
    out = io.BytesIO()
    (frame.write_ipc if content_type == FILE else frame.write_ipc_stream)(out)
    return out.getvalue()


def _check_stream(body: bytes, limits: Limits) -> int:
    """Return where the stream ends; refuse it if a claim is false or beyond the limits."""
    position = rows = num_messages = 0
    while position < len(body) and (message := _read_message(body, position, len(body))) is not None:
        num_messages += 1
        _check_num_messages(num_messages)
        if (message.kind == _SCHEMA) != (position == 0):
            raise _BrokenError("it does not begin with its only schema")
        if message.kind == _SCHEMA:
            _check_schema(message.metadata, message.header)
        else:
            rows = _add_rows(message, rows, limits)
        position = message.end
    if position == 0:
        raise _BrokenError("it is empty")
    return position


def _check_file(body: bytes, limits: Limits) -> None:
    """Refuse a file if its footer, or a message that the footer points to, is false or beyond the limits."""
    if len(body) < 24 or not body.startswith(MAGIC) or not body.endswith(MAGIC):
        raise _BrokenError("it is cut off, or not an Arrow file")
    start = len(body) - 10 - _number("<I", body, len(body) - 10)
    if start < 8 or len(body) - start > _MAX_METADATA:
        raise _BrokenError("its footer is damaged or too long")
    footer = body[start:-10]
    table = _number("<I", footer, 0)
    schema = _field(footer, table, 1)
    _check_schema(footer, schema + _number("<I", footer, schema))
    blocks = [
        (kind, _vector(footer, _field(footer, table, number), 24))
        for kind, number in ((_DICTIONARY, 2), (_RECORDS, 3))
    ]
    _check_num_messages(sum(len(entries) for _, entries in blocks))
    rows = checked_bytes = 0
    for kind, entries in blocks:
        for entry in entries:
            position = _number("<q", footer, entry)
            message = _read_message(body, position, start)
            if message is None or message.kind != kind:
                raise _BrokenError("its footer is damaged")
            checked_bytes += message.end - position
            # Checking a message takes time; a footer could name the same one thousands of times.
            if checked_bytes > start:
                raise _BrokenError("its footer names a batch twice")
            rows = _add_rows(message, rows, limits)


def _check_num_messages(count: int) -> None:
    if count > _MAX_MESSAGES:
        raise _BrokenError(f"it holds more than {_MAX_MESSAGES:,} batches; join them")


class _Message(NamedTuple):
    kind: int
    metadata: bytes
    header: int
    """Position of the header's table in the metadata."""
    size: int
    """Bytes of the body."""
    end: int


def _read_message(body: bytes, position: int, stop: int) -> _Message | None:
    """Return the message at `position`, which must end by `stop`; None for the mark of a stream's end."""
    if not 0 <= position <= stop - 8 or body[position : position + 4] != _CONTINUATION:
        raise _BrokenError("it is cut off, or not an Arrow stream")
    length = _number("<i", body, position + 4)
    if length == 0:
        return None
    if not 0 < length <= min(_MAX_METADATA, stop - position - 8):
        raise _BrokenError("it is cut off, or its metadata are too long")
    metadata = body[position + 8 : position + 8 + length]
    message = _number("<I", metadata, 0)
    kind = _number("<B", metadata, _field(metadata, message, 1))
    header = _field(metadata, message, 2)
    if kind not in (_SCHEMA, _DICTIONARY, _RECORDS) or not header:
        raise _BrokenError(f"it holds a message of kind {kind}")
    body_length = _field(metadata, message, 3)
    size = _number("<q", metadata, body_length) if body_length else 0
    end = position + 8 + length + size
    if not 0 <= size <= stop or end > stop:
        raise _BrokenError("it is cut off")
    return _Message(kind, metadata, header + _number("<I", metadata, header), size, end)


def _add_rows(message: _Message, rows: int, limits: Limits) -> int:
    """Check the batch of a message and return `rows` plus its rows; a dictionary has none."""
    table = message.header
    if message.kind == _DICTIONARY:
        data = _field(message.metadata, table, 1)
        _check_batch(message.metadata, data + _number("<I", message.metadata, data), message.size, limits)
        return rows
    rows += _check_batch(message.metadata, table, message.size, limits)
    if rows > limits.rows:
        raise Problem(413, f"more than {limits.rows:,} rows", fix="send them in several requests")
    return rows


def _check_schema(metadata: bytes, table: int) -> None:
    columns = _vector(metadata, _field(metadata, table, 1), 4)
    if len(columns) > _MAX_COLUMNS:
        raise _BrokenError(f"it has {len(columns):,} columns, more than {_MAX_COLUMNS:,}")
    for entry in columns:
        _check_type(metadata, entry + _number("<I", metadata, entry), 0)


def _check_type(metadata: bytes, table: int, depth: int) -> None:
    kind = _number("<B", metadata, _field(metadata, table, 2))
    children = _vector(metadata, _field(metadata, table, 5), 4)
    if kind not in _TYPES or depth > 1 or len(children) != (kind in _LISTS):
        raise _BrokenError("a column holds neither numbers, text, Booleans, dates nor lists of these")
    for entry in children:
        _check_type(metadata, entry + _number("<I", metadata, entry), depth + 1)


def _check_batch(metadata: bytes, table: int, size: int, limits: Limits) -> int:
    """Return the rows of a batch; refuse it unless all its buffers lie within its `size` bytes."""
    if _field(metadata, table, 3):
        raise _BrokenError("its buffers are compressed")
    length = _field(metadata, table, 0)
    rows = _number("<q", metadata, length) if length else 0
    max_values = max(limits.rows, 8 * size)  # A Boolean takes one bit.
    for entry in _vector(metadata, _field(metadata, table, 1), 16):
        if not 0 <= _number("<q", metadata, entry) <= max_values:
            raise _BrokenError("a column claims more values than it has bytes for")
    for entry in _vector(metadata, _field(metadata, table, 2), 16):
        offset, length = _number("<q", metadata, entry), _number("<q", metadata, entry + 8)
        if offset < 0 or length < 0 or offset + length > size:
            raise _BrokenError("a buffer lies outside the body")
    if rows < 0:
        raise _BrokenError("a batch has a negative number of rows")
    return rows


def _number(form: str, data: bytes, position: int) -> int:
    # unpack_from would count a negative position from the end, and no table begins at 0.
    if position <= 0 and form != "<I":
        raise _BrokenError("it is damaged")
    number: int = struct.unpack_from(form, data, max(position, 0))[0]
    return number


def _field(data: bytes, table: int, number: int) -> int:
    """Return the position of field `number` of a table; 0 if the field is absent."""
    vtable = table - _number("<i", data, table)
    if vtable < 0 or 6 + 2 * number > _number("<H", data, max(vtable, 1)):
        return 0
    offset = _number("<H", data, vtable + 4 + 2 * number)
    return table + offset if offset else 0


def _vector(data: bytes, position: int, width: int) -> range:
    """Return the positions of a vector's entries; none if the field is absent (position 0)."""
    if not position:
        return range(0)
    start = position + _number("<I", data, position)
    count = _number("<I", data, start)
    if count * width > len(data) - start - 4:
        raise _BrokenError("it is damaged")
    return range(start + 4, start + 4 + count * width, width)
