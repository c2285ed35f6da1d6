"""How far to trust that a log's newest click rate will last.

Later rows have a click rate of their own: a calm month is followed by a busy one. A calibration that takes all of the
newest rows' level for granted is wrong by all of the next jump, and one that takes none of it by all that lasts. How
much lasts is measured on the log itself, by forecasting the level of each stretch of rows from those before it.

Shape suffixes: N rows, B stretches of rows.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from recap_ctr.evaluation.calibrate import Calibration, fitting, level_shift, shifted
from recap_ctr.evaluation.metrics import Floats, logit

KNOWN_STRETCHES = 2  # The first forecast is made from so many.
USUAL_SHARE = 0.5
"""Without evidence, half of a difference in level is taken to last: the best share on four logs (decision 36)."""
PRIOR = 4.0  # The usual share counts as so many forecasts.


@dataclass(frozen=True)
class Levels:
    """The level of the rows before the newest ones, and how much of a difference to it lasts."""

    usual: float
    """The log odds of a click in the training rows."""
    lasting: float
    """The share of a difference in level that is still there in the next stretch of rows."""

    def steadied(
        self, calibration: Calibration, labels: ArrayLike, logits: ArrayLike, weights: ArrayLike | None = None
    ) -> Calibration:
        """Return a calibration that was fitted on these rows without the part of their level that won't last."""
        unusual = unusual_level(self.usual, labels, logits, weights)
        return shifted(calibration, (self.lasting - 1.0) * unusual)


def unusual_level(
    usual: float, labels: ArrayLike, logits: ArrayLike, weights: ArrayLike | None = None
) -> float:
    """Return how much higher the level of these rows is than a model's logits, which know the `usual` level, expect.

    That is at most the difference between their click rate and the usual one: what logits miss beyond that is wrong on
    all rows.
    """
    missed = level_shift(labels, logits, weights)
    return float(np.median([0.0, missed, level(labels, weights) - usual]))


def calibrated(
    kind: str,
    levels: Levels | None,
    labels: ArrayLike,
    logits: ArrayLike,
    weights: ArrayLike | None = None,
) -> Calibration:
    """Return the calibration `kind` of these rows, for later ones; without `levels`, these are like all others."""
    calibration = fitting(kind)(labels, logits, weights)
    return calibration if levels is None else levels.steadied(calibration, labels, logits, weights)


def level(labels: ArrayLike, weights: ArrayLike | None = None) -> float:
    """Return the log odds of a click, with half a click and half a row without one added.

    >>> level([0, 1])
    0.0
    """
    labels_N = np.asarray(labels, np.float64)
    weights_N = np.ones_like(labels_N) if weights is None else np.asarray(weights, np.float64)
    clicks = weights_N @ labels_N
    return float(logit((clicks + 0.5) / (weights_N.sum() + 1.0)))


def lasting_share(levels_B: Floats) -> float:
    """Return which share of a stretch's difference from the mean before it is best forecast for the next stretch.

    >>> lasting_share(np.array([0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0]))
    0.0
    >>> lasting_share(np.array([0.0]))
    0.5
    """
    forecasts = range(KNOWN_STRETCHES, len(levels_B))
    means = np.array([levels_B[: at - 1].mean() for at in forecasts])
    now, later = (np.array([levels_B[at - back] for at in forecasts]) - means for back in (1, 0))
    if not (spread := float(now @ now)):
        return USUAL_SHARE
    prior = PRIOR * spread / len(now)
    return float(np.clip((now @ later + prior * USUAL_SHARE) / (spread + prior), 0.0, 1.0))
