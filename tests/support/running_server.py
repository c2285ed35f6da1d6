"""A server within the test's own process, and one as a process of its own; and plain requests to both."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from recap_ctr.serve.app import Service
from recap_ctr.serve.codec import Codec
from recap_ctr.serve.config import ServeConfig
from recap_ctr.serve.counters import Counters
from recap_ctr.serve.engine import Engine
from recap_ctr.serve.scheduler import Costs
from recap_ctr.serve.versions import Version
from recap_ctr.serve.worker import make_server

ROOT = Path(__file__).parents[2]
JSON = {"content-type": "application/json"}


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Fixed:
    """One version that always serves."""

    def __init__(self, version: Version) -> None:
        self.current: Version | None = version
        self.history: dict[str, Any] = {}


class Address(NamedTuple):
    port: int

    def ask(
        self, method: str, path: str, body: bytes | str | None = None, headers: dict[str, str] | None = None
    ) -> Answer:
        """One request on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            connection.request(method, path, body, headers or {})
            found = connection.getresponse()
            return Answer(found.status, {k.lower(): v for k, v in found.getheaders()}, found.read())
        finally:
            connection.close()

    def score(self, asked: Any, **headers: str) -> Answer:
        return self.ask("POST", "/score", json.dumps(asked), {**JSON, **headers})

    def raw(self, *parts: bytes, pause: float = 0.0) -> bytes:
        """What comes back for bytes that need be no HTTP."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=20) as connection:
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
        return f"http://127.0.0.1:{self.port}"


def version_of(
    engine: Engine, config: ServeConfig, name: str = "test", costs: Costs | None = None
) -> Version:
    """A version whose settings cost next to nothing, unless told otherwise."""
    free = Costs((1, 512), tuple((1e-6, 1e-4) for _ in engine.settings))
    return Version(name, engine, Codec(engine.encoder, config.limits), costs or free, "# a card", 0.0)


@contextmanager
def within(
    engine: Engine, config: ServeConfig | None = None, *, token: str | None = None, costs: Costs | None = None
) -> Iterator[Address]:
    """The whole HTTP stack on a thread."""
    config = config or ServeConfig(artifact="", deadline_ms=20_000)
    with tempfile.TemporaryDirectory() as state, socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        serving = Fixed(version_of(engine, config, costs=costs))
        server = make_server(
            Service(config, serving, Counters(Path(state) / "counters-000.bin"), token), config
        )
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            while not server.started:
                time.sleep(0.01)
            yield Address(port)
        finally:
            server.should_exit = True
            thread.join()


class Process:
    """`Supervisor` in a process of its own, as `recap serve` runs it."""

    def __init__(self, config: ServeConfig, directory: Path, token: str | None = None) -> None:
        code = (
            "import sys, msgspec\n"
            "from recap_ctr.serve.config import ServeConfig\n"
            "from recap_ctr.serve.supervisor import Supervisor\n"
            "config = msgspec.json.decode(sys.argv[1], type=ServeConfig)\n"
            "Supervisor(config, sys.argv[2] or None, lambda *_: None).run()\n"
        )
        import msgspec

        path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        self._log = directory / "log.jsonl"
        self._out = self._log.open("wb")
        self.popen = subprocess.Popen(
            [sys.executable, "-c", code, msgspec.json.encode(config).decode(), token or ""],
            stdout=self._out,
            env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(directory)},
        )

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = self._log.read_bytes().split(b"\n")[:-1]
        return [found for found in map(json.loads, lines) if found["event"] == name]

    def wait(self, name: str, count: int = 1, seconds: float = 30.0) -> dict[str, Any]:
        """The event, once it has happened so often."""
        end = time.monotonic() + seconds
        while len(found := self.events(name)) < count:
            assert time.monotonic() < end, f"no {name!r} in\n{self._log.read_text()}"
            assert self.popen.poll() is None, f"the server ended:\n{self._log.read_text()}"
            time.sleep(0.02)
        return found[count - 1]

    @property
    def address(self) -> Address:
        return Address(int(self.wait("serving")["address"].rpartition(":")[2]))

    def send(self, number: signal.Signals) -> None:
        self.popen.send_signal(number)

    def close(self) -> None:
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGTERM)
            try:
                self.popen.wait(20)
            except subprocess.TimeoutExpired:
                self.popen.kill()
                self.popen.wait()
        self._out.close()


class Load:
    """Threads that send one request after the other until told to stop, and keep what they get."""

    def __init__(self, address: Address, body: bytes, threads: int = 3) -> None:
        self.answers: list[tuple[float, Answer]] = []
        """When it was sent, and what came."""
        self.failures: list[tuple[float, Exception]] = []
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

    def _run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._address.port, timeout=20)
        while not self._stop.is_set():
            start = time.monotonic()
            try:
                connection.request("POST", "/score", self._body, JSON)
                found = connection.getresponse()
                self.answers.append((start, Answer(found.status, {}, found.read())))
            except (OSError, http.client.HTTPException) as error:
                self.failures.append((start, error))
                connection.close()
        connection.close()
