"""Micro-batching: one thread encodes and scores, and requests that arrive meanwhile are queued and joined.

The queue is bounded: a request that could not be answered in time even at the cheapest setting is refused at once, if
possible before its body is read. One that waits is refused, by a timer, when it is too late to begin with it.
All methods run on the event loop, except those marked as the scoring thread's.
"""

import asyncio
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from recap_ctr.data.encode import Encoded
from recap_ctr.errors import InputError
from recap_ctr.inference.engine import Floats, Scores
from recap_ctr.inference.explain import contributions
from recap_ctr.serve.codec import slice_scores
from recap_ctr.serve.columns import Table
from recap_ctr.serve.problem import Problem
from recap_ctr.serve.scheduler import (
    ADMIT_SHARE,
    Pace,
    QueueState,
    choose_setting,
    remembered,
    retry_after,
)
from recap_ctr.serve.versions import Version

clock = time.monotonic


def scoring_failed() -> Problem:
    """Return the error for a client after a fault of the server."""
    return Problem(500, "scoring failed", fix="tell the operator of this server; its log says more")


@dataclass(eq=False)
class Pending:
    """An accepted request."""

    table: Table
    version: Version
    fixed: int | None
    """The index of the setting that the request demands; None leaves the choice to the dial."""
    deadline: float
    """In seconds of `clock`."""
    explain: bool = False
    """Whether to answer what each field contributes to each row."""
    answer: "asyncio.Future[Answer]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    @property
    def rows(self) -> int:
        """Return the number of rows to score: an explained row is scored once more for each field."""
        return num_scored(self.table.height, self.version, explain=self.explain)


def num_scored(rows: int, version: Version, *, explain: bool) -> int:
    """Return how many rows are scored to answer a request of `rows` rows."""
    return rows * (version.engine.encoder.layout.num_fields + 1) if explain else rows


@dataclass(frozen=True, eq=False)
class Answer:
    """The scores of one request."""

    columns: dict[str, Floats]
    setting: int
    ready: float
    """When the scores were computed, in seconds of `clock`."""
    contributions_BF: Floats | None = None
    """What each field adds to each row's logit, where the request wants to know."""


@dataclass(frozen=True, eq=False)
class Batch:
    """A finished batch, for the counters."""

    version: Version
    setting: int
    requests: Sequence[Pending]
    rows: int
    seconds: float
    encoded: Encoded | None
    """None if the batch could not be scored as a whole."""


class Batcher:
    """The queue of one worker and the thread that empties it.

    `on_batch` is called with each batch, on the event loop, after its requests are answered. `on_queue` is called with
    the numbers of unanswered requests and of their rows whenever they change. `on_death` is called if the scoring
    thread dies: a process that accepts requests but never answers them is worse than none.
    """

    def __init__(
        self,
        *,
        dial: bool,
        batch_rows: int,
        max_requests: int,
        on_queue: Callable[[int, int], None],
        on_batch: Callable[[Batch], None],
        log: Callable[..., None],
        on_death: Callable[[], None] = lambda: os._exit(1),
    ) -> None:
        self._dial, self._batch_rows, self._max_requests = dial, batch_rows, max_requests
        self._on_queue, self._on_batch, self._log, self._on_death = on_queue, on_batch, log, on_death
        self._loop = asyncio.get_running_loop()
        self._queue: deque[Pending] = deque()
        self._pace = Pace()
        self._lag = 0.0  # seconds from scores to answer, a running mean
        self._busy_until: float | None = None
        self._idle_since = clock()
        self._num_held = self._num_held_rows = 0
        self._queued_rows: Counter[Version] = Counter()  # Only requests that leave the setting to the dial.
        self._queued_seconds = 0.0  # Only requests with a fixed setting.
        self._coming: Counter[Version] = Counter()  # Rows whose body is being read.
        self._wake = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="scoring", daemon=True)
        self._thread.start()

    async def score(
        self, table: Table, version: Version, fixed: int | None, deadline: float, *, explain: bool = False
    ) -> Answer:
        """Queue the rows and return their scores; raise Problem 429 if the deadline can't be kept."""
        pending = Pending(table, version, fixed, deadline, explain)
        self._admit(pending.rows, version, fixed, deadline)
        self._hold(1, pending.rows)
        timer = self._start_timer(pending) if self._dial else None
        try:
            with self._wake:
                self._queue.append(pending)
                self._count(pending, 1)
                self._wake.notify()
            answer = await pending.answer
            self._lag += 0.05 * (clock() - answer.ready - self._lag)
            return answer
        finally:
            if timer is not None:
                timer.cancel()
            self._hold(-1, -pending.rows)

    def _start_timer(self, pending: Pending) -> asyncio.TimerHandle:
        """Refuse a request when it is too late to begin with it, whatever the scoring thread does then."""
        costs = pending.version.costs
        seconds = costs.seconds(costs.cheapest if pending.fixed is None else pending.fixed, pending.rows)
        return self._loop.call_later(max(pending.deadline - seconds - clock(), 0.0), self._expire, pending)

    def _expire(self, pending: Pending) -> None:
        with self._wake:
            if pending not in self._queue:
                return  # It is being scored.
            self._queue.remove(pending)
            self._count(pending, -1)
        self._give_up([pending])

    def _count(self, pending: Pending, sign: int) -> None:
        """Keep the sums of what is queued; the caller holds the lock."""
        if pending.fixed is None:
            self._queued_rows[pending.version] += sign * pending.rows
            if not self._queued_rows[pending.version]:
                del self._queued_rows[pending.version]
        else:
            self._queued_seconds += sign * pending.version.costs.seconds(pending.fixed, pending.rows)

    @contextmanager
    def expecting(self, rows: int, version: Version) -> Iterator[None]:
        """Count the rows of a request as waiting while its body is read."""
        self._coming[version] += rows
        try:
            yield
        finally:
            self._coming[version] -= rows
            if not self._coming[version]:
                del self._coming[version]

    def _hold(self, requests: int, rows: int) -> None:
        self._num_held += requests
        self._num_held_rows += rows
        self._on_queue(self._num_held, self._num_held_rows)

    def is_overloaded(self, rows: int, version: Version, seconds_left: float) -> bool:
        """Return whether a request of about `rows` rows can't be answered in time; then its body is not read."""
        if self._num_held >= self._max_requests:
            return True
        wait = self._wait_seconds()
        if not self._dial or wait == 0.0:
            return False
        seconds = self._pace.value * version.costs.seconds(version.costs.cheapest, rows)
        return wait + seconds + self._lag > ADMIT_SHARE * seconds_left

    @property
    def is_scoring(self) -> bool:
        """Return whether the scoring thread is at work on a batch."""
        return self._busy_until is not None

    def refusal(self) -> Problem:
        """Return the 429 that says how long the server is busy."""
        return _busy(self._wait_seconds())

    def close(self) -> None:
        """Finish the queue and end the scoring thread."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    def _admit(self, rows: int, version: Version, fixed: int | None, deadline: float) -> None:
        """Refuse a request that can't be answered before its deadline."""
        if self._num_held >= self._max_requests:
            raise self.refusal()
        if not self._dial:
            return
        costs = version.costs
        seconds = costs.seconds(costs.cheapest if fixed is None else fixed, rows)
        seconds_left = deadline - clock()
        if seconds > seconds_left:
            setting = "the cheapest setting" if fixed is None else "the requested setting"
            raise Problem(
                400,
                f"{rows:,} rows take about {1000 * seconds:.0f} ms at {setting},"
                f" more than the {1000 * max(seconds_left, 0):.0f} ms until the deadline",
                fix="send fewer rows, or a longer deadline_ms",
            )
        wait = self._wait_seconds()
        if wait == 0.0:
            return  # The server is idle; a short slowdown must not make it refuse every request.
        if wait + self._pace.value * seconds + self._lag > ADMIT_SHARE * seconds_left:
            raise _busy(wait)

    def _wait_seconds(self) -> float:
        """Return the seconds until the queue is empty, with each request at its cheapest allowed setting."""
        with self._wake:
            rows_by_version, total = self._queued_rows + self._coming, self._queued_seconds
        for version, rows in rows_by_version.items():
            total += version.costs.drain(version.costs.cheapest, rows, self._batch_rows)
        total *= self._pace.value
        until = self._busy_until
        return total + (max(until - clock(), 0.0) if until is not None else 0.0)

    # The scoring thread runs everything from here on, up to the next such comment.

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._log("scoring thread died", level="error", reason=f"{type(error).__name__}: {error}")
            self._on_death()

    def _work(self) -> None:
        while (batch_and_setting := self._next_batch()) is not None:
            requests, setting = batch_and_setting
            if not requests:
                continue
            version, rows = requests[0].version, sum(pending.rows for pending in requests)
            planned = version.costs.seconds(setting, rows)
            start = clock()
            self._busy_until = start + self._pace.value * planned
            batch, results = self._score(version, requests, setting, start)
            self._busy_until, self._idle_since = None, clock()
            if batch.encoded is not None and planned > 0:
                self._pace.update(batch.seconds / planned)
            self._loop.call_soon_threadsafe(self._deliver, batch, results)

    def _next_batch(self) -> tuple[list[Pending], int] | None:
        """Return the requests of the next batch and its setting; None when the batcher is closed and done."""
        with self._wake:
            while not self._queue and not self._closing:
                self._wake.wait()
            if not self._queue:
                return None
            now = clock()
            self._pace.rest(now - self._idle_since)
            self._lag *= remembered(now - self._idle_since)
            self._idle_since = now
            self._drop_late(now)
            if not self._queue:
                return [], 0
            first = self._queue[0]
            state = [
                (
                    pending.rows,
                    pending.deadline - now - self._lag,
                    None
                    if pending.fixed is None
                    else pending.version.costs.seconds(pending.fixed, pending.rows),
                )
                for pending in self._queue
                if pending.version is first.version
            ]
            requests = self._pop_batch(first)
        if first.fixed is not None:
            return requests, first.fixed
        if not self._dial:
            return requests, 0
        queue = QueueState.of(state)
        return requests, choose_setting(first.version.costs, queue, self._pace.value, self._batch_rows)

    def _drop_late(self, now: float) -> None:
        """Refuse queued requests whose deadline has passed."""
        late = [pending for pending in self._queue if self._dial and pending.deadline < now]
        if late:
            self._queue = deque(pending for pending in self._queue if pending.deadline >= now)
            for pending in late:
                self._count(pending, -1)
            self._loop.call_soon_threadsafe(self._give_up, late)

    def _pop_batch(self, first: Pending) -> list[Pending]:
        """Take the requests that can share a batch with the first one off the queue."""
        requests: list[Pending] = []
        rows = 0
        while self._queue:
            pending = self._queue[0]
            if pending.version is not first.version or pending.fixed != first.fixed:
                break
            if pending.explain != first.explain:
                break
            if requests and rows + pending.rows > self._batch_rows:
                break
            requests.append(self._queue.popleft())
            self._count(pending, -1)
            rows += pending.rows
        return requests

    def _score(
        self, version: Version, requests: list[Pending], setting: int, start: float
    ) -> tuple[Batch, list[Answer | Problem]]:
        rows = sum(pending.rows for pending in requests)
        try:
            encoded = version.encode([pending.table for pending in requests])
            scores = version.engine.score(encoded, version.engine.settings[setting])
            explained_BF = _explain(version, setting, encoded, scores) if requests[0].explain else None
            if not np.isfinite(scores.logit_B).all():
                raise InputError("a score is not a finite number", fix="look for extreme numbers in the row")
        except BaseException as error:  # a panic of polars is not an Exception
            if len(requests) > 1:  # Score them one by one: a bad request must not harm the others.
                parts = [self._score(version, [pending], setting, start) for pending in requests]
                answers = [answer for _, part in parts for answer in part]
                return Batch(version, setting, requests, rows, clock() - start, None), answers
            if isinstance(error, InputError):
                problem = Problem(400, error.message, fix=error.fix)
            else:
                self._log("scoring failed", level="error", reason=f"{type(error).__name__}: {error}")
                problem = scoring_failed()
            return Batch(version, setting, requests, rows, clock() - start, None), [problem]
        ready = clock()
        results: list[Answer | Problem] = []
        stop = 0
        for pending in requests:
            begin, stop = stop, stop + pending.table.height
            contributions_BF = None if explained_BF is None else explained_BF[begin:stop]
            results.append(Answer(slice_scores(scores, begin, stop), setting, ready, contributions_BF))
        return Batch(version, setting, requests, rows, ready - start, encoded), results

    # The event loop runs the rest, called by the scoring thread.

    def _deliver(self, batch: Batch, results: list[Answer | Problem]) -> None:
        for pending, result in zip(batch.requests, results, strict=True):
            if pending.answer.done():
                continue
            if isinstance(result, Problem):
                pending.answer.set_exception(result)
            else:
                pending.answer.set_result(result)
        self._on_batch(batch)

    def _give_up(self, late: list[Pending]) -> None:
        for pending in late:
            if not pending.answer.done():
                pending.answer.set_exception(self.refusal())


def _explain(version: Version, setting: int, encoded: Encoded, scores: Scores) -> Floats:
    """Return what each field adds to each row's logit at one of the settings."""
    engine = version.engine

    def logits(changed: Encoded) -> Floats:
        return engine.score(changed, engine.settings[setting]).logit_B

    return contributions(logits, engine.encoder, encoded, scores.logit_B)


def _busy(wait: float) -> Problem:
    return Problem(
        429,
        f"the server is busy for the next {1000 * wait:.0f} ms",
        fix="wait, or send a longer deadline_ms",
        retry_after=retry_after(wait),
    )
