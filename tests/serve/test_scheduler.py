"""The dial: costs between the measured sizes, and a setting that keeps all deadlines."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recap_ctr.serve.scheduler import (
    DIAL_SHARE,
    HALF_LIFE,
    Costs,
    Pace,
    QueueState,
    choose_setting,
    measure_costs,
    retry_after,
)
from recap_ctr.serve.versions import sample_rows
from tests.support.fake_engine import FakeEngine

COSTS = Costs((1, 10, 100), ((1.0, 2.0, 11.0), (0.5, 1.0, 5.5), (0.1, 0.2, 1.1)))
Requests = list[tuple[int, float, float | None]]
queues = st.lists(
    st.tuples(st.integers(1, 150), st.floats(0.01, 100), st.none() | st.floats(0, 5)), min_size=1, max_size=12
)


def choose(requests: Requests, pace: float) -> int:
    return choose_setting(COSTS, QueueState.of(requests), pace, 100)


def test_costs_are_linear_between_and_beyond_their_sizes() -> None:
    assert [COSTS.seconds(0, rows) for rows in (0, 1, 10, 55, 100, 200)] == pytest.approx(
        [0, 1, 2, 6.5, 11, 21]
    )
    assert COSTS.cheapest == 2
    assert Costs.from_dict(COSTS.to_dict()) == COSTS
    # Three batches of ten, and a rest of five.
    assert COSTS.drain_Q(0, np.array([35.0, 30.0]), 10) == pytest.approx([6 + 1 + 4 / 9, 6])


@pytest.mark.slow
@given(queues, st.floats(0.5, 4))
def test_the_best_setting_that_answers_all_requests_in_time_is_chosen(
    requests: Requests, pace: float
) -> None:
    def is_in_time(setting: int) -> bool:
        """Walk along the queue, one request at a time."""
        total_rows, total_fixed = 0, 0.0
        for rows, left, fixed in requests:
            total_rows, total_fixed = total_rows + rows * (fixed is None), total_fixed + (fixed or 0.0)
            full, rest = divmod(total_rows, 100)
            last = COSTS.seconds(setting, rest) if rest >= 1 else 0.0
            seconds = pace * (full * COSTS.seconds(setting, 100) + last + total_fixed)
            if seconds > DIAL_SHARE * left + 1e-9:
                return False
        return True

    expected = next((setting for setting in range(3) if is_in_time(setting)), COSTS.cheapest)
    assert choose(requests, pace) == expected


@pytest.mark.slow
@given(queues, st.floats(0.5, 4), st.integers(1, 300))
def test_more_load_never_raises_the_setting(requests: Requests, pace: float, more: int) -> None:
    before = choose(requests, pace)
    assert choose([(more, 1.0, None), *requests], pace) >= before
    assert choose(requests, 2 * pace) >= before


def test_pace_follows_slow_batches_and_recovers() -> None:
    pace = Pace()
    for _ in range(50):
        pace.update(3.0)
    assert 2.9 < pace.value < 3.2
    for _ in range(100):
        pace.update(1.0)
    assert 0.95 < pace.value < 1.1
    for ratio in (0.5, 1.5) * 100:
        pace.update(ratio)
    assert pace.value > 1.8, "the plan allows for variation"


def test_pace_forgets_while_the_server_is_idle() -> None:
    slow, rested = Pace(), Pace()
    for pace in (slow, rested):
        for _ in range(200):
            pace.update(20.0)
    rested.rest(0.001)
    assert rested.value == pytest.approx(slow.value, rel=0.01), (
        "a busy server hardly forgets between two batches"
    )
    rested.rest(HALF_LIFE - 0.001)
    assert rested.value - Pace().value == pytest.approx((slow.value - Pace().value) / 2)
    rested.rest(5 - HALF_LIFE)
    assert rested.value == pytest.approx(Pace().value, rel=0.02)
    fast = Pace()
    for _ in range(200):
        fast.update(0.2)
    fast.rest(5)
    assert fast.value == pytest.approx(Pace().value, rel=0.02), (
        "what was faster than measured is forgotten, too"
    )


@pytest.mark.slow
def test_measured_costs_follow_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock moves only by what the engine sleeps and by a little at each look, so that no noise can fail it."""
    now = 0.0

    def look() -> float:
        nonlocal now
        now += 1e-5
        return now

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(time, "perf_counter", look)
    engine = FakeEngine({"start_us": 1000, "row_us": 100}, sleep)
    costs = measure_costs(engine, lambda rows: sample_rows(engine.encoder, rows), 0.01)
    assert len(costs.seconds_by_setting) == len(engine.settings)
    for setting, share in enumerate(engine.costs):
        for rows in (1, 512):
            assert costs.seconds(setting, rows) == pytest.approx(share * (0.001 + 0.0001 * rows), abs=1e-4)
    for measured in costs.seconds_by_setting:
        assert list(measured) == sorted(measured)


def test_retry_after_is_at_least_a_whole_second() -> None:
    assert [retry_after(seconds) for seconds in (0.0, 0.2, 1.0, 1.1)] == [1, 1, 1, 2]
