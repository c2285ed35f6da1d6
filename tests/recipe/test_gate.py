"""The gate: what it lets pass, and each reason for which it refuses."""

import numpy as np
import pytest
from scipy.stats import norm

from recap_ctr.evaluation import metrics
from recap_ctr.evaluation.calibrate import AffineCalibration
from recap_ctr.recipe.gate import (
    FieldShares,
    GateLimits,
    NewestRows,
    Ranking,
    Verdict,
    judge,
    share_won,
)

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
        "fields": {"ad": FieldShares(0.1, 0.1, 0.0, 0.0)},
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


BEYOND = {
    "unknown": (
        FieldShares(0.1, 0.95, 0.0, 0.0),
        "95.0 % of the values are unknown to the shipped model, 10.0 %",
    ),
    "empty": (FieldShares(0.1, 0.95, 0.0, 0.9), "90.0 % of the rows have no value, 0.0 % when"),
    "an empty field of several values": (
        FieldShares(0.0, 0.0, 0.03, 1.0),
        "100.0 % of the rows have no value",
    ),
    "unknown where half was unknown": (FieldShares(0.6, 1.0, 0.0, 0.0), "(limit: 36 points more)"),
    "empty where most rows were": (FieldShares(0.7, 1.0, 0.7, 1.0), "(limit: 27 points more)"),
}
WITHIN = {
    "half of the values new": FieldShares(0.1, 0.6, 0.0, 0.0),
    "half of what was known lost": FieldShares(0.6, 0.8, 0.0, 0.0),
    "nearly nothing known": FieldShares(0.96, 1.0, 0.0, 0.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BEYOND)
def test_broken_fields_are_refused(name: str) -> None:
    shares, words = BEYOND[name]
    site = FieldShares(0.5, 0.7, 0.0, 0.0)
    (reason,) = verdict(TRUTH, TRUTH + NOISE, fields={"ad": shares, "site": site}).reasons
    assert reason.startswith("field 'ad': ") and words in reason
    assert verdict(TRUTH, TRUTH + NOISE, fields={"ad": shares}, limits=GateLimits(max_unknown=1.0)).passes


@pytest.mark.parametrize("name", WITHIN)
def test_fields_with_new_values_pass(name: str) -> None:
    assert verdict(TRUTH, TRUTH + NOISE, fields={"ad": WITHIN[name]}).passes


@pytest.mark.slow
def test_churn_and_calibration_have_limits() -> None:
    strict = GateLimits(max_churn=0.1)
    assert verdict(TRUTH, TRUTH + NOISE, limits=strict).reasons[0].startswith("churn: scores change by")
    bent = np.sign(TRUTH + 1.0) * np.abs(TRUTH + 1.0) ** 4 / 30  # No affine map makes that right.
    reasons = verdict(bent, TRUTH + 3 * NOISE).reasons
    assert any(reason.startswith("calibration: an error of") for reason in reasons)


def test_blocks_of_rows_change_nothing_but_the_time() -> None:
    gaps = np.random.default_rng(3).normal(-0.02, 1.0, 5_000)
    weights = np.ones(5_000)
    z = gaps.mean() / (gaps.std() / 5_000**0.5)
    assert share_won(gaps) == share_won(gaps, weights) == pytest.approx(norm.cdf(-z), abs=0.03)
