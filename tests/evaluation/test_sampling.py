"""The sampling of negatives is undone."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from recap_ctr.errors import InputError
from recap_ctr.evaluation.calibrate import fit_affine
from recap_ctr.evaluation.metrics import logloss, sigmoid
from recap_ctr.evaluation.sampling import negative_rate_shift, undo_sampling, weigh_negatives

repeatable = settings(derandomize=True, deadline=None, max_examples=50)


@dataclass(frozen=True)
class Rows:
    """Rows as a shard has them."""

    labels: NDArray[np.bool_]
    weights: NDArray[np.float64] | None = None


@repeatable
@given(st.floats(-30, 30), st.floats(1e-6, 1.0))
def test_negative_rate_shift_undoes_dropped_negatives(z: float, rate: float) -> None:
    """Brute force: of `clicks` and `others`, the model saw clicks and rate * others."""
    kept_probability = float(sigmoid(z))
    clicks, others_kept = kept_probability, float(sigmoid(-z))
    true = clicks / (clicks + others_kept / rate)
    assert float(sigmoid(z + negative_rate_shift(rate))) == pytest.approx(true, rel=1e-12)


def test_negative_rate_shift_by_sampling() -> None:
    rng = np.random.default_rng(7)
    logits = rng.normal(-1.5, 1.3, 200_000)
    labels = rng.random(logits.size) < sigmoid(logits)
    kept = labels | (np.random.default_rng(8).random(labels.size) < 0.1)
    biased = logits - np.log(0.1)  # what a perfect model learns from the kept rows
    assert fit_affine(labels[kept], biased[kept]).shift == pytest.approx(
        0.0, abs=0.05
    )  # three standard errors
    assert sigmoid(biased + negative_rate_shift(0.1)).mean() == pytest.approx(labels.mean(), abs=0.004)


@pytest.mark.parametrize("rate", [0.0, -0.5, 1.5, float("nan")])
def test_impossible_negative_rates_are_refused(rate: float) -> None:
    with pytest.raises(InputError, match="negative rate"):
        negative_rate_shift(rate)


def test_the_loss_on_sampled_rows_is_that_of_the_whole_log() -> None:
    rng = np.random.default_rng(9)
    logits = rng.normal(-1.5, 1.3, 200_000)
    labels = rng.random(logits.size) < sigmoid(logits)
    kept = labels | (rng.random(labels.size) < 0.1)
    learned = logits[kept] - np.log(0.1)

    corrected, weights = undo_sampling(learned, Rows(labels[kept]), 0.1)

    np.testing.assert_allclose(corrected, logits[kept])
    assert logloss(labels[kept], corrected, weights) == pytest.approx(logloss(labels, logits), rel=0.01)


def test_weights_of_negatives_are_multiplied_and_those_of_clicks_kept() -> None:
    labels, weights = np.array([1, 0, 0]), np.array([2.0, 3.0, 0.0])
    assert weigh_negatives(labels, weights, 0.25) == pytest.approx([2.0, 12.0, 0.0])
    assert weigh_negatives(labels, None, 0.5) == pytest.approx([1.0, 2.0, 2.0])
    assert weigh_negatives(labels, weights, 1.0) is weights
    assert weigh_negatives(labels, None, 1.0) is None
