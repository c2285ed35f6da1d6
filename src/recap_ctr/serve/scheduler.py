"""The latency dial: what each setting costs, as measured here, and which one keeps the deadlines of all who wait.

Under load the setting is lowered before anybody is turned away: fewer routes first, then less depth, in the order that
the artifact gives. Shapes: Q requests that wait, in order; S settings, N batch sizes.
"""

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import polars as pl

from recap_ctr.serve.engine import Engine, Floats

SIZES = (1, 32, 128, 512)
# Of the time that is left, a setting may plan for so much; what the plan can't know takes the rest.
DIAL_SHARE, ADMIT_SHARE = 0.4, 0.6


@dataclass(frozen=True)
class Costs:
    """Seconds from raw rows to scores for each setting of an engine, at a few batch sizes."""

    sizes: tuple[int, ...]
    seconds_by_setting: tuple[tuple[float, ...], ...]

    def seconds(self, setting: int, rows: int) -> float:
        """Linear between the sizes, and beyond the last."""
        known, sizes = self.seconds_by_setting[setting], self.sizes
        if rows <= 0:
            return 0.0
        at = min(max(bisect_left(sizes, rows), 1), len(sizes) - 1)
        slope = (known[at] - known[at - 1]) / (sizes[at] - sizes[at - 1])
        return max(known[at - 1] + slope * (rows - sizes[at - 1]), known[0])

    def drain_Q(self, setting: int, rows_Q: Floats, batch_rows: int) -> Floats:
        """Seconds until so many rows are done, in batches of `batch_rows`."""
        full_Q, rest_Q = np.divmod(rows_Q, batch_rows)
        last_Q = np.interp(rest_Q, (0, *self.sizes), (0.0, *self.seconds_by_setting[setting]))
        return np.asarray(full_Q * self.seconds(setting, batch_rows) + last_Q)

    @property
    def cheapest(self) -> int:
        return int(np.argmin([known[-1] for known in self.seconds_by_setting]))

    def to_dict(self) -> dict[str, Any]:
        return {"sizes": self.sizes, "seconds": self.seconds_by_setting}

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> "Costs":
        return cls(tuple(found["sizes"]), tuple(map(tuple, found["seconds"])))


def measure(engine: Engine, rows: Callable[[int], pl.DataFrame], seconds: float) -> Costs:
    """Time the engine at each setting and size, three times at least; `seconds` are divided among them.

    More rows, or a better setting, never count as cheaper: what the clock says against that is noise.
    """
    share = seconds / (len(SIZES) * (len(engine.settings) + 1))
    frames = [rows(size) for size in SIZES]
    encoding_N = np.array([_time(partial(engine.encode, frame), share) for frame in frames])
    encoded = [engine.encode(frame) for frame in frames]
    costs_SN = np.array(
        [
            [_time(partial(engine.score, part, setting), share) for part in encoded]
            for setting in engine.settings
        ]
    )
    costs_SN = np.maximum.accumulate(costs_SN + encoding_N, axis=1)
    costs_SN = np.maximum.accumulate(costs_SN[::-1], axis=0)[::-1]
    return Costs(SIZES, tuple(map(tuple, costs_SN.tolist())))


def _time(run: Callable[[], object], seconds: float) -> float:
    """The lower quartile: other work on the machine only ever adds to a time."""
    run()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or (time.perf_counter() < end and len(times) < 1000):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return float(np.quantile(times, 0.25))


class Pace:
    """How much slower than in the table batches are now: a running mean and twice its deviation."""

    def __init__(self) -> None:
        self._mean, self._deviation = 1.0, 0.1

    def update(self, ratio: float) -> None:
        ratio = min(max(ratio, 0.2), 20.0)
        self._deviation += 0.1 * (abs(ratio - self._mean) - self._deviation)
        self._mean += 0.1 * (ratio - self._mean)

    @property
    def value(self) -> float:
        return self._mean + 2.0 * self._deviation


@dataclass(frozen=True, eq=False)
class Line:
    """Who waits, in order: rows, seconds left until the deadline, and for those who insist on a setting its seconds."""

    rows_Q: Floats
    left_Q: Floats
    fixed_Q: Floats

    @classmethod
    def of(cls, waiting: Sequence[tuple[int, float, float | None]]) -> "Line":
        """Of (rows, seconds left, seconds at the setting asked for or None)."""
        rows, left, fixed = zip(*waiting, strict=True)
        return cls(
            np.array([0.0 if one is not None else n for n, one in zip(rows, fixed, strict=True)]),
            np.array(left, np.float64),
            np.array([one or 0.0 for one in fixed]),
        )


def choose(costs: Costs, line: Line, pace: float, batch_rows: int) -> int:
    """The most accurate setting at which everybody who waits is answered in time, else the cheapest one."""
    rows_Q, fixed_Q = np.cumsum(line.rows_Q), np.cumsum(line.fixed_Q)
    for setting in range(len(costs.seconds_by_setting)):
        done_Q = pace * (costs.drain_Q(setting, rows_Q, batch_rows) + fixed_Q)
        if (done_Q <= DIAL_SHARE * line.left_Q).all():
            return setting
    return costs.cheapest


def retry_after(seconds: float) -> int:
    """Whole seconds, as HTTP has it."""
    return max(1, math.ceil(seconds))
