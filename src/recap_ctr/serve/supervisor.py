"""The supervisor: it owns the listening socket, keeps the workers alive, and decides which artifact serves.

A snapshot of the artifact serves, so that a restarted worker loads the same bytes whatever has happened to the
original. A process of its own tries an offered artifact; then every worker loads it, and it serves only when all of
them accept it. SIGHUP offers the artifact now at the path, SIGUSR1 goes back to the version before, SIGTERM and SIGINT
stop after accepted requests are answered.
"""

import os
import selectors
import shutil
import signal
import socket
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
from filelock import FileLock, Timeout

from recap_ctr.errors import InputError
from recap_ctr.serve.check import Check, Verdict
from recap_ctr.serve.config import ServeConfig, check_exposure
from recap_ctr.serve.log import log
from recap_ctr.serve.snapshots import Signature, Snapshots, remove

PREFIX, LOCK = "recap-serve-", "lock"
"""How the directory of a server is called, and the file in it that its supervisor holds."""
WATCH_SECONDS = 1.0
LOAD_SECONDS = 300.0
MAX_FAILURES = 5  # failed starts in a row before the server gives up
# Windows has only the first two.
_SIGNALS = [item for item in signal.Signals if item.name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")]


@dataclass(eq=False)
class _Child:
    """A worker's process and the socket to it."""

    slot: int
    process: subprocess.Popen[bytes]
    control: socket.socket
    snapshot: Path
    unread: bytes = b""
    is_ready: bool = False

    def send(self, **message: Any) -> None:
        with suppress(OSError):  # The worker died; `_receive` notices that.
            self.control.sendall(msgspec.json.encode(message) + b"\n")


@dataclass(eq=False)
class _Offer:
    """An artifact that is being tried, and then loaded by the workers."""

    number: int
    snapshot: Path
    checker: subprocess.Popen[bytes]
    is_checked: bool = False
    verdict: bytes = b""
    undecided: set[int] = field(default_factory=set)
    """Slots of the workers that have not answered yet."""
    comparisons: list[dict[str, float]] = field(default_factory=list)
    model: str = ""
    started: float = field(default_factory=time.monotonic)


class Supervisor:
    """The process above the workers; it calls `ready` once, with address and version, when the first one serves."""

    def __init__(self, config: ServeConfig, token: str | None, ready: Callable[[str, str], None]) -> None:
        check_exposure(config, token)
        self._config, self._token, self._ready = config, token, ready
        self._children: dict[int, _Child] = {}
        self._restart_times: dict[int, float] = {}
        self._num_failures = 0
        self._models: dict[Path, str] = {}  # snapshot -> version
        self._current: Path | None = None
        self._previous: Path | None = None
        self._offer: _Offer | None = None
        self._history: dict[str, Any] = {}
        self._signals: list[int] = []
        self._watched: Signature = ()
        self._offered: Signature = ()
        self._stopping = False

    def run(self) -> None:
        """Serve until a signal says to stop."""
        self._listener = _listen(self._config)
        remove_leftovers()
        self._state = Path(tempfile.mkdtemp(prefix=PREFIX))
        lock = FileLock(self._state / LOCK, timeout=0)
        lock.acquire()
        self._snapshots = Snapshots(self._config.artifact, self._state)
        self._selector = selectors.DefaultSelector()
        try:
            self._catch_signals()
            self._current = self._snapshots.take()
            self._offered = self._watched = self._snapshots.signature()
            self._start(0)  # The others start once it has measured what settings cost.
            while not self._stopping:
                self._step()
        finally:
            self._stop()
            lock.release()
            shutil.rmtree(self._state, ignore_errors=True)

    @property
    def _model(self) -> str:
        """Return the serving version; empty until a worker has loaded it."""
        return self._models.get(self._current, "") if self._current else ""

    @property
    def address(self) -> str:
        """Return the URL of the server."""
        host, port = self._listener.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def _step(self) -> None:
        """Wait for the next event, and handle whatever is due."""
        due = [*self._restart_times.values(), time.monotonic() + WATCH_SECONDS]
        for key, _ in self._selector.select(max(0.0, min(due) - time.monotonic())):
            if isinstance(key.data, _Child):
                self._receive(key.data)
            elif isinstance(key.data, _Offer):
                self._receive_verdict(key.data)
            else:
                self._wakeup.recv(4096)
        while self._signals:
            self._handle_signal(self._signals.pop(0))
        for slot, restart_time in list(self._restart_times.items()):
            if restart_time <= time.monotonic() and not self._stopping:
                del self._restart_times[slot]
                self._start(slot)
        if self._offer is not None and time.monotonic() - self._offer.started > LOAD_SECONDS:
            self._refuse(f"it did not load within {LOAD_SECONDS:g} s")
        if self._config.watch:
            self._watch()

    def _catch_signals(self) -> None:
        """Make signals wake the selector, so that they are handled between two events."""
        self._wakeup, self._wakeup_writer = socket.socketpair()
        for end in (self._wakeup, self._wakeup_writer):
            end.setblocking(False)
        signal.set_wakeup_fd(self._wakeup_writer.fileno(), warn_on_full_buffer=False)
        self._original_handlers = {
            number: signal.signal(number, lambda number, _: self._signals.append(number))
            for number in _SIGNALS
        }
        self._selector.register(self._wakeup, selectors.EVENT_READ)

    def _handle_signal(self, number: int) -> None:
        if number in (signal.SIGTERM, signal.SIGINT):
            self._stopping = True
        elif number == signal.SIGHUP:
            self._offer_artifact()
        else:
            self._roll_back()

    # Workers

    def _start(self, slot: int) -> None:
        ours, theirs = socket.socketpair()
        descriptors = {
            "RECAP_CONTROL": str(theirs.fileno()),
            "RECAP_LISTENER": str(self._listener.fileno()),
        }
        assert self._current is not None
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "recap_ctr.serve.worker"],
            pass_fds=(theirs.fileno(), self._listener.fileno()),
            stdin=subprocess.DEVNULL,
            env=self._environment() | descriptors,
        )
        theirs.close()
        child = self._children[slot] = _Child(slot, process, ours, self._current)
        self._selector.register(ours, selectors.EVENT_READ, child)
        child.send(
            config=self._config,
            slot=slot,
            state=str(self._state),
            snapshot=str(self._current),
            previous=str(self._previous) if self._previous else None,
            token=self._token,
            history=self._history,
        )

    def _environment(self) -> dict[str, str]:
        """Return the environment of workers and of checks: as many threads as configured, and no token."""
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(self._config.threads),
            "POLARS_MAX_THREADS": str(self._config.threads),
            "OMP_WAIT_POLICY": "PASSIVE",
            "RUST_BACKTRACE": "0",
        }
        environment.pop("RECAP_TOKEN", None)
        return environment

    def _receive(self, child: _Child) -> None:
        """Read what a worker sent; an end of file means that it died."""
        try:
            data = child.control.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self._handle_death(child)
            return
        *lines, child.unread = (child.unread + data).split(b"\n")
        for line in lines:
            self._handle_message(child, msgspec.json.decode(line))

    def _handle_message(self, child: _Child, message: dict[str, Any]) -> None:
        offer = self._offer
        if message["did"] == "ready":
            self._handle_ready(child, message)
        elif "number" not in message:  # The worker could not load the artifact at its start.
            reason = self._snapshots.with_user_path(message["reason"])
            if not self._model:
                raise InputError(reason)
            log("worker can't load the artifact", level="error", slot=child.slot, reason=reason)
        elif offer is not None and message["number"] == offer.number:
            offer.undecided.discard(child.slot)
            if message["did"] == "refused":
                self._refuse(message["reason"])
                return
            offer.model = message["model"]
            offer.comparisons.append(message["shadow"])
            if not offer.undecided:
                self._accept()

    def _handle_ready(self, child: _Child, message: dict[str, Any]) -> None:
        child.is_ready, self._num_failures = True, 0
        log(
            "worker ready",
            slot=child.slot,
            worker=child.process.pid,
            model=message["model"],
            seconds=message["seconds"],
        )
        # If the version changed while the worker started, end it and start another.
        if child.snapshot != self._current:
            child.control.shutdown(socket.SHUT_WR)
        elif not self._model:
            self._models[child.snapshot] = message["model"]
            log("serving", address=self.address, model=self._model, workers=self._config.workers)
            self._ready(self.address, self._model)
            for slot in range(1, self._config.workers):
                self._start(slot)
        if self._offer is not None and self._offer.is_checked:
            self._offer.undecided.add(child.slot)
            child.send(do="load", number=self._offer.number, path=str(self._offer.snapshot))

    def _handle_death(self, child: _Child) -> None:
        self._selector.unregister(child.control)
        child.control.close()
        del self._children[child.slot]
        code = child.process.wait()
        if self._stopping:
            return
        log("worker died", level="warning", slot=child.slot, worker=child.process.pid, code=code)
        self._num_failures = 0 if child.is_ready else self._num_failures + 1
        if self._num_failures >= MAX_FAILURES:
            self._stopping = True
            raise RuntimeError(f"workers died {self._num_failures} times in a row before they could serve")
        pause = 0.5 * 2**self._num_failures if self._num_failures else 0.0
        self._restart_times[child.slot] = time.monotonic() + pause
        if self._offer is not None and child.slot in self._offer.undecided:
            self._refuse("a worker died while it loaded the artifact")

    # Versions

    def _watch(self) -> None:
        """Offer a changed artifact once two looks in a row find it the same."""
        try:
            signature = self._snapshots.signature()
        except Exception:  # It may be half-copied, or its store may be out of reach.
            return
        if signature == self._watched and signature != self._offered and self._offer is None:
            self._offer_artifact()
        self._watched = signature

    def _offer_artifact(self) -> None:
        """Take a snapshot of the artifact at the path, and have it tried by a process of its own."""
        if self._offer is not None or not self._model:
            reason = "another offer is being loaded" if self._model else "the server is starting"
            log("offer ignored", level="warning", reason=reason)
            return
        try:
            self._offered = self._snapshots.signature()
            snapshot = self._snapshots.take(self._current)
        except Exception as error:  # Whatever is wrong with it, the serving version goes on.
            reason = (
                str(error) if isinstance(error, OSError | InputError) else f"{type(error).__name__}: {error}"
            )
            self._record("refused", reason=self._snapshots.with_user_path(reason))
            return
        checker = subprocess.Popen(
            [sys.executable, "-P", "-m", "recap_ctr.serve.check"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=self._environment(),
        )
        assert checker.stdin is not None and checker.stdout is not None
        with suppress(OSError), checker.stdin as stdin:
            wanted = Check(self._config, str(self._state), str(snapshot), str(self._current))
            stdin.write(msgspec.json.encode(wanted))
        self._offer = _Offer(self._snapshots.number, snapshot, checker)
        self._selector.register(checker.stdout, selectors.EVENT_READ, self._offer)
        log("offered", number=self._offer.number)

    def _receive_verdict(self, offer: _Offer) -> None:
        """Read what a check says; once it has ended, ask every worker to load the artifact, or refuse it."""
        assert offer.checker.stdout is not None
        if data := os.read(offer.checker.stdout.fileno(), 1 << 16):
            offer.verdict += data
            return
        self._end_check(offer)
        try:
            verdict = msgspec.json.decode(offer.verdict, type=Verdict)
        except msgspec.DecodeError:
            seconds, mib = self._config.offer_seconds, self._config.offer_mib
            verdict = Verdict(
                reason=f"its check ended with code {offer.checker.returncode}; it may take {seconds:g} s and"
                f" {mib:,} MiB beyond eight times the artifact"
            )
        if verdict.reason:
            self._refuse(verdict.reason)
            return
        offer.is_checked, offer.started = True, time.monotonic()
        ready = [child for child in self._children.values() if child.is_ready]
        offer.undecided = {child.slot for child in ready}
        for child in ready:
            child.send(do="load", number=offer.number, path=str(offer.snapshot))

    def _end_check(self, offer: _Offer) -> None:
        """End the process of a check, whether it is done or not."""
        assert offer.checker.stdout is not None
        if not offer.checker.stdout.closed:
            self._selector.unregister(offer.checker.stdout)
            offer.checker.stdout.close()
            if not offer.verdict:
                with suppress(subprocess.TimeoutExpired):
                    offer.checker.wait(0.2)
            offer.checker.kill()
            offer.checker.wait()

    def _accept(self) -> None:
        """Serve the offered version, unless it is the one that serves already."""
        offer = self._offer
        assert offer is not None
        if offer.model == self._model:
            self._record("unchanged", model=offer.model)
            self._drop_offer(offer)
            return
        oldest = self._previous
        self._previous, self._current = self._current, offer.snapshot
        self._models[offer.snapshot] = offer.model
        self._record("swapped", model=offer.model, shadow=_combine(offer.comparisons))
        self._offer = None
        self._send_to_ready(do="swap", history=self._history)
        if oldest is not None:
            shutil.rmtree(oldest, ignore_errors=True)

    def _refuse(self, reason: str) -> None:
        offer = self._offer
        assert offer is not None
        self._record("refused", reason=self._snapshots.with_user_path(reason))
        self._drop_offer(offer)

    def _drop_offer(self, offer: _Offer) -> None:
        self._offer = None
        self._end_check(offer)
        self._send_to_ready(do="drop", history=self._history)
        remove(offer.snapshot)

    def _roll_back(self) -> None:
        if self._previous is None or self._offer is not None:
            is_first = self._previous is None
            reason = "there is no version before this one" if is_first else "an offer is being loaded"
            log("not rolled back", level="warning", reason=reason)
            return
        self._current, self._previous = self._previous, self._current
        self._record("rolled back", model=self._model)
        self._send_to_ready(do="rollback", history=self._history)

    def _send_to_ready(self, **message: Any) -> None:
        for child in self._children.values():
            if child.is_ready:
                child.send(**message)

    def _record(self, outcome: str, **details: Any) -> None:
        """Log what became of an offer, and remember it for `GET /model`."""
        level = "warning" if outcome == "refused" else "info"
        log(outcome, level=level, **details)
        self._history = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "outcome": outcome,
            **details,
        }

    def _stop(self) -> None:
        """Let workers answer the requests they have accepted, then end them."""
        self._stopping = True
        self._listener.close()
        if self._offer is not None:
            self._end_check(self._offer)
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
        for number, handler in self._original_handlers.items():
            signal.signal(number, handler)
        self._selector.close()
        self._wakeup.close()
        self._wakeup_writer.close()


def remove_leftovers() -> None:
    """Remove the directories of servers that were killed: those of this user that no process holds."""
    for directory in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError, Timeout):
            is_ours = directory.lstat().st_uid == os.getuid() and not directory.is_symlink()
            if is_ours and (directory / LOCK).is_file():
                with FileLock(directory / LOCK, timeout=0):
                    shutil.rmtree(directory, ignore_errors=True)


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


def _combine(comparisons: list[dict[str, float]]) -> dict[str, float]:
    """Return the comparison over the rows of all workers."""
    with_rows = [comparison for comparison in comparisons if comparison["rows"]]
    rows = sum(comparison["rows"] for comparison in with_rows)
    if not rows:
        return {"rows": 0}
    means = ("mean_difference", "mean_before", "mean_after")
    return {
        "rows": rows,
        **{name: sum(part[name] * part["rows"] for part in with_rows) / rows for name in means},
        "largest_difference": max(part["largest_difference"] for part in with_rows),
    }
