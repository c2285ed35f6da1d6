"""Connections that are slow, silent, broken or do not speak HTTP."""

import asyncio
import json
import socket
import tempfile
import threading
import time
from pathlib import Path

import pytest

from recap_ctr.serve.counters import Counters
from recap_ctr.serve.scheduler import Costs
from recap_ctr.serve.service import Service
from recap_ctr.serve.worker import make_server
from tests.support.fake_engine import ROW, FakeEngine
from tests.support.running_server import (
    SMALL_LIMITS,
    SMALL_SERVER,
    Address,
    FixedVersion,
    serve_in_thread,
    version_of,
    wait_until,
)


@pytest.mark.slow
def test_size_and_duration_of_heads_are_limited(fake: Address) -> None:
    def with_head(size: int) -> bytes:
        start = b"GET /health/live HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nx-pad: "
        return start + b"p" * (size - len(start) - 4) + b"\r\n\r\n"

    assert fake.raw(with_head(SMALL_LIMITS.header_bytes - 100)).startswith(b"HTTP/1.1 200")
    assert fake.raw(with_head(SMALL_LIMITS.header_bytes + 100)).startswith(b"HTTP/1.1 431")
    assert fake.raw(b"GET /" + b"x" * SMALL_LIMITS.header_bytes).startswith(b"HTTP/1.1 431")
    assert fake.raw(b"GET /health/live HTTP/1.1\r\n").startswith(b"HTTP/1.1 408")
    assert fake.raw() == b"", "a connection that stays silent is closed"
    start = time.monotonic()
    slowly = [bytes([byte]) for byte in b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n"]
    assert b"408" in fake.raw(*slowly, pause=0.05)
    assert time.monotonic() - start < 4
    head = b"POST /score HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n"
    assert fake.raw(head, b"{").startswith(b"HTTP/1.1 408")
    again = b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n"
    twice = fake.raw(again, b"GET /health", pause=0.05)
    assert twice.startswith(b"HTTP/1.1 200") and b"HTTP/1.1 408" in twice, "a second head on the connection"


@pytest.mark.slow
def test_every_connection_is_closed_in_the_end(fake: Address) -> None:
    """`raw` returns when the server has closed the connection, and fails if it doesn't."""
    live = b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n"
    for blank in (b"", b"\r\n", b"\r\n\r\n"):
        assert fake.raw(live, blank, pause=0.1).count(b"HTTP/1.1") == 1
    assert fake.raw(b"\r\n") == b""
    long = b"POST /model HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000000\r\n\r\n"
    assert fake.raw(long, *[b"x"] * 60, pause=0.05).startswith(b"HTTP/1.1 405")
    assert fake.raw(long).startswith(b"HTTP/1.1 405")


@pytest.mark.slow
def test_a_body_may_arrive_after_its_answer(fake: Address) -> None:
    """A 429 is sent before the body is read, to a client that is still sending."""
    head = b"POST /model HTTP/1.1\r\nhost: localhost\r\ncontent-length: 20\r\n\r\n"
    last = b"GET /health/live HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    body = b"x" * 20
    for parts in ([head, body[:10], body[10:], last], [head + body + last], [head, body + head, body + last]):
        answer = fake.raw(*parts, pause=0.1)
        assert answer.startswith(b"HTTP/1.1 405") and b"HTTP/1.1 200" in answer


def test_bytes_that_are_not_http_get_a_400(fake: Address) -> None:
    post = b"POST /score HTTP/1.1\r\n"
    for junk in (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"hello\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        post + b"content-length: -1\r\n\r\n",
        post + b"content-length: 1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    ):
        assert fake.raw(junk).startswith(b"HTTP/1.1 400")


def test_broken_connections_do_no_harm(fake: Address) -> None:
    head = b"POST /score HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 60\r\n\r\n"
    body = json.dumps({"rows": [{"site": "a"}]}).encode().ljust(60)
    for cut in (0, 10, len(head), len(head) + 10, len(head) + 60):
        with socket.create_connection(("127.0.0.1", fake.port)) as connection:
            connection.sendall((head + body)[:cut])
    assert fake.score({"rows": [ROW]}).status == 200


def test_heads_that_mislead_are_refused() -> None:
    """A length of thousands of digits, and HTTP/1.1 without the Host header that it requires."""
    head = b"POST /score HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with serve_in_thread(FakeEngine({})) as address:
        for digits in (b"9" * 16, b"9" * 5_000, b"0" * 30 + b"9" * 30):
            answer = address.raw(head + b"content-length: " + digits + b"\r\nconnection: close\r\n\r\n")
            assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 413")), answer[:200]
        answer = address.raw(b"GET /model HTTP/1.1\r\nconnection: close\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 400") and b"Host" in answer
        assert address.raw(b"GET /health/live HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200")


def test_a_busy_server_refuses_before_the_body_is_sent() -> None:
    go_on = threading.Event()

    def sleep(_: float) -> None:
        go_on.wait(20)

    costs = Costs((1, 512), tuple((5.0, 5.0) for _ in FakeEngine.settings))
    head = b"POST /score HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 900\r\n\r\n"
    with serve_in_thread(FakeEngine({"row_us": 1}, sleep), costs=costs) as address:
        long = {"rows": [{"site": "a"}], "deadline_ms": 60_000}
        first = threading.Thread(target=address.score, args=(long,))
        first.start()
        wait_until(lambda: "\nrecap_waiting_requests 1\n" in metrics_text(address), "the first one is scored")
        with socket.create_connection(("127.0.0.1", address.port), timeout=20) as client:
            client.sendall(head.replace(b"/score", b"/score?deadline_ms=5000"))
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 429")
        go_on.set()
        first.join()


def metrics_text(address: Address) -> str:
    return address.ask("GET", "/metrics").body.decode()


def test_connections_in_the_backlog_are_answered_before_the_end() -> None:
    """The system accepts connections before the server does; a server that stops serves them, too."""

    async def stop(listener: socket.socket, state: str) -> None:
        versions = FixedVersion(version_of(FakeEngine({}), SMALL_SERVER))
        service = Service(SMALL_SERVER, versions, Counters(Path(state) / "counters-000.bin"), None)
        server = make_server(service, SMALL_SERVER)
        server.config.load()
        server.lifespan = server.config.lifespan_class(server.config)
        server.servers = []
        await server.lifespan.startup()
        await server.shutdown([listener])

    with (
        tempfile.TemporaryDirectory() as state,
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname(), timeout=20) as client,
    ):
        client.sendall(b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n")
        asyncio.run(stop(listener, state))
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")
