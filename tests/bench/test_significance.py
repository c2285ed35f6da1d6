"""Tests of differences, against scipy and against simulated runs."""

import statistics

import numpy as np
import pytest
from scipy.stats import ttest_ind, ttest_rel

from recap_ctr.bench.arms import Arm
from recap_ctr.bench.significance import (
    Difference,
    chance_limit,
    compare,
    detectable_difference,
    holm,
    paired_difference,
)
from tests.support.arms import arm

ARMS = {
    "lr": arm("LR", 0.70),
    "qnn": arm("QNN", 0.80, 0.802, 0.801),
    "fcn": arm("FCN", 0.79, 0.795, 0.792),
    "recap": arm("RECAP", 0.82, 0.823, 0.8205),
}


def paired(baseline: Arm, other: Arm) -> Difference:
    """Return the paired difference in AUC of arms that share seeds."""
    difference = paired_difference(baseline, other, "auc")
    assert difference is not None
    return difference


def test_paired_is_that_of_scipy() -> None:
    rng = np.random.default_rng(0)
    first, second = rng.normal(0.8, 0.001, 5), rng.normal(0.801, 0.001, 5)
    difference = paired(arm("a", *first), arm("b", *second))
    expected = ttest_rel(second, first)
    interval = expected.confidence_interval(0.95)

    assert difference.mean == pytest.approx((second - first).mean(), rel=1e-12)
    assert difference.standard_error == pytest.approx((second - first).std(ddof=1) / 5**0.5, rel=1e-12)
    assert (difference.low, difference.high) == pytest.approx((interval.low, interval.high), rel=1e-9)
    assert difference.p == pytest.approx(expected.pvalue, rel=1e-9)
    assert difference.seeds == (1, 2, 3, 4, 5)


def test_paired_by_hand() -> None:
    """Differences 1 and 3: mean 2, error 1; with one degree of freedom t is Cauchy's, its 97.5% point 12.706."""
    difference = paired(arm("a", 0.0, 0.0), arm("b", 1.0, 3.0))
    assert (difference.mean, difference.standard_error) == pytest.approx((2.0, 1.0))
    assert (difference.low, difference.high) == pytest.approx((2 - 12.7062047, 2 + 12.7062047))
    assert difference.p == pytest.approx(1 - 2 * np.arctan(2) / np.pi)


def test_paired_turns_its_sign_with_the_arms() -> None:
    a, b = arm("a", 0.1, 0.2, 0.4), arm("b", 0.3, 0.3, 0.3)
    there, back = paired(a, b), paired(b, a)
    assert there.p == back.p
    assert (there.low, there.high) == (-float(back.high or 0), -float(back.low or 0))


def test_paired_takes_the_shared_seeds_whatever_their_order() -> None:
    some = Arm("a", {}, (3, 1, 2), {"auc": (0.3, 0.1, 0.2)})
    other = Arm("b", {}, (2, 3, 4), {"auc": (0.5, 0.7, 9.0)})
    difference = paired(some, other)
    assert difference.seeds == (3, 2)
    assert difference.mean == pytest.approx(statistics.mean([0.7 - 0.3, 0.5 - 0.2]))


def test_too_few_seeds_give_a_difference_at_most() -> None:
    difference = paired(arm("a", 0.5, 0.6), arm("b", 0.7, 0.9, first_seed=2))
    assert difference.mean == pytest.approx(0.1)
    assert (difference.standard_error, difference.low, difference.high, difference.p, difference.seeds) == (
        None,
        None,
        None,
        None,
        (2,),
    )
    assert paired_difference(arm("a", 0.5), arm("b", 0.7, first_seed=2), "auc") is None


def test_equal_differences_have_no_p_unless_they_are_zero() -> None:
    a = arm("a", 0.1, 0.2, 0.3)
    same = paired(a, a)
    assert (same.mean, same.low, same.high, same.p) == (0.0, 0.0, 0.0, 1.0)
    # The differences are equal but for rounding.
    shifted = paired(a, arm("b", *(value + 0.1 for value in (0.1, 0.2, 0.3))))
    assert (shifted.standard_error, shifted.p) == (0.0, None)
    assert shifted.low == shifted.high == shifted.mean == pytest.approx(0.1)


def test_ours_is_compared_by_welch_and_corrected() -> None:
    comparisons = compare(ARMS, "recap")
    raw = {
        name: ttest_ind(ARMS["recap"].figures["auc"], ARMS[name].figures["auc"], equal_var=False).pvalue
        for name in ("qnn", "fcn")
    }
    smaller, larger = sorted(raw, key=lambda name: raw[name])

    assert comparisons["lr"].p is None
    assert comparisons["lr"].gap == pytest.approx(0.1211666, abs=1e-6)
    assert comparisons[smaller].p == pytest.approx(2 * raw[smaller])
    assert comparisons[larger].p == pytest.approx(max(raw[larger], 2 * raw[smaller]))


def test_other_numbers_of_runs_are_compared_by_their_means() -> None:
    two = Arm("FCN", {}, (7, 8), {"auc": (0.79, 0.795)})
    comparison = compare({"fcn": two, "recap": ARMS["recap"]}, "recap")["fcn"]
    assert comparison.gap == pytest.approx(np.mean([0.82, 0.823, 0.8205]) - 0.7925)
    assert comparison.p is not None


def test_holm_never_lowers_and_never_exceeds_one() -> None:
    corrected = holm({"a": 0.5, "b": 0.001, "c": 0.02, "d": 0.9})
    assert corrected == pytest.approx({"b": 0.004, "c": 0.06, "a": 1.0, "d": 1.0})


@pytest.mark.parametrize(
    ("counts", "deviations", "level"),
    [
        ((2, 2), (1.0, 1.0), 0.05),
        ((3, 3), (1.0, 1.0), 0.05),
        ((5, 5), (1.0, 1.0), 0.05 / 4),
        ((5, 3), (1.0, 8.0), 0.05),
        ((5, 3), (8.0, 1.0), 0.05 / 4),
    ],
)
def test_the_test_of_the_table_finds_a_detectable_difference_four_times_in_five(
    counts: tuple[int, int], deviations: tuple[float, float], level: float
) -> None:
    """Simulated: Welch's test, on runs that have the deviations that the formula is given."""
    sides = []
    for name, count, deviation in zip("ab", counts, deviations, strict=True):
        values = np.array([1.0, -1.0, *[0.0] * (count - 2)])
        values *= 0.001 * deviation / values.std(ddof=1)
        sides.append(Arm(name, {}, tuple(range(count)), {"auc": tuple(0.5 + values)}))
    least = detectable_difference(sides[0], sides[1], level)
    assert least is not None
    rng = np.random.default_rng(0)
    first, second = (
        0.001 * deviation * rng.normal(size=(20_000, count))
        for count, deviation in zip(counts, deviations, strict=True)
    )
    is_found = ttest_ind(least + first, second, axis=1, equal_var=False).pvalue < level
    assert is_found.mean() == pytest.approx(0.8, abs=0.012)


def test_too_few_or_equal_runs_have_no_detectable_difference() -> None:
    assert detectable_difference(arm("a", 0.80, 0.81, 0.82), arm("c", 0.7)) is None
    assert detectable_difference(arm("a", 0.8, 0.8), arm("b", 0.7, 0.7)) is None


def test_chance_alone_is_reported_one_table_in_twenty_at_most() -> None:
    """Simulated: values that differ from the recipe's in their seed alone, all compared with one run of it."""
    rng = np.random.default_rng(0)
    tables, values = 20_000, 14
    for noise_runs in (2, 3, 5):
        runs = rng.normal(size=(tables, noise_runs))
        others = rng.normal(size=(tables, values))
        largest = np.abs(others - runs[:, :1]).max(axis=1)
        unit = chance_limit(1.0, noise_runs, values, 1)
        assert (largest > unit * runs.std(axis=1, ddof=1)).mean() < 0.06
