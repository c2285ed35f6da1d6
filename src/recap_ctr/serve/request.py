"""What the head of a request says of its body, and packed bodies."""

import zlib
from urllib.parse import parse_qs

from starlette.datastructures import Headers
from starlette.requests import Request

from recap_ctr.serve import arrow
from recap_ctr.serve.codec import JSON
from recap_ctr.serve.problem import Problem

GZIP = "gzip"
KINDS = (JSON, arrow.STREAM, arrow.FILE)
_MAX_DIGITS = 15  # of a length in bytes


def content_length(headers: Headers) -> int | None:
    """Return the length that the head states, None if it states none; a number of too many digits is a large one."""
    digits = headers.get("content-length", "")
    return int(digits[:_MAX_DIGITS]) if digits.isascii() and digits.isdigit() else None


def body_kind(headers: Headers) -> tuple[str, str]:
    """Return content type and encoding: bodies of one kind take about as many bytes a row."""
    content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    return (content_type if content_type in KINDS else "", content_encoding(headers))


def content_encoding(headers: Headers) -> str:
    """Return gzip for a packed body; nothing for one as it is, and for any other encoding."""
    return GZIP if headers.get("content-encoding", "").strip().lower() == GZIP else ""


def unpack(body: bytes, limit: int) -> bytes | None:
    """Return an unpacked body; None if it is larger than `limit`, beyond which nothing is unpacked."""
    unpacker = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    try:
        unpacked = unpacker.decompress(body, limit + 1)
    except zlib.error:
        raise Problem(400, "the body is not valid gzip", fix="pack it again, or send it as it is") from None
    if len(unpacked) > limit:
        return None
    if not unpacker.eof or unpacker.unused_data:
        raise Problem(400, "the body is not one whole gzip stream", fix="send exactly one")
    return unpacked


def deadline_in_url(query: bytes, default: float) -> float:
    """Return the deadline in the URL, in milliseconds, if it is a number; if it is a wrong one, that is found later."""
    if b"deadline_ms" not in query:
        return default
    try:
        return float(parse_qs(query.decode("latin-1")).get("deadline_ms", [""])[0])
    except ValueError:
        return default


def content_type_of(request: Request, default: str = "") -> str:
    """Return the content type of a body; raises Problem 415 for one that is not supported."""
    header, encoding = request.headers.get("content-type", default), request.headers.get("content-encoding")
    kind, _, parameter = header.partition(";")
    kind = kind.strip().lower()
    is_utf8 = parameter.strip().lower() in ("", "charset=utf-8", 'charset="utf-8"')
    is_odd = bool(encoding) and not content_encoding(request.headers)
    if kind not in KINDS or not is_utf8 or is_odd:
        what = (
            f"content encoding {encoding[:50]!r}" if encoding and is_odd else f"content type {header[:200]!r}"
        )
        raise Problem(
            415,
            f"{what} is not supported",
            fix=f"send {', '.join(KINDS)}, as it is or packed by {GZIP}",
        )
    return kind
