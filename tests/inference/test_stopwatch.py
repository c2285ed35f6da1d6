"""The stopwatch takes turns, warms up, and stops in time."""

from functools import partial

import pytest

from recap_ctr.inference.stopwatch import interleaved_seconds


def test_calls_take_turns_and_each_round_starts_with_another_one() -> None:
    order: list[str] = []
    now = 0.0

    def work(name: str, seconds: float) -> None:
        nonlocal now
        order.append(name)
        now += seconds

    calls = {name: partial(work, name, cost) for name, cost in (("a", 1.0), ("b", 2.0), ("c", 4.0))}
    times = interleaved_seconds(calls, rounds=3, clock=lambda: now)

    rounds = ["".join(order[start : start + 3]) for start in range(0, len(order), 3)]
    assert rounds == ["abc", "bca", "cab", "abc"], "the first round warms up"
    assert times == {"a": [1.0] * 3, "b": [2.0] * 3, "c": [4.0] * 3}


def test_it_goes_on_until_the_seconds_have_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def work() -> None:
        nonlocal now
        now += 1.0

    monkeypatch.setattr("time.perf_counter", lambda: now)
    times = interleaved_seconds({"work": work}, rounds=2, seconds=5.0, clock=lambda: now)
    assert times == {"work": [1.0] * 5}
    times = interleaved_seconds({"work": work}, rounds=8, seconds=5.0, clock=lambda: now)
    assert times == {"work": [1.0] * 8}
