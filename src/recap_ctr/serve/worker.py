"""One worker: an engine, an event loop, and a socket to the supervisor, without which it ends.

python -m recap_ctr.serve.worker    (only by the supervisor, which passes file descriptors and the configuration)
"""

import asyncio
import gc
import logging
import os
import socket
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import uvicorn

from recap_ctr.errors import InputError
from recap_ctr.serve.app import make_app
from recap_ctr.serve.check import SHADOW_SECONDS
from recap_ctr.serve.config import ServeConfig
from recap_ctr.serve.connection import limited_protocol
from recap_ctr.serve.counters import SWAPS, Counters, labelled
from recap_ctr.serve.log import JsonHandler
from recap_ctr.serve.service import Service
from recap_ctr.serve.versions import Version, check_fields, compare, load_version

LOAD_NICENESS = 10
DRAIN_SECONDS = 0.1  # For the requests of connections that were accepted last to arrive.


class Start(msgspec.Struct, frozen=True):
    """The first message of the supervisor."""

    config: ServeConfig
    slot: int
    """The worker's place among the workers; its successor takes the same slot, and with it its counters."""
    state: str
    """The directory that the processes of the server share."""
    snapshot: str
    """The artifact that serves now."""
    previous: str | None
    """The artifact that served before, for a rollback."""
    token: str | None
    history: dict[str, Any]


class HeldVersions:
    """The versions that this worker holds in memory."""

    def __init__(self, start: Start) -> None:
        self._start = start
        self.current: Version | None = None
        self.previous: Version | None = None
        self.offered: Version | None = None
        self.history = start.history

    def load(self, path: str, seconds: float) -> Version:
        """Load the artifact in `path` and measure it for about `seconds`."""
        return load_version(Path(path), self._start.config, Path(self._start.state), seconds)


class _Server(uvicorn.Server):
    """Answers, before it ends, the connections that the system has already accepted for it."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept the connections that wait, stop listening, and give them time to send their requests."""
        for listener in sockets or []:
            await self._accept_waiting(listener)
        for server in self.servers:
            server.close()
        for listener in sockets or []:
            listener.close()
        await asyncio.sleep(DRAIN_SECONDS)
        await super().shutdown(sockets)

    async def _accept_waiting(self, listener: socket.socket) -> None:
        """Accept connections until none waits; otherwise closing the socket would reset them."""
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                connection, _ = listener.accept()
                connection.setblocking(False)
                await loop.connect_accepted_socket(self._make_protocol, connection)

    def _make_protocol(self) -> asyncio.Protocol:
        protocol: Any = self.config.http_protocol_class
        made: asyncio.Protocol = protocol(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return made


def make_server(service: Service, config: ServeConfig) -> uvicorn.Server:
    """Return the HTTP server of `service`, without a socket."""
    return _Server(
        uvicorn.Config(
            make_app(service),
            http=limited_protocol(config.limits),
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            limit_concurrency=config.limits.connections,
            timeout_keep_alive=max(1, int(config.limits.idle_seconds)),
            timeout_graceful_shutdown=max(1, int(config.grace_seconds)),
            backlog=2048,
        )
    )


class Worker:
    """One process that scores; `orders` are the supervisor's messages after the first, one per line."""

    def __init__(
        self, start: Start, control: socket.socket, orders: Iterable[bytes], listener: socket.socket
    ) -> None:
        self._start, self._control, self._orders, self._listener = start, control, orders, listener
        self._versions = HeldVersions(start)
        self._counters = Counters(Path(start.state) / f"counters-{start.slot:03d}.bin")
        self._service = Service(start.config, self._versions, self._counters, start.token)
        self._server = make_server(self._service, start.config)

    def run(self) -> int:
        """Load the artifact, serve until the supervisor says to stop, and return the exit code."""
        try:
            version = self._versions.load(self._start.snapshot, self._start.config.cost_seconds)
        except InputError as error:
            self._send(did="refused", reason=str(error))
            return 2
        self._versions.current = version
        self._counters.add("recap_worker_starts_total")
        _freeze()
        self._send(did="ready", model=version.name, seconds=round(version.seconds, 3))
        threading.Thread(target=self._follow_orders, daemon=True).start()
        with suppress(KeyboardInterrupt):
            self._server.run(sockets=[self._listener])
        return 0

    def _send(self, **message: Any) -> None:
        with suppress(OSError):
            self._control.sendall(msgspec.json.encode(message) + b"\n")

    def _follow_orders(self) -> None:
        """Do what the supervisor says, one order at a time; stop when it is gone."""
        if self._start.previous is not None:  # Load it now, so that a rollback is instant.
            with suppress(InputError):
                self._versions.previous = self._versions.load(self._start.previous, SHADOW_SECONDS)
        with suppress(OSError):
            for line in self._orders:
                self._follow(msgspec.json.decode(line))
        self._service.draining = True
        self._server.should_exit = True

    def _follow(self, order: dict[str, Any]) -> None:
        versions = self._versions
        if order["do"] == "load":
            self._load_offer(order["path"], order["number"])
            return
        match order["do"]:
            case "swap":
                if versions.offered is not None:
                    versions.current, versions.previous = versions.offered, versions.current
                    versions.offered = None
                    _freeze()
            case "drop":
                versions.offered = None
            case "rollback":
                if versions.previous is None:  # It could not be loaded; a restarted worker will load it.
                    self._server.should_exit = True
                versions.current, versions.previous = versions.previous or versions.current, versions.current
        versions.history = order["history"]
        self._counters.add(labelled(SWAPS, outcome=order["history"]["outcome"]))

    def _load_offer(self, path: str, number: int) -> None:
        """Load an offered artifact, which has been tried elsewhere, and tell the supervisor whether it can serve.

        A thread of its own does that, which lets those that score go first.
        """
        thread = threading.Thread(target=self._load_slowly, args=(path, number))
        thread.start()
        thread.join()

    def _load_slowly(self, path: str, number: int) -> None:
        # The engine's own threads, if it has any, would inherit the niceness.
        if self._start.config.threads == 1 and sys.platform == "linux":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOAD_NICENESS)
        try:
            report = self._try_offer(path)
        except Exception as error:  # Whatever is wrong with it, the serving version goes on.
            is_ours = isinstance(error, InputError)
            reason = str(error) if is_ours else f"{type(error).__name__}: {error}"
            self._send(did="refused", number=number, reason=reason)
        else:
            self._send(did="loaded", number=number, **report)

    def _try_offer(self, path: str) -> dict[str, Any]:
        serving = self._versions.current
        assert serving is not None
        offered = self._versions.load(path, SHADOW_SECONDS)
        check_fields(offered, serving)
        comparison = compare(offered, serving, self._service.recent.tables())
        self._versions.offered = offered
        self._counters.add("recap_shadow_rows_total", comparison["rows"])
        difference = comparison.get("mean_difference", 0.0) * comparison["rows"]
        self._counters.add("recap_shadow_difference_total", difference)
        return {"model": offered.name, "seconds": round(offered.seconds, 3), "shadow": comparison}


def _freeze() -> None:
    """Take what is loaded out of garbage collection: it stays, so the collector need not look at it again."""
    gc.collect()
    gc.freeze()


def main() -> int:
    """Serve as a worker of the supervisor that started this process."""
    # Below this level uvicorn reports every bad client.
    logging.basicConfig(handlers=[JsonHandler()], level=logging.ERROR)
    control = socket.socket(fileno=int(os.environ["RECAP_CONTROL"]))
    listener = socket.socket(fileno=int(os.environ["RECAP_LISTENER"]))
    orders = control.makefile("rb")
    start = msgspec.json.decode(orders.readline(), type=Start)
    return Worker(start, control, orders, listener).run()


if __name__ == "__main__":
    sys.exit(main())
