"""Which settings are measured, and which are good enough to be offered."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recap_ctr.inference.setting import (
    LARGEST_EXCESS,
    LARGEST_LOSS_OF_GAIN,
    dial_settings,
    measured_settings,
    shortfall,
)

losses = st.floats(0.01, 2.0)


def quality(loss: float) -> dict[str, Any]:
    return {"routes": 4, "depth": 2, "logloss": loss}


@pytest.mark.slow
@given(st.integers(0, 40), st.sets(st.integers(1, 9), min_size=1))
def test_every_setting_of_the_dial_is_measured(routes: int, depths: set[int]) -> None:
    dial, measured = dial_settings(routes, sorted(depths)), measured_settings(routes, sorted(depths))
    assert measured[0] == dial[0]
    assert set(dial) <= set(measured) and len(set(measured)) == len(measured)
    assert [setting.depth or 0 for setting in measured] == sorted(
        (setting.depth or 0 for setting in measured), reverse=True
    ), "settings of one depth stand together"


@given(losses, losses, losses)
def test_an_offered_setting_is_near_the_full_one_and_better_than_the_base_rate(
    loss: float, full: float, base_rate: float
) -> None:
    reason = shortfall(quality(loss), quality(full), base_rate)
    assert (reason is None) == (
        loss < base_rate
        and loss <= (1 + LARGEST_EXCESS) * full
        and loss - full <= LARGEST_LOSS_OF_GAIN * (base_rate - full)
    )
    assert reason is None or f"{loss:.5f}" in reason


def test_without_a_base_rate_only_the_full_setting_is_the_measure() -> None:
    assert shortfall(quality(0.5), quality(0.5), None) is None
    assert shortfall(quality(0.52), quality(0.5), None) is not None
