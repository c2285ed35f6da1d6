"""Counters that add up over all workers, and outlive each of them: one small memory-mapped file a worker.

An entry is a name of Prometheus' text format, labels included, and a number. A worker writes its own file alone, and a
scrape, whichever worker answers it, adds up all files beside it.
"""

import mmap
import struct
import threading
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path

_ENTRY, _NAME = 128, 120  # bytes of an entry, and of the name in it
_ENTRIES = 1024
# Seconds, √2 apart: from half a millisecond to sixteen seconds.
BUCKETS = tuple(round(0.0005 * 2 ** (k / 2), 6) for k in range(31))
LATENCY = "recap_request_seconds"
HELP = {
    "recap_requests_total": ("counter", "Requests to /score, by status of the answer."),
    "recap_rows_total": ("counter", "Rows scored, by setting of the dial."),
    "recap_lowered_total": (
        "counter",
        "Answers for which the dial took a cheaper setting than the best one.",
    ),
    "recap_late_total": ("counter", "Answers that took longer than their deadline."),
    "recap_batches_total": ("counter", "Batches scored; several requests may share one."),
    "recap_busy_seconds_total": ("counter", "Time spent encoding and scoring."),
    "recap_unseen_total": ("counter", "Values that the training rows did not have, by field."),
    "recap_missing_total": ("counter", "Values that were missing, by field."),
    LATENCY: ("histogram", "Time from a request's head to its answer, 200 only."),
    "recap_waiting_requests": ("gauge", "Requests accepted and not yet answered."),
    "recap_waiting_rows": ("gauge", "Their rows."),
    "recap_worker_starts_total": (
        "counter",
        "Starts of workers: more than there are of them means that some died.",
    ),
    "recap_swaps_total": ("counter", "Artifacts offered while serving, by outcome; each worker counts."),
    "recap_shadow_rows_total": ("counter", "Rows scored by an offered artifact beside the serving one."),
    "recap_uncounted_total": ("counter", "What was counted under names too long or too many to keep."),
    "recap_shadow_difference_total": (
        "counter",
        "Sum over these rows of how far the probabilities are apart.",
    ),
}
_UNCOUNTED = "recap_uncounted_total"
_GAUGES = tuple(name for name, (kind, _) in HELP.items() if kind == "gauge")


class Counters:
    """The counters of this worker, in a file of its own."""

    def __init__(self, path: Path) -> None:
        self._directory, self._lock = path.parent, threading.Lock()
        if not path.exists():
            path.write_bytes(bytes(_ENTRY * _ENTRIES))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _ENTRY * _ENTRIES)
        self._values = memoryview(self._map).cast("d")
        self._at = {name: at for at, (name, _) in enumerate(_entries(self._map))}
        self._enter(_UNCOUNTED)
        for name in self._at:  # counters go on where a predecessor died; what it held at that moment is gone
            if name.startswith(_GAUGES):
                self.set(name, 0.0)

    def add(self, name: str, amount: float = 1.0) -> None:
        at = self._at.get(name)
        if at is None:
            at = self._enter(name)
        self._values[at * (_ENTRY // 8)] += amount

    def set(self, name: str, value: float) -> None:
        at = self._at.get(name)
        if at is None:
            at = self._enter(name)
        self._values[at * (_ENTRY // 8)] = value

    def observe(self, seconds: float) -> None:
        """Count one latency; the buckets are added up when they are read."""
        at = bisect_left(BUCKETS, seconds)
        self.add(f"{LATENCY}_bucket{at:02d}")
        self.add(f"{LATENCY}_sum", seconds)

    def totals(self) -> dict[str, float]:
        """Over all workers, dead ones included."""
        found: dict[str, float] = {}
        for path in sorted(self._directory.glob("counters-*.bin")):
            for name, value in _entries(path.read_bytes()):
                found[name] = found.get(name, 0.0) + value
        return found

    def _enter(self, name: str) -> int:
        raw = name.encode()
        with self._lock:
            at = len(self._at)
            if name in self._at or at >= _ENTRIES or len(raw) > _NAME:
                return self._at[name if name in self._at else _UNCOUNTED]
            self._map[at * _ENTRY + 8 : at * _ENTRY + 8 + len(raw)] = raw
            self._at[name] = at
            return at


def _entries(data: bytes | mmap.mmap) -> list[tuple[str, float]]:
    found = []
    for at in range(0, _ENTRY * _ENTRIES, _ENTRY):
        raw = data[at + 8 : at + _ENTRY].rstrip(b"\0")
        if not raw:
            break
        found.append((raw.decode(), struct.unpack_from("<d", data, at)[0]))
    return found


def labelled(name: str, **labels: object) -> str:
    """A name with its labels, as Prometheus writes them.

    >>> labelled("recap_rows_total", routes=8, depth="full")
    'recap_rows_total{routes="8",depth="full"}'
    """
    pairs = (f'{key}="{_escape(str(value))}"' for key, value in labels.items())
    return name + "{" + ",".join(pairs) + "}"


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def exposition(totals: dict[str, float], info: Sequence[str] = ()) -> str:
    """Prometheus' text format: every metric with its help, in order."""
    lines = []
    for metric, (kind, text) in HELP.items():
        lines += [f"# HELP {metric} {text}", f"# TYPE {metric} {kind}"]
        if kind == "histogram":
            lines += _histogram(metric, totals)
            continue
        found = {name: value for name, value in totals.items() if name.partition("{")[0] == metric}
        lines += [f"{name} {value:.17g}" for name, value in sorted(found.items())] or (
            [] if kind == "counter" else [f"{metric} 0"]
        )
    return "\n".join([*lines, *info, ""])


def _histogram(metric: str, totals: dict[str, float]) -> list[str]:
    lines, count = [], 0.0
    for at, edge in enumerate((*BUCKETS, float("inf"))):
        count += totals.get(f"{metric}_bucket{at:02d}", 0.0)
        le = "+Inf" if edge == float("inf") else f"{edge:g}"
        lines.append(f'{metric}_bucket{{le="{le}"}} {count:.17g}')
    return [*lines, f"{metric}_sum {totals.get(f'{metric}_sum', 0.0):.17g}", f"{metric}_count {count:.17g}"]
