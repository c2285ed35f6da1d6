"""The dial: costs between what was measured, and a setting that keeps everybody's deadline."""

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recap_ctr.serve.scheduler import DIAL_SHARE, Costs, Line, Pace, choose, measure, retry_after
from recap_ctr.serve.versions import sample_rows
from tests.support.fake_engine import FakeEngine

COSTS = Costs((1, 10, 100), ((1.0, 2.0, 11.0), (0.5, 1.0, 5.5), (0.1, 0.2, 1.1)))
lines = st.lists(
    st.tuples(st.integers(1, 150), st.floats(0.01, 100), st.none() | st.floats(0, 5)), min_size=1, max_size=12
)


def test_costs_are_linear_between_and_beyond_their_sizes() -> None:
    assert [COSTS.seconds(0, rows) for rows in (0, 1, 10, 55, 100, 200)] == pytest.approx(
        [0, 1, 2, 6.5, 11, 21]
    )
    assert COSTS.cheapest == 2
    assert Costs.from_dict(COSTS.to_dict()) == COSTS
    # Three batches of ten, and a rest of five.
    assert COSTS.drain_Q(0, np.array([35.0, 30.0]), 10) == pytest.approx([6 + 1 + 4 / 9, 6])


@given(lines, st.floats(0.5, 4))
def test_the_best_setting_that_answers_everybody_in_time(
    waiting: list[tuple[int, float, float | None]], pace: float
) -> None:
    def in_time(setting: int) -> bool:
        """By walking along the line."""
        rows, fixed = 0, 0.0
        for count, left, seconds in waiting:
            rows, fixed = rows + count * (seconds is None), fixed + (seconds or 0.0)
            full, rest = divmod(rows, 100)
            last = COSTS.seconds(setting, rest) if rest >= 1 else 0.0
            if pace * (full * COSTS.seconds(setting, 100) + last + fixed) > DIAL_SHARE * left + 1e-9:
                return False
        return True

    expected = next((setting for setting in range(3) if in_time(setting)), COSTS.cheapest)
    assert choose(COSTS, Line.of(waiting), pace, 100) == expected


@given(lines, st.floats(0.5, 4), st.integers(1, 300))
def test_more_load_never_raises_the_setting(
    waiting: list[tuple[int, float, float | None]], pace: float, more: int
) -> None:
    before = choose(COSTS, Line.of(waiting), pace, 100)
    assert choose(COSTS, Line.of([(more, 1.0, None), *waiting]), pace, 100) >= before
    assert choose(COSTS, Line.of(waiting), 2 * pace, 100) >= before


def test_pace_follows_batches_and_forgives() -> None:
    pace = Pace()
    for _ in range(50):
        pace.update(3.0)
    assert 2.9 < pace.value < 3.2
    for _ in range(100):
        pace.update(1.0)
    assert 0.95 < pace.value < 1.1
    for ratio in (0.5, 1.5) * 100:
        pace.update(ratio)
    assert pace.value > 1.8, "what varies is planned for"


def test_measured_costs_follow_the_engine() -> None:
    engine = FakeEngine({"start_us": 1000, "row_us": 100})
    costs = measure(engine, lambda rows: sample_rows(engine.encoder, rows), 0.3)
    assert len(costs.seconds_by_setting) == len(engine.settings)
    assert costs.seconds(0, 512) > 1.5 * costs.seconds(2, 512) > 0.002
    for known in costs.seconds_by_setting:
        assert list(known) == sorted(known)


def test_sample_rows_hold_values_and_one_row_without() -> None:
    engine = FakeEngine({})
    rows = sample_rows(engine.encoder, 40)
    encoded = engine.encode(rows)
    assert rows.height == 40 and rows.head(1).select(pl.all().is_null().all()).row(0) == (True,) * rows.width
    assert encoded.num_unseen.sum() == 0 and (encoded.num_missing == 1).all()
    assert sample_rows(engine.encoder, 1).height == 1


def test_retry_after_is_a_whole_second_at_least() -> None:
    assert [retry_after(seconds) for seconds in (0.0, 0.2, 1.0, 1.1)] == [1, 1, 1, 2]
