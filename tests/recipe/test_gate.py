"""The gate: what it lets pass, and each reason for which it refuses."""

import numpy as np
import pytest
from scipy.stats import norm

from recap_ctr.evaluation import metrics
from recap_ctr.evaluation.calibrate import AffineCalibration
from recap_ctr.recipe.gate import GateLimits, NewestRows, Ranking, Verdict, judge, share_won

ROWS = 4_000
RNG = np.random.default_rng(0)
TRUTH = RNG.normal(-1.0, 1.0, ROWS)
LABELS = (RNG.random(ROWS) < metrics.sigmoid(TRUTH)).astype(np.uint8)
NOISE = RNG.normal(0.0, 0.7, ROWS)
IDENTITY = AffineCalibration(1.0, 0.0)


def verdict(
    updated: np.ndarray, shipped: np.ndarray, *, labels: np.ndarray = LABELS, **options: object
) -> Verdict:
    settings = {
        "limits": GateLimits(),
        "unknown": {"ad": (0.1, 0.1, 0.0)},
        "ranking": Ranking(metrics.auc(labels, shipped), 0.01, 0.75),
        **options,
    }
    return judge(NewestRows(labels, None, updated, shipped), IDENTITY, **settings)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_better_model_passes() -> None:
    found = verdict(TRUTH, TRUTH + NOISE)
    assert found.passes and found.better_than_shipped == found.better_than_recalibrated == 1.0
    assert found.updated.logloss == pytest.approx(metrics.logloss(LABELS, TRUTH), abs=2e-3)
    assert found.shipped.logloss == pytest.approx(metrics.logloss(LABELS, TRUTH + NOISE))


@pytest.mark.slow
def test_a_worse_model_and_the_same_model_are_refused() -> None:
    for updated, shipped in ((TRUTH + NOISE, TRUTH), (TRUTH, TRUTH)):
        found = verdict(updated, shipped)
        assert [reason.partition(":")[0] for reason in found.reasons] == ["logloss"] * 2


def test_what_a_new_calibration_would_do_too_is_refused() -> None:
    found = verdict(TRUTH, 0.5 * TRUTH + 0.5)
    assert found.better_than_shipped == 1.0
    assert len(found.reasons) == 1 and "calibrated again" in found.reasons[0]


def test_shuffled_labels_are_refused() -> None:
    found = verdict(TRUTH, TRUTH + NOISE, labels=np.random.default_rng(1).permutation(LABELS))
    assert found.reasons[0].startswith("labels: the shipped model ranks these rows with an AUC of")
    assert "75.00 when it shipped" in found.reasons[0]


@pytest.mark.parametrize(
    ("missing", "words"), [(0.9, "90 % of the rows have no value"), (0.0, "another way")]
)
def test_unknown_values_are_refused(missing: float, words: str) -> None:
    found = verdict(TRUTH, TRUTH + NOISE, unknown={"ad": (0.1, 0.95, missing), "site": (0.5, 0.7, 0.0)})
    (reason,) = found.reasons
    assert (
        "field 'ad': 95.0 % of the values are unknown to the shipped model, 10.0 % when it shipped" in reason
    )
    assert words in reason


@pytest.mark.slow
def test_churn_and_calibration_have_limits() -> None:
    strict = GateLimits(max_churn=0.1)
    assert verdict(TRUTH, TRUTH + NOISE, limits=strict).reasons[0].startswith("churn: scores change by")
    bent = np.sign(TRUTH + 1.0) * np.abs(TRUTH + 1.0) ** 4  # No affine map makes that right.
    reasons = verdict(bent, TRUTH + 3 * NOISE).reasons
    assert any(reason.startswith("calibration: an error of") for reason in reasons)


def test_blocks_of_rows_change_nothing_but_the_time() -> None:
    gaps = np.random.default_rng(3).normal(-0.02, 1.0, 5_000)
    weights = np.ones(5_000)
    z = gaps.mean() / (gaps.std() / 5_000**0.5)
    assert share_won(gaps) == share_won(gaps, weights) == pytest.approx(norm.cdf(-z), abs=0.03)
