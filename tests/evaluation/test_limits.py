"""Limits of shares: alarms are as rare as promised, and follow the variation of the periods before."""

import numpy as np
import pytest
from scipy import stats

from recap_ctr.evaluation.limits import exchanged_limit, share_limits, student_quantile


def test_quantiles_of_student() -> None:
    for freedom in (7, 15, 31, 95):
        for chance in (0.05, 1e-3, 1e-5):
            exact = stats.t.isf(chance / 2, freedom)
            assert student_quantile(chance, freedom) == pytest.approx(exact, rel=0.03)
    assert student_quantile(0.01, 0) == np.inf


@pytest.mark.parametrize("spread", [0.0, 0.02])
@pytest.mark.parametrize("total", [500, 2_000, 10_000])
def test_shares_like_those_before_are_ordinary(spread: float, total: int) -> None:
    rng = np.random.default_rng(1)
    alarms, chance, num_shares = 0, 0.01, 2_000
    shares = np.clip(rng.normal(0.2, spread, (40, num_shares)), 0.01, 0.99)
    counts = rng.binomial(2_000, shares)
    limits = share_limits(counts, np.full(40, 2_000), total, chance=chance)
    periods = max(total // 2_000, 1)  # A long window spans several of them.
    fresh_shares = np.clip(rng.normal(0.2, spread, (periods, num_shares)), 0.01, 0.99)
    fresh = rng.binomial(total // periods, fresh_shares).sum(axis=0) / total
    alarms = ((fresh < limits.low_K) | (fresh > limits.high_K)).mean()
    assert alarms <= 1.5 * chance


def test_a_shift_beyond_the_usual_variation_is_not_ordinary() -> None:
    rng = np.random.default_rng(2)
    steady, varied = rng.binomial(1_000, 0.2, 40), rng.binomial(1_000, rng.uniform(0.05, 0.35, 40))
    limits = share_limits(np.stack([steady, varied], axis=1), np.full(40, 1_000), 1_000, chance=1e-4)
    assert limits.high_K[0] < 0.30 < limits.high_K[1]
    assert limits.low_K[0] > 0.10 > limits.low_K[1]
    alike = share_limits(
        np.stack([steady, varied], axis=1), np.full(40, 1_000), 1_000, chance=1e-4, alike=True
    )
    assert alike.high_K[0] > limits.high_K[0] and alike.high_K[1] == limits.high_K[1]


def test_a_trend_widens_the_limits() -> None:
    rising = np.linspace(100, 300, 40).astype(int)
    limits = share_limits(rising[:, None], np.full(40, 1_000), 1_000, chance=1e-3)
    assert limits.high_K[0] > 0.4


def test_few_rows_and_few_periods_have_wide_limits() -> None:
    counts, totals = np.full((40, 1), 1), np.full(40, 1_000)
    assert share_limits(counts, totals, 20, chance=1e-4).high_K[0] > 4 / 20
    assert share_limits(counts[:1], totals[:1], 1_000, chance=1e-4).high_K[0] == pytest.approx(0.99)
    assert share_limits(counts, totals, 10_000, chance=1e-4, least=0.05).high_K[0] == pytest.approx(0.051)


@pytest.mark.parametrize("exponent", [0.0, 1.0])
def test_more_new_values_than_the_limit_come_as_rarely_as_said(exponent: float) -> None:
    rng, chance = np.random.default_rng(3), 1e-3
    shares = np.arange(1.0, 301.0) ** -exponent
    shares /= shares.sum()
    sums = (rng.random((20_000, 300)) < 0.06) @ shares
    limit = exchanged_limit(shares, 0.06, chance)
    assert (sums > limit).mean() <= chance
    assert np.quantile(sums, 1 - chance) < limit < 1.6 * np.quantile(sums, 1 - chance)
    assert limit < exchanged_limit(shares, 0.12, chance)
