"""The theory of estimator scaling as numpy functions on logits (section 3 and appendices B, C of the paper).

Shape suffixes: N rows, M estimators, S runs, T points of the trajectory, R routes.
Variances over estimators are population variances (ddof=0): what averaging just these estimators removes.
"""

from itertools import permutations

import numpy as np
import numpy.typing as npt

from recap_ctr.evaluation.metrics import sigmoid, softplus

Floats = npt.NDArray[np.float64]
AXES = ("run", "trajectory", "route")


def nonshared_variance(logits_NM: Floats) -> Floats:
    """Variance that averaging the estimators removes, per row: V_ns (Eq. 5).

    The population variance over estimators is unbiased for tau² (1 - rho) (1 - 1/M), so neither tau nor rho
    needs estimating.

    >>> nonshared_variance(np.array([[0.0, 2.0], [1.0, 1.0]]))
    array([1., 0.])
    """
    return np.asarray(logits_NM.var(axis=1))


def covariance_nonshared_variance(covariance_MM: Floats) -> float:
    """V_ns of a known covariance: mean variance of one estimator minus the variance of the mean (Appendix B.1)."""
    M = len(covariance_MM)
    return float(np.trace(covariance_MM) / M - covariance_MM.sum() / M**2)


def mean_variance(tau2: float, rho: float, num_estimators: int) -> float:
    """Variance of the mean of equicorrelated estimators (Eq. 4).

    >>> mean_variance(2.0, 0.5, 4)
    1.25
    """
    return tau2 * (rho + (1 - rho) / num_estimators)


def variance_removed(tau2: float, rho: float, num_estimators: int) -> float:
    """What averaging equicorrelated estimators removes (Eq. 5).

    >>> variance_removed(2.0, 0.5, 4)
    0.75
    """
    return tau2 * (1 - rho) * (1 - 1 / num_estimators)


def curvature(logits: Floats) -> Floats:
    """Second derivative of the cross-entropy in the logit, σ(z)(1 - σ(z)); the label does not enter."""
    return np.asarray(sigmoid(logits) * sigmoid(-np.asarray(logits)))


def expected_loss(mean_loss: float, mean_logits_N: Floats, variance_N: Floats) -> float:
    """Second-order loss of an estimator that varies around its family's mean (Eq. 3)."""
    return mean_loss + 0.5 * float((curvature(mean_logits_N) * variance_N).mean())


def predicted_gain(logits_NM: Floats) -> float:
    """Loss that averaging should remove, to second order: half the curvature-weighted V_ns (Eq. 6)."""
    return 0.5 * float((curvature(logits_NM.mean(axis=1)) * nonshared_variance(logits_NM)).mean())


def exact_gain(logits_NM: Floats) -> float:
    """Mean loss of the estimators minus the loss of their mean logit, which labels cancel from (Appendix B.3)."""
    return float((softplus(logits_NM).mean(axis=1) - softplus(logits_NM.mean(axis=1))).mean())


def two_axis(logits_NAB: Floats) -> tuple[Floats, Floats]:
    """(V_A, V_B|A) per row: what averaging axis A removes, and what is left for axis B (Eq. 7)."""
    return np.asarray(logits_NAB.var(axis=1).mean(axis=1)), np.asarray(logits_NAB.mean(axis=1).var(axis=1))


def decompose(logits_NSTR: Floats) -> dict[tuple[str, ...], dict[str, Floats]]:
    """The variance per row split over the axes, for each order of averaging (Appendix C.2); all sum to the total.

    An order such as (route, trajectory, run) averages routes first; the share of an axis is what it still removes
    after those before it.
    """
    found: dict[tuple[str, ...], dict[str, Floats]] = {}
    for order in permutations(AXES):
        rest, names = logits_NSTR, list(AXES)
        shares = {}
        for axis in order:
            at = 1 + names.index(axis)
            variance = rest.var(axis=at)
            shares[axis] = variance.reshape(len(variance), -1).mean(axis=1)
            rest = rest.mean(axis=at)
            names.remove(axis)
        found[order] = shares
    return found
