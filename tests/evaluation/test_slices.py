"""Slices, gains, thresholds and histograms against computations row by row."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import log_loss, roc_auc_score

from recap_ctr.evaluation.slices import (
    FieldValues,
    ScoredRows,
    break_down,
    gains,
    histogram,
    period_slices,
    thresholds,
    value_slices,
)


def draw(rows: int = 400, seed: int = 0, *, weighted: bool = False, step: float = 0.25) -> ScoredRows:
    """Return rows with many tied scores."""
    rng = np.random.default_rng(seed)
    logits = np.round(rng.normal(-1.0, 1.5, rows) / step) * step
    labels = (rng.random(rows) < 1 / (1 + np.exp(-logits))).astype(np.uint8)
    return ScoredRows(labels, logits, rng.integers(0, 4, rows).astype(float) if weighted else None)


def unfolded(rows: ScoredRows) -> ScoredRows:
    """Return the rows with each repeated as often as its weight says."""
    assert rows.weights is not None
    counts = rows.weights.astype(int)
    return ScoredRows(np.repeat(rows.labels, counts), np.repeat(rows.logits, counts))


def test_slices_are_the_figures_of_their_rows() -> None:
    rows = draw()
    codes = np.random.default_rng(1).choice([3, 5, 9, 11], 400, p=[0.1, 0.5, 0.3, 0.1])
    slices = value_slices(rows, FieldValues(codes, lambda code: f"v{code}"), count=2)
    assert [part.name for part in slices] == ["v5", "v9", "2 other values"]
    for part, chosen in zip(slices, (codes == 5, codes == 9, np.isin(codes, [3, 11])), strict=True):
        labels, scores = rows.labels[chosen], 1 / (1 + np.exp(-rows.logits[chosen]))
        assert part.rows == chosen.sum() and part.base_rate == pytest.approx(labels.mean())
        assert part.auc == pytest.approx(roc_auc_score(labels, scores))
        assert part.logloss == pytest.approx(log_loss(labels, scores))
        assert part.calibration_ratio == pytest.approx(scores.mean() / labels.mean())


def test_slices_of_one_label_have_no_auc_and_without_clicks_no_ratio() -> None:
    rows = ScoredRows(np.array([0, 0, 1, 1]), np.array([-1.0, 0.0, 0.5, 1.0]))
    quiet, clicked = value_slices(rows, FieldValues(np.array([0, 0, 1, 1]), str))
    assert (quiet.auc, quiet.calibration_ratio) == (None, None)
    assert clicked.auc is None and clicked.calibration_ratio == pytest.approx(0.6767, abs=1e-3)


def test_long_names_are_cut() -> None:
    rows = ScoredRows(np.array([0, 1]), np.array([0.0, 1.0]))
    assert value_slices(rows, FieldValues(np.zeros(2, int), lambda _: "x" * 500))[0].name == "x" * 59 + "…"


def test_periods_are_equally_long_and_empty_ones_are_left_out() -> None:
    rows = draw(200)
    times = np.concatenate([np.linspace(0, 20, 100), np.linspace(70, 100, 100)])
    periods = period_slices(rows, times, "day {:.0f}".format)
    assert [part.name for part in periods] == [f"from day {start}" for start in (0, 10, 20, 70, 80, 90)]
    expected = [int(((times >= low) & (times < low + 10)).sum()) for low in (0, 10, 20, 70, 80, 90)]
    expected[-1] += 1  # The last moment belongs to the last period.
    assert [part.rows for part in periods] == expected
    assert not period_slices(rows, np.ones(200))


def test_gains_count_the_clicks_of_the_highest_scores() -> None:
    rng = np.random.default_rng(3)
    rows = ScoredRows((rng.random(500) < 0.2).astype(np.uint8), rng.normal(size=500))
    order = np.argsort(-rows.logits)
    for gain in gains(rows):
        top = rows.labels[order[: round(gain.rows * 500)]]
        assert gain.clicks == pytest.approx(top.sum() / rows.labels.sum())
        assert gain.lift == pytest.approx(top.mean() / rows.labels.mean())


def test_gains_of_constant_scores_are_those_of_a_random_order() -> None:
    rows = ScoredRows(np.array([1, 1, 0, 0, 0, 0, 0, 0, 0, 0]), np.zeros(10))
    assert [gain.clicks for gain in gains(rows)] == pytest.approx([gain.rows for gain in gains(rows)])
    assert not histogram(rows)
    assert not gains(ScoredRows(np.zeros(3), np.arange(3.0))) and not thresholds(
        ScoredRows(np.zeros(3), np.arange(3.0))
    )


def test_thresholds_say_what_they_select() -> None:
    rows = draw()
    scores = 1 / (1 + np.exp(-rows.logits))
    table = thresholds(rows)
    assert [row.score for row in table] == sorted({row.score for row in table}, reverse=True)
    for row in table:
        selected = scores >= row.score - 1e-12
        assert row.rows == pytest.approx(selected.mean())
        assert row.precision == pytest.approx(rows.labels[selected].mean())
        assert row.recall == pytest.approx(rows.labels[selected].sum() / rows.labels.sum())
    exact = ScoredRows(np.array([1, 0] * 50), np.arange(100.0))
    assert [row.rows for row in thresholds(exact)] == pytest.approx([0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5])


def test_histogram_holds_every_row_once() -> None:
    rows = draw()
    bins = histogram(rows, 7)
    scores = 1 / (1 + np.exp(-rows.logits))
    assert sum(part.rows for part in bins) == pytest.approx(1.0)
    assert sum(part.clicks for part in bins) == pytest.approx(1.0)
    first = (scores >= bins[0].low) & (scores < bins[0].high)
    assert bins[0].rows == pytest.approx(first.mean())
    assert bins[0].clicks == pytest.approx(rows.labels[first].sum() / rows.labels.sum())
    assert len({round(part.high - part.low, 12) for part in bins}) == 1


@pytest.mark.slow
@given(st.integers(0, 1_000))
def test_a_weight_counts_a_row_as_often_as_it_says(seed: int) -> None:
    weighted = draw(80, seed, weighted=True)
    repeated = unfolded(weighted)
    for figures in (gains, thresholds, histogram):
        for one, other in zip(figures(weighted), figures(repeated), strict=True):
            assert one.model_dump() == pytest.approx(other.model_dump())


def test_breakdown_goes_through_json() -> None:
    rows = draw()
    breakdown = break_down(
        "test", rows, {"site": FieldValues(np.arange(400) % 3, str)}, np.arange(400.0), "{:g}".format
    )
    assert breakdown.rows == 400 and len(breakdown.periods) == 10 and breakdown.fields[0].field == "site"
    assert type(breakdown).model_validate(breakdown.to_json()) == breakdown
