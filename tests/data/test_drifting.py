"""Clicks that drift: values appear and fade, effects move, and no day is easier than another."""

import numpy as np
import polars as pl
import pytest

from recap_ctr.data.drifting import DriftConfig, DriftingData
from recap_ctr.data.moments import DAY
from recap_ctr.data.synthetic import SyntheticConfig
from recap_ctr.errors import InputError
from recap_ctr.evaluation.metrics import sigmoid

PLANTED = SyntheticConfig(rows=28_000, num_fields=5, max_values=200)


def by_day(drift: float) -> list[pl.DataFrame]:
    frame = DriftingData(DriftConfig(PLANTED, 14, drift)).frame()
    assert frame["ts"].is_sorted() and frame.height == PLANTED.rows
    return frame.with_columns(day=(pl.col("ts") - frame["ts"].min()) // DAY).partition_by("day")


def test_values_are_exchanged_and_effects_move() -> None:
    days = by_day(0.2)
    assert len(days) == 14
    first = set(days[0]["f5"]) | set(days[1]["f5"])
    new = [1 - day["f5"].is_in(list(first)).mean() for day in days[2:]]  # type: ignore[operator]
    assert new[-1] > new[3] > new[0] and new[-1] > 0.3
    assert set(days[-1]["f1"]) == set(days[0]["f1"])  # A small field keeps its values.
    spreads = [float(day["bayes_logit"].std()) for day in days]  # type: ignore[arg-type]
    assert max(spreads) < 1.6 * min(spreads)

    def effects(day: pl.DataFrame) -> dict[str, float]:
        return dict(day.group_by("f1").agg(pl.col("bayes_logit").mean()).rows())

    start = effects(days[0])
    moved = [np.mean([abs(effects(days[at])[value] - start[value]) for value in start]) for at in (1, 13)]
    assert moved[1] > 1.5 * moved[0]


def test_without_drift_all_days_are_alike() -> None:
    days = by_day(0.0)
    assert {value for day in days for value in day["f5"]} <= {f"f5_{number}" for number in range(1, 201)}
    clicks = pl.concat(days)["click"].mean()
    assert clicks == pytest.approx(float(sigmoid(pl.concat(days)["bayes_logit"]).mean()), abs=0.01)


@pytest.mark.parametrize("change", [{"days": 0}, {"drift": 1.0}, {"drift": -0.1}])
def test_impossible_drift_is_refused(change: dict[str, float]) -> None:
    with pytest.raises(InputError, match=next(iter(change))):
        DriftConfig(PLANTED, **change)  # type: ignore[arg-type]
