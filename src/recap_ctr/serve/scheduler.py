"""The latency dial: the measured cost of each setting, and the choice of one that keeps all deadlines.

Under load the setting is lowered before any request is refused: fewer routes first, then less depth, in the order of
the artifact. Shapes: Q queued requests in order, S settings, N batch sizes.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import polars as pl

from recap_ctr.inference.engine import Floats
from recap_ctr.inference.stopwatch import interleaved_seconds
from recap_ctr.serve.interface import RowScorer

SIZES = (1, 32, 128, 512)
# The shares of the remaining time that a plan may use; the rest is for what a plan can't know.
DIAL_SHARE, ADMIT_SHARE = 0.4, 0.6
HALF_LIFE = 0.5
"""Idle seconds after which half of what was learnt from slow batches is forgotten.

After five of them a thousandth is left: the next request is planned as on a server that has just started. Between the
batches of a busy server hardly anything is forgotten.
"""


@dataclass(frozen=True)
class Costs:
    """Seconds from raw rows to scores for each setting of an engine, at a few batch sizes."""

    sizes: tuple[int, ...]
    seconds_by_setting: tuple[tuple[float, ...], ...]

    def seconds(self, setting: int, rows: int) -> float:
        """Return the seconds of one batch, linear between the measured sizes and beyond the last."""
        measured, sizes = self.seconds_by_setting[setting], self.sizes
        if rows <= 0:
            return 0.0
        at = min(max(bisect_left(sizes, rows), 1), len(sizes) - 1)
        slope = (measured[at] - measured[at - 1]) / (sizes[at] - sizes[at - 1])
        return max(measured[at - 1] + slope * (rows - sizes[at - 1]), measured[0])

    def drain_Q(self, setting: int, rows_Q: Floats, batch_rows: int) -> Floats:
        """Return the seconds to score each number of rows in batches of `batch_rows`."""
        full_Q, rest_Q = np.divmod(rows_Q, batch_rows)
        last_Q = np.interp(rest_Q, (0, *self.sizes), (0.0, *self.seconds_by_setting[setting]))
        return np.asarray(full_Q * self.seconds(setting, batch_rows) + last_Q)

    def drain(self, setting: int, rows: int, batch_rows: int) -> float:
        """Return what `drain_Q` does for one number of rows, without the cost of calls into numpy."""
        full, rest = divmod(rows, batch_rows)
        return full * self.seconds(setting, batch_rows) + self.seconds(setting, rest)

    @cached_property
    def cheapest(self) -> int:
        """Return the index of the setting that costs least at the largest batch size."""
        return int(np.argmin([measured[-1] for measured in self.seconds_by_setting]))

    def to_dict(self) -> dict[str, Any]:
        """Return the costs as JSON values."""
        return {"sizes": self.sizes, "seconds": self.seconds_by_setting}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Costs":
        """Return the costs that `to_dict` wrote."""
        return cls(tuple(data["sizes"]), tuple(map(tuple, data["seconds"])))


def measure_costs(engine: RowScorer, make_rows: Callable[[int], pl.DataFrame], seconds: float) -> Costs:
    """Time the engine at each setting and batch size, at least three times each, in about `seconds` in all.

    More rows or a better setting never count as cheaper: a clock that says so shows noise.
    """
    share = seconds / (len(SIZES) * (len(engine.settings) + 1))
    frames = [make_rows(size) for size in SIZES]
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
    """Return the lower quartile of repeated timings, because other work on the machine only adds time."""
    return float(np.quantile(interleaved_seconds({None: run}, rounds=3, seconds=seconds)[None], 0.25))


def remembered(idle_seconds: float) -> float:
    """Return the share of what was learnt that is left after an idle time.

    >>> [remembered(seconds) for seconds in (0.0, 0.5, 1.0)]
    [1.0, 0.5, 0.25]
    """
    return float(0.5 ** (idle_seconds / HALF_LIFE))


class Pace:
    """How much slower than measured batches are now: a running mean plus twice its deviation."""

    _MEAN, _DEVIATION = 1.0, 0.1  # Those of an idle server, for which costs were measured.

    def __init__(self) -> None:
        self._mean, self._deviation = self._MEAN, self._DEVIATION

    def rest(self, seconds: float) -> None:
        """Forget with the time that the server was idle, since other work may have ended meanwhile."""
        share = remembered(seconds)
        self._mean = self._MEAN + share * (self._mean - self._MEAN)
        self._deviation = self._DEVIATION + share * (self._deviation - self._DEVIATION)

    def update(self, ratio: float) -> None:
        """Take in the actual time of one batch over its planned time."""
        ratio = min(max(ratio, 0.2), 20.0)
        self._deviation += 0.1 * (abs(ratio - self._mean) - self._deviation)
        self._mean += 0.1 * (ratio - self._mean)

    @property
    def value(self) -> float:
        """Return the factor to plan with."""
        return self._mean + 2.0 * self._deviation


@dataclass(frozen=True, eq=False)
class QueueState:
    """The queued requests in order, as the dial sees them."""

    rows_Q: Floats
    """Rows to score at the setting that the dial chooses; 0 for requests with a fixed setting."""
    left_Q: Floats
    """Seconds left until the deadline."""
    fixed_Q: Floats
    """Seconds to score requests with a fixed setting; 0 for the others."""

    @classmethod
    def of(cls, requests: Sequence[tuple[int, float, float | None]]) -> "QueueState":
        """Make the state from (rows, seconds left, seconds at the fixed setting or None) of each request."""
        rows, left, fixed = zip(*requests, strict=True)
        return cls(
            np.array([n if seconds is None else 0.0 for n, seconds in zip(rows, fixed, strict=True)]),
            np.array(left, np.float64),
            np.array([seconds or 0.0 for seconds in fixed]),
        )


def choose_setting(costs: Costs, queue: QueueState, pace: float, batch_rows: int) -> int:
    """Return the most accurate setting that answers all queued requests in time, else the cheapest one."""
    rows_Q, fixed_Q = np.cumsum(queue.rows_Q), np.cumsum(queue.fixed_Q)
    for setting in range(len(costs.seconds_by_setting)):
        done_Q = pace * (costs.drain_Q(setting, rows_Q, batch_rows) + fixed_Q)
        if (done_Q <= DIAL_SHARE * queue.left_Q).all():
            return setting
    return costs.cheapest


def retry_after(seconds: float) -> int:
    """Return a Retry-After value: whole seconds, at least one."""
    return max(1, math.ceil(seconds))
