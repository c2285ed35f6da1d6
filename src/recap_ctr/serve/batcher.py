"""Micro-batching: one thread encodes and scores; what arrives while it is busy waits in one line and is joined.

The line never grows without bound: who could not be answered in time, even at the cheapest setting, is turned away at
once. All methods but the thread's own run on the event loop.
"""

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from recap_ctr.data.encode import Encoded
from recap_ctr.errors import InputError
from recap_ctr.serve.codec import Table, columns_of
from recap_ctr.serve.engine import Floats
from recap_ctr.serve.problem import Problem
from recap_ctr.serve.scheduler import ADMIT_SHARE, Line, Pace, choose, retry_after
from recap_ctr.serve.versions import Version

clock = time.monotonic


def failed() -> Problem:
    """What a client is told of a fault of ours."""
    return Problem(500, "scoring failed", fix="tell whoever runs this server; its log says more")


@dataclass(eq=False)
class Pending:
    """An accepted request."""

    table: Table
    version: Version
    fixed: int | None
    """The setting it insists on."""
    deadline: float
    answer: "asyncio.Future[Answer]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    @property
    def rows(self) -> int:
        return self.table.height


@dataclass(frozen=True, eq=False)
class Answer:
    columns: dict[str, Floats]
    setting: int
    ready: float
    """When the scores were there, by `clock`."""


@dataclass(frozen=True, eq=False)
class Batch:
    """What was done in one go, for the counters."""

    version: Version
    setting: int
    requests: Sequence[Pending]
    rows: int
    seconds: float
    encoded: Encoded | None


class Batcher:
    """`done` is told each batch, on the event loop, after its requests have their answers.

    `waiting` is told how many requests, and rows of them, are not yet answered, whenever that changes.
    `died` is called if the thread that scores comes to an end that nobody asked for: who accepts requests that will
    never be answered had better not be there at all.
    """

    def __init__(
        self,
        *,
        dial: bool,
        batch_rows: int,
        max_requests: int,
        waiting: Callable[[int, int], None],
        done: Callable[[Batch], None],
        log: Callable[..., None],
        died: Callable[[], None] = lambda: os._exit(1),
    ) -> None:
        self._dial, self._batch_rows, self._max_requests = dial, batch_rows, max_requests
        self._waiting, self._done, self._log, self._died = waiting, done, log, died
        self._loop = asyncio.get_running_loop()
        self._line: deque[Pending] = deque()
        self._pace = Pace()
        self._lag = 0.0  # seconds from scores to answer, a running mean
        self._busy_until: float | None = None
        self._held = self._held_rows = 0
        self._wake = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="scoring", daemon=True)
        self._thread.start()

    async def score(self, table: Table, version: Version, fixed: int | None, deadline: float) -> Answer:
        """Join the line, and wait; raises Problem 429 if the deadline can't be kept."""
        self._admit(table.height, version, fixed, deadline)
        pending = Pending(table, version, fixed, deadline)
        self._hold(1, table.height)
        try:
            with self._wake:
                self._line.append(pending)
                self._wake.notify()
            answer = await pending.answer
            self._lag += 0.05 * (clock() - answer.ready - self._lag)
            return answer
        finally:
            self._hold(-1, -table.height)

    def _hold(self, requests: int, rows: int) -> None:
        self._held += requests
        self._held_rows += rows
        self._waiting(self._held, self._held_rows)

    def is_full(self, left: float) -> bool:
        """Whether even an empty request would not be answered in so many seconds; known before its body is read."""
        if self._held >= self._max_requests:
            return True
        wait = self._wait()
        return self._dial and wait > 0 and wait + self._lag > ADMIT_SHARE * left

    def full(self) -> Problem:
        return self._busy(self._wait())

    def close(self) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    def _admit(self, rows: int, version: Version, fixed: int | None, deadline: float) -> None:
        if self._held >= self._max_requests:
            raise self._busy(self._wait())
        if not self._dial:
            return
        costs = version.costs
        own = costs.seconds(costs.cheapest if fixed is None else fixed, rows)
        left = deadline - clock()
        if own > left:
            which = "the cheapest setting" if fixed is None else "the setting asked for"
            raise Problem(
                400,
                f"{rows:,} rows take about {1000 * own:.0f} ms at {which},"
                f" more than the {1000 * max(left, 0):.0f} ms until the deadline",
                fix="send fewer rows, or a longer deadline_ms",
            )
        wait = self._wait()
        if wait == 0.0:
            return  # nothing is under way: a moment's slowness must not turn everybody away
        if wait + self._pace.value * own + self._lag > ADMIT_SHARE * left:
            raise self._busy(wait)

    def _wait(self) -> float:
        """Seconds until all who wait are answered, at the cheapest settings they take."""
        with self._wake:
            waiting = list(self._line)
        total = 0.0
        free: dict[Version, int] = {}
        for pending in waiting:
            if pending.fixed is None:
                free[pending.version] = free.get(pending.version, 0) + pending.rows
            else:
                total += pending.version.costs.seconds(pending.fixed, pending.rows)
        for version, rows in free.items():
            costs = version.costs
            total += float(costs.drain_Q(costs.cheapest, np.array([float(rows)]), self._batch_rows)[0])
        total *= self._pace.value
        until = self._busy_until
        return total + (max(until - clock(), 0.0) if until is not None else 0.0)

    def _busy(self, wait: float) -> Problem:
        return Problem(
            429,
            f"the server is busy for the next {1000 * wait:.0f} ms",
            fix="wait, or send a longer deadline_ms",
            retry_after=retry_after(wait),
        )

    # From here on: the scoring thread.

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._log("scoring thread died", level="error", reason=f"{type(error).__name__}: {error}")
            self._died()

    def _work(self) -> None:
        while (taken := self._take()) is not None:
            requests, setting = taken
            if not requests:
                continue
            version, rows = requests[0].version, sum(pending.rows for pending in requests)
            planned = version.costs.seconds(setting, rows)
            start = clock()
            self._busy_until = start + self._pace.value * planned
            batch, results = self._score(version, requests, setting, start)
            self._busy_until = None
            if batch.encoded is not None and planned > 0:
                self._pace.update(batch.seconds / planned)
            self._loop.call_soon_threadsafe(self._deliver, batch, results)

    def _take(self) -> tuple[list[Pending], int] | None:
        """The next batch and its setting; None when all is done."""
        with self._wake:
            while not self._line and not self._closing:
                self._wake.wait()
            if not self._line:
                return None
            now = clock()
            late = [pending for pending in self._line if self._dial and pending.deadline < now]
            if late:
                self._line = deque(pending for pending in self._line if pending.deadline >= now)
                self._loop.call_soon_threadsafe(self._give_up, late)
                if not self._line:
                    return [], 0
            first = self._line[0]
            waiting = [
                (
                    p.rows,
                    p.deadline - now - self._lag,
                    None if p.fixed is None else p.version.costs.seconds(p.fixed, p.rows),
                )
                for p in self._line
                if p.version is first.version
            ]
            requests: list[Pending] = []
            rows = 0
            while self._line:
                after = self._line[0]
                if after.version is not first.version or after.fixed != first.fixed:
                    break
                if requests and rows + after.rows > self._batch_rows:
                    break
                requests.append(self._line.popleft())
                rows += after.rows
        if first.fixed is not None:
            return requests, first.fixed
        if not self._dial:
            return requests, 0
        return requests, choose(first.version.costs, Line.of(waiting), self._pace.value, self._batch_rows)

    def _score(
        self, version: Version, requests: list[Pending], setting: int, start: float
    ) -> tuple[Batch, list[Answer | Problem]]:
        rows = sum(pending.rows for pending in requests)
        try:
            encoded = version.engine.encode(version.codec.join([pending.table for pending in requests]))
            scores = version.engine.score(encoded, version.engine.settings[setting])
            if not np.isfinite(scores.logit_B).all():
                raise InputError("a score is not a finite number", fix="look for extreme numbers in the row")
        except BaseException as error:  # a panic of polars is no Exception
            if len(requests) > 1:  # one bad request must not harm its neighbours
                parts = [self._score(version, [pending], setting, start) for pending in requests]
                answers = [answer for _, found in parts for answer in found]
                return Batch(version, setting, requests, rows, clock() - start, None), answers
            if isinstance(error, InputError):
                problem = Problem(400, error.message, fix=error.fix)
            else:
                self._log("scoring failed", level="error", reason=f"{type(error).__name__}: {error}")
                problem = failed()
            return Batch(version, setting, requests, rows, clock() - start, None), [problem]
        ready = clock()
        results: list[Answer | Problem] = []
        stop = 0
        for pending in requests:
            begin, stop = stop, stop + pending.rows
            results.append(Answer(columns_of(scores, begin, stop), setting, ready))
        return Batch(version, setting, requests, rows, ready - start, encoded), results

    # On the event loop again, called by the thread.

    def _deliver(self, batch: Batch, results: list[Answer | Problem]) -> None:
        for pending, result in zip(batch.requests, results, strict=True):
            if pending.answer.done():
                continue
            if isinstance(result, Problem):
                pending.answer.set_exception(result)
            else:
                pending.answer.set_result(result)
        self._done(batch)

    def _give_up(self, late: list[Pending]) -> None:
        for pending in late:
            if not pending.answer.done():
                pending.answer.set_exception(self._busy(self._wait()))
