"""Figures computed from means over rows, with intervals for other rows and for other runs.

A figure is a function of a few means, and a mean is a linear combination of terms. So one pass over the rows gives all
figures. The bootstrap over rows resamples groups of rows; the jackknife over runs uses terms of estimators without a
run.

Shape suffixes: G groups of rows, D bootstrap draws, S runs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from math import nan
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from recap_ctr.diagnose.cube import Cube
from recap_ctr.diagnose.terms import BLOCK_ROWS, GROUPS, Influence, Rows, Term, tabulate
from recap_ctr.diagnose.theory import Floats

DRAWS, LEVEL = 1_000, 0.95
ENDS = (DRAWS // 40 - 1, DRAWS - DRAWS // 40)  # ranks of the draws that 2.5 % lie below and 2.5 % above
Result = TypeVar("Result")
Form = dict[Term, float]
"""A linear combination of terms."""


@dataclass(frozen=True)
class Estimate:
    """A figure and its 95 % intervals, each for one source of chance with the other held fixed.

    `low` to `high` is for other rows, drawn independently. `runs_low` to `runs_high` is for other runs on the same
    rows; None if there are too few runs to tell.
    """

    value: float
    low: float
    high: float
    runs_low: float | None = None
    runs_high: float | None = None

    def scaled(self, factor: float) -> "Estimate":
        """Return the figure and its intervals times a positive factor."""
        runs = (None if end is None else factor * end for end in (self.runs_low, self.runs_high))
        return Estimate(factor * self.value, factor * self.low, factor * self.high, *runs)


@dataclass(frozen=True, eq=False)
class Mean:
    """A linear combination of terms: with all runs, and without each run in turn (None: too few are left)."""

    form: Form
    without: tuple[Form | None, ...]


@dataclass(frozen=True, eq=False)
class Figure:
    """The function `of` of some means. If it is `positive`, the jackknife works on its logarithm."""

    means: tuple[Mean, ...]
    of: Callable[..., Any] = lambda mean: mean
    positive: bool = False


EstimateFigure = Callable[[Figure], Estimate]


def measure(
    cube: Cube,
    labels: npt.ArrayLike,
    build: Callable[[EstimateFigure], Result],
    *,
    weights: npt.ArrayLike | None = None,
    seed: int = 0,
    block_rows: int = BLOCK_ROWS,
) -> Result:
    """Return what `build` makes of the estimates of its figures.

    `build` is called twice and must request the same figures both times: first with estimates that are NaN, to
    collect the terms it needs; then, after the pass over the rows, with real estimates.
    """
    terms: set[Term] = set()

    def collect(figure: Figure) -> Estimate:
        for form in chain.from_iterable((mean.form, *mean.without) for mean in figure.means):
            terms.update(form or ())
        return Estimate(nan, nan, nan)

    build(collect)
    rows = Rows.check(cube, labels, weights, seed)
    return build(_Table(tabulate(cube, rows, terms, block_rows), seed).estimate)


class _Table:
    """The values of terms, and how each group of rows changes them."""

    def __init__(self, terms: dict[Term, Influence], seed: int) -> None:
        self._terms = terms
        self._counts_DG = _resamples(seed)
        self._drawn: dict[Mean, Floats] = {}

    def estimate(self, figure: Figure) -> Estimate:
        """Return a figure with its intervals."""
        value = float(figure.of(*(self._value(mean.form) for mean in figure.means)))
        draws_D = np.broadcast_to(figure.of(*(self._draws(mean) for mean in figure.means)), DRAWS)
        low, high = np.partition(draws_D, ENDS)[list(ENDS)].tolist()
        without = list(zip(*(mean.without for mean in figure.means), strict=True))
        if len(without) < 2 or any(form is None for forms in without for form in forms):
            return Estimate(value, low, high)
        replicates = [float(figure.of(*(self._value(form or {}) for form in forms))) for forms in without]
        return Estimate(value, low, high, *jackknife(value, replicates, positive=figure.positive))

    def _value(self, form: Form) -> float:
        return sum(share * self._terms[term].value for term, share in form.items())

    def _draws(self, mean: Mean) -> Floats:
        if mean not in self._drawn:
            by_group_G = np.zeros(GROUPS)
            for term, share in mean.form.items():
                by_group_G += share * self._terms[term].by_group_G
            self._drawn[mean] = self._value(mean.form) + self._counts_DG @ by_group_G
        return self._drawn[mean]


@lru_cache(maxsize=4)
def _resamples(seed: int) -> Floats:
    """Return how often each bootstrap draw contains each group."""
    drawn_DG = np.random.default_rng(seed).multinomial(GROUPS, np.full(GROUPS, 1 / GROUPS), DRAWS)
    return drawn_DG.astype(np.float64)


def jackknife(value: float, replicates: list[float], *, positive: bool = False) -> tuple[float, float]:
    """Return an interval from the values without each run, by Student's t; for a mean over runs, the usual one.

    A positive figure is taken on the log scale, where variances between runs are far closer to normal. In simulations
    of 3 to 16 runs whose noise has one to a thousand dimensions, that interval contains the truth in 94 to 99.8 % of
    cases, the one on the plain scale in 80 to 98 %.
    """
    logarithmic = positive and min(value, *replicates) > 0
    centre, values_S = (np.log(value), np.log(replicates)) if logarithmic else (value, np.array(replicates))
    from scipy.special import stdtrit  # The inverse of Student's distribution function.

    reach = stdtrit(len(values_S) - 1, (1 + LEVEL) / 2) * np.sqrt((len(values_S) - 1) * values_S.var())
    low, high = float(centre - reach), float(centre + reach)
    return (float(np.exp(low)), float(np.exp(high))) if logarithmic else (low, high)
