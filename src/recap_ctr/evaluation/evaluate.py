"""Labels and logits to figures: raw and calibrated side by side, with the base rate for scale."""

from contextlib import suppress
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt

from recap_ctr.errors import InputError
from recap_ctr.evaluation import metrics
from recap_ctr.evaluation.calibrate import Calibration

Array = npt.NDArray[Any]


def figures(
    labels: Array, logits: Array, weights: Array | None = None, groups: Array | None = None
) -> dict[str, Any]:
    """All metrics of one set of predictions."""
    found: dict[str, Any] = {
        "auc": metrics.auc(labels, logits, weights),
        "auc_error": metrics.auc_error(labels, logits, weights),
        "logloss": metrics.logloss(labels, logits, weights),
        "normalised_entropy": metrics.normalised_entropy(labels, logits, weights),
        "calibration_error": metrics.expected_calibration_error(labels, metrics.sigmoid(logits), weights),
        "mean_prediction": float(np.average(metrics.sigmoid(logits), weights=weights)),
    }
    if groups is not None:
        found["group_auc"] = None
        with suppress(InputError):  # no group holds both classes: that is no reason to lose the rest
            found["group_auc"] = asdict(metrics.group_auc(labels, logits, groups, weights))
    return found


def evaluate(
    labels: Array,
    logits: Array,
    calibration: Calibration,
    *,
    weights: Array | None = None,
    groups: Array | None = None,
    reliability: bool = False,
) -> dict[str, Any]:
    """Raw and calibrated figures of the same rows, and what the base rate alone would score."""
    raw = figures(labels, logits, weights, groups)  # first: it refuses rows that can't be measured
    rate = float(np.average(labels, weights=weights))
    calibrated = calibration.apply(logits)
    constant = np.full(len(labels), metrics.logit(rate))
    result: dict[str, Any] = {
        "rows": len(labels),
        "base_rate": rate,
        "base_rate_logloss": metrics.logloss(labels, constant, weights),
        "raw": raw,
        "calibrated": figures(labels, calibrated, weights, groups),
    }
    if reliability:
        for name, scores in (("reliability", calibrated), ("reliability_raw", logits)):
            table = metrics.reliability_table(labels, metrics.sigmoid(scores), weights)
            result[name] = [asdict(row) for row in table]
    return result
