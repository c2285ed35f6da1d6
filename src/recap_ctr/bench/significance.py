"""Tests of differences between runs: t-tests, Holm's correction, and how small a difference could be detected."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy.optimize import brentq
from scipy.special import ndtr, stdtr, stdtrit
from scipy.stats import chi2
from scipy.stats import t as student_t

from recap_ctr.bench.arms import Arm
from recap_ctr.errors import InputError

Floats = npt.NDArray[np.float64]
QUANTILES = 200  # Of each side's variance, for the power of Welch's test.


@dataclass(frozen=True)
class Difference:
    """A mean difference, with what a two-tailed t-test says of it; None where there are too few runs for that."""

    mean: float
    standard_error: float | None = None
    low: float | None = None
    """Lower end of the 95 % confidence interval; `high` is the upper end."""
    high: float | None = None
    p: float | None = None
    seeds: tuple[int, ...] = ()
    """The seeds that both arms have, if the difference is paired over seeds."""


def _check_splits(baseline: Arm, arm: Arm) -> None:
    if baseline.split != arm.split:
        raise InputError(
            f"{baseline.name!r} has figures of the {baseline.split} split, {arm.name!r} of the {arm.split} split",
            fix="compare arms on the same rows",
        )


def paired_difference(baseline: Arm, arm: Arm, metric: str) -> Difference | None:
    """Return `arm` minus `baseline` over the seeds that both have, by a paired t-test; None if they share no seed.

    Pairs are for arms of one model: the same seed gives them the same initial weights and the same order of rows.

    If all differences are equal there is no p, except that it is 1 if they are all 0.
    """
    _check_splits(baseline, arm)
    before, after = baseline.by_seed(metric), arm.by_seed(metric)
    seeds = tuple(seed for seed in baseline.seeds if seed in after)
    gaps = [after[seed] - before[seed] for seed in seeds]
    if not gaps:
        return None
    if len(gaps) == 1:
        return Difference(gaps[0], seeds=seeds)
    mean, error = statistics.mean(gaps), statistics.stdev(gaps) / math.sqrt(len(gaps))
    rounding = 1e-14 * max(abs(values[seed]) for values in (before, after) for seed in seeds)
    if error <= rounding:
        return Difference(mean, 0.0, mean, mean, 1.0 if abs(mean) <= rounding else None, seeds)
    freedom = len(gaps) - 1
    reach = error * float(stdtrit(freedom, 0.975))
    p = 2 * float(stdtr(freedom, -abs(mean) / error))
    return Difference(mean, error, mean - reach, mean + reach, p, seeds)


@dataclass(frozen=True)
class Comparison:
    """One arm against another, in AUC: the difference of the means over seeds, and Welch's t-test of it."""

    gap: float
    p: float | None
    """Two-tailed, with Holm's correction for all comparisons of the table; None where a side has only one run."""
    uncorrected_p: float | None
    """The same without correction, for the single comparison with the best baseline."""


def compare(arms: Mapping[str, Arm], name: str) -> dict[str, Comparison]:
    """Compare the arm `name` with each other arm; return nothing if there is no such arm.

    The models differ, so that equal seeds have neither initial weights nor a course of training in common: the test is
    not paired.
    """
    if name not in arms:
        return {}
    comparisons = {other: _compare(arms[name], arm) for other, arm in arms.items() if other != name}
    corrected = holm({other: result.p for other, result in comparisons.items() if result.p is not None})
    return {other: replace(result, p=corrected.get(other)) for other, result in comparisons.items()}


def _compare(arm: Arm, other: Arm) -> Comparison:
    """Return `arm` minus `other`, with a p that is not corrected yet."""
    _check_splits(arm, other)
    aucs, others = arm.figures["auc"], other.figures["auc"]
    gap, p = statistics.mean(aucs) - statistics.mean(others), None
    if len(aucs) > 1 and len(others) > 1:
        squares = [statistics.variance(values) / len(values) for values in (aucs, others)]
        if sum(squares) > 0:
            parts = [
                square**2 / (len(values) - 1) for square, values in zip(squares, (aucs, others), strict=True)
            ]
            p = 2 * float(stdtr(sum(squares) ** 2 / sum(parts), -abs(gap) / math.sqrt(sum(squares))))
    return Comparison(gap, p, p)


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Correct p-values by Holm's method: multiply each by the number of those that are not smaller, and never let them
    fall.

    >>> holm({"a": 0.01, "b": 0.04, "c": 0.03})
    {'a': 0.03, 'c': 0.06, 'b': 0.06}
    """
    corrected: dict[str, float] = {}
    largest = 0.0
    for rank, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        largest = max(largest, min(1.0, p * (len(p_values) - rank)))
        corrected[name] = largest
    return corrected


def detectable_difference(arm: Arm, other: Arm, level: float = 0.05) -> float | None:
    """Return the smallest true difference in AUC that Welch's test at `level` would find with a power of 80 %.

    The runs are taken to vary as much as they did here. None where there are too few, or where they are all equal.
    """
    if min(len(arm.seeds), len(other.seeds)) < 2:
        return None
    auc_figures = arm.figures["auc"], other.figures["auc"]
    squares = [statistics.variance(values) / len(values) for values in auc_figures]
    error = math.sqrt(sum(squares))
    if error == 0:
        return None
    limits = error * _welch_limits(
        [square / error**2 for square in squares], list(map(len, auc_figures)), level
    )

    def missing_power(difference: float) -> float:
        return 0.8 - float(ndtr((difference - limits) / error).mean())  # The other tail adds hardly anything.

    return float(brentq(missing_power, 0.0, float(limits.max()) + 10 * error, xtol=1e-6 * error))


def _welch_limits(shares: Sequence[float], counts: Sequence[int], level: float) -> Floats:
    """Return the differences, in true standard errors, beyond which Welch's test finds one, equally likely each.

    Which one applies depends on how much the runs of the two sides happen to vary; `shares` are what each side's
    variance is of that of the difference.
    """
    middles = (np.arange(QUANTILES) + 0.5) / QUANTILES
    drawn = [
        share * chi2.ppf(middles, count - 1) / (count - 1)
        for share, count in zip(shares, counts, strict=True)
    ]
    first, second = np.meshgrid(*drawn)
    parts = first**2 / (counts[0] - 1) + second**2 / (counts[1] - 1)
    limits: Floats = stdtrit((first + second) ** 2 / parts, 1 - level / 2) * np.sqrt(first + second)
    return limits


def chance_limit(noise: float, noise_runs: int, values: int, runs: int) -> float:
    """Return the difference that chance alone exceeds in at most one table of twenty.

    The table compares `values` means of `runs` runs each with one such mean. `noise` is the standard deviation between
    seeds, measured over `noise_runs` runs: hence Student's t, corrected for `values` comparisons by Bonferroni.
    """
    return float(student_t.ppf(1 - 0.025 / values, noise_runs - 1)) * noise * math.sqrt(2 / runs)
