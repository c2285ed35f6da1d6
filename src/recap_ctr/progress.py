"""What a long job shows while it runs: a bar on a terminal, a line now and then elsewhere, nothing when quiet."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

PLAIN_SECONDS = 10.0


class Meter:
    """One job's progress: how far it is, how fast it goes, and whatever it has to say."""

    def __init__(self, title: str, total: float | None, unit: str, *, quiet: bool = False) -> None:
        self._title, self._total, self._unit, self._quiet = title, total, unit, quiet
        self._start = self._shown = time.monotonic()
        self._units, self._done = 0, 0.0
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        if not quiet and sys.stderr.isatty():
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[note]}"),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(title, total=total, note="")
            self._bar.start()

    def advance(self, units: int, done: float, note: str = "") -> None:
        """`units` more of what is counted; `done` more of the total; and what there is to say."""
        self._units += units
        self._done += done
        if self._quiet:
            return
        now = time.monotonic()
        if self._bar is not None and self._task is not None:
            text = f"{self.rate:,.0f} {self._unit}/s {note}"
            self._bar.update(self._task, advance=done, note=text)
        elif now - self._shown >= PLAIN_SECONDS:
            self._shown = now
            share = f" {self._done / self._total:.0%}" if self._total else ""
            left = f", {self.seconds_left:,.0f} s left" if self._total and self._done else ""
            said = f", {note}" if note else ""
            say(
                f"{self._title}:{share} {self._units:,} {self._unit}, {self.rate:,.0f} {self._unit}/s{left}{said}"
            )

    @property
    def rate(self) -> float:
        return self._units / max(time.monotonic() - self._start, 1e-9)

    @property
    def seconds_left(self) -> float:
        elapsed = time.monotonic() - self._start
        return elapsed * max((self._total or 0.0) - self._done, 0.0) / max(self._done, 1e-9)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


@contextmanager
def meter(title: str, total: float | None, unit: str, *, quiet: bool = False) -> Iterator[Meter]:
    shown = Meter(title, total, unit, quiet=quiet)
    try:
        yield shown
    finally:
        shown.close()


def say(text: str) -> None:
    """A message to the person at the terminal: always on standard error, which leaves standard output to results."""
    print(text, file=sys.stderr, flush=True)
