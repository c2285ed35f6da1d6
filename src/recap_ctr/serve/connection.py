"""HTTP connections with limits on what the application never sees.

These are the size and duration of a request's head, the silence between two requests, and the time for the rest of a
body whose request was answered before the body was read.
"""

import asyncio
from typing import Any, ClassVar

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from recap_ctr.serve.config import Limits

_HEAD_TOO_LARGE = 431, "the request's head is too large"


class _TooLargeError(Exception):
    pass


class _LimitedProtocol(HttpToolsProtocol):
    """One connection, with one timer: for a head, the rest of a body, or the silence between two requests."""

    limits: ClassVar[Limits]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = self._in_body = False
        self._head_bytes = self._parsed_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._refusal = 400, "the request is not valid HTTP"

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_next()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._in_head or self.transport.is_closing():
            return
        self._head_bytes += len(data)
        if self._head_bytes > self.limits.header_bytes:
            self._refuse(*_HEAD_TOO_LARGE)
        elif self._timer is None:
            self._timer = self.loop.call_later(self.limits.header_seconds, self._refuse_slow_head)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        # The silence ends only here: empty lines before a request don't count as one.
        self._stop_timer()
        self._in_head, self._head_bytes, self._parsed_bytes = True, 0, 0

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head, self._in_body = False, True
        self._stop_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_body = False
        if self.cycle.response_complete:
            self._await_next()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # If the next request has already begun, the timer belongs to that one.
        if not self._in_head and self.cycle.response_complete:
            self._await_next()

    def send_400_response(self, msg: str) -> None:
        self._refuse(*self._refusal)

    def _count_head(self, size: int) -> None:
        self._parsed_bytes += size
        if self._parsed_bytes > self.limits.header_bytes:
            self._refusal = _HEAD_TOO_LARGE
            raise _TooLargeError

    def _refuse_slow_head(self) -> None:
        self._timer = None
        if not self.transport.is_closing():
            self._refuse(
                408, f"the request's head took longer than {self.limits.header_seconds:g} s to arrive"
            )

    def _await_next(self) -> None:
        """Close the connection unless the next request, or the end of an unread body, comes in time."""
        self._stop_timer()
        if not self.transport.is_closing():
            seconds = self.limits.body_seconds if self._in_body else self.limits.idle_seconds
            self._timer = self.loop.call_later(seconds, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, status: int, message: str) -> None:
        body = msgspec.json.encode({"error": message})
        head = b"content-type: application/json\r\nconnection: close\r\n"
        self.transport.write(STATUS_LINE[status] + head + b"content-length: %d\r\n\r\n" % len(body) + body)
        self.transport.close()


def limited_protocol(limits: Limits) -> type[HttpToolsProtocol]:
    """Return uvicorn's HTTP protocol with `limits` added; bodies that are read are limited by the application."""
    return type("LimitedProtocol", (_LimitedProtocol,), {"limits": limits})
