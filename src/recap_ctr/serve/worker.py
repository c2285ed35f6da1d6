"""One worker: an engine, an event loop, and a line to the supervisor that it can't outlive.

python -m recap_ctr.serve.worker    (by the supervisor alone: file descriptors and settings come from it)
"""

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
from recap_ctr.serve.app import Service, make_app
from recap_ctr.serve.config import ServeConfig
from recap_ctr.serve.connection import limited
from recap_ctr.serve.counters import Counters, labelled
from recap_ctr.serve.log import Relay
from recap_ctr.serve.versions import Version, check_fits, load, shadow

BESIDE_SECONDS = 0.2  # to time an engine while another one serves


class Start(msgspec.Struct, frozen=True):
    """What a worker is told first."""

    config: ServeConfig
    slot: int
    """Which of the workers it is; a successor takes the same slot, and its counters."""
    state: str
    """The server's directory for what its processes share."""
    snapshot: str
    """The artifact that serves now."""
    previous: str | None
    token: str | None
    history: dict[str, Any]


class Held:
    """The versions of this worker."""

    def __init__(self, start: Start) -> None:
        self._start = start
        self.current: Version | None = None
        self.previous: Version | None = None
        self.offered: Version | None = None
        self.history = start.history

    def load(self, path: str, seconds: float) -> Version:
        return load(Path(path), self._start.config, Path(self._start.state), seconds)


def make_server(service: Service, config: ServeConfig) -> uvicorn.Server:
    return uvicorn.Server(
        uvicorn.Config(
            make_app(service),
            http=limited(config.limits),
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
    """`orders` are the lines of the supervisor, after the first one."""

    def __init__(
        self, start: Start, control: socket.socket, orders: Iterable[bytes], listener: socket.socket
    ) -> None:
        self._start, self._control, self._orders, self._listener = start, control, orders, listener
        self._held = Held(start)
        self._counters = Counters(Path(start.state) / f"counters-{start.slot:03d}.bin")
        self._service = Service(start.config, self._held, self._counters, start.token)
        self._server = make_server(self._service, start.config)

    def run(self) -> int:
        try:
            self._held.current = self._held.load(self._start.snapshot, self._start.config.cost_seconds)
        except InputError as error:
            self._say(did="refused", reason=str(error))
            return 2
        self._counters.add("recap_worker_starts_total")
        # What was loaded stays: the collector need not look at it again.
        gc.collect()
        gc.freeze()
        version = self._held.current
        self._say(did="ready", model=version.name, seconds=round(version.seconds, 3))
        threading.Thread(target=self._listen, daemon=True).start()
        with suppress(KeyboardInterrupt):
            self._server.run(sockets=[self._listener])
        return 0

    def _say(self, **message: Any) -> None:
        with suppress(OSError):
            self._control.sendall(msgspec.json.encode(message) + b"\n")

    def _listen(self) -> None:
        """Do what the supervisor says, one thing after the other; when it is gone, stop."""
        if self._start.previous is not None:  # so that going back is instant here, too
            with suppress(InputError):
                self._held.previous = self._held.load(self._start.previous, BESIDE_SECONDS)
        with suppress(OSError):
            for line in self._orders:
                self._obey(msgspec.json.decode(line))
        self._service.draining = True
        self._server.should_exit = True

    def _obey(self, order: dict[str, Any]) -> None:
        held = self._held
        match order["do"]:
            case "load":
                try:
                    found = self._try(order["path"])
                except Exception as error:  # whatever is wrong with it, the serving one goes on
                    reason = (
                        str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
                    )
                    self._say(did="refused", number=order["number"], reason=reason)
                else:
                    self._say(did="loaded", number=order["number"], **found)
            case "swap":
                if held.offered is not None:
                    held.current, held.previous, held.offered = held.offered, held.current, None
                    gc.collect()
                    gc.freeze()
                held.history = order["history"]
                self._counters.add(labelled("recap_swaps_total", outcome="swapped"))
            case "drop":
                held.offered = None
                held.history = order["history"]
                self._counters.add(labelled("recap_swaps_total", outcome="refused"))
            case "rollback":
                if (
                    held.previous is None
                ):  # it could not be loaded again here: start anew, with what serves now
                    self._server.should_exit = True
                held.current, held.previous = held.previous or held.current, held.current
                held.history = order["history"]
                self._counters.add(labelled("recap_swaps_total", outcome="rolled back"))

    def _try(self, path: str) -> dict[str, Any]:
        serving = self._held.current
        assert serving is not None
        offered = self._held.load(path, BESIDE_SECONDS)
        check_fits(offered, serving)
        compared = shadow(offered, serving, list(self._service.recent))
        self._held.offered = offered
        self._counters.add("recap_shadow_rows_total", compared["rows"])
        difference = compared.get("mean_difference", 0.0) * compared["rows"]
        self._counters.add("recap_shadow_difference_total", difference)
        return {"model": offered.name, "seconds": round(offered.seconds, 3), "shadow": compared}


def main() -> int:
    logging.basicConfig(
        handlers=[Relay()], level=logging.ERROR
    )  # below that uvicorn tells of every bad client
    control = socket.socket(fileno=int(os.environ["RECAP_CONTROL"]))
    listener = socket.socket(fileno=int(os.environ["RECAP_LISTENER"]))
    orders = control.makefile("rb")
    start = msgspec.json.decode(orders.readline(), type=Start)
    return Worker(start, control, orders, listener).run()


if __name__ == "__main__":
    sys.exit(main())
