"""The stopwatch: calls are timed in turns, so that other work on the machine disturbs all of them alike."""

import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

K = TypeVar("K", bound=Hashable)


def interleaved_seconds(
    calls: Mapping[K, Callable[[], object]],
    *,
    rounds: int,
    seconds: float = 0.0,
    clock: Callable[[], float] | None = None,
) -> dict[K, list[float]]:
    """Return how long each call takes, round by round, in seconds by `clock`: the wall clock by default.

    Every call runs once in a round. A first round only warms up; then follow at least `rounds` rounds, and more
    until `seconds` of wall time have passed. Each round starts with another call, because the first call of a round
    finds the caches cold.
    """
    clock = clock or time.perf_counter
    names = list(calls)
    for name in names:
        calls[name]()
    times: dict[K, list[float]] = {name: [] for name in names}
    end = time.perf_counter() + seconds
    finished = 0
    while finished < rounds or time.perf_counter() < end:
        finished += 1
        first = finished % len(names)
        for name in names[first:] + names[:first]:
            start = clock()
            calls[name]()
            times[name].append(clock() - start)
    return times
