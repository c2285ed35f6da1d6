"""Metrics against scikit-learn, against counting pairs, and against what must not change them."""

from collections.abc import Callable
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn.metrics import log_loss, roc_auc_score

from recap_ctr.errors import InputError
from recap_ctr.evaluation.metrics import (
    auc,
    auc_difference,
    excess_logloss,
    expected_calibration_error,
    group_auc,
    logit,
    logloss,
    normalised_entropy,
    reliability_table,
    sigmoid,
)

Array = NDArray[np.generic]
Drawn = tuple[NDArray[np.int8], NDArray[np.float64], NDArray[np.float64]]
repeatable = settings(derandomize=True, deadline=None, max_examples=50)


@st.composite
def rows(draw: st.DrawFn) -> Drawn:
    """Labels of both classes, logits with many ties (quarters: exact in float32), weights with zeros."""
    size = draw(st.integers(2, 25))
    labels = draw(st.lists(st.integers(0, 1), min_size=size, max_size=size))
    quarters = draw(st.lists(st.integers(-draw(st.integers(1, 40)), 12), min_size=size, max_size=size))
    weights = draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.7, 3.0]), min_size=size, max_size=size))
    labels[:2], weights[:2] = [0, 1], [1.0, 2.0]
    return np.array(labels, np.int8), np.array(quarters) / 4, np.array(weights)


def count_pairs(labels: Array, logits: Array, weights: Array) -> float:
    clicks, others = (
        [(z, w) for y, z, w in zip(labels, logits, weights, strict=True) if y == c] for c in (1, 0)
    )
    pairs = [(v * w, float(a > b) + float(a == b) / 2) for (a, v), (b, w) in product(clicks, others)]
    return float(sum(mass * won for mass, won in pairs) / sum(mass for mass, _ in pairs))


@pytest.mark.slow
@repeatable
@given(rows())
def test_auc_matches_sklearn_and_pair_counting_on_every_path(drawn: Drawn) -> None:
    labels, logits, weights = drawn
    # Rounding alone: sums of at most 12 * 13 products of order 1.
    exact = pytest.approx(roc_auc_score(labels, logits), abs=1e-13)
    assert auc(labels, logits.astype(np.float32)) == exact
    assert auc(labels, logits) == auc(labels, logits.astype(np.float32))
    assert auc(labels, logits, np.ones(labels.size)) == exact
    assert auc(labels, logits) == pytest.approx(count_pairs(labels, logits, np.ones(labels.size)), abs=1e-13)
    weighted = auc(labels, logits, weights)
    assert weighted == pytest.approx(roc_auc_score(labels, logits, sample_weight=weights), abs=1e-13)
    assert weighted == pytest.approx(count_pairs(labels, logits, weights), abs=1e-13)


@repeatable
@given(
    st.lists(st.tuples(st.booleans(), st.floats(width=32, allow_nan=False)), min_size=2, max_size=30).filter(
        lambda pairs: len({label for label, _ in pairs}) == 2
    )
)
def test_packed_keys_order_like_floats(pairs: list[tuple[bool, float]]) -> None:
    """Any float32: both zeros, subnormals, infinities."""
    labels, logits = np.array([y for y, _ in pairs]), np.array([z for _, z in pairs], np.float32)
    assert auc(labels, logits) == pytest.approx(count_pairs(labels, logits, np.ones(labels.size)), abs=1e-13)
    assert auc(labels, logits) == auc(labels, logits.astype(np.float64))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_both_zeros_tie(dtype: type[np.floating]) -> None:
    logits = np.array([-0.0, 0.0], dtype)
    assert auc([1, 0], logits) == auc([0, 1], logits) == 0.5
    assert auc([1, 0], logits, [1.0, 2.0]) == 0.5
    assert group_auc([0, 1], logits, [7, 7]).auc == 0.5


@repeatable
@given(rows())
def test_auc_sees_only_the_order(drawn: Drawn) -> None:
    labels, logits, weights = drawn
    order = np.random.default_rng(0).permutation(labels.size)
    assert auc(labels, 8 * logits + 3) == auc(labels, logits) == auc(labels[order], logits[order])
    assert auc(labels, -logits) == pytest.approx(1 - auc(labels, logits), abs=1e-15)
    assert auc(labels, logits, 1e200 * weights) == pytest.approx(auc(labels, logits, weights), abs=1e-13)


def test_auc_at_its_ends() -> None:
    rng = np.random.default_rng(0)
    labels, weights = rng.integers(0, 2, 1_000), rng.random(1_000)
    for scores in (labels.astype(np.float32), labels.astype(np.float64)):
        assert (auc(labels, scores), auc(labels, -scores), auc(labels, 0 * scores)) == (1.0, 0.0, 0.5)
    assert 1 - 1e-13 < auc(labels, labels, weights) <= 1.0
    assert auc([0, 1], [-np.inf, np.inf]) == 1.0


def test_auc_counts_pairs_beyond_float_precision() -> None:
    """A float32 sum over 10^6 rows would be off in the fourth digit; integers are exact."""
    labels = np.tile(np.array([0, 1], np.int8), 500_000)
    logits = np.arange(1_000_000, dtype=np.float32)
    assert auc(labels, logits) == (500_000 * 500_001 / 2) / 500_000**2


def delong_by_pairs(labels: Array, logits_a: Array, logits_b: Array) -> tuple[float, float]:
    """DeLong's estimate from the matrix of all pairs: the two AUCs' covariances, then their difference."""
    positive = labels == 1
    won_of_click, won_of_other = [], []
    for logits in (logits_a, logits_b):
        click, other = (
            logits[positive][:, None].astype(np.float64),
            logits[~positive][None, :].astype(np.float64),
        )
        won = (click > other) + (click == other) / 2
        won_of_click.append(won.mean(axis=1))
        won_of_other.append(won.mean(axis=0))
    covariance = np.cov(won_of_click) / positive.sum() + np.cov(won_of_other) / (~positive).sum()
    variance = covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1]
    return float(won_of_click[0].mean() - won_of_click[1].mean()), float(np.sqrt(max(variance, 0.0)))


@pytest.mark.slow
@repeatable
@given(rows(), st.integers(0, 2**32 - 1), st.sampled_from([np.float32, np.float64]))
def test_auc_difference_matches_delong_by_pairs(drawn: Drawn, seed: int, dtype: type[np.floating]) -> None:
    labels, logits_a, _ = drawn
    labels, logits_a = np.append(labels, [0, 1]), np.append(logits_a, [0.0, 0.5])  # two of each class
    logits_b = logits_a + np.random.default_rng(seed).integers(-3, 4, labels.size) / 4
    measured = auc_difference(labels, logits_a.astype(dtype), logits_b.astype(dtype))
    difference, error = delong_by_pairs(labels, logits_a, logits_b)
    assert measured.difference == pytest.approx(difference, abs=1e-13)
    assert measured.difference == pytest.approx(auc(labels, logits_a) - auc(labels, logits_b), abs=1e-13)
    assert measured.standard_error == pytest.approx(
        error, abs=1e-7
    )  # the oracle subtracts variances: sqrt(1e-16)


def test_auc_difference_has_the_error_of_the_bootstrap() -> None:
    rng = np.random.default_rng(8)
    bayes = rng.normal(-1.0, 1.0, 2_000)
    labels = (rng.random(2_000) < sigmoid(bayes)).astype(np.int8)
    logits_a, logits_b = bayes + rng.normal(0, 0.3, 2_000), bayes + rng.normal(0, 0.6, 2_000)
    drawn = (rng.integers(0, 2_000, 2_000) for _ in range(400))
    gaps = [auc(labels[row], logits_a[row]) - auc(labels[row], logits_b[row]) for row in drawn]

    # 400 draws know a standard deviation to 1 / sqrt(800) = 3.5%.
    assert auc_difference(labels, logits_a, logits_b).standard_error == pytest.approx(np.std(gaps), rel=0.15)


def test_weighted_auc_difference_is_that_of_repeated_rows_with_the_error_of_small_changes() -> None:
    """The error is the infinitesimal jackknife: what each row's weight would change, squared and added up."""
    rng = np.random.default_rng(10)
    labels, weights = rng.integers(0, 2, 60), rng.integers(1, 5, 60).astype(np.float64)
    first, second = (labels + rng.normal(size=60) for _ in range(2))

    measured = auc_difference(labels, first, second, weights)
    copies = weights.astype(int)
    repeated = auc_difference(np.repeat(labels, copies), np.repeat(first, copies), np.repeat(second, copies))
    assert measured.difference == pytest.approx(repeated.difference, abs=1e-12)

    def gap(weights: np.ndarray) -> float:
        return auc(labels, first, weights) - auc(labels, second, weights)

    squares = np.zeros(2)
    for row in range(60):
        more, less = (weights * np.where(np.arange(60) == row, factor, 1) for factor in (1 + 1e-5, 1 - 1e-5))
        squares[labels[row]] += ((gap(more) - gap(less)) / 2e-5) ** 2
    counts = np.bincount(labels)
    assert measured.standard_error == pytest.approx(np.sqrt(squares @ (counts / (counts - 1))), rel=1e-5)
    assert auc_difference(labels, first, second, 7 * weights).standard_error == pytest.approx(
        measured.standard_error
    )


def test_auc_difference_of_the_same_order_is_nothing() -> None:
    rng = np.random.default_rng(9)
    labels, logits = rng.integers(0, 2, 1_000), rng.integers(-20, 20, 1_000) / 8
    for other in (logits, 8 * logits + 3, np.where(logits == logits.max(), np.inf, logits)):
        measured = auc_difference(labels, logits, other)
        assert (measured.difference, measured.standard_error) == (0.0, 0.0)
    there, back = auc_difference(labels, logits, -logits), auc_difference(labels, -logits, logits)
    assert (there.difference, there.standard_error) == (-back.difference, back.standard_error)


def test_auc_difference_names_bad_rows() -> None:
    with pytest.raises(InputError, match="score nan at row 3"):
        auc_difference([0, 1, 0, 1], [0.0] * 4, [0.0, 0.0, 0.0, np.nan])
    with pytest.raises(InputError, match="scores of shape"):
        auc_difference([0, 1, 0, 1], [0.0] * 4, [0.0])
    with pytest.raises(InputError, match="3 have label 1 and 1 label 0"):
        auc_difference([1, 1, 0, 1], [0.0] * 4, [0.0] * 4)


@pytest.mark.slow
@repeatable
@given(rows())
def test_logloss_matches_sklearn(drawn: Drawn) -> None:
    labels, logits, weights = drawn
    # |z| <= 10: probabilities keep log(1 - p) to 2.2e-16 * e^10 = 5e-12.
    assert logloss(labels, logits) == pytest.approx(log_loss(labels, sigmoid(logits)), abs=1e-11)
    expected = log_loss(labels, sigmoid(logits), sample_weight=weights)
    assert logloss(labels, logits.astype(np.float32), weights) == pytest.approx(expected, abs=1e-11)


def test_logloss_does_not_saturate() -> None:
    assert logloss([0, 1], [800.0, -800.0]) == 800.0
    assert logloss([1, 0], [800.0, -800.0]) == 0.0
    assert log_loss([0, 1], sigmoid([800.0, -800.0])) == pytest.approx(36.04, abs=0.01)


METRICS: dict[str, Callable[[Array, Array, Array | None], object]] = {
    "auc": auc,
    "logloss": logloss,
    "normalised_entropy": normalised_entropy,
    "excess_logloss": lambda y, z, w: excess_logloss(y.astype(np.float64) - 0.5, z, w),
    "reliability_table": lambda y, z, w: reliability_table(y, sigmoid(z), w, num_bins=7),
    "expected_calibration_error": lambda y, z, w: expected_calibration_error(y, sigmoid(z), w, num_bins=7),
    "group_auc": lambda y, z, w: group_auc(y, z, np.round(z.astype(np.float64)), w),
}


def numbers(result: object) -> list[float]:
    if isinstance(result, list):
        return [number for part in result for number in numbers(part)]
    return [result] if isinstance(result, float) else list(vars(result).values())


@pytest.mark.parametrize("name", METRICS)
def test_a_weight_is_a_number_of_copies(name: str) -> None:
    rng = np.random.default_rng(3)
    labels, logits = rng.integers(0, 2, 500), rng.integers(-20, 20, 500) / 8
    copies = rng.integers(0, 4, 500)
    repeated = numbers(METRICS[name](np.repeat(labels, copies), np.repeat(logits, copies), None))
    weighted = numbers(METRICS[name](labels, logits, copies))
    assert weighted == pytest.approx(repeated, abs=1e-12)  # about 750 rows, values of order 1 (rows: 100)


@pytest.mark.parametrize("name", METRICS)
def test_order_of_rows_does_not_matter(name: str) -> None:
    rng = np.random.default_rng(4)
    labels, logits, weights = rng.integers(0, 2, 500), rng.integers(-20, 20, 500) / 8, rng.random(500)
    order = rng.permutation(500)
    shuffled = numbers(METRICS[name](labels[order], logits[order], weights[order]))
    assert numbers(METRICS[name](labels, logits, weights)) == pytest.approx(shuffled, abs=1e-12)


BAD: dict[str, tuple[list[float], list[float], list[float] | None, str]] = {
    "nan logit": ([0, 1], [0.0, np.nan], None, "score nan at row 1"),
    "label 2": ([0, 2], [0.0, 1.0], None, "label 2 at row 1"),
    "nan label": ([np.nan, 1], [0.0, 1.0], None, "label nan at row 0"),
    "negative weight": ([0, 1], [0.0, 1.0], [1.0, -1.0], "weight -1.0 at row 1"),
    "infinite weight": ([0, 1], [0.0, 1.0], [np.inf, 1.0], "weight inf at row 0"),
    "nan weight": ([0, 1], [0.0, 1.0], [np.nan, 1.0], "weight nan at row 0"),
    "no weight": ([0, 1], [0.0, 1.0], [0.0, 0.0], "every row has weight 0"),
    "short weights": ([0, 1], [0.0, 1.0], [1.0], "weights have shape"),
    "short logits": ([0, 1], [0.0], None, "scores of shape"),
    "no rows": ([], [], None, "no rows"),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("metric", [auc, logloss, normalised_entropy, reliability_table])
def test_bad_rows_are_named(metric: Callable[..., object], case: str) -> None:
    labels, scores, weights, message = BAD[case]
    with pytest.raises(InputError, match=message):
        metric(labels, scores, weights)


@pytest.mark.parametrize("metric", [auc, normalised_entropy])
def test_one_class_is_refused(metric: Callable[..., float]) -> None:
    with pytest.raises(InputError, match="needs both classes"):
        metric([1, 1], [0.0, 1.0])
    with pytest.raises(InputError, match="needs both classes"):
        metric([0, 1], [0.0, 1.0], [1.0, 0.0])  # the only click has weight 0


def test_infinite_logits_have_no_logloss() -> None:
    with pytest.raises(InputError, match="score inf at row 1"):
        logloss([0, 1], [0.0, np.inf])


def test_normalised_entropy_of_the_base_rate_is_one() -> None:
    labels = np.array([0, 0, 0, 1])
    assert normalised_entropy(labels, np.full(4, logit(0.25))) == pytest.approx(1.0, abs=1e-15)
    assert normalised_entropy(labels, np.where(labels, 3.0, -3.0)) < 0.1


@repeatable
@given(st.floats(-700, 700))
def test_sigmoid_and_logit(z: float) -> None:
    p, q = float(sigmoid(z)), float(sigmoid(-z))
    assert p + q == pytest.approx(1.0, abs=1e-15)
    assert float(logit(min(p, q))) == pytest.approx(
        -abs(z), rel=1e-14, abs=1e-15
    )  # the small side keeps its digits


def test_logit_refuses_logits() -> None:
    for wrong in (1.5, -0.1, np.nan):
        with pytest.raises(InputError, match="probability"):
            logit([0.5, wrong])


@repeatable
@given(st.lists(st.tuples(st.floats(-50, 50), st.floats(-50, 50)), min_size=1, max_size=20))
def test_excess_logloss_is_never_negative(pairs: list[tuple[float, float]]) -> None:
    bayes, logits = np.array(pairs).T
    assert excess_logloss(bayes, logits) >= 0
    assert excess_logloss(bayes, bayes) == 0


def test_excess_logloss_is_the_difference_of_expected_losses() -> None:
    """With p = 3/4, four copies of a row of which three click hold the expectation exactly."""
    bayes, logits = np.full(4, logit(0.75)), np.full(4, -0.5)
    labels = [1, 1, 1, 0]
    gap = logloss(labels, logits) - logloss(labels, bayes)
    assert excess_logloss(bayes, logits) == pytest.approx(gap, abs=1e-15)
    assert gap > 0.1


def test_excess_logloss_needs_matching_rows() -> None:
    with pytest.raises(InputError):
        excess_logloss([0.0, 1.0], [0.0])


def test_bins_have_equal_mass_and_keep_ties_together() -> None:
    rng = np.random.default_rng(5)
    probabilities = rng.random(1_000)
    table = reliability_table(rng.random(1_000) < probabilities, probabilities)
    assert [part.rows for part in table] == [50.0] * 20
    assert all(left.high < right.low for left, right in pairwise(table))

    tied = reliability_table([0, 1, 1, 0, 1, 1], [0.5, 0.5, 0.5, 0.5, 0.9, 0.9], num_bins=3)
    assert [(part.low, part.high, part.rows, part.mean_label) for part in tied] == [
        (0.5, 0.5, 4.0, 0.5),
        (0.9, 0.9, 2.0, 1.0),
    ]


def test_calibration_error_by_hand() -> None:
    labels, probabilities = [0, 1, 1, 1], [0.25, 0.25, 0.5, 0.75]
    assert expected_calibration_error(labels, probabilities, num_bins=2) == (0.25 + 0.375) / 2
    assert expected_calibration_error(labels, probabilities, [3, 1, 0, 0], num_bins=2) == 0.0


def test_reliability_refuses_logits_and_no_bins() -> None:
    with pytest.raises(InputError, match=r"probability 1.5 at row 1"):
        reliability_table([0, 1], [0.5, 1.5])
    with pytest.raises(InputError, match="num_bins"):
        reliability_table([0, 1], [0.5, 0.5], num_bins=0)


@pytest.mark.slow
@repeatable
@given(rows(), st.integers(1, 6), st.booleans())
def test_group_auc_is_the_mean_over_groups(drawn: Drawn, num_groups: int, named: bool) -> None:
    labels, logits, weights = drawn
    groups = np.random.default_rng(labels.size).integers(0, num_groups, labels.size)
    groups[:2] = 0  # holds both classes
    masses, aucs, one_class = [], [], 0
    for group in np.unique(groups[weights > 0]):
        member = (groups == group) & (weights > 0)
        if np.unique(labels[member]).size == 1:
            one_class += 1
            continue
        masses.append(weights[member].sum())
        aucs.append(count_pairs(labels[member], logits[member], weights[member]))
    names = np.array([f"user {group}" for group in groups], dtype=object)
    result = group_auc(labels, logits, names if named else groups, weights)
    assert result.auc == pytest.approx(np.average(aucs, weights=masses), abs=1e-12)
    assert (result.num_groups, result.num_one_class) == (len(aucs), one_class)


def test_one_group_is_auc() -> None:
    rng = np.random.default_rng(6)
    labels, logits = rng.integers(0, 2, 1_000), rng.normal(size=1_000)
    assert group_auc(labels, logits, np.zeros(1_000)).auc == pytest.approx(auc(labels, logits), abs=1e-14)


def test_groups_without_pairs_are_refused() -> None:
    with pytest.raises(InputError, match="none of the 2 groups"):
        group_auc([0, 1], [0.0, 1.0], [1, 2])
    with pytest.raises(InputError, match="groups have shape"):
        group_auc([0, 1], [0.0, 1.0], [1])
