"""The time of a fit: shares of a budget, what was spent before, and no limit at all."""

import math
import time

import pytest

from recap_ctr.recipe.clock import Clock


def test_shares_count_from_the_start_and_include_what_was_spent() -> None:
    clock = Clock(2.0, started=time.time() - 30, spent=20)
    assert clock.taken == pytest.approx(50, abs=1)
    assert clock.until(0.5) == pytest.approx(10, abs=1)
    assert clock.until(1.0, reserve=40) == pytest.approx(30, abs=1)
    assert clock.until(0.25) == 0
    deadline = clock.deadline(5)
    assert deadline is not None and deadline == pytest.approx(time.time() + 5, abs=1)


def test_without_a_budget_there_is_no_end() -> None:
    clock = Clock(None)
    assert not clock.is_limited and math.isinf(clock.until(0.1))
    assert clock.deadline(clock.until(0.5)) is None
