"""Figures of predictions on labelled rows: raw and calibrated side by side, with the base rate for scale."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from recap_ctr.config import Record
from recap_ctr.errors import InputError
from recap_ctr.evaluation import metrics
from recap_ctr.evaluation.calibrate import Calibration
from recap_ctr.evaluation.metrics import GroupAuc, ReliabilityBin

Array = npt.NDArray[Any]


class Figures(Record):
    """All metrics of one set of predictions."""

    auc: float
    auc_error: float | None = None
    """Standard error of the AUC over rows (DeLong); None for weighted rows."""
    logloss: float
    normalised_entropy: float | None = None
    calibration_error: float | None = None
    mean_prediction: float | None = None
    group_auc: GroupAuc | None = None
    """AUC within groups, where the schema names a group column and some group has both classes."""


class SplitFigures(Record):
    """Raw and calibrated figures of the same rows, and what the base rate alone would score."""

    rows: int
    base_rate: float | None = None
    base_rate_logloss: float
    raw: Figures
    calibrated: Figures
    reliability: list[ReliabilityBin] | None = None
    """Bins of the calibrated scores; `reliability_raw` has those before calibration."""
    reliability_raw: list[ReliabilityBin] | None = None

    @property
    def explained(self) -> float:
        """Return the share of the base rate's logloss that the calibrated scores explain."""
        return 1 - self.calibrated.logloss / self.base_rate_logloss


class Metrics(Record):
    """Figures on the held-out rows: validation always, test where there are test rows."""

    valid: SplitFigures
    test: SplitFigures | None = None

    @property
    def split(self) -> str:
        """Return the split to quote: test, or valid where there are no test rows."""
        return "valid" if self.test is None else "test"

    @property
    def held_out(self) -> SplitFigures:
        """Return the figures of the split to quote."""
        return self.valid if self.test is None else self.test

    def on(self, split: str) -> SplitFigures:
        """Return the figures of one split, by name."""
        figures = self.test if split == "test" else self.valid
        if split not in ("valid", "test") or figures is None:
            raise InputError(f"there are no figures on {split} rows")
        return figures

    def items(self) -> Iterator[tuple[str, SplitFigures]]:
        """Yield each split that was measured, with its figures."""
        yield "valid", self.valid
        if self.test is not None:
            yield "test", self.test

    def without_reliability(self) -> Self:
        """Return the metrics without the bins of the reliability curves."""
        figures = {
            split: measured.model_dump(exclude={"reliability", "reliability_raw"}, exclude_unset=True)
            for split, measured in self.items()
        }
        return self.model_validate(figures)


def measure(
    labels: Array, logits: Array, weights: Array | None = None, groups: Array | None = None
) -> Figures:
    """Return all metrics of one set of predictions."""
    values: dict[str, Any] = {
        "auc": metrics.auc(labels, logits, weights),
        "auc_error": metrics.auc_error(labels, logits, weights),
        "logloss": metrics.logloss(labels, logits, weights),
        "normalised_entropy": metrics.normalised_entropy(labels, logits, weights),
        "calibration_error": metrics.expected_calibration_error(labels, metrics.sigmoid(logits), weights),
        "mean_prediction": float(np.average(metrics.sigmoid(logits), weights=weights)),
    }
    if groups is not None:
        values["group_auc"] = None
        with suppress(InputError):  # No group has both classes: that is no reason to lose the other figures.
            values["group_auc"] = metrics.group_auc(labels, logits, groups, weights)
    return Figures(**values)


def evaluate(
    labels: Array,
    logits: Array,
    calibration: Calibration,
    *,
    weights: Array | None = None,
    groups: Array | None = None,
    reliability: bool = False,
) -> SplitFigures:
    """Return raw and calibrated figures of the same rows; with `reliability`, their reliability curves too."""
    raw = measure(labels, logits, weights, groups)  # First: it refuses rows that can't be measured.
    base_rate = float(np.average(labels, weights=weights))
    calibrated = calibration.apply(logits)
    constant = np.full(len(labels), metrics.logit(base_rate))
    curves = {
        name: metrics.reliability_table(labels, metrics.sigmoid(scores), weights)
        for name, scores in (("reliability", calibrated), ("reliability_raw", logits))
        if reliability
    }
    return SplitFigures(
        rows=len(labels),
        base_rate=base_rate,
        base_rate_logloss=metrics.logloss(labels, constant, weights),
        raw=raw,
        calibrated=measure(labels, calibrated, weights, groups),
        **curves,
    )
