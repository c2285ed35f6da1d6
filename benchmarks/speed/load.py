"""A small load generator for loopback: one process, one event loop, no library between it and the socket.

`closed`: so many connections, each sending its next request when it has its answer: what the server can do.
`open_loop`: requests at random times at a given rate, whatever becomes of them, timed from when they were due: what
users would see.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass
class Answers:
    """When each request was due, how long it took, and its status (0: no answer came)."""

    due: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    status: list[int] = field(default_factory=list)

    def add(self, due: float, seconds: float, status: int) -> None:
        self.due.append(due)
        self.seconds.append(seconds)
        self.status.append(status)

    def milliseconds(self, status: int = 200) -> Floats:
        return np.asarray(1000 * np.array(self.seconds)[np.array(self.status, np.int64) == status])


class Connection(asyncio.Protocol):
    """One request at a time over one kept connection."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._data = bytearray()
        self._answer: asyncio.Future[int] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def send(self, request: bytes) -> int:
        """The status of the answer; 0 if the connection broke."""
        if self._transport is None or self._transport.is_closing():
            return 0
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._answer

    def write(self, data: bytes) -> None:
        """Send bytes, and wait for no answer."""
        if self._transport is not None:
            self._transport.write(data)

    def data_received(self, data: bytes) -> None:
        self._data += data
        head = self._data.find(b"\r\n\r\n")
        if head < 0:
            return
        lower = bytes(self._data[:head]).lower()
        at = lower.find(b"content-length:")
        length = int(lower[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
        if len(self._data) >= head + 4 + length and self._answer is not None:
            status = int(self._data[9:12])
            self.answered(bytes(self._data[head + 4 :]))
            self._data.clear()
            if not self._answer.done():
                self._answer.set_result(status)

    def answered(self, body: bytes) -> None:
        """For whoever wants to look at answers."""

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(0)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


async def connect(port: int, kind: type[Connection] = Connection) -> Connection:
    _, made = await asyncio.get_running_loop().create_connection(kind, "127.0.0.1", port)
    return made


def post(path: str, body: bytes, content_type: str) -> bytes:
    """The bytes of a request."""
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: {content_type}\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()


async def closed(port: int, requests: list[bytes], connections: int, seconds: float) -> Answers:
    """Requests one after the other on each connection; those of the first tenth of the time are not counted."""
    answers = Answers()
    start = time.perf_counter()

    async def go(number: int) -> None:
        connection = await connect(port)
        at = number
        while (due := time.perf_counter()) < start + seconds:
            status = await connection.send(requests[at % len(requests)])
            at += 1
            if due > start + seconds / 10:
                answers.add(due - start, time.perf_counter() - due, status)
            if not connection.is_open:
                connection = await connect(port)
        connection.close()

    await asyncio.gather(*(go(number) for number in range(connections)))
    return answers


async def open_loop(
    port: int,
    requests: list[bytes],
    rate: float,
    seconds: float,
    connections: int,
    kind: type[Connection] = Connection,
) -> Answers:
    """Poisson arrivals; a request that finds no free connection waits for one, and its clock runs."""
    rng = np.random.default_rng(0)
    due = np.cumsum(rng.exponential(1.0 / rate, int(1.2 * rate * seconds) + 10))
    due = due[due < seconds]
    answers = Answers()
    free = deque([await connect(port, kind) for _ in range(connections)])
    waiting: deque[asyncio.Future[Connection]] = deque()
    start = time.perf_counter()

    async def request_at(at: int) -> None:
        if free:
            connection = free.pop()
        else:
            place: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
            waiting.append(place)
            connection = await place
        if not connection.is_open:
            connection = await connect(port, kind)
        status = await connection.send(requests[at % len(requests)])
        answers.add(float(due[at]), time.perf_counter() - start - due[at], status)
        if waiting:
            waiting.popleft().set_result(connection)
        else:
            free.append(connection)

    tasks = []
    for at in range(len(due)):
        pause = start + due[at] - time.perf_counter()
        if pause > 0:
            await asyncio.sleep(pause)
        tasks.append(asyncio.create_task(request_at(at)))
    await asyncio.gather(*tasks)
    for connection in free:
        connection.close()
    return answers
