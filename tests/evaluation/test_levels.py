"""How much of the newest rows' click rate a calibration takes for lasting."""

import numpy as np
import pytest

from recap_ctr.evaluation.calibrate import AffineCalibration, IsotonicCalibration, shifted
from recap_ctr.evaluation.levels import USUAL_SHARE, Levels, calibrated, lasting_share, level
from recap_ctr.evaluation.metrics import Floats, sigmoid


def rows(shift: float, num: int = 40_000, seed: int = 0) -> tuple[Floats, Floats]:
    """Return labels, and logits that are too low by `shift`."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(-2.0, 1.0, num)
    return (rng.random(num) < sigmoid(logits + shift)).astype(np.float64), logits


def walk(lasting: float, num: int = 4_000) -> Floats:
    """Return levels of which so much of a difference from the mean lasts."""
    rng, levels = np.random.default_rng(1), [0.0]
    for _ in range(num):
        levels.append(lasting * levels[-1] + rng.normal())
    return np.array(levels)


@pytest.mark.parametrize("lasting", [0.0, 0.3, 0.9])
def test_what_lasts_is_found_in_a_long_log(lasting: float) -> None:
    assert lasting_share(walk(lasting)) == pytest.approx(lasting, abs=0.05)


def test_few_stretches_say_little() -> None:
    """A level that has risen once and stayed is no proof of anything."""
    assert lasting_share(np.array([0.0, 0.0, 0.0])) == USUAL_SHARE
    assert USUAL_SHARE < lasting_share(np.array([0.0, 1.0, 1.0])) < 0.75
    assert lasting_share(np.arange(40.0)) > 0.9, "a trend goes on"


@pytest.mark.parametrize("kind", ["affine", "isotonic"])
@pytest.mark.parametrize("lasting", [0.0, 0.4, 1.0])
def test_the_passing_part_of_a_level_is_left_out(kind: str, lasting: float) -> None:
    labels, logits = rows(0.8)
    usual, newest = level(rows(0.0)[0]), level(labels)
    fitted = calibrated(kind, None, labels, logits).apply(logits)
    steady = calibrated(kind, Levels(usual, lasting), labels, logits).apply(logits)
    passing = min(newest - usual, 0.8)
    np.testing.assert_allclose(fitted - steady, (1 - lasting) * passing, atol=0.05)
    assert sigmoid(fitted).mean() == pytest.approx(labels.mean(), abs=1e-3)


def test_logits_that_are_wrong_on_all_rows_are_corrected_in_full() -> None:
    """Where the click rate is the usual one, what the logits miss of it is the model's own fault."""
    labels, logits = rows(0.8)
    levels = Levels(level(labels), 0.0)
    steady = calibrated("affine", levels, labels, logits)
    assert sigmoid(steady.apply(logits)).mean() == pytest.approx(labels.mean(), abs=1e-3)


def test_a_level_that_the_features_explain_is_left_alone() -> None:
    labels, logits = rows(0.0)
    levels = Levels(level(labels) - 1.0, 0.0)
    steady = calibrated("affine", levels, labels, logits)
    assert sigmoid(steady.apply(logits)).mean() == pytest.approx(labels.mean(), rel=0.03)


def test_weights_count() -> None:
    labels, logits = rows(0.5, num=4_000)
    weights = np.where(labels == 1, 2.0, 1.0)
    assert level(labels, weights) == pytest.approx(level(labels) + np.log(2.0), abs=0.01)
    twice = np.concatenate([labels, labels[labels == 1]]), np.concatenate([logits, logits[labels == 1]])
    levels = Levels(-2.0, 0.5)
    weighted, repeated = (
        calibrated("affine", levels, labels, logits, weights).apply([0.0]),
        calibrated("affine", levels, *twice).apply([0.0]),
    )
    np.testing.assert_allclose(weighted, repeated, atol=0.01)


def test_both_kinds_of_calibration_can_be_shifted() -> None:
    assert shifted(AffineCalibration(2.0, 1.0, limit=3.0), -0.5) == AffineCalibration(2.0, 0.5, limit=3.0)
    moved = shifted(IsotonicCalibration((0.0, 1.0), (-1.0, 1.0)), 0.5)
    assert moved == IsotonicCalibration((0.0, 1.0), (-0.5, 1.5))
