"""Arrow bodies: their envelope is walked before a native parser sees a byte of them.

An IPC stream is a row of messages, each a flatbuffer and a body. What it claims (types, nesting, rows, buffers,
compression) is held against what it brought, so that no claim costs more memory than the body itself. A file holds the
same messages between two marks, with a footer that says where they stand.
Layouts of the tables: the Arrow project's Message.fbs and Schema.fbs.
"""

import io
import struct
from typing import NamedTuple

import polars as pl

from recap_ctr.data.source import UNREADABLE
from recap_ctr.serve.config import Limits
from recap_ctr.serve.problem import Problem

STREAM, FILE = "application/vnd.apache.arrow.stream", "application/vnd.apache.arrow.file"
MAGIC = b"ARROW1"
_CONTINUED = b"\xff\xff\xff\xff"
_SCHEMA, _DICTIONARY, _RECORDS = 1, 2, 3
_LISTS = (12, 21)
# null, integers, floats, text, Boolean, dates and times, and lists of these
_TYPES = (1, 2, 3, 5, 6, 8, 10, *_LISTS, 20, 24)
_MAX_METADATA = 1 << 20
_MAX_COLUMNS = 4096
_MAX_MESSAGES = 4096  # each costs a walk through its metadata, however few rows it brings


class _BrokenError(Exception):
    pass


def read(body: bytes, content_type: str, limits: Limits) -> pl.DataFrame:
    """The rows of a stream, or of a file."""
    try:
        if content_type == FILE:
            _check_file(body, limits)
            return pl.read_ipc(io.BytesIO(body))
        return pl.read_ipc_stream(io.BytesIO(body[: _check_stream(body, limits)]))
    except _BrokenError as error:
        reason = str(error)
    except (struct.error, *UNREADABLE):  # whose words tell a client nothing
        reason = "it is damaged"
    raise Problem(
        400,
        f"the body is no {content_type} that is read here: {reason}",
        fix="send plain columns, uncompressed, as polars' write_ipc_stream or write_ipc makes them",
    )


def write(frame: pl.DataFrame, content_type: str) -> bytes:
    out = io.BytesIO()
    (frame.write_ipc if content_type == FILE else frame.write_ipc_stream)(out)
    return out.getvalue()


def _check_stream(body: bytes, limits: Limits) -> int:
    """Where the stream ends, if all that it claims is true and within bounds."""
    at = rows = count = 0
    while at < len(body) and (message := _message(body, at, len(body))) is not None:
        count += 1
        _check_count(count)
        if (message.kind == _SCHEMA) != (at == 0):
            raise _BrokenError("it does not begin with its only schema")
        if message.kind == _SCHEMA:
            _check_schema(message.metadata, message.header)
        else:
            rows = _count(message, rows, limits)
        at = message.end
    if at == 0:
        raise _BrokenError("it is empty")
    return at


def _check_file(body: bytes, limits: Limits) -> None:
    """A file's footer says where its messages are."""
    if len(body) < 24 or not body.startswith(MAGIC) or not body.endswith(MAGIC):
        raise _BrokenError("it is cut, or no file at all")
    start = len(body) - 10 - _number("<I", body, len(body) - 10)
    if start < 8 or len(body) - start > _MAX_METADATA:
        raise _BrokenError("its footer is damaged, or too long")
    footer = body[start:-10]
    table = _number("<I", footer, 0)
    schema = _field(footer, table, 1)
    _check_schema(footer, schema + _number("<I", footer, schema))
    rows = walked = 0
    blocks = [
        (kind, _vector(footer, _field(footer, table, number), 24))
        for kind, number in ((_DICTIONARY, 2), (_RECORDS, 3))
    ]
    _check_count(sum(len(places) for _, places in blocks))
    for kind, places in blocks:
        for at in places:
            place = _number("<q", footer, at)
            message = _message(body, place, start)
            if message is None or message.kind != kind:
                raise _BrokenError("its footer is damaged")
            walked += message.end - place
            if (
                walked > start
            ):  # there is work in each: who names one a thousand times would have it done as often
                raise _BrokenError("its footer names a batch twice")
            rows = _count(message, rows, limits)


def _check_count(messages: int) -> None:
    if messages > _MAX_MESSAGES:
        raise _BrokenError(f"it holds more than {_MAX_MESSAGES:,} batches; join them")


class _Message(NamedTuple):
    kind: int
    metadata: bytes
    header: int
    """Where the header's table stands in the metadata."""
    size: int
    """Bytes of the body."""
    end: int


def _message(body: bytes, at: int, stop: int) -> _Message | None:
    """The message at a place, before `stop`; None for the mark of a stream's end."""
    if not 0 <= at <= stop - 8 or body[at : at + 4] != _CONTINUED:
        raise _BrokenError("it is cut, or no stream at all")
    length = _number("<i", body, at + 4)
    if length == 0:
        return None
    if not 0 < length <= min(_MAX_METADATA, stop - at - 8):
        raise _BrokenError("it is cut, or its metadata are too long")
    metadata = body[at + 8 : at + 8 + length]
    message = _number("<I", metadata, 0)
    kind = _number("<B", metadata, _field(metadata, message, 1))
    header = _field(metadata, message, 2)
    if kind not in (_SCHEMA, _DICTIONARY, _RECORDS) or not header:
        raise _BrokenError(f"it holds a message of kind {kind}")
    long = _field(metadata, message, 3)
    size = _number("<q", metadata, long) if long else 0
    end = at + 8 + length + size
    if not 0 <= size <= stop or end > stop:
        raise _BrokenError("it is cut")
    return _Message(kind, metadata, header + _number("<I", metadata, header), size, end)


def _count(message: _Message, rows: int, limits: Limits) -> int:
    """Rows so far, those of the message's batch included."""
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
        raise _BrokenError(f"it has {len(columns):,} columns")
    for at in columns:
        _check_type(metadata, at + _number("<I", metadata, at), 0)


def _check_type(metadata: bytes, table: int, depth: int) -> None:
    kind = _number("<B", metadata, _field(metadata, table, 2))
    children = _vector(metadata, _field(metadata, table, 5), 4)
    if kind not in _TYPES or depth > 1 or len(children) != (kind in _LISTS):
        raise _BrokenError("a column is neither of numbers, text, Booleans, dates nor lists of these")
    for at in children:
        _check_type(metadata, at + _number("<I", metadata, at), depth + 1)


def _check_batch(metadata: bytes, table: int, size: int, limits: Limits) -> int:
    """Rows of a batch whose buffers all lie within its `size` bytes."""
    if _field(metadata, table, 3):
        raise _BrokenError("its buffers are compressed")
    long = _field(metadata, table, 0)
    rows = _number("<q", metadata, long) if long else 0
    most = max(limits.rows, 8 * size)  # a Boolean takes one bit
    for at in _vector(metadata, _field(metadata, table, 1), 16):
        if not 0 <= _number("<q", metadata, at) <= most:
            raise _BrokenError("a column claims more values than there are bytes")
    for at in _vector(metadata, _field(metadata, table, 2), 16):
        offset, length = _number("<q", metadata, at), _number("<q", metadata, at + 8)
        if offset < 0 or length < 0 or offset + length > size:
            raise _BrokenError("a buffer lies outside the body")
    if rows < 0:
        raise _BrokenError("a batch has fewer rows than none")
    return rows


def _number(form: str, data: bytes, at: int) -> int:
    if at <= 0 and form != "<I":  # unpack_from would count from the end; no table begins at 0
        raise _BrokenError("it is damaged")
    found: int = struct.unpack_from(form, data, max(at, 0))[0]
    return found


def _field(data: bytes, table: int, number: int) -> int:
    """Where field `number` of a table stands; 0 if it has none."""
    vtable = table - _number("<i", data, table)
    if vtable < 0 or 6 + 2 * number > _number("<H", data, max(vtable, 1)):
        return 0
    offset = _number("<H", data, vtable + 4 + 2 * number)
    return table + offset if offset else 0


def _vector(data: bytes, at: int, width: int) -> range:
    """Where the entries of a vector stand; none if the field is absent."""
    if not at:
        return range(0)
    start = at + _number("<I", data, at)
    count = _number("<I", data, start)
    if count * width > len(data) - start - 4:
        raise _BrokenError("it is damaged")
    return range(start + 4, start + 4 + count * width, width)
