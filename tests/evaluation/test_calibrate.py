"""Calibration recovers known distortions, survives degenerate rows, and survives storage."""

import json
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import ArrayLike, NDArray
from sklearn.linear_model import LogisticRegression

from recap_ctr.errors import InputError
from recap_ctr.evaluation.calibrate import (
    RAREST,
    AffineCalibration,
    Calibration,
    IsotonicCalibration,
    calibration_from_dict,
    fit_affine,
    fit_isotonic,
)
from recap_ctr.evaluation.metrics import auc, logit, logloss, sigmoid

Floats = NDArray[np.float64]
repeatable = settings(derandomize=True, deadline=None, max_examples=50)


def clicks(num_rows: int, seed: int = 0, mean: float = -1.5) -> tuple[NDArray[np.bool_], Floats]:
    """Labels drawn from calibrated logits, and those logits."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(mean, 1.3, num_rows)
    return rng.random(num_rows) < sigmoid(logits), logits


def gradient(calibration: AffineCalibration, labels: Floats, logits: Floats, weights: Floats) -> Floats:
    errors = weights / weights.sum() * (sigmoid(calibration.apply(logits)) - labels)
    standard = (logits - np.average(logits, weights=weights)) / logits.std()
    return np.array([errors @ standard, errors.sum()])


@pytest.mark.parametrize(("scale", "shift"), [(1.0, 0.0), (0.3, 2.0), (4.0, -6.0), (1e4, 3e4), (1e-4, 50.0)])
def test_affine_recovers_a_known_distortion(scale: float, shift: float) -> None:
    labels, logits = clicks(200_000)
    fitted = fit_affine(labels, scale * logits + shift)
    # Standard errors on 200,000 rows are 0.008 for the scale and 0.01 for the shift: four of them.
    assert fitted.scale * scale == pytest.approx(1.0, abs=0.03)
    assert fitted.scale * shift + fitted.shift == pytest.approx(0.0, abs=0.04)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("mean", [-1.5, -7.0])
def test_affine_is_logistic_regression(mean: float, weighted: bool) -> None:
    labels, logits = clicks(20_000, seed=1, mean=mean)
    distorted = 0.6 * logits + 1.0
    weights = (
        np.random.default_rng(2).integers(0, 4, labels.size).astype(float)
        if weighted
        else np.ones(labels.size)
    )
    oracle = LogisticRegression(C=1e12, tol=1e-10, solver="newton-cholesky").fit(
        distorted[:, None], labels, sample_weight=weights
    )
    fitted = fit_affine(labels, distorted, weights if weighted else None)
    # Both solve the same equations, scikit-learn to a gradient of 1e-10, ours up to a pull of weight 1 / N².
    assert fitted.scale == pytest.approx(oracle.coef_[0, 0], rel=1e-6)
    assert fitted.shift == pytest.approx(oracle.intercept_[0], rel=1e-6)
    rows = weights.sum() ** 2 / (weights @ weights)
    bound = (2e-10 + 2 / rows**2) * labels.mean()
    assert np.abs(gradient(fitted, labels.astype(float), distorted, weights)).max() < bound


@repeatable
@given(
    st.integers(0, 1_000),
    st.integers(4, 60),
    st.sampled_from([1e-8, 1e-3, 0.2, 1.0, 3.0, 40.0, 1e5]),
    st.sampled_from([-500.0, -3.0, 0.0, 3.0, 1e6]),
    st.sampled_from([-1.0, 0.0, 0.5, 8.0]),
)
def test_affine_never_loses_to_raw_logits(
    seed: int, num_rows: int, scale: float, shift: float, signal: float
) -> None:
    """Tiny, saturated, shifted, separable, upside-down and uninformative logits."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, num_rows)
    labels[:2] = [0, 1]
    logits = scale * (rng.normal(size=num_rows) + signal * labels) + shift
    fitted = fit_affine(labels, logits)
    raw = logloss(labels, logits)
    # The slack is rounding: logits near 1e6 carry 1e-10 of a logit, which the scale multiplies.
    assert logloss(labels, fitted.apply(logits)) <= raw + 1e-8 + RAREST / num_rows
    assert fitted.scale > 0


def test_one_exploded_logit_costs_no_more_than_rows_can_show() -> None:
    rng = np.random.default_rng(3)
    logits = rng.normal(size=1000)
    labels = (rng.random(1000) < sigmoid(logits)).astype(int)
    usual = fit_affine(labels, logits)
    assert usual.limit == pytest.approx(math.log(10_000))
    assert sigmoid(usual.apply([-763.0]))[0] > 1e-6, "a row that comes later"
    logits[np.flatnonzero(labels)[0]] = -763.0
    fitted = fit_affine(labels, logits)
    assert fitted.scale == pytest.approx(usual.scale, abs=0.2)
    assert logloss(labels, fitted.apply(logits)) < logloss(labels, usual.apply(np.clip(logits, -9, 9))) + 0.01
    assert calibration_from_dict(fitted.to_dict()) == fitted


def test_exploded_logits_that_happen_to_be_right_are_limited_too() -> None:
    """A later row of the same user may be clicked."""
    rng = np.random.default_rng(3)
    logits = rng.normal(size=1000)
    labels = (rng.random(1000) < sigmoid(logits)).astype(int)
    logits[np.flatnonzero(labels == 0)[:5]] = -36_372.0
    fitted = fit_affine(labels, logits)
    assert fitted.limit == pytest.approx(math.log(10_000))
    assert sigmoid(fitted.apply([-36_372.0]))[0] > 1e-6


def test_no_limit_where_it_would_cost() -> None:
    labels, logits = clicks(1_000)
    assert fit_affine(labels, 30 * logits).limit is None, "the scale is wrong, and all rows show it"


@pytest.mark.parametrize("scale", [1e-9, 1 / 2000, 1.0, 1e6])
def test_affine_knows_no_scale_of_weights(scale: float) -> None:
    rng = np.random.default_rng(5)
    logits = rng.normal(size=2000)
    labels = rng.random(2000) < sigmoid(0.6 * logits)
    weights = rng.uniform(0.5, 2.0, 2000)
    plain, scaled = (fit_affine(labels, logits, by * weights) for by in (1.0, scale))
    assert (scaled.scale, scaled.shift) == pytest.approx((plain.scale, plain.shift), rel=1e-9)


def test_affine_on_constant_logits_fits_the_shift_only() -> None:
    fitted = fit_affine([0, 0, 0, 1], np.full(4, 12.5, np.float32))
    assert fitted.scale == 1.0
    assert fitted.apply([12.5])[0] == pytest.approx(float(logit(0.25)), abs=1e-12)


def test_affine_on_upside_down_logits_fits_the_shift_only() -> None:
    labels, logits = clicks(10_000)
    fitted = fit_affine(labels, -logits)
    assert fitted.scale == 1.0
    assert sigmoid(fitted.apply(-logits)).mean() == pytest.approx(labels.mean(), abs=1e-12)


def test_affine_survives_one_row_that_outweighs_all() -> None:
    """The other rows' curvature is then below the rounding of its own."""
    weights = np.array([1e9, 1e-6, 1.0, 1e-6])
    fitted = fit_affine([0, 1, 0, 1], [-300.0, 10.0, 0.5, 7e4], weights)
    assert logloss([0, 1, 0, 1], fitted.apply([-300.0, 10.0, 0.5, 7e4]), weights) < 1e-6


def test_affine_on_separated_classes_is_bounded() -> None:
    logits = np.linspace(-2.0, 2.0, 1_000)
    labels = logits > 0
    fitted = fit_affine(labels, logits)
    assert logloss(labels, fitted.apply(logits)) < 0.02
    assert 0 < fitted.scale < 1e3
    assert abs(fitted.shift) < 1e-6 * fitted.scale  # symmetric rows: the boundary stays in the middle
    assert 0 < fit_affine([0, 1], [-1.0, 1.0]).scale < 100


def test_ten_lucky_rows_do_not_make_certainty() -> None:
    logits = np.array([-0.01] * 5 + [0.01] * 5)
    fitted = fit_affine(logits > 0, logits)
    assert sigmoid(fitted.apply(logits)).max() < 0.995


@pytest.mark.parametrize("fit", [fit_affine, fit_isotonic])
def test_one_class_cannot_be_calibrated(fit: Callable[[ArrayLike, ArrayLike], Calibration]) -> None:
    with pytest.raises(InputError, match="needs both classes"):
        fit([0, 0, 0], [0.0, 1.0, 2.0])


def test_weights_are_copies() -> None:
    labels, logits = clicks(2_000, seed=3)
    copies = np.random.default_rng(4).integers(0, 3, labels.size)
    weighted = fit_affine(labels, logits, copies)
    repeated = fit_affine(np.repeat(labels, copies), np.repeat(logits, copies))
    assert (weighted.scale, weighted.shift) == pytest.approx((repeated.scale, repeated.shift), rel=1e-6)


@repeatable
@given(st.integers(0, 1_000), st.integers(2, 60), st.integers(1, 30), st.booleans())
def test_isotonic_is_monotone_finite_and_as_good_as_raw(
    seed: int, num_rows: int, levels: int, weighted: bool
) -> None:
    rng = np.random.default_rng(seed)
    labels, logits = rng.integers(0, 2, num_rows), rng.integers(0, levels, num_rows) / 3 - 2
    labels[:2] = [0, 1]
    weights = rng.random(num_rows) + 0.1 if weighted else None
    fitted = fit_isotonic(labels, logits, weights)
    mapped = fitted.apply(np.concatenate([[-np.inf, -1e300], np.linspace(-9, 9, 999), [1e300, np.inf]]))
    assert np.isfinite(mapped).all()
    assert (np.diff(mapped) >= -1e-13).all()  # interpolation rounds
    half_row = 0.5 / num_rows
    assert logit(half_row) - 1e-12 <= mapped[0] <= mapped[-1] <= logit(1 - half_row) + 1e-12
    # The raw logits are a monotone map too, so only the margin of half a row can cost: at most log(1 - 1/2N).
    raw = logloss(labels, logits, weights)
    assert logloss(labels, fitted.apply(logits), weights) <= raw - np.log1p(-half_row) + 1e-12


def test_isotonic_recovers_a_bent_scale() -> None:
    labels, logits = clicks(100_000, seed=5)
    bent = np.sinh(logits)
    fitted = fit_isotonic(labels, bent)
    assert auc(labels, fitted.apply(bent)) == pytest.approx(auc(labels, bent), abs=0.002)  # ties only
    # Isotonic regression overfits by about N^(-2/3) = 5e-4.
    assert logloss(labels, fitted.apply(bent)) == pytest.approx(logloss(labels, logits), abs=1e-3)
    assert logloss(labels, bent) > logloss(labels, logits) + 0.02


def test_round_trip_is_exact() -> None:
    labels, logits = clicks(3_000, seed=6)
    for fitted in (
        fit_affine(labels, logits),
        fit_isotonic(labels, logits),
        IsotonicCalibration((0.1,), (1 / 3,)),
    ):
        restored = calibration_from_dict(json.loads(json.dumps(fitted.to_dict())))
        assert restored == fitted
        assert restored.apply(logits).tobytes() == fitted.apply(logits).tobytes()


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({"kind": "spline"}, "unknown calibration 'spline'"),
        ({}, "unknown calibration None"),
        ({"kind": "affine", "scale": 1.0}, "lacks an entry"),
        ({"kind": "affine", "scale": "1", "shift": 0.0}, "'1' where a number belongs"),
        ({"kind": "affine", "scale": -1.0, "shift": 0.0}, "not an increasing map"),
        ({"kind": "affine", "scale": 1.0, "shift": float("nan")}, "not an increasing map"),
        ({"kind": "isotonic", "knots": [0.0, 1.0], "values": [0.0]}, "one non-decreasing value each"),
        ({"kind": "isotonic", "knots": [], "values": []}, "one non-decreasing value each"),
        ({"kind": "isotonic", "knots": [0.0, 0.0], "values": [0.0, 1.0]}, "increasing knots"),
        ({"kind": "isotonic", "knots": [0.0, 1.0], "values": [1.0, 0.0]}, "non-decreasing"),
        ({"kind": "isotonic", "knots": [0.0, 1.0], "values": [0.0, float("inf")]}, "finite"),
        ({"kind": "isotonic", "knots": [0.0, None], "values": [0.0, 1.0]}, "None where a number belongs"),
    ],
)
def test_damaged_storage_is_refused(stored: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        calibration_from_dict(stored)


def test_affine_keeps_shape() -> None:
    assert AffineCalibration(1.0, 0.5).apply(np.zeros((2, 3), np.float32)).shape == (2, 3)
