"""Calibration: a monotone map from logits to logits, fitted on validation rows and stored in the artifact.

Because the map is monotone, calibration changes probabilities but no ranking (AUC), except by creating ties.

Shape suffixes: N rows, K knots.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from recap_ctr.errors import InputError
from recap_ctr.evaluation.metrics import (
    Bools,
    Floats,
    check_rows,
    logit,
    logloss,
    refuse_one_class,
    sigmoid,
    softplus,
)

JsonDict = dict[str, str | float | list[float]]


@dataclass(frozen=True)
class AffineCalibration:
    """The map z -> scale * z + shift with scale > 0: temperature and base rate (Platt scaling).

    >>> AffineCalibration(2.0, -1.0).apply([0.0, 1.0]).tolist()
    [-1.0, 1.0]
    >>> AffineCalibration(2.0, -1.0, limit=3.0).apply([-700.0, 1.0]).tolist()
    [-7.0, 1.0]
    """

    scale: float
    shift: float
    limit: float | None = None
    """Logits are taken to be between minus this and this; None if there is no limit."""

    def __post_init__(self) -> None:
        if not (0 < self.scale < math.inf and math.isfinite(self.shift)):
            raise InputError(
                f"calibration with scale {self.scale} and shift {self.shift} is not an increasing map"
            )
        if self.limit is not None and not self.limit > 0:
            raise InputError(f"calibration with a limit of {self.limit} lets no logit through")

    def apply(self, logits: ArrayLike) -> Floats:
        """Return the calibrated logits."""
        logits_N = np.asarray(logits, dtype=np.float64)
        if self.limit is not None:
            logits_N = np.clip(logits_N, -self.limit, self.limit)
        return np.asarray(self.scale * logits_N + self.shift)

    def to_dict(self) -> JsonDict:
        """Return the map as plain JSON values."""
        limit = {} if self.limit is None else {"limit": self.limit}
        return {"kind": "affine", "scale": self.scale, "shift": self.shift, **limit}


@dataclass(frozen=True)
class IsotonicCalibration:
    """A map that is linear in logits between the knots and constant outside of them.

    >>> IsotonicCalibration((0.0, 2.0), (-1.0, 1.0)).apply([-5.0, 1.0, 5.0]).tolist()
    [-1.0, 0.0, 1.0]
    """

    knots: tuple[float, ...]
    """Logits, increasing."""
    values: tuple[float, ...]
    """Calibrated logits at the knots, not decreasing."""

    def __post_init__(self) -> None:
        knots_K, values_K = np.array(self.knots), np.array(self.values)
        if not (
            0 < knots_K.size == values_K.size
            and np.isfinite([knots_K, values_K]).all()
            and (np.diff(knots_K) > 0).all()
            and (np.diff(values_K) >= 0).all()
        ):
            raise InputError(
                "isotonic calibration needs finite, increasing knots with one non-decreasing value each"
            )

    def apply(self, logits: ArrayLike) -> Floats:
        """Return the calibrated logits."""
        return np.asarray(np.interp(np.asarray(logits, dtype=np.float64), self.knots, self.values))

    def to_dict(self) -> JsonDict:
        """Return the map as plain JSON values."""
        return {"kind": "isotonic", "knots": list(self.knots), "values": list(self.values)}


Calibration = AffineCalibration | IsotonicCalibration


def calibration_from_dict(stored: Mapping[str, object]) -> Calibration:
    """Return the calibration that `to_dict` stored; JSON keeps every digit, so the round trip is exact."""
    match dict(stored):
        case {"kind": "affine", "scale": scale, "shift": shift, **rest}:
            limit = _number(rest["limit"]) if "limit" in rest else None
            return AffineCalibration(_number(scale), _number(shift), limit)
        case {"kind": "isotonic", "knots": [*knots], "values": [*values]}:
            return IsotonicCalibration(tuple(map(_number, knots)), tuple(map(_number, values)))
        case {"kind": "affine" | "isotonic" as kind}:
            raise InputError(f"stored {kind} calibration lacks an entry; it has {', '.join(sorted(stored))}")
    raise InputError(f"unknown calibration {stored.get('kind')!r}", fix="choose 'affine' or 'isotonic'")


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"stored calibration holds {value!r} where a number belongs")
    return float(value)


def fit_isotonic(
    labels: ArrayLike, logits: ArrayLike, weights: ArrayLike | None = None
) -> IsotonicCalibration:
    """Return the monotone map with the smallest logloss on these rows.

    Its probabilities keep a distance of half a row, 1 / (2N), from 0 and 1. Without it, one click below the first knot
    would cost an infinite loss.
    """
    from sklearn.isotonic import IsotonicRegression

    rows = check_rows(labels, logits, weights)
    refuse_one_class(rows, "isotonic calibration")
    half_row = 0.5 / rows.positive.size
    fitted = IsotonicRegression(y_min=half_row, y_max=1 - half_row).fit(
        rows.scores.astype(np.float64), rows.positive, sample_weight=rows.weights
    )
    values_K = np.maximum.accumulate(logit(fitted.y_thresholds_))  # Rounding in the logit could decrease.
    return IsotonicCalibration(tuple(fitted.X_thresholds_.tolist()), tuple(values_K.tolist()))


def shifted(calibration: Calibration, by: float) -> Calibration:
    """Return the calibration with all calibrated logits higher by so much."""
    if isinstance(calibration, AffineCalibration):
        return replace(calibration, shift=calibration.shift + by)
    return replace(calibration, values=tuple(value + by for value in calibration.values))


def level_shift(labels: ArrayLike, logits: ArrayLike, weights: ArrayLike | None = None) -> float:
    """Return by how much all logits must rise for the mean prediction to be the click rate."""
    rows = check_rows(labels, logits, weights)
    refuse_one_class(rows, "the level of logits")
    weights_N = rows.masses / rows.masses.sum()
    return _shift(rows.scores.astype(np.float64), float(weights_N @ rows.positive), weights_N)


def fitting(name: str) -> Callable[..., Calibration]:
    """Return the function that fits the calibration `name` to labels, logits and weights."""
    fits: dict[str, Callable[..., Calibration]] = {"affine": fit_affine, "isotonic": fit_isotonic}
    return fits[name]


# A spread of logits, or a fitted slope per standard deviation, below this is float32 rounding, not signal.
FLAT = 1e-6
RAREST = 0.1  # From N rows nobody can tell that something is rarer than one in N divided by this.


def fit_affine(labels: ArrayLike, logits: ArrayLike, weights: ArrayLike | None = None) -> AffineCalibration:
    """Return the logistic regression of labels on logits, which are limited to what so many rows can show.

    A model may give a single row of a million a logit of -700, and one such row that was clicked would cost more than
    all others. Where all such rows happen to be right, the limit costs at most `RAREST` of a row in all: by so little
    the logloss may be above that of the logits. Where it costs more, as it does if the scale is wrong, there is none.
    """
    rows = check_rows(labels, logits, weights)
    refuse_one_class(rows, "affine calibration")
    limit = math.log(rows.positive.size / RAREST)
    limited_N = np.clip(np.asarray(logits, dtype=np.float64), -limit, limit)
    limited = replace(_fit_affine(labels, limited_N, weights), limit=limit)
    if np.abs(rows.scores).max() <= limit:
        return limited
    fitted = _fit_affine(labels, logits, weights)
    losses = [logloss(labels, each.apply(logits), weights) for each in (limited, fitted)]
    return limited if losses[0] <= losses[1] + RAREST / rows.positive.size else fitted


def _fit_affine(labels: ArrayLike, logits: ArrayLike, weights: ArrayLike | None) -> AffineCalibration:
    """Return the best map without a limit, by damped Newton steps.

    Three guards matter only on unusual data:
    - Constant logits say nothing about the scale: it is 1, and only the shift is fitted.
    - The same holds where the fitted scale is not positive: turning a ranking upside down is not calibration.
    - Perfectly separated classes would make the scale infinite; a pull towards the identity, of weight 1 / N², bounds
      it. Raw logits pay nothing for that pull, which is why the result can't be worse than they are. N is Kish's
      effective number of rows, so multiplying all weights by a constant changes nothing.
    """
    rows = check_rows(labels, logits, weights)
    z_N, weights_N = rows.scores.astype(np.float64), rows.masses / rows.masses.sum()
    mean = float(weights_N @ z_N)
    spread = math.sqrt(weights_N @ (z_N - mean) ** 2)
    if spread > FLAT * max(1.0, abs(mean)):
        num_rows = float(rows.masses.sum() ** 2 / (rows.masses @ rows.masses))
        slope, level = _newton((z_N - mean) / spread, rows.positive, weights_N, spread, num_rows)
        if slope > FLAT:
            return AffineCalibration(slope / spread, level - slope / spread * mean)
    return AffineCalibration(1.0, _shift(z_N, float(weights_N @ rows.positive), weights_N))


def _newton(
    x_N: Floats, positive_N: Bools, weights_N: Floats, identity: float, num_rows: float
) -> tuple[float, float]:
    """Return slope and level of the logits slope * x + level; `identity` is the slope of the raw logits.

    The steps start from the base rate, not from the raw logits: where those saturate, there is no curvature to follow.
    """
    design_N2 = np.column_stack([x_N, np.ones_like(x_N)])
    sign_N = np.where(positive_N, -1.0, 1.0)
    rate = float(weights_N @ positive_N)
    variance = rate * (1 - rate)
    # A prior that matters where rows are few and separated by luck, and vanishes where they are many.
    ridge_2 = np.array([variance / num_rows**2 / max(1.0, identity) ** 2, 0.0])

    def objective(theta_2: Floats) -> float:
        pull = ridge_2[0] / 2 * (theta_2[0] - identity) ** 2
        return float(weights_N @ softplus(sign_N * (design_N2 @ theta_2)) + pull)

    theta_2 = np.array([0.0, float(logit(rate))])
    value = objective(theta_2)
    for _ in range(200):  # In practice about 8 steps, or 30 where classes are separated.
        z_N = design_N2 @ theta_2
        errors_N = sign_N * sigmoid(sign_N * z_N)  # This is p - y without cancellation.
        gradient_2 = design_N2.T @ (weights_N * errors_N) + ridge_2 * (theta_2 - [identity, 0.0])
        if np.linalg.norm(gradient_2) <= 1e-10 * variance:
            break
        curvature_N = weights_N * sigmoid(z_N) * sigmoid(-z_N)
        hessian_22 = (design_N2.T * curvature_N) @ design_N2 + np.diag(ridge_2)
        damping_22 = 1e-12 * np.trace(hessian_22) * np.eye(2)  # One row may hold all the curvature.
        step_2 = np.linalg.solve(hessian_22 + damping_22, gradient_2)
        rounding = 1e-14 * value
        while (new_value := objective(theta_2 - step_2)) > value + rounding:
            step_2 = step_2 / 2
        theta_2, value = theta_2 - step_2, new_value
    return float(theta_2[0]), float(theta_2[1])


def _shift(z_N: Floats, rate: float, weights_N: Floats) -> float:
    """Return the shift at which the mean prediction is the base rate, by bisection, which never diverges."""
    low, high = float(logit(rate)) - float(z_N.max()), float(logit(rate)) - float(z_N.min())
    for _ in range(60):
        middle = (low + high) / 2
        if weights_N @ sigmoid(z_N + middle) < rate:
            low = middle
        else:
            high = middle
    return (low + high) / 2
