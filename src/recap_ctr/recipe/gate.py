"""Decide whether an updated model ships: it must be better on the newest rows, which neither model was trained on.

Three models are compared there: the updated one, the shipped one, and the shipped one merely calibrated again. Where a
calibration must be fitted, one half of the rows fits it and the other half judges, both ways round.

Shapes: N rows, B blocks of rows, S samples.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import Field, PositiveFloat

from recap_ctr.config import Frozen, Record
from recap_ctr.evaluation import metrics
from recap_ctr.evaluation.calibrate import Calibration, fitting
from recap_ctr.evaluation.halves import halves

SAMPLES, BLOCKS = 2_000, 1_000
LOST, LEAST_KNOWN = 0.9, 0.05
"""A field that loses so much of what the shipped model knew is broken, if the model knew at least so much."""
BINS = 20  # The calibration error is measured in this many bins.
Floats = npt.NDArray[np.float64]


class GateLimits(Frozen):
    """What an updated model must keep to."""

    confidence: float = Field(0.9, ge=0.5, lt=1)
    """The share of bootstrap samples in which its logloss must be lower than that of each other model."""
    max_churn: PositiveFloat = 0.5
    """The mean change of a score, relative to the mean score, at most."""
    max_calibration_error: PositiveFloat = 0.1
    """How much its calibration error may exceed that of the shipped model calibrated again, relative to the click
    rate and beyond chance."""
    max_unknown: PositiveFloat = 0.5
    """How much the share of values that the shipped model doesn't know may rise in a field, or that of rows without a
    value; never by more than nine tenths of what is left."""
    min_ranking: float = Field(0.5, ge=0, le=1)
    """The share of the shipped model's AUC above one half, as it was when it shipped, that it must still have."""


class Judged(Record):
    """A model on the newest rows."""

    auc: float
    logloss: float
    calibration_error: float


class Verdict(Record):
    """What the gate measured, and the reasons why it refuses the model; without reasons, the model ships."""

    rows: int
    clicks: int
    updated: Judged
    shipped: Judged
    recalibrated: Judged
    """The shipped model, calibrated again."""
    better_than_shipped: float
    """The share of bootstrap samples in which the updated model has the lower logloss."""
    better_than_recalibrated: float
    churn: float
    reasons: list[str]

    @property
    def passes(self) -> bool:
        """Return whether the updated model ships."""
        return not self.reasons


@dataclass(frozen=True, eq=False)
class NewestRows:
    """The labels of the newest rows, and the logits of both models on them, corrected for sampled negatives."""

    labels: npt.NDArray[Any]
    weights: npt.NDArray[Any] | None
    updated: Floats
    shipped: Floats


@dataclass(frozen=True)
class FieldShares:
    """What a field held when the model shipped, and what it holds now."""

    unknown_before: float
    """Values that the shipped model doesn't know, among all."""
    unknown: float
    missing_before: float
    """Rows without a value, among all."""
    missing: float


@dataclass(frozen=True)
class Ranking:
    """How the shipped model ranks all new rows, none of which it was trained on, and how it ranked when it shipped."""

    auc: float
    error: float
    """Its standard error over rows."""
    before: float


def judge(
    rows: NewestRows,
    calibration: Calibration,
    *,
    limits: GateLimits,
    fields: Mapping[str, FieldShares],
    ranking: Ranking,
) -> Verdict:
    """Compare the updated model with the shipped one, whose `calibration` is given, and list what speaks against it.

    `fields` are the shares of each field, by name. `ranking` is how the shipped model ranks all new rows.
    """
    kind = str(calibration.to_dict()["kind"])
    scores = {
        "updated": _cross_calibrated(rows, rows.updated, kind),
        "shipped": calibration.apply(rows.shipped),
        "recalibrated": _cross_calibrated(rows, rows.shipped, kind),
    }
    judged = {name: _judged(rows, logits) for name, logits in scores.items()}
    won = {
        name: share_won(_losses(rows, scores["updated"]) - _losses(rows, scores[name]), rows.weights)
        for name in ("shipped", "recalibrated")
    }
    updated, shipped = (metrics.sigmoid(scores[name]) for name in ("updated", "shipped"))
    churn = float(
        np.average(np.abs(updated - shipped), weights=rows.weights)
        / max(float(np.average(shipped, weights=rows.weights)), 1e-12)
    )
    verdict = Verdict(
        rows=len(rows.labels),
        clicks=int(rows.labels.sum()),
        updated=judged["updated"],
        shipped=judged["shipped"],
        recalibrated=judged["recalibrated"],
        better_than_shipped=won["shipped"],
        better_than_recalibrated=won["recalibrated"],
        churn=churn,
        reasons=[],
    )
    rate = float(np.average(rows.labels, weights=rows.weights))
    reasons = [
        *_reasons_in_fields(fields, limits),
        *_reasons_in_labels(ranking, limits),
        *_reasons_in_scores(verdict, rate, limits),
    ]
    return verdict.model_copy(update={"reasons": reasons})


def _cross_calibrated(rows: NewestRows, logits: Floats, kind: str) -> Floats:
    """Return calibrated logits; those of each half of the rows by a calibration that the other half fitted."""
    calibrated = np.empty_like(logits)
    first, second = halves(rows.labels)
    for fitted_on, judged_on in ((first, second), (second, first)):
        weights = None if rows.weights is None else rows.weights[fitted_on]
        calibration = fitting(kind)(rows.labels[fitted_on], logits[fitted_on], weights)
        calibrated[judged_on] = calibration.apply(logits[judged_on])
    return calibrated


def _judged(rows: NewestRows, logits: Floats) -> Judged:
    return Judged(
        auc=metrics.auc(rows.labels, logits, rows.weights),
        logloss=metrics.logloss(rows.labels, logits, rows.weights),
        calibration_error=metrics.expected_calibration_error(
            rows.labels, metrics.sigmoid(logits), rows.weights
        ),
    )


def _losses(rows: NewestRows, logits: Floats) -> Floats:
    return metrics.softplus(np.where(rows.labels == 1, -logits, logits))


def share_won(gaps_N: Floats, weights_N: npt.NDArray[Any] | None = None, seed: int = 1) -> float:
    """Return the share of bootstrap samples of the rows in which the mean gap is negative.

    Rows are drawn in random blocks where there are many; that changes nothing but the time it takes.

    >>> share_won(np.full(50, -0.1)), share_won(np.full(50, 0.1))
    (1.0, 0.0)
    """
    rng = np.random.default_rng(seed)
    weights_N = np.ones(len(gaps_N)) if weights_N is None else np.asarray(weights_N, np.float64)
    blocks = min(len(gaps_N), BLOCKS)
    block_N = rng.permutation(len(gaps_N)) % blocks
    sums_B = np.bincount(block_N, weights_N * gaps_N, blocks)
    drawn_SB = rng.multinomial(blocks, np.full(blocks, 1 / blocks), SAMPLES)
    return float((drawn_SB @ sums_B < 0).mean())


def _reasons_in_fields(fields: Mapping[str, FieldShares], limits: GateLimits) -> list[str]:
    reasons = []
    for name, shares in fields.items():
        missing_limit = _largest_rise(shares.missing_before, limits)
        unknown_limit = _largest_rise(shares.unknown_before, limits)
        if shares.missing - shares.missing_before > missing_limit:
            reasons.append(
                f"field {name!r}: {100 * shares.missing:.1f} % of the rows have no value,"
                f" {100 * shares.missing_before:.1f} % when the model shipped (limit: {100 * missing_limit:.0f} points"
                " more); is the column empty?"
            )
        elif shares.unknown - shares.unknown_before > unknown_limit:
            reasons.append(
                f"field {name!r}: {100 * shares.unknown:.1f} % of the values are unknown to the shipped model,"
                f" {100 * shares.unknown_before:.1f} % when it shipped (limit: {100 * unknown_limit:.0f} points more);"
                " are its values written in another way?"
            )
    return reasons


def _largest_rise(before: float, limits: GateLimits) -> float:
    """Return by how much a share may rise; a field that held nearly nothing before may lose that, too."""
    left = 1 - before
    most = limits.max_unknown
    return most if left < LEAST_KNOWN else min(most, max(LOST, most) * left)


def _reasons_in_labels(ranking: Ranking, limits: GateLimits) -> list[str]:
    lowest = 0.5 + limits.min_ranking * (ranking.before - 0.5)
    if ranking.before <= 0.5 or ranking.auc + ranking.error >= lowest:
        return []
    return [
        f"labels: the shipped model ranks these rows with an AUC of {100 * ranking.auc:.2f} ±"
        f" {100 * ranking.error:.2f} points, which was {100 * ranking.before:.2f} when it shipped (limit:"
        f" {100 * lowest:.2f}); do the labels belong to these rows?"
    ]


def _reasons_in_scores(verdict: Verdict, rate: float, limits: GateLimits) -> list[str]:
    reasons = []
    others = (
        ("the shipped model", verdict.shipped, verdict.better_than_shipped),
        ("the shipped model calibrated again", verdict.recalibrated, verdict.better_than_recalibrated),
    )
    for name, other, won in others:
        if won < limits.confidence:
            reasons.append(
                f"logloss: {verdict.updated.logloss:.5f} against {other.logloss:.5f} of {name}; lower in"
                f" {100 * won:.1f} % of bootstrap samples (limit: {100 * limits.confidence:.0f} %)"
            )
    if verdict.churn > limits.max_churn:
        reasons.append(
            f"churn: scores change by {100 * verdict.churn:.1f} % of the mean score (limit:"
            f" {100 * limits.max_churn:.0f} %)"
        )
    excess = (verdict.updated.calibration_error - verdict.recalibrated.calibration_error) / max(rate, 1e-12)
    # Half of the error that a calibrated model has by chance: few rows in a bin, and its rate is off.
    chance = math.sqrt(2 / math.pi * (1 - rate) / max(rate, 1e-12) * BINS / verdict.rows) / 2
    if excess > limits.max_calibration_error + chance:
        reasons.append(
            f"calibration: an error of {verdict.updated.calibration_error:.4f} against"
            f" {verdict.recalibrated.calibration_error:.4f} of the shipped model calibrated again, {100 * excess:.1f} %"
            f" of the click rate more (limit: {100 * limits.max_calibration_error:.0f} %, and {100 * chance:.1f} % for"
            " chance)"
        )
    return reasons
