"""Servers for tests, one inside the test's process and one as a process of its own, and plain requests to both."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from recap_ctr.serve.codec import Codec
from recap_ctr.serve.config import Limits, ServeConfig
from recap_ctr.serve.counters import Counters
from recap_ctr.serve.interface import RowScorer
from recap_ctr.serve.scheduler import Costs
from recap_ctr.serve.service import Service
from recap_ctr.serve.versions import Version
from recap_ctr.serve.worker import make_server

ROOT = Path(__file__).parents[2]
JSON = {"content-type": "application/json"}
POLL_SECONDS = 0.02
SMALL_LIMITS = Limits(
    body_bytes=4000,
    rows=50,
    value_length=100,
    header_bytes=2000,
    header_seconds=0.6,
    body_seconds=0.6,
    idle_seconds=1.5,
)
SMALL_SERVER = ServeConfig(artifact="", deadline_ms=20_000, limits=SMALL_LIMITS)
SUPERVISE = """
import sys, msgspec
from recap_ctr.serve.config import ServeConfig
from recap_ctr.serve.supervisor import Supervisor
config = msgspec.json.decode(sys.argv[1], type=ServeConfig)
Supervisor(config, sys.argv[2] or None, lambda *_: None).run()
"""


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    """Poll until the condition holds; fail with `what` if it never does."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"never happened: {what}"
        time.sleep(POLL_SECONDS)


class Answer(NamedTuple):
    """An HTTP answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        """Return the decoded body."""
        return json.loads(self.body)


class FixedVersion:
    """A version holder with one version that always serves."""

    def __init__(self, version: Version) -> None:
        self.current: Version | None = version
        self.history: dict[str, Any] = {}


class Address(NamedTuple):
    """A server on loopback."""

    port: int

    def ask(
        self, method: str, path: str, body: bytes | str | None = None, headers: dict[str, str] | None = None
    ) -> Answer:
        """Send one request on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            names = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, names, response.read())
        finally:
            connection.close()

    def score(self, body: Any, **headers: str) -> Answer:
        """Send a JSON body to /score."""
        return self.ask("POST", "/score", json.dumps(body), {**JSON, **headers})

    def counter(self, name: str, label: str) -> dict[str, float]:
        """Return the values of one metric, by its only label."""
        text = self.ask("GET", "/metrics").body.decode()
        pattern = rf'^{name}\{{{label}="(.*?)"\}} (\S+)$'
        return {key: float(value) for key, value in re.findall(pattern, text, re.MULTILINE)}

    def raw(self, *parts: bytes, pause: float = 0.0) -> bytes:
        """Send bytes that need not be HTTP, `pause` seconds apart, and return all that comes back until the end."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as connection:
            with suppress(ConnectionError):
                for part in parts:
                    connection.sendall(part)
                    time.sleep(pause)
            answer = b""
            with suppress(ConnectionError):
                while data := connection.recv(1 << 16):
                    answer += data
            return answer

    @property
    def url(self) -> str:
        """The server's URL."""
        return f"http://127.0.0.1:{self.port}"


def version_of(
    engine: RowScorer, config: ServeConfig, name: str = "test", costs: Costs | None = None
) -> Version:
    """Return a version of an engine; unless `costs` says otherwise, its settings cost next to nothing."""
    free = Costs((1, 512), tuple((1e-6, 1e-4) for _ in engine.settings))
    return Version(name, engine, Codec(engine.encoder, config.limits), costs or free, "# a card", 0.0)


@contextmanager
def serve_in_thread(
    engine: RowScorer,
    config: ServeConfig | None = None,
    *,
    token: str | None = None,
    costs: Costs | None = None,
) -> Iterator[Address]:
    """Run the whole HTTP stack of one worker on a thread."""
    config = config or ServeConfig(artifact="", deadline_ms=20_000)
    with tempfile.TemporaryDirectory() as state, socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        versions = FixedVersion(version_of(engine, config, costs=costs))
        counters = Counters(Path(state) / "counters-000.bin")
        server = make_server(Service(config, versions, counters, token), config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            wait_until(lambda: server.started, "the server starts")
            yield Address(port)
        finally:
            server.should_exit = True
            thread.join()


class Process:
    """A supervisor in a process of its own, as `recap serve` runs it."""

    def __init__(self, config: ServeConfig, directory: Path, token: str | None = None) -> None:
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        self._log = directory / "log.jsonl"
        self._out = self._log.open("wb")
        self.popen = subprocess.Popen(
            [sys.executable, "-c", SUPERVISE, msgspec.json.encode(config).decode(), token or ""],
            stdout=self._out,
            env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(directory)},
        )

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the events of that name in the log, so far."""
        lines = self._log.read_bytes().split(b"\n")[:-1]
        return [event for event in map(json.loads, lines) if event["event"] == name]

    def wait(self, name: str, count: int = 1, seconds: float = 90.0) -> dict[str, Any]:
        """Return the event of that name, the `count`-th one, once it has happened."""
        end = time.monotonic() + seconds
        while len(events := self.events(name)) < count:
            assert time.monotonic() < end, f"no {name!r} in\n{self._log.read_text()}"
            assert self.popen.poll() is None, f"the server ended:\n{self._log.read_text()}"
            time.sleep(POLL_SECONDS)
        return events[count - 1]

    @property
    def address(self) -> Address:
        """The server's address, once it serves."""
        return Address(int(self.wait("serving")["address"].rpartition(":")[2]))

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the supervisor."""
        self.popen.send_signal(number)

    def close(self) -> None:
        """Stop the server."""
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGTERM)
            try:
                self.popen.wait(20)
            except subprocess.TimeoutExpired:
                self.popen.kill()
                self.popen.wait()
        self._out.close()


class Load:
    """Threads that send one request after the other until the block ends, and keep the answers."""

    def __init__(self, address: Address, body: bytes, threads: int = 3) -> None:
        self.answers: list[tuple[float, Answer]] = []
        """When each request was sent, and its answer."""
        self.failures: list[tuple[float, Exception]] = []
        """When a request was sent that got no answer, and the error."""
        self._address, self._body, self._stop = address, body, threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(threads)]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def wait(self, count: int) -> None:
        """Wait until `count` more requests are answered."""
        goal = len(self.answers) + count
        wait_until(lambda: len(self.answers) >= goal, f"{count} more answers")

    def _run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._address.port, timeout=60)
        while not self._stop.is_set():
            start = time.monotonic()
            try:
                connection.request("POST", "/score", self._body, JSON)
                response = connection.getresponse()
                self.answers.append((start, Answer(response.status, {}, response.read())))
            except (OSError, http.client.HTTPException) as error:
                self.failures.append((start, error))
                connection.close()
        connection.close()
