"""The theory against brute force and simulation."""

import itertools

import numpy as np
import pytest

from recap_ctr.diagnose import (
    covariance_nonshared_variance,
    curvature,
    decompose,
    exact_gain,
    expected_loss,
    mean_variance,
    nonshared_variance,
    predicted_gain,
    two_axis,
    variance_removed,
)
from recap_ctr.evaluation.metrics import logloss


def test_predicted_gain_matches_exact_bce_gap() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(-2.0, 1.0, (5_000, 1)) + rng.normal(0.0, 0.1, (5_000, 5))

    assert predicted_gain(logits) == pytest.approx(exact_gain(logits), rel=0.01)


def test_exact_gain_is_the_gap_of_measured_losses_whatever_the_labels() -> None:
    rng = np.random.default_rng(1)
    logits = rng.normal(0.0, 2.0, (400, 4))
    for labels in (np.zeros(400), np.ones(400), rng.integers(0, 2, 400)):
        single = np.mean([logloss(labels, logits[:, m]) for m in range(4)])
        assert exact_gain(logits) == pytest.approx(single - logloss(labels, logits.mean(axis=1)))
    assert exact_gain(logits) > 0


def test_equicorrelated_form_is_the_general_one() -> None:
    tau2, rho, M = 0.7, 0.3, 6
    covariance = tau2 * (rho * np.ones((M, M)) + (1 - rho) * np.eye(M))

    assert covariance_nonshared_variance(covariance) == pytest.approx(variance_removed(tau2, rho, M))
    assert covariance.sum() / M**2 == pytest.approx(mean_variance(tau2, rho, M))
    assert tau2 - mean_variance(tau2, rho, M) == pytest.approx(variance_removed(tau2, rho, M))


def test_sample_variance_is_unbiased_for_what_averaging_removes() -> None:
    rng = np.random.default_rng(2)
    tau2, rho, M, N = 1.5, 0.6, 4, 200_000
    shared = rng.normal(0.0, np.sqrt(tau2 * rho), (N, 1))
    logits = shared + rng.normal(0.0, np.sqrt(tau2 * (1 - rho)), (N, M))

    variance_N = nonshared_variance(logits)

    assert variance_N.mean() == pytest.approx(
        variance_removed(tau2, rho, M), abs=float(4 * variance_N.std() / np.sqrt(N))
    )


def test_curvature_is_the_second_derivative_of_the_loss() -> None:
    z, step = np.linspace(-4, 4, 9), 1e-4
    second = [
        (logloss([1], [x + step]) - 2 * logloss([1], [x]) + logloss([1], [x - step])) / step**2 for x in z
    ]

    np.testing.assert_allclose(curvature(z), second, atol=1e-6)


def test_expected_loss_to_second_order() -> None:
    rng = np.random.default_rng(3)
    mean = rng.normal(-1.0, 1.0, 2_000)
    labels = rng.integers(0, 2, 2_000)
    variance = np.full(2_000, 0.04)
    drawn = [logloss(labels, mean + rng.normal(0.0, 0.2, 2_000)) for _ in range(400)]

    predicted = expected_loss(logloss(labels, mean), mean, variance)

    assert predicted == pytest.approx(np.mean(drawn), abs=float(4 * np.std(drawn) / 20 + 2e-5))


def test_two_axes_sum_to_the_total_both_ways() -> None:
    logits = np.random.default_rng(4).normal(size=(50, 3, 5))
    total = logits.reshape(50, -1).var(axis=1)

    v_a, v_b_given_a = two_axis(logits)
    v_b, v_a_given_b = two_axis(logits.swapaxes(1, 2))

    np.testing.assert_allclose(v_a + v_b_given_a, total, rtol=1e-9)
    np.testing.assert_allclose(v_b + v_a_given_b, total, rtol=1e-9)
    by_hand = np.mean([np.var([logits[0, a, b] for a in range(3)]) for b in range(5)])
    assert v_a[0] == pytest.approx(by_hand)


def test_all_six_orders_sum_to_the_total_and_match_nested_loops() -> None:
    logits = np.random.default_rng(5).normal(size=(20, 2, 3, 4))
    total = logits.reshape(20, -1).var(axis=1)

    shares_by_order = decompose(logits)

    assert len(shares_by_order) == 6
    for shares in shares_by_order.values():
        np.testing.assert_allclose(sum(shares.values()), total, rtol=1e-9)
    # The paper's order: routes, then trajectory, then runs, for one row by loops.
    z = logits[7]
    shares = shares_by_order["route", "trajectory", "run"]
    v_r = np.mean([np.var(z[s, t]) for s, t in itertools.product(range(2), range(3))])
    v_t = np.mean([np.var([z[s, t].mean() for t in range(3)]) for s in range(2)])
    v_s = np.var([z[s].mean() for s in range(2)])
    assert [shares[axis][7] for axis in ("route", "trajectory", "run")] == pytest.approx([v_r, v_t, v_s])
