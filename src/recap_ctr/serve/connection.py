"""HTTP connections with bounds on what the application never sees: how large and how slow heads may be, how long a
connection may keep silent, and how long the rest of a body may take that was answered before it was read."""

import asyncio
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from recap_ctr.serve.config import Limits


class _TooLargeError(Exception):
    pass


def limited(limits: Limits) -> type[HttpToolsProtocol]:
    """uvicorn's protocol, which bounds none of these, with `limits`; other bodies are the application's own matter."""

    class Limited(HttpToolsProtocol):
        """There is one timer: for a head, for the rest of a body, or for the silence between two requests."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._in_head = self._in_body = False
            self._head_bytes = self._named_bytes = 0
            self._timer: asyncio.TimerHandle | None = None
            self._refusal = 400, "this is not HTTP"

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
            if self._head_bytes > limits.header_bytes:
                self._refuse(431, "the request's head is too large")
            elif self._timer is None:
                self._timer = self.loop.call_later(limits.header_seconds, self._too_slow)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._stop_timer()  # it is idle no more; empty lines before a request change nothing
            self._in_head, self._head_bytes, self._named_bytes = True, 0, 0

        def on_url(self, url: bytes) -> None:
            self._weigh(len(url))
            super().on_url(url)

        def on_header(self, name: bytes, value: bytes) -> None:
            self._weigh(len(name) + len(value) + 4)
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
            # Another request may be on its way already: then it is that one's turn.
            if not self._in_head and self.cycle.response_complete:
                self._await_next()

        def send_400_response(self, msg: str) -> None:
            self._refuse(*self._refusal)

        def _weigh(self, size: int) -> None:
            self._named_bytes += size
            if self._named_bytes > limits.header_bytes:
                self._refusal = 431, "the request's head is too large"
                raise _TooLargeError

        def _too_slow(self) -> None:
            self._timer = None
            if not self.transport.is_closing():
                self._refuse(
                    408, f"the request's head took longer than {limits.header_seconds:g} s to arrive"
                )

        def _await_next(self) -> None:
            """Until the next request begins: silence, after the rest of a body that nobody waits for any more."""
            self._stop_timer()
            if not self.transport.is_closing():
                seconds = limits.body_seconds if self._in_body else limits.idle_seconds
                self._timer = self.loop.call_later(seconds, self.transport.close)

        def _stop_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _refuse(self, status: int, message: str) -> None:
            body = msgspec.json.encode({"error": message})
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(
                body
            )
            self.transport.write(STATUS_LINE[status] + head + body)
            self.transport.close()

    return Limited
