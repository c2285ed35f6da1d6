"""Counters that add up over all workers and survive each of them: one small memory-mapped file per worker.

An entry is a number and a name in Prometheus' text format, labels included. A worker writes only its own file; a
scrape, whichever worker answers it, adds up all files in the directory.
"""

import mmap
import struct
import threading
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path

_ENTRY_BYTES, _NAME_BYTES = 128, 120
_MAX_ENTRIES = 1024
# Bucket edges in seconds, a factor of √2 apart, from half a millisecond to sixteen seconds.
BUCKETS = tuple(round(0.0005 * 2 ** (k / 2), 6) for k in range(31))
LATENCY = "recap_request_seconds"
SWAPS = "recap_swaps_total"
_UNCOUNTED = "recap_uncounted_total"
HELP = {
    "recap_requests_total": ("counter", "Requests to /score, by status of the answer."),
    "recap_rows_total": ("counter", "Rows scored, by setting of the dial."),
    "recap_lowered_total": (
        "counter",
        "Answers for which the dial chose a cheaper setting than the best one.",
    ),
    "recap_late_total": ("counter", "Answers that took longer than their deadline."),
    "recap_batches_total": ("counter", "Batches scored; several requests may share one."),
    "recap_busy_seconds_total": ("counter", "Time spent encoding and scoring."),
    "recap_unseen_total": (
        "counter",
        "Values outside the vocabulary (unseen or rare in training), by field.",
    ),
    "recap_missing_total": ("counter", "Values that were missing, by field."),
    "recap_windows_total": ("counter", "Windows of rows that were compared with the training rows."),
    "recap_findings_total": (
        "counter",
        "Windows in which a field is not as usual, by check (missing, unseen, shifted) and field.",
    ),
    "recap_psi_total": (
        "counter",
        "Sum over the windows of a field's population stability index; divide it by recap_windows_total.",
    ),
    "recap_rare_share_total": (
        "counter",
        "Sum over the windows of the share of values that few training rows have; divide it by recap_windows_total.",
    ),
    LATENCY: ("histogram", "Time from a request's head to its answer, only for status 200."),
    "recap_waiting_requests": ("gauge", "Requests accepted and not yet answered."),
    "recap_waiting_rows": ("gauge", "Rows of the requests accepted and not yet answered."),
    "recap_worker_starts_total": (
        "counter",
        "Worker starts; a count above the number of workers means that some died.",
    ),
    SWAPS: (
        "counter",
        "Offered artifacts and rollbacks, by outcome (swapped, unchanged, refused, rolled back), per worker.",
    ),
    "recap_shadow_rows_total": ("counter", "Rows scored by both an offered artifact and the serving one."),
    _UNCOUNTED: ("counter", "Amounts whose metric name was too long, or came after the table was full."),
    "recap_shadow_difference_total": (
        "counter",
        "Sum over the shadow rows of the absolute difference between the two probabilities.",
    ),
}
_GAUGES = tuple(name for name, (kind, _) in HELP.items() if kind == "gauge")


class Counters:
    """The counters of one worker, stored in the file `path`."""

    def __init__(self, path: Path) -> None:
        self._directory, self._lock = path.parent, threading.Lock()
        if not path.exists():
            path.write_bytes(bytes(_ENTRY_BYTES * _MAX_ENTRIES))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _ENTRY_BYTES * _MAX_ENTRIES)
        self._values = memoryview(self._map).cast("d")
        self._index_by_name = {name: index for index, (name, _) in enumerate(_entries(self._map))}
        self._index(_UNCOUNTED)
        # After a crash, counters continue where the dead worker stopped, but the requests it held are gone.
        for name in self._index_by_name:
            if name.startswith(_GAUGES):
                self.set(name, 0.0)

    def add(self, name: str, amount: float = 1.0) -> None:
        """Add `amount` to a counter."""
        self._values[self._index(name) * (_ENTRY_BYTES // 8)] += amount

    def set(self, name: str, value: float) -> None:
        """Set a gauge."""
        self._values[self._index(name) * (_ENTRY_BYTES // 8)] = value

    def observe(self, seconds: float) -> None:
        """Count one latency in its own bucket; `exposition` makes the buckets cumulative."""
        self.add(f"{LATENCY}_bucket{bisect_left(BUCKETS, seconds):02d}")
        self.add(f"{LATENCY}_sum", seconds)

    def totals(self) -> dict[str, float]:
        """Return the sums over all workers, dead ones included."""
        totals: dict[str, float] = {}
        for path in sorted(self._directory.glob("counters-*.bin")):
            for name, value in _entries(path.read_bytes()):
                totals[name] = totals.get(name, 0.0) + value
        return totals

    def _index(self, name: str) -> int:
        """Return the place of an entry; make it if there is none and it fits."""
        index = self._index_by_name.get(name)
        if index is not None:
            return index
        raw = name.encode()
        with self._lock:
            index = len(self._index_by_name)
            if name in self._index_by_name or index >= _MAX_ENTRIES or len(raw) > _NAME_BYTES:
                return self._index_by_name[name if name in self._index_by_name else _UNCOUNTED]
            start = index * _ENTRY_BYTES + 8
            self._map[start : start + len(raw)] = raw
            self._index_by_name[name] = index
            return index


def _entries(data: bytes | mmap.mmap) -> list[tuple[str, float]]:
    entries = []
    for start in range(0, _ENTRY_BYTES * _MAX_ENTRIES, _ENTRY_BYTES):
        raw = data[start + 8 : start + _ENTRY_BYTES].rstrip(b"\0")
        if not raw:
            break
        entries.append((raw.decode(), struct.unpack_from("<d", data, start)[0]))
    return entries


def labelled(name: str, **labels: object) -> str:
    """Return a metric's name with its labels, as Prometheus writes them.

    >>> labelled("recap_rows_total", routes=8, depth="full")
    'recap_rows_total{routes="8",depth="full"}'
    """
    pairs = (f'{key}="{_escape(str(value))}"' for key, value in labels.items())
    return name + "{" + ",".join(pairs) + "}"


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def exposition(totals: dict[str, float], info: Sequence[str] = ()) -> str:
    """Return all metrics in Prometheus' text format, each with its help, followed by the lines `info`."""
    lines = []
    for metric, (kind, text) in HELP.items():
        lines += [f"# HELP {metric} {text}", f"# TYPE {metric} {kind}"]
        if kind == "histogram":
            lines += _histogram(metric, totals)
            continue
        values = {name: value for name, value in totals.items() if name.partition("{")[0] == metric}
        lines += [f"{name} {value:.17g}" for name, value in sorted(values.items())] or (
            [] if kind == "counter" else [f"{metric} 0"]
        )
    return "\n".join([*lines, *info, ""])


def _histogram(metric: str, totals: dict[str, float]) -> list[str]:
    lines, count = [], 0.0
    for index, edge in enumerate((*BUCKETS, float("inf"))):
        count += totals.get(f"{metric}_bucket{index:02d}", 0.0)
        le = "+Inf" if edge == float("inf") else f"{edge:g}"
        lines.append(f'{metric}_bucket{{le="{le}"}} {count:.17g}')
    return [*lines, f"{metric}_sum {totals.get(f'{metric}_sum', 0.0):.17g}", f"{metric}_count {count:.17g}"]
