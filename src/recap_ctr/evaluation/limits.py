"""How far a share may be from the usual one before chance and ordinary variation no longer explain it.

Shape suffixes: P periods, G groups of periods, K shares that are judged, V values, T tilts of a distribution.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
MAX_EXCHANGED, TILTS = 1_000, 40
MIN_GROUPS = 16
MOST_OF_ALL, NEARLY_ALL = 0.9, 0.99
"""Where no group of rows had a share above the first, one above the second is not ordinary, however shares vary."""
ALIKE = 2.0  # Neighbouring rows are alike, so that they vary as if they were half as many.


@dataclass(frozen=True, eq=False)
class ShareLimits:
    """The usual shares, and the lowest and highest that still are ordinary."""

    usual_K: Floats
    low_K: Floats
    high_K: Floats


def share_limits(
    counts_PK: npt.NDArray[np.int64],
    totals_P: npt.NDArray[np.int64],
    total: int,
    *,
    chance: float,
    least: Floats | float = 0.0,
    alike: bool = False,
) -> ShareLimits:
    """Return the limits of shares among `total` rows, from counts among the `totals_P` rows of earlier periods.

    Periods are joined into groups with about `total` rows, and the shares' variation between groups says what is
    ordinary: a share beyond its limits comes with a probability of about `chance`. No limit is closer to the usual
    share than `least`. Shares that are `alike` may each vary as much as the most variable of them did: where values
    come and go, the next to come is not known.
    """
    grouped_GK, rows_G = group_counts(counts_PK, totals_P, total)
    num_rows, num_groups = max(float(rows_G.sum()), 1.0), len(rows_G)
    usual_K = grouped_GK.sum(axis=0) / num_rows
    # As if half a row more had the value, and half a row more had not.
    smooth_K = (grouped_GK.sum(axis=0) + 0.5) / (num_rows + 1.0)
    chance_K = smooth_K * (1.0 - smooth_K)
    group_rows = num_rows / num_groups
    squares_GK = (grouped_GK / np.maximum(rows_G, 1)[:, None] - usual_K) ** 2
    between_K = squares_GK.sum(axis=0) / max(num_groups - 1, 1)
    between_K = np.maximum(between_K, _trend(grouped_GK, rows_G))
    if alike:
        between_K = np.full_like(between_K, between_K.max(initial=0.0))
    variance_K = np.maximum(between_K, chance_K / group_rows)
    variance_K = variance_K + ALIKE * chance_K * max(1.0 / total - 1.0 / group_rows, 0.0)
    variance_K = variance_K * (1.0 + 1.0 / num_groups)
    # The second term is Bernstein's, for shares so small that a few rows are many.
    z = normal_quantile(chance)
    width_K = student_quantile(chance, num_groups - 1) * np.sqrt(variance_K) + z * z / (3.0 * total)
    width_K = np.maximum(width_K, least)
    most_K = np.max(grouped_GK / np.maximum(rows_G, 1)[:, None], axis=0)
    high_K = np.minimum(usual_K + width_K, np.where(most_K < MOST_OF_ALL, NEARLY_ALL, 1.0))
    return ShareLimits(usual_K, np.maximum(usual_K - width_K, 0.0), high_K)


def _trend(grouped_GK: Floats, rows_G: Floats) -> Floats:
    """Return the mean square by which the later half of the groups is off the mean of the earlier half."""
    half = len(rows_G) // 2
    if not half:
        return np.zeros(grouped_GK.shape[1])
    before_K = grouped_GK[:half].sum(axis=0) / max(float(rows_G[:half].sum()), 1.0)
    later_GK = grouped_GK[half:] / np.maximum(rows_G[half:], 1)[:, None]
    return np.asarray(((later_GK - before_K) ** 2).mean(axis=0))


def exchanged_limit(shares_V: Floats, probability: float, chance: float) -> float:
    """Return the highest ordinary share that new values have, where each of V values, with these shares, has been
    exchanged for a new one with some `probability`: more comes with a probability of at most `chance`.

    It is Chernoff's bound. A few common values decide, which a mean and a variance would not show.

    >>> exchanged_limit(np.full(1_000, 0.001), 0.0, 1e-4), exchanged_limit(np.ones(1), 1.0, 1e-4)
    (0.0, 1.0)
    >>> even, uneven = np.full(1_000, 0.001), np.array([0.4, *[0.001] * 600])
    >>> [round(exchanged_limit(shares_V, 0.05, 1e-4), 3) for shares_V in (even, uneven)]
    [0.082, 0.451]
    """
    if not 0.0 < probability < 1.0:
        return float(probability) * float(shares_V.sum())
    commonest_V = np.sort(shares_V)[::-1]
    some_V = commonest_V[:MAX_EXCHANGED]
    # Rarer values are so many that about as many of them are new as is to be expected.
    rest = probability * float(commonest_V[MAX_EXCHANGED:].sum())
    tilts_T1 = np.geomspace(1.0, 4.0 / max(float(some_V.min(initial=1.0)), 1e-4), TILTS)[:, None]
    exponents_TV = np.logaddexp(math.log1p(-probability), math.log(probability) + tilts_T1 * some_V)
    bounds_T = (exponents_TV.sum(axis=1) - math.log(chance)) / tilts_T1[:, 0]
    return min(rest + float(bounds_T.min()), float(commonest_V.sum()))


def group_counts(
    counts_PK: npt.NDArray[np.int64], totals_P: npt.NDArray[np.int64], total: int
) -> tuple[Floats, Floats]:
    """Join neighbouring periods until each group has about `total` rows, but keep `MIN_GROUPS` if there are as many."""
    all_rows = int(totals_P.sum())
    target = max(min(total, all_rows / MIN_GROUPS), 1.0)
    middles_P = np.cumsum(totals_P) - totals_P / 2
    _, groups_P = np.unique((middles_P / target).astype(np.int64), return_inverse=True)
    num_groups = int(groups_P.max(initial=0)) + 1
    rows_G = np.bincount(groups_P, totals_P, minlength=num_groups)
    counts_GK = np.zeros((num_groups, counts_PK.shape[1]))
    np.add.at(counts_GK, groups_P, counts_PK)
    is_full = rows_G >= rows_G.max() / 2  # What is left over at the end says little.
    return counts_GK[is_full], rows_G[is_full]


def normal_quantile(chance: float) -> float:
    """Return how many standard deviations a normal number exceeds, either way, with this probability.

    >>> round(normal_quantile(0.05), 3)
    1.96
    """
    return -NormalDist().inv_cdf(chance / 2)


def student_quantile(chance: float, freedom: int) -> float:
    """Return the quantile of Student's t (Wallace's approximation); infinity without a degree of freedom.

    >>> round(student_quantile(0.05, 10), 2), round(student_quantile(1e-5, 10), 1)
    (2.23, 8.2)
    """
    if freedom < 1:
        return math.inf
    z = normal_quantile(chance) * (8 * freedom + 3) / (8 * freedom + 1)
    exponent = z * z / freedom
    return math.sqrt(freedom * math.expm1(exponent)) if exponent < 700 else math.inf
