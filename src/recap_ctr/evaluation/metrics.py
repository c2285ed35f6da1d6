"""Metrics of click prediction: numpy functions of labels, scores and row weights.

A weight says how many rows a row stands for: weight 2 counts it twice, weight 0 leaves it out.
Everything is computed in float64, and from logits where the metric allows it: probabilities near 1 have lost digits.

Shape suffixes: N rows, T runs of tied scores, G groups, K bins.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from recap_ctr.errors import InputError

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Rows:
    """The checked input of a metric, one entry per row, without rows of weight 0."""

    positive: Bools
    scores: NDArray[np.floating]
    weights: Floats | None
    """None if every row counts once."""
    kept: Bools | None
    """Which rows of the input are left; None if all of them are."""

    @property
    def masses(self) -> Floats:
        """Return the weights, which are ones if every row counts once."""
        return np.ones(self.positive.size) if self.weights is None else self.weights

    def mean(self, values_N: NDArray[np.generic]) -> float:
        """Return the weighted mean of `values_N`."""
        return float(np.average(values_N.astype(np.float64, copy=False), weights=self.weights))


def check_rows(
    labels: ArrayLike, scores: ArrayLike, weights: ArrayLike | None = None, *, finite: bool = True
) -> Rows:
    """Check that all have one length, labels are 0 or 1, weights >= 0, and scores not NaN (with `finite`: finite)."""
    labels_N, scores_N = np.asarray(labels), np.asarray(scores)
    if scores_N.dtype != np.float32:
        scores_N = scores_N.astype(np.float64, copy=False)
    if labels_N.ndim != 1 or labels_N.shape != scores_N.shape:
        raise InputError(
            f"labels of shape {labels_N.shape}, scores of shape {scores_N.shape}",
            fix="give one label and one score per row",
        )
    if labels_N.size == 0:
        raise InputError("no rows to measure")
    positive_N: Bools = labels_N == 1
    _refuse(~(positive_N | (labels_N == 0)), labels_N, "label", "labels are 0 or 1")
    bad_N = ~np.isfinite(scores_N) if finite else np.isnan(scores_N)
    _refuse(bad_N, scores_N, "score", "clip infinite scores; drop rows whose score is not a number")
    if weights is None:
        return Rows(positive_N, scores_N, None, None)

    weights_N = np.asarray(weights, dtype=np.float64)
    if weights_N.shape != labels_N.shape:
        raise InputError(f"weights have shape {weights_N.shape}, labels {labels_N.shape}")
    bad_N = ~((weights_N >= 0) & (weights_N < np.inf))
    _refuse(bad_N, weights_N, "weight", "weights are finite and not negative")
    kept_N = weights_N > 0
    if not kept_N.any():
        raise InputError("every row has weight 0", fix="give at least one row a positive weight")
    return Rows(positive_N[kept_N], scores_N[kept_N], weights_N[kept_N], kept_N)


def refuse_one_class(rows: Rows, purpose: str) -> None:
    """Refuse rows that all have the same label; `purpose` names what needs both."""
    if rows.positive.all() or not rows.positive.any():
        count, label = rows.positive.size, int(rows.positive[0])
        raise InputError(
            f"{purpose} needs both classes, but {count} of {count} rows have label {label}",
            fix="use more rows",
        )


def _refuse(bad_N: Bools, values_N: NDArray[np.generic], name: str, fix: str) -> None:
    """Raise an error for the first bad value, if there is one."""
    if bad_N.any():
        row = int(bad_N.argmax())
        raise InputError(f"{name} {values_N[row]} at row {row} (and {int(bad_N.sum()) - 1} more)", fix=fix)


def sigmoid(logits: ArrayLike) -> Floats:
    """Return 1 / (1 + exp(-z)), computed so that no exponential can overflow.

    >>> sigmoid([-1000.0, 0.0, 1000.0]).tolist()
    [0.0, 0.5, 1.0]
    """
    z = np.asarray(logits, dtype=np.float64)
    small = np.exp(-np.abs(z))
    return np.asarray(np.where(z >= 0, 1.0, small) / (1.0 + small))


def logit(probabilities: ArrayLike) -> Floats:
    """Return log(p / (1 - p)), the inverse of `sigmoid`; 0 and 1 become infinite.

    >>> logit([0.0, 0.5, 1.0]).tolist()
    [-inf, 0.0, inf]
    """
    p = np.asarray(probabilities, dtype=np.float64)
    if not ((p >= 0) & (p <= 1)).all():
        raise InputError("a probability lies outside [0, 1]", fix="pass probabilities, not logits")
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(p) - np.log1p(-p))


def softplus(logits: ArrayLike) -> Floats:
    """Return log(1 + exp(z)): the loss of logit z on a row with label 0, and of -z on a row with label 1."""
    return np.asarray(np.logaddexp(0.0, np.asarray(logits, dtype=np.float64)))


def logloss(labels: ArrayLike, logits: ArrayLike, weights: ArrayLike | None = None) -> float:
    """Return the mean binary cross-entropy in nats (Eq. 1), from logits.

    scikit-learn's `log_loss` takes probabilities and clips them at the dtype's epsilon, so that no row costs more
    than 36.04 (float64) or 15.94 (float32). Below that limit both agree to about epsilon * exp(|z|); beyond it this
    one keeps growing like |z|.

    >>> logloss([0, 1], [-1000.0, -1000.0])
    500.0
    """
    rows = check_rows(labels, logits, weights)
    return rows.mean(softplus(np.where(rows.positive, -rows.scores, rows.scores)))


def normalised_entropy(labels: ArrayLike, logits: ArrayLike, weights: ArrayLike | None = None) -> float:
    """Return logloss over the entropy of the base rate: 1 for always predicting the base rate; lower is better.

    >>> normalised_entropy([0, 1], [0.0, 0.0])
    1.0
    """
    rows = check_rows(labels, logits, weights)
    refuse_one_class(rows, "normalised entropy")
    rate = rows.mean(rows.positive)
    entropy = -rate * np.log(rate) - (1 - rate) * np.log1p(-rate)
    return float(logloss(labels, logits, weights) / entropy)


def excess_logloss(bayes_logits: ArrayLike, logits: ArrayLike, weights: ArrayLike | None = None) -> float:
    """Return how far the expected loss lies above that of the true (Bayes) logits: the mean KL divergence.

    The noise of the labels is integrated out, so that differences far below the noise of a logloss become visible.

    >>> excess_logloss([0.0, 1.0], [0.0, 1.0])
    0.0
    """
    no_labels_N = np.zeros(np.shape(bayes_logits))
    rows, bayes = check_rows(no_labels_N, logits, weights), check_rows(no_labels_N, bayes_logits, weights)
    cost_of_1_N = softplus(-rows.scores) - softplus(-bayes.scores)
    cost_of_0_N = softplus(rows.scores) - softplus(bayes.scores)
    excess_N = sigmoid(bayes.scores) * cost_of_1_N + sigmoid(-bayes.scores) * cost_of_0_N
    return rows.mean(np.maximum(excess_N, 0.0))  # Only rounding makes it negative.


def auc(labels: ArrayLike, logits: ArrayLike, weights: ArrayLike | None = None) -> float:
    """Return the probability that a click scores higher than a non-click; a tie counts one half.

    Any increasing function of the logits gives the same value, as long as it creates no ties. It takes one sort.

    >>> auc([0, 1, 0, 1], [0.1, 0.4, 0.4, 0.9])
    0.875
    """
    rows = check_rows(labels, logits, weights, finite=False)
    refuse_one_class(rows, "AUC")
    if rows.weights is None and rows.scores.dtype == np.float32:
        positive_N, starts_T = _sort_packed(rows.positive, rows.scores)
    else:
        order_N = np.argsort(rows.scores)
        positive_N = rows.positive[order_N]
        starts_T = _starts(rows.scores[order_N])
        if rows.weights is not None:
            weights_N = rows.weights[order_N] / rows.weights.max()
            clicks_T = np.add.reduceat(weights_N * positive_N, starts_T)
            others_T = np.add.reduceat(weights_N * ~positive_N, starts_T)
            wins = np.dot(clicks_T, np.cumsum(others_T) - others_T / 2)
            return min(float(wins / clicks_T.sum() / others_T.sum()), 1.0)  # Rounding may give 1 + 2e-16.

    # Integers up to the last division: twice the number of pairs won fits int64 for every N below 2^32.
    hits_T = np.add.reduceat(positive_N, starts_T, dtype=np.int64)
    misses_T = np.diff(starts_T, append=positive_N.size) - hits_T
    twice_wins = np.dot(hits_T, 2 * np.cumsum(misses_T) - misses_T)
    return float(twice_wins / (2 * hits_T.sum() * misses_T.sum()))


def _sort_packed(positive_N: Bools, scores_N: NDArray[np.floating]) -> tuple[Bools, NDArray[np.intp]]:
    """Return the labels in the order of their scores, and where each run of tied scores starts.

    Sorting numbers is several times faster than sorting an index. So the score goes into the high bits of an integer,
    mapped so that integers sort like floats (flip all bits of negatives, the sign bit of the rest), and the label goes
    into the lowest bit.
    """
    bits_N = (scores_N + np.float32(0.0)).view(np.uint32)  # Adding 0.0 turns -0.0 into 0.0: they tie.
    flip_N = np.where(bits_N >> 31, np.uint32(0xFFFFFFFF), np.uint32(0x80000000))
    keys_N = (bits_N ^ flip_N).astype(np.uint64) << np.uint64(1) | positive_N
    keys_N.sort()
    return (keys_N & np.uint64(1)).astype(np.bool_), _starts(keys_N >> np.uint64(1))


def _starts(*sorted_columns: NDArray[np.generic]) -> NDArray[np.intp]:
    """Return where each run of equal rows begins, in columns that are sorted together."""
    new_N = np.ones(sorted_columns[0].size, dtype=np.bool_)
    new_N[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in sorted_columns])
    return np.flatnonzero(new_N)


@dataclass(frozen=True)
class Difference:
    """The difference of a metric of two models on the same rows, with its standard error over the drawing of rows."""

    difference: float
    standard_error: float


def are_comparable(labels: ArrayLike) -> bool:
    """Return whether there are two rows of each label, which the error of a difference of AUCs needs.

    >>> are_comparable([0, 0, 1]), are_comparable([0, 0, 1, 1])
    (False, True)
    """
    positive_N = np.asarray(labels) == 1
    return min(int(positive_N.sum()), int((~positive_N).sum())) > 1


def auc_difference(
    labels: ArrayLike, logits_a: ArrayLike, logits_b: ArrayLike, weights: ArrayLike | None = None
) -> Difference:
    """Return the AUC of `logits_a` minus that of `logits_b`, with DeLong's standard error.

    It is the error of drawing rows; how much another seed would change the logits is not part of it.

    >>> auc_difference([0, 0, 1, 1], [1.0, 2.0, 3.0, 4.0], [1.0, 3.0, 2.0, 4.0])
    Difference(difference=0.25, standard_error=0.3535533905932738)
    """
    rows_a, rows_b = (check_rows(labels, logits, weights, finite=False) for logits in (logits_a, logits_b))
    positive_N = rows_a.positive
    clicks, others = int(positive_N.sum()), int((~positive_N).sum())
    if min(clicks, others) < 2:
        raise InputError(
            f"comparing AUCs needs two rows of each label, but {clicks} have label 1 and {others} label 0",
            fix="use more rows",
        )
    won_a_N, won_b_N = (pairs_won(positive_N, rows.scores, rows.masses) for rows in (rows_a, rows_b))
    return Difference(*delong(positive_N, won_a_N - won_b_N, rows_a.masses))


def logloss_difference(
    labels: ArrayLike, logits_a: ArrayLike, logits_b: ArrayLike, weights: ArrayLike | None = None
) -> Difference:
    """Return the logloss of `logits_a` minus that of `logits_b`, with the standard error of the paired difference.

    >>> logloss_difference([0, 1], [0.0, 0.0], [-1.0, 1.0]).difference > 0
    True
    """
    rows_a, rows_b = (check_rows(labels, logits, weights) for logits in (logits_a, logits_b))
    losses_a, losses_b = (
        softplus(np.where(rows.positive, -rows.scores, rows.scores)) for rows in (rows_a, rows_b)
    )
    gaps_N, shares_N = losses_a - losses_b, rows_a.masses / rows_a.masses.sum()
    mean = float(shares_N @ gaps_N)
    return Difference(mean, math.sqrt(float(shares_N**2 @ (gaps_N - mean) ** 2)))


def auc_error(labels: ArrayLike, logits: ArrayLike, weights: ArrayLike | None = None) -> float | None:
    """Return DeLong's standard error of an AUC over the drawing of rows; None with fewer than two rows of a label.

    >>> auc_error([0, 0, 1, 1], [1.0, 3.0, 2.0, 4.0])
    0.3535533905932738
    """
    rows = check_rows(labels, logits, weights, finite=False)
    clicks = int(rows.positive.sum())
    if min(clicks, rows.positive.size - clicks) < 2:
        return None
    return delong(rows.positive, pairs_won(rows.positive, rows.scores, rows.masses), rows.masses)[1]


def delong(positive_N: Bools, won_N: Floats, masses_N: Floats) -> tuple[float, float]:
    """Return the mean of the shares of pairs won, which is the same over both labels, and its standard error."""
    mean = float(np.average(won_N[positive_N], weights=masses_N[positive_N]))
    variance = 0.0
    for of_label_N in (positive_N, ~positive_N):
        share_K = masses_N[of_label_N] / masses_N[of_label_N].sum()
        variance += share_K.size / (share_K.size - 1) * float(share_K**2 @ (won_N[of_label_N] - mean) ** 2)
    return mean, math.sqrt(variance)


def pairs_won(positive_N: Bools, scores_N: NDArray[np.floating], masses_N: Floats) -> Floats:
    """Return, for each row, the share of rows of the other label against which it is ranked correctly.

    A tie counts one half. The mean over clicks is the AUC, and so is the mean over non-clicks; the spread over both
    gives DeLong's error.
    """
    order_N = np.argsort(scores_N)
    starts_T = _starts(scores_N[order_N])
    positive_sorted, masses = positive_N[order_N], masses_N[order_N]
    clicks, others = masses * positive_sorted, masses * ~positive_sorted
    if tied := len(starts_T) < len(order_N):
        clicks, others = np.add.reduceat(clicks, starts_T), np.add.reduceat(others, starts_T)
    below = (np.cumsum(others) - others / 2) / others.sum()
    above = 1 - (np.cumsum(clicks) - clicks / 2) / clicks.sum()
    if tied:
        sizes_T = np.diff(starts_T, append=len(order_N))
        below, above = (np.repeat(share, sizes_T) for share in (below, above))
    won_N = np.empty(len(order_N))
    won_N[order_N] = np.where(positive_sorted, below, above)
    return won_N


@dataclass(frozen=True)
class GroupAuc:
    """The mean AUC within groups, such as users or sessions."""

    auc: float
    num_groups: int
    """Groups in the mean."""
    num_one_class: int
    """Groups that are left out, because all of their rows have the same label."""


def group_auc(
    labels: ArrayLike, logits: ArrayLike, groups: ArrayLike, weights: ArrayLike | None = None
) -> GroupAuc:
    """Return the mean of the groups' AUCs, each weighted by the rows of its group.

    >>> group_auc([0, 1, 1, 0, 1], [0.1, 0.2, 0.3, 0.4, 0.5], ["a", "a", "b", "b", "c"])
    GroupAuc(auc=0.5, num_groups=2, num_one_class=1)
    """
    rows = check_rows(labels, logits, weights, finite=False)
    groups_N = np.asarray(groups)
    if groups_N.shape != np.shape(labels):
        raise InputError(f"groups have shape {groups_N.shape}, labels {np.shape(labels)}")
    if groups_N.dtype.kind not in "iu":  # np.lexsort can't sort Python objects.
        groups_N = np.unique(groups_N, return_inverse=True)[1]
    if rows.kept is not None:
        groups_N = groups_N[rows.kept]

    order_N = np.lexsort((rows.scores, groups_N))
    groups_N, positive_N, masses_N = groups_N[order_N], rows.positive[order_N], rows.masses[order_N]
    starts_T = _starts(groups_N, rows.scores[order_N])
    clicks_T = np.add.reduceat(masses_N * positive_N, starts_T)
    others_T = np.add.reduceat(masses_N * ~positive_N, starts_T)

    first_G = _starts(groups_N[starts_T])  # The first run of ties of each group.
    below_T = np.cumsum(others_T) - others_T / 2
    before_G = (np.cumsum(others_T) - others_T)[first_G]
    below_T -= np.repeat(before_G, np.diff(first_G, append=starts_T.size))
    wins_G, clicks_G, others_G = (
        np.add.reduceat(column_T, first_G) for column_T in (clicks_T * below_T, clicks_T, others_T)
    )
    both_G = (clicks_G > 0) & (others_G > 0)
    if not both_G.any():
        raise InputError(f"none of the {both_G.size} groups has both classes", fix="use larger groups")
    auc_G = wins_G[both_G] / (clicks_G * others_G)[both_G]
    mean = np.average(auc_G, weights=(clicks_G + others_G)[both_G])
    return GroupAuc(float(mean), int(both_G.sum()), int((~both_G).sum()))


@dataclass(frozen=True)
class ReliabilityBin:
    """Rows of similar prediction: a calibrated model has `mean_prediction` near `mean_label`."""

    low: float
    """The smallest prediction in the bin."""
    high: float
    """The largest prediction in the bin."""
    rows: float
    """Total weight of the rows; their number where rows have no weights."""
    mean_prediction: float
    mean_label: float


def reliability_table(
    labels: ArrayLike, probabilities: ArrayLike, weights: ArrayLike | None = None, num_bins: int = 20
) -> list[ReliabilityBin]:
    """Return bins of equal total weight, in ascending order of prediction.

    Equal predictions share the bin into which the middle of their weight falls, so that the table does not depend on
    the order of the rows. Empty bins are left out.

    >>> reliability_table([0, 1], [0.25, 0.5], num_bins=1)
    [ReliabilityBin(low=0.25, high=0.5, rows=2.0, mean_prediction=0.375, mean_label=0.5)]
    """
    rows = check_rows(labels, probabilities, weights)
    p_N = rows.scores.astype(np.float64, copy=False)
    _refuse((p_N < 0) | (p_N > 1), p_N, "probability", "pass probabilities, not logits")
    if num_bins < 1:
        raise InputError(f"num_bins is {num_bins}", fix="use at least one bin")

    order_N = np.argsort(p_N)
    p_N, positive_N, masses_N = p_N[order_N], rows.positive[order_N], rows.masses[order_N]
    starts_T = _starts(p_N)
    masses_T = np.add.reduceat(masses_N, starts_T)
    middles_T = np.cumsum(masses_T) - masses_T / 2
    bins_T = np.minimum(num_bins * middles_T / masses_T.sum(), num_bins - 1).astype(np.int64)

    first_K = starts_T[_starts(bins_T)]
    last_K = np.append(first_K[1:], p_N.size) - 1
    mass_K, predicted_K, clicked_K = (
        np.add.reduceat(column_N, first_K) for column_N in (masses_N, masses_N * p_N, masses_N * positive_N)
    )
    columns = (p_N[first_K], p_N[last_K], mass_K, predicted_K / mass_K, clicked_K / mass_K)
    return [ReliabilityBin(*values) for values in np.column_stack(columns).tolist()]


def expected_calibration_error(
    labels: ArrayLike, probabilities: ArrayLike, weights: ArrayLike | None = None, num_bins: int = 20
) -> float:
    """Return the mean distance of prediction and click rate over the bins of `reliability_table`, by their weight.

    Noise alone keeps it above 0: at rates near 0.2, a perfect model has about a third of sqrt(num_bins / N).

    >>> expected_calibration_error([0, 1], [0.25, 0.5], num_bins=1)
    0.125
    """
    table = reliability_table(labels, probabilities, weights, num_bins)
    gaps = [entry.rows * abs(entry.mean_prediction - entry.mean_label) for entry in table]
    return sum(gaps) / sum(entry.rows for entry in table)
