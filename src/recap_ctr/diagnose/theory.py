"""The theory of estimator scaling as numpy functions on logits (section 3 and appendices B, C of the paper).

Shape suffixes: N rows, M estimators, S runs, T points of the trajectory, R routes.
Variances over estimators are population variances (ddof=0): the variance that averaging these estimators removes.
"""

from itertools import permutations

import numpy as np
import numpy.typing as npt

from recap_ctr.evaluation.metrics import sigmoid, softplus

Floats = npt.NDArray[np.float64]
AXES = ("run", "trajectory", "route")


def nonshared_variance(logits_NM: Floats) -> Floats:
    """Return the variance that averaging the estimators removes, per row: V_ns (Eq. 5).

    The population variance over estimators is unbiased for tau² (1 - rho) (1 - 1/M), so neither tau nor rho
    needs estimating.

    >>> nonshared_variance(np.array([[0.0, 2.0], [1.0, 1.0]]))
    array([1., 0.])
    """
    return np.asarray(logits_NM.var(axis=1))


def covariance_nonshared_variance(covariance_MM: Floats) -> float:
    """Return V_ns for a covariance: the mean variance of an estimator minus the variance of the mean (Appendix B.1)."""
    M = len(covariance_MM)
    return float(np.trace(covariance_MM) / M - covariance_MM.sum() / M**2)


def mean_variance(tau2: float, rho: float, num_estimators: int) -> float:
    """Return the variance of the mean of equicorrelated estimators (Eq. 4).

    >>> mean_variance(2.0, 0.5, 4)
    1.25
    """
    return tau2 * (rho + (1 - rho) / num_estimators)


def variance_removed(tau2: float, rho: float, num_estimators: int) -> float:
    """Return the variance that averaging equicorrelated estimators removes (Eq. 5).

    >>> variance_removed(2.0, 0.5, 4)
    0.75
    """
    return tau2 * (1 - rho) * (1 - 1 / num_estimators)


def curvature(logits: Floats) -> Floats:
    """Return the second derivative of the cross-entropy in the logit: σ(z)(1 - σ(z)), whatever the label."""
    return np.asarray(sigmoid(logits) * sigmoid(-np.asarray(logits)))


def expected_loss(mean_loss: float, mean_logits_N: Floats, variance_N: Floats) -> float:
    """Return the loss, to second order, of an estimator that varies around its family's mean (Eq. 3)."""
    return mean_loss + 0.5 * float((curvature(mean_logits_N) * variance_N).mean())


def predicted_gain(logits_NM: Floats) -> float:
    """Return the loss that averaging removes, to second order: half the curvature-weighted V_ns (Eq. 6)."""
    return 0.5 * float((curvature(logits_NM.mean(axis=1)) * nonshared_variance(logits_NM)).mean())


def exact_gain(logits_NM: Floats) -> float:
    """Return the mean loss of the estimators minus the loss of their mean logit; labels cancel (Appendix B.3)."""
    return float((softplus(logits_NM).mean(axis=1) - softplus(logits_NM.mean(axis=1))).mean())


def two_axis(logits_NAB: Floats) -> tuple[Floats, Floats]:
    """Return (V_A, V_B|A) per row: the variance that averaging A removes, and what B then removes (Eq. 7)."""
    return np.asarray(logits_NAB.var(axis=1).mean(axis=1)), np.asarray(logits_NAB.mean(axis=1).var(axis=1))


def decompose(logits_NSTR: Floats) -> dict[tuple[str, ...], dict[str, Floats]]:
    """Return, for each order of averaging, the variance per row split over the axes (Appendix C.2).

    An order such as (route, trajectory, run) averages routes first. The share of an axis is the variance that it
    removes after the axes before it. The shares of every order sum to the total variance.
    """
    shares_by_order: dict[tuple[str, ...], dict[str, Floats]] = {}
    for order in permutations(AXES):
        averaged, remaining_axes = logits_NSTR, list(AXES)
        shares = {}
        for axis in order:
            dimension = 1 + remaining_axes.index(axis)
            variance = averaged.var(axis=dimension)
            shares[axis] = variance.reshape(len(variance), -1).mean(axis=1)
            averaged = averaged.mean(axis=dimension)
            remaining_axes.remove(axis)
        shares_by_order[order] = shares
    return shares_by_order
