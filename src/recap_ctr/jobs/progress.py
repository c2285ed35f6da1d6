"""What a long job shows while it runs: a bar on a terminal, a line every ten seconds elsewhere, nothing if quiet."""

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column

PLAIN_SECONDS = 10.0
SEND_SECONDS = 0.3
_COLUMNS = (  # The note is cut where a terminal is narrow, so that every task has one line.
    TextColumn("{task.description}", table_column=Column(no_wrap=True)),
    BarColumn(bar_width=16),
    TextColumn("{task.fields[note]}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
    TimeRemainingColumn(compact=True),
)
Send = Callable[[dict[str, Any]], None]
"""What takes progress and messages as events, which JSON can hold."""
Listen = Callable[[str, dict[str, Any]], None]
"""What hears of every epoch of every run: the directory of the run, and the figures of the epoch."""
_send: Send | None = None
_listen: Listen | None = None
_brief = False
_overall: "Overall | None" = None


class Overall:
    """Several boards as parts of one whole: how many seconds have passed, and how many there will be."""

    def __init__(self, title: str, seconds: Callable[[], tuple[float, float]], counts_jobs: bool) -> None:
        """Name the whole; `seconds` gives the time taken, and the whole time, infinite where it is not known.

        With `counts_jobs`, plain logs also say how many jobs of a board are done.
        """
        self.title, self.seconds, self.counts_jobs = title, seconds, counts_jobs
        self.shown = time.monotonic()

    @property
    def text(self) -> str:
        """Return the time taken and the time left, in words."""
        taken, total = self.seconds()
        if not math.isfinite(total):
            return f"{_minutes(taken)} so far"
        return f"{_minutes(taken)} of {_minutes(total)}, {_minutes(max(total - taken, 0.0))} left"


@contextmanager
def overall(
    title: str, seconds: Callable[[], tuple[float, float]], *, counts_jobs: bool = False
) -> Iterator[None]:
    """Show the time of the whole above every board while this context is open; see `Overall`."""
    global _overall
    before, _overall = _overall, Overall(title, seconds, counts_jobs)
    try:
        yield
    finally:
        _overall = before


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


@contextmanager
def sent_to(send: Send) -> Iterator[None]:
    """Send progress and messages as events, instead of showing them here, while this context is open."""
    global _send
    before, _send = _send, send
    try:
        yield
    finally:
        _send = before


@contextmanager
def heard_by(listen: Listen) -> Iterator[None]:
    """Tell `listen` of the epochs of all runs, in whichever process they are trained, while this context is open."""
    global _listen
    before, _listen = _listen, listen
    try:
        yield
    finally:
        _listen = before


@contextmanager
def brief() -> Iterator[None]:
    """Let boards show which jobs are done, but not the messages of each, while this context is open."""
    global _brief
    before, _brief = _brief, True
    try:
        yield
    finally:
        _brief = before


class Meter:
    """The progress of one job: how far it is, how fast it goes, and a note."""

    def __init__(self, title: str, total: float | None, unit: str, *, quiet: bool = False) -> None:
        self._title, self._total, self._unit, self._quiet = title, total, unit, quiet
        self._start = self._shown = time.monotonic()
        self._units, self._done = 0, 0.0
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        if not quiet and _send is None and sys.stderr.isatty():
            self._bar = Progress(*_COLUMNS, console=Console(stderr=True), transient=True, expand=True)
            self._task = self._bar.add_task(title, total=total, note="")
            self._bar.start()

    def advance(self, units: int, done: float, note: str = "") -> None:
        """Count `units` more of the unit and `done` more of the total, and show them with `note`."""
        self._units += units
        self._done += done
        if self._quiet:
            return
        now = time.monotonic()
        if _send is not None:
            if now - self._shown >= SEND_SECONDS:
                self._shown = now
                text = f"{self._title}, {self.rate:,.0f} {self._unit}/s {note}"
                _send({"kind": "progress", "done": self._done, "total": self._total, "note": text})
        elif self._bar is not None and self._task is not None:
            text = f"{self.rate:,.0f} {self._unit}/s {note}"
            self._bar.update(self._task, advance=done, note=text)
        elif now - self._shown >= PLAIN_SECONDS:
            self._shown = now
            share = f" {self._done / self._total:.0%}" if self._total else ""
            left = f", {self.seconds_left:,.0f} s left" if self._total and self._done else ""
            ending = f", {note}" if note else ""
            say(
                f"{self._title}:{share} {self._units:,} {self._unit}, {self.rate:,.0f} {self._unit}/s{left}{ending}"
            )

    @property
    def rate(self) -> float:
        """Return the units per second so far."""
        return self._units / max(time.monotonic() - self._start, 1e-9)

    @property
    def seconds_left(self) -> float:
        """Return the time left, if the rest is as fast as what is done."""
        elapsed = time.monotonic() - self._start
        return elapsed * max((self._total or 0.0) - self._done, 0.0) / max(self._done, 1e-9)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()


@contextmanager
def meter(title: str, total: float | None, unit: str, *, quiet: bool = False) -> Iterator[Meter]:
    """Show the progress of one job while the context is open; `total` is None if it is not known."""
    shown = Meter(title, total, unit, quiet=quiet)
    try:
        yield shown
    finally:
        shown.close()


class _Bars(Progress):
    """Bars that are brought up to date each time they are drawn, so that the clock goes on while jobs are silent."""

    def __init__(self, update: Callable[[], None]) -> None:
        self._update_clock = update
        super().__init__(*_COLUMNS, console=Console(stderr=True), transient=True, expand=True)

    def get_renderables(self) -> Iterable[RenderableType]:
        """Yield what is drawn."""
        self._update_clock()
        yield from super().get_renderables()


class Board:
    """The progress of several jobs side by side: a bar for each one that runs, and their messages."""

    def __init__(self, title: str, num_jobs: int, *, quiet: bool = False) -> None:
        self._quiet, self._title, self._num_jobs = quiet, title, num_jobs
        self._send = _send  # Not that of the jobs, which may send their events to this board.
        self._finished = 0
        self._tasks: dict[str, TaskID] = {}
        self._bars: Progress | None = None
        self._whole: TaskID | None = None
        if not quiet and _send is None and sys.stderr.isatty():
            self._bars = _Bars(self._update_whole)
            if _overall is not None:
                taken, total = _overall.seconds()
                seconds = total if math.isfinite(total) else None
                self._whole = self._bars.add_task(
                    _overall.title, total=seconds, completed=int(taken), note=""
                )
            self._all = self._bars.add_task(title, total=num_jobs, note=f"0 of {num_jobs}")
            self._bars.start()

    def receive(self, name: str, event: dict[str, Any]) -> None:
        """Show the event of the job `name`: how far it is, or its message."""
        if event["kind"] == "epoch":
            _announce(event, self._send)
        elif event["kind"] == "say":
            if not _brief:
                self.say(f"{name}: {event['text']}")
        elif self._bars is None:
            self._tell_time(name, event)
        else:
            if name not in self._tasks:
                self._tasks[name] = self._bars.add_task(f"  {name}", total=event["total"], note="")
            self._bars.update(
                self._tasks[name], completed=event["done"], total=event["total"], note=event["note"]
            )

    def _update_whole(self) -> None:
        """Move the bar of the whole, if this board is a part of one."""
        if self._bars is not None and self._whole is not None and _overall is not None:
            self._bars.update(self._whole, completed=_overall.seconds()[0], note=_overall.text)

    def _tell_time(self, name: str, event: dict[str, Any]) -> None:
        """Say every ten seconds, where there is no terminal, how far the whole is."""
        if _overall is None or self._quiet or time.monotonic() - _overall.shown < PLAIN_SECONDS:
            return
        _overall.shown = time.monotonic()
        self.say(f"{_overall.title}: {_overall.text}; {self._title}: {name}, {event['note'].strip()}")

    def say(self, text: str) -> None:
        """Show a message above the bars."""
        if self._quiet:
            return
        if self._bars is not None:
            self._bars.console.print(text, markup=False, highlight=False)
        else:
            _say(text, self._send)

    def finish(self, name: str) -> None:
        """Count the job `name` as done."""
        self._finished += 1
        if self._bars is not None:
            self._bars.update(
                self._all, completed=self._finished, note=f"{self._finished} of {self._num_jobs}"
            )
            if name in self._tasks:
                self._bars.remove_task(self._tasks.pop(name))
        elif self._num_jobs > 1 and (_overall is None or _overall.counts_jobs):
            self.say(f"{self._title}: {self._finished} of {self._num_jobs} done ({name})")

    def close(self) -> None:
        """Remove the bars."""
        if self._bars is not None:
            self._bars.stop()


@contextmanager
def board(title: str, num_jobs: int, *, quiet: bool = False) -> Iterator[Board]:
    """Show the progress of several jobs while the context is open."""
    shown = Board(title, num_jobs, quiet=quiet)
    try:
        yield shown
    finally:
        shown.close()


def announce_epoch(directory: str, figures: dict[str, Any]) -> None:
    """Tell whoever listens, here or in the process that gave out the job, that a run has ended an epoch."""
    _announce({"kind": "epoch", "directory": directory, "figures": figures}, _send)


def _announce(event: dict[str, Any], send: Send | None) -> None:
    if send is not None:
        send(event)
    elif _listen is not None:
        _listen(event["directory"], event["figures"])


def say(text: str) -> None:
    """Show a message on standard error, which leaves standard output to results."""
    _say(text, _send)


def _say(text: str, send: Send | None) -> None:
    if send is not None:
        send({"kind": "say", "text": text})
    else:
        print(text, file=sys.stderr, flush=True)
