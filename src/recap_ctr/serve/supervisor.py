"""The supervisor: it holds the listening socket, keeps the workers alive, and decides which artifact serves.

What serves is a snapshot, so that a worker that comes back finds the same bytes, whatever has become of the original.
An offered artifact is loaded by every worker; only when all of them take it does it serve. SIGHUP offers what stands at
the path now, SIGUSR1 goes back to the version before, SIGTERM and SIGINT finish what was accepted.
"""

import os
import selectors
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from recap_ctr.errors import InputError
from recap_ctr.serve.config import ServeConfig, check_exposure
from recap_ctr.serve.log import log

WATCH_SECONDS = 1.0
LOAD_SECONDS = 300.0
MAX_FAILURES = 5  # starts in a row that fail before the server gives up
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


@dataclass(eq=False)
class _Child:
    """A worker's process, and the line to it."""

    slot: int
    process: subprocess.Popen[bytes]
    control: socket.socket
    snapshot: Path
    unread: bytes = b""
    is_ready: bool = False
    started: float = field(default_factory=time.monotonic)

    def tell(self, **order: Any) -> None:
        with suppress(OSError):  # it died; that is noticed elsewhere
            self.control.sendall(msgspec.json.encode(order) + b"\n")


@dataclass(eq=False)
class _Offer:
    """An artifact that is being tried."""

    number: int
    snapshot: Path
    undecided: set[int]
    shadows: list[dict[str, float]] = field(default_factory=list)
    model: str = ""
    started: float = field(default_factory=time.monotonic)


class Supervisor:
    """`ready` is called once, with the address, when the first worker answers."""

    def __init__(self, config: ServeConfig, token: str | None, ready: Callable[[str, str], None]) -> None:
        check_exposure(config, token)
        self._config, self._token, self._ready = config, token, ready
        self._artifact = Path(config.artifact).absolute()
        self._children: dict[int, _Child] = {}
        self._restart_at: dict[int, float] = {}
        self._failures = 0
        self._number = 0
        self._models: dict[Path, str] = {}  # snapshot -> version
        self._current = self._previous = None  # type: Path | None
        self._offer: _Offer | None = None
        self._history: dict[str, Any] = {}
        self._signals: list[int] = []
        self._seen = self._offered = ()  # type: tuple[Any, ...]
        self._stopping = False

    def run(self) -> None:
        """Serve until told to stop."""
        self._state = Path(tempfile.mkdtemp(prefix="recap-serve-"))
        self._selector = selectors.DefaultSelector()
        self._listener = _listen(self._config)
        try:
            self._catch_signals()
            self._current = self._take_snapshot()
            self._offered = self._seen = _signature(_inside(self._artifact))
            self._start(0)  # the others follow once it has measured what settings cost
            while not self._stopping:
                self._step()
        finally:
            self._stop()
            shutil.rmtree(self._state, ignore_errors=True)

    @property
    def _model(self) -> str:
        """The version that serves; empty until a worker has loaded it."""
        return self._models.get(self._current, "") if self._current else ""

    @property
    def address(self) -> str:
        host, port = self._listener.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def _step(self) -> None:
        due = [*self._restart_at.values(), time.monotonic() + WATCH_SECONDS]
        for key, _ in self._selector.select(max(0.0, min(due) - time.monotonic())):
            if isinstance(key.data, _Child):
                self._hear(key.data)
            else:
                self._wakeup.recv(4096)
        while self._signals:
            self._handle(self._signals.pop(0))
        for slot, at in list(self._restart_at.items()):
            if at <= time.monotonic() and not self._stopping:
                del self._restart_at[slot]
                self._start(slot)
        if self._offer is not None and time.monotonic() - self._offer.started > LOAD_SECONDS:
            for slot in self._offer.undecided:
                self._children[slot].process.kill()
            self._refuse(f"it did not load within {LOAD_SECONDS:g} s")
        if self._config.watch:
            self._look()

    def _catch_signals(self) -> None:
        self._wakeup, writer = socket.socketpair()
        self._writer = writer
        for end in (self._wakeup, writer):
            end.setblocking(False)
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        self._before = {
            number: signal.signal(number, lambda number, _: self._signals.append(number))
            for number in _SIGNALS
        }
        self._selector.register(self._wakeup, selectors.EVENT_READ)

    def _handle(self, number: int) -> None:
        if number in (signal.SIGTERM, signal.SIGINT):
            self._stopping = True
        elif number == signal.SIGHUP:
            self._try()
        else:
            self._roll_back()

    # Workers

    def _start(self, slot: int) -> None:
        ours, theirs = socket.socketpair()
        environment = {
            **os.environ,
            "RECAP_CONTROL": str(theirs.fileno()),
            "RECAP_LISTENER": str(self._listener.fileno()),
            "OMP_NUM_THREADS": str(self._config.threads),
            "POLARS_MAX_THREADS": str(self._config.threads),
            "OMP_WAIT_POLICY": "PASSIVE",
            "RUST_BACKTRACE": "0",
        }
        environment.pop("RECAP_TOKEN", None)
        assert self._current is not None
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "recap_ctr.serve.worker"],
            pass_fds=(theirs.fileno(), self._listener.fileno()),
            stdin=subprocess.DEVNULL,
            env=environment,
        )
        theirs.close()
        child = self._children[slot] = _Child(slot, process, ours, self._current)
        self._selector.register(ours, selectors.EVENT_READ, child)
        child.tell(
            config=self._config,
            slot=slot,
            state=str(self._state),
            snapshot=str(self._current),
            previous=str(self._previous) if self._previous else None,
            token=self._token,
            history=self._history,
        )

    def _hear(self, child: _Child) -> None:
        try:
            data = child.control.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self._bury(child)
            return
        *lines, child.unread = (child.unread + data).split(b"\n")
        for line in lines:
            self._answer(child, msgspec.json.decode(line))

    def _answer(self, child: _Child, said: dict[str, Any]) -> None:
        offer = self._offer
        if said["did"] == "ready":
            child.is_ready, self._failures = True, 0
            log(
                "worker ready",
                slot=child.slot,
                worker=child.process.pid,
                model=said["model"],
                seconds=said["seconds"],
            )
            if child.snapshot != self._current:  # it was overtaken by a swap while it started
                child.control.shutdown(socket.SHUT_WR)
            elif not self._model:
                self._models[child.snapshot] = said["model"]
                log("serving", address=self.address, model=self._model, workers=self._config.workers)
                self._ready(self.address, self._model)
                for slot in range(1, self._config.workers):
                    self._start(slot)
            if offer is not None:
                offer.undecided.add(child.slot)
                child.tell(do="load", number=offer.number, path=str(offer.snapshot))
        elif "number" not in said:  # refused at its start
            reason = self._named(said["reason"], child.snapshot)
            if not self._model:
                raise InputError(reason)
            log("worker can't load the artifact", level="error", slot=child.slot, reason=reason)
        elif offer is not None and said["number"] == offer.number:
            offer.undecided.discard(child.slot)
            if said["did"] == "refused":
                self._refuse(said["reason"])
                return
            offer.model = said["model"]
            offer.shadows.append(said["shadow"])
            if not offer.undecided:
                self._accept()

    def _bury(self, child: _Child) -> None:
        self._selector.unregister(child.control)
        child.control.close()
        del self._children[child.slot]
        code = child.process.wait()
        if self._stopping:
            return
        log("worker died", level="warning", slot=child.slot, worker=child.process.pid, code=code)
        self._failures = 0 if child.is_ready else self._failures + 1
        if self._failures >= MAX_FAILURES:
            self._stopping = True
            raise RuntimeError(f"workers ended {self._failures} times in a row before they could serve")
        self._restart_at[child.slot] = time.monotonic() + (0.5 * 2**self._failures if self._failures else 0.0)
        if self._offer is not None and child.slot in self._offer.undecided:
            self._refuse("a worker died while it loaded it")

    # Versions

    def _look(self) -> None:
        """Offer what has changed at the path, once it changes no more."""
        try:
            found = _signature(_inside(self._artifact))
        except OSError:
            return
        if found == self._seen and found != self._offered and self._offer is None:
            self._try()
        self._seen = found

    def _try(self) -> None:
        if self._offer is not None or not self._model:
            log("offer not taken: another one is under way", level="warning")
            return
        try:
            self._offered = _signature(_inside(self._artifact))
            snapshot = self._take_snapshot()
        except (OSError, InputError) as error:
            self._record("refused", reason=self._named(str(error), self._snapshot))
            return
        ready = [child for child in self._children.values() if child.is_ready]
        self._offer = _Offer(self._number, snapshot, {child.slot for child in ready})
        log("offered", number=self._number)
        for child in ready:
            child.tell(do="load", number=self._number, path=str(snapshot))

    def _accept(self) -> None:
        offer = self._offer
        assert offer is not None
        if offer.model == self._model:
            self._record("unchanged", model=offer.model)
            self._end_offer("drop")
            shutil.rmtree(offer.snapshot, ignore_errors=True)
            return
        old = self._previous
        self._previous, self._current = self._current, offer.snapshot
        self._models[offer.snapshot] = offer.model
        self._record("swapped", model=offer.model, shadow=_combined(offer.shadows))
        self._end_offer("swap")
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)

    def _refuse(self, reason: str) -> None:
        offer = self._offer
        assert offer is not None
        self._record("refused", reason=self._named(reason, offer.snapshot))
        self._end_offer("drop")
        shutil.rmtree(offer.snapshot, ignore_errors=True)

    def _end_offer(self, order: str) -> None:
        self._offer = None
        for child in self._children.values():
            if child.is_ready:
                child.tell(do=order, history=self._history)

    def _roll_back(self) -> None:
        if self._previous is None or self._offer is not None:
            why = "there is no version before this one" if self._previous is None else "an offer is under way"
            log("not rolled back", level="warning", reason=why)
            return
        self._current, self._previous = self._previous, self._current
        self._record("rolled back", model=self._model)
        for child in self._children.values():
            if child.is_ready:
                child.tell(do="rollback", history=self._history)

    def _record(self, outcome: str, **details: Any) -> None:
        level = "warning" if outcome == "refused" else "info"
        log(outcome, level=level, **details)
        self._history = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "outcome": outcome,
            **details,
        }

    @property
    def _snapshot(self) -> Path:
        """Where the copy of what was offered last stands."""
        return self._state / f"artifact-{self._number}"

    def _take_snapshot(self) -> Path:
        self._number += 1
        into = self._snapshot
        try:
            _copy(_inside(self._artifact), into)
        except BaseException:
            shutil.rmtree(into, ignore_errors=True)
            raise
        return into

    def _named(self, reason: str, snapshot: Path) -> str:
        """What is wrong with an artifact, by the path that it was given by: ours means nothing to whoever reads it."""
        return reason.replace(str(snapshot), self._config.artifact)

    def _stop(self) -> None:
        """Let workers finish what they have accepted, then end."""
        self._stopping = True
        self._listener.close()
        for child in self._children.values():
            with suppress(OSError):
                child.control.shutdown(socket.SHUT_WR)
        log("stopping", workers=len(self._children))
        end = time.monotonic() + self._config.grace_seconds + 5.0
        for child in self._children.values():
            try:
                child.process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
            child.control.close()
        log("stopped")
        signal.set_wakeup_fd(-1)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._selector.close()
        self._wakeup.close()
        self._writer.close()


def _listen(config: ServeConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise InputError(
            f"can't listen on {config.host} port {config.port}: {getattr(error, 'strerror', None) or error}",
            fix="choose another --host or --port; port 0 takes a free one",
        ) from None
    listener.listen(2048)
    listener.set_inheritable(True)
    return listener


def _inside(path: Path) -> Path:
    """A run's directory stands for the artifact inside it."""
    inner = path / "artifact"
    return inner if not (path / "manifest.json").is_file() and (inner / "manifest.json").is_file() else path


def _copy(source: Path, into: Path) -> None:
    """Plain files of a directory and of those right below it; nothing that leads elsewhere is followed."""
    if not (source / "manifest.json").is_file():
        raise InputError(
            f"{source} holds no artifact", fix="give a directory that `recap train` or `recap fit` wrote"
        )
    into.mkdir()
    for entry in sorted(source.resolve().iterdir()):
        mode = entry.lstat().st_mode
        if stat.S_ISREG(mode):
            shutil.copyfile(entry, into / entry.name)
        elif stat.S_ISDIR(mode):
            (into / entry.name).mkdir()
            for file in sorted(entry.iterdir()):
                if stat.S_ISREG(file.lstat().st_mode):
                    shutil.copyfile(file, into / entry.name / file.name)


def _signature(path: Path) -> tuple[Any, ...]:
    """What moves when somebody writes to the artifact, or puts another one in its place."""
    real = path.resolve()
    files = sorted(file for pattern in ("*", "*/*") for file in real.glob(pattern))
    found = [(str(file), file.lstat()) for file in files]
    return tuple((name, status.st_ino, status.st_size, status.st_mtime_ns) for name, status in found)


def _combined(shadows: list[dict[str, float]]) -> dict[str, float]:
    """The comparison over all workers' rows."""
    seen = [found for found in shadows if found["rows"]]
    rows = sum(found["rows"] for found in seen)
    if not rows:
        return {"rows": 0}
    means = ("mean_difference", "mean_before", "mean_after")
    return {
        "rows": rows,
        **{name: sum(found[name] * found["rows"] for found in seen) / rows for name in means},
        "largest_difference": max(found["largest_difference"] for found in seen),
    }
