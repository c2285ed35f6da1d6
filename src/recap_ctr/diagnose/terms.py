"""Means over rows of the estimators' losses, variances and differences, all in one pass over batches of rows.

Rows are split into 256 random groups. Each mean is also taken by group, for the bootstrap to resample.

Shape suffixes: N rows, B rows of a batch, C cells of the grid, K estimators, M members of a family, G groups.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from recap_ctr.diagnose.cube import Cube, Ints
from recap_ctr.diagnose.theory import Floats, curvature
from recap_ctr.evaluation.metrics import check_rows, pairs_won, refuse_one_class, sigmoid

GROUPS = 256
BLOCK_ROWS = 1 << 13
CHUNK = 32
"""Estimators whose losses are computed together, so that their batch stays in the processor's cache."""
RANKED_ROWS, RANKED_LOGITS = 500_000, 100_000_000  # the most that are kept in memory for sorting

Bools = npt.NDArray[np.bool_]
Cells = tuple[int, ...]
Kind = Literal[
    "loss", "variance", "curved", "logit", "logit²", "probability", "probability²", "auc", "decile"
]
SPREADS: tuple[Kind, ...] = ("variance", "curved")
CHANGES: tuple[Kind, ...] = ("logit", "logit²", "probability", "probability²")
RANKED: tuple[Kind, ...] = ("auc", "decile")


class Term(NamedTuple):
    """A mean over rows that some estimators determine; an estimator is the mean logit of some cells.

    By kind: `loss` is the cross-entropy of one estimator, `auc` its AUC. `variance` is the population variance between
    several, `curved` half of it times the curvature at their mean. `logit` and `probability` are the absolute
    difference of two, with ² its square. `decile` is whether two put a row in different tenths of all rows.
    """

    kind: Kind
    estimators: tuple[Cells, ...]


class Influence(NamedTuple):
    """A term's value, and how much it changes, to first order, if a group of rows is counted once more."""

    value: float
    by_group_G: Floats


@dataclass(frozen=True, eq=False)
class Rows:
    """Labels and weights of the rows."""

    positive_N: Bools
    weights_N: Floats | None
    seed: int

    @classmethod
    def check(cls, cube: Cube, labels: npt.ArrayLike, weights: npt.ArrayLike | None, seed: int) -> "Rows":
        """Return the rows of a cube; refuse labels and weights that don't fit, or labels of one class."""
        refuse_one_class(check_rows(labels, np.zeros(len(cube), np.float32), weights), "a diagnosis")
        weights_N = None if weights is None else np.asarray(weights, np.float64)
        return cls(np.asarray(labels) == 1, weights_N, seed)

    def masses(self, at: slice | Ints) -> Floats:
        """Return the weights of some rows; 1 each if the rows have none."""
        return np.ones(len(self.positive_N[at])) if self.weights_N is None else self.weights_N[at]

    def groups(self, at_B: npt.NDArray[np.integer[Any]]) -> Ints:
        """Return the group of each row: a hash (splitmix64) of its number, whatever the size of batches."""
        mixed_B = at_B.astype(np.uint64) + np.uint64((self.seed + 1) * 0x9E3779B97F4A7C15 % 2**64)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed_B = (mixed_B ^ (mixed_B >> np.uint64(shift))) * np.uint64(factor)
        return (mixed_B >> np.uint64(56)).astype(np.intp)


def num_ranked(cube: Cube) -> int:
    """Return how many rows are sorted for the terms that need an order of rows."""
    return min(len(cube), RANKED_ROWS, RANKED_LOGITS // cube.num_cells)


def tabulate(cube: Cube, rows: Rows, terms: Collection[Term], block_rows: int) -> dict[Term, Influence]:
    """Return the values of `terms`; those that need an order of rows are taken from evenly spaced rows."""
    ranked = {term for term in terms if term.kind in RANKED}
    count = num_ranked(cube) if ranked else 0
    at_N = np.arange(count) * len(cube) // max(count, 1)
    sample_CN = np.empty((cube.num_cells, count), np.result_type(*cube.sources))
    sums = _Sums(cube.num_cells, {term for term in terms if term not in ranked})
    for start in range(0, len(cube), block_rows):
        logits_CB = cube.block(start, start + block_rows)
        first, last = np.searchsorted(at_N, [start, start + block_rows])
        sample_CN[:, first:last] = logits_CB[:, at_N[first:last] - start]
        sums.add(logits_CB, rows, start)
    return sums.finish() | _ranked(sample_CN, rows, at_N, ranked)


def averaging(estimators: Sequence[Cells], num_cells: int) -> Floats:
    """Return the matrix that maps the logits of the cells to those of the estimators."""
    shares_KC = np.zeros((len(estimators), num_cells))
    for share_C, cells in zip(shares_KC, estimators, strict=True):
        share_C[list(cells)] = 1 / len(cells)
    return shares_KC


class _Sums:
    """Sums over the rows of each group, for the terms that need no order of rows."""

    def __init__(self, num_cells: int, terms: Collection[Term]) -> None:
        def estimators_of(kinds: tuple[Kind, ...]) -> list[tuple[Cells, ...]]:
            return sorted({term.estimators for term in terms if term.kind in kinds})

        losses, families, pairs = estimators_of(("loss",)), estimators_of(SPREADS), estimators_of(CHANGES)
        compared = sorted({*chain(*families, *pairs)})
        place = {cells: k for k, cells in enumerate(compared)}
        self._loss_KC = averaging([cells for (cells,) in losses], num_cells)
        self._compared_KC = averaging(compared, num_cells)
        self._families = [[place[cells] for cells in family] for family in families]
        self._pairs = [(place[first], place[second]) for first, second in pairs]
        self._terms = [
            *(Term("loss", estimator) for estimator in losses),
            *(Term(kind, family) for family in families for kind in SPREADS),
            *(Term(kind, pair) for pair in pairs for kind in CHANGES),
        ]
        self._sums_KG = np.zeros((len(self._terms) + 1, GROUPS))  # the last is the mass of the rows

    def add(self, logits_CB: Floats, rows: Rows, start: int) -> None:
        """Add a batch. Its rows are sorted by group, so that the sum of a group is that of a slice."""
        at_B = np.arange(start, start + logits_CB.shape[1])
        groups_B = rows.groups(at_B)
        order_B = np.argsort(groups_B, kind="stable")
        present_G, first_G = np.unique(groups_B[order_B], return_index=True)
        at_B, row = at_B[order_B], 0
        for values_KB in self._values(logits_CB[:, order_B], rows.positive_N[at_B]):
            if rows.weights_N is not None:
                values_KB = values_KB * rows.weights_N[at_B]
            part = slice(row, row := row + len(values_KB))
            self._sums_KG[part, present_G] += np.add.reduceat(values_KB, first_G, axis=1)

    def _values(self, logits_CB: Floats, positive_B: Bools) -> Iterator[Floats]:
        """Yield the value of each term in each row, in the order of the terms, then a 1 for each row."""
        sign_B = np.where(positive_B, -1.0, 1.0)
        for first in range(0, len(self._loss_KC), CHUNK):
            yield _softplus(sign_B * (self._loss_KC[first : first + CHUNK] @ logits_CB))
        compared_KB = self._compared_KC @ logits_CB
        for members in self._families:
            logits_MB = compared_KB[members]
            mean_B, variance_B = logits_MB.mean(axis=0), logits_MB.var(axis=0)
            yield np.stack([variance_B, 0.5 * curvature(mean_B) * variance_B])
        probabilities = {k: sigmoid(compared_KB[k]) for k in {*chain(*self._pairs)}}
        for first, second in self._pairs:
            logit_B = compared_KB[first] - compared_KB[second]
            probability_B = probabilities[first] - probabilities[second]
            yield np.stack([np.abs(logit_B), logit_B**2, np.abs(probability_B), probability_B**2])
        yield np.ones((1, len(sign_B)))

    def finish(self) -> dict[Term, Influence]:
        """Return the terms over all rows that were added."""
        masses_G = self._sums_KG[-1]
        values_K = self._sums_KG[:-1].sum(axis=1) / masses_G.sum()
        by_group_KG = (self._sums_KG[:-1] - values_K[:, None] * masses_G) / masses_G.sum()
        return dict(zip(self._terms, map(Influence, values_K.tolist(), by_group_KG), strict=True))


def _softplus(logits: Floats) -> Floats:
    """Return log(1 + exp(z)) in half the time of `metrics.softplus`, with an absolute error of 1e-16."""
    log1p = np.exp(-np.abs(logits))
    log1p += 1.0
    return np.asarray(np.log(log1p, out=log1p) + np.maximum(logits, 0.0))


def _ranked(sample_CN: npt.NDArray[Any], rows: Rows, at_N: Ints, terms: set[Term]) -> dict[Term, Influence]:
    """Return the terms that need an order of rows, on a sample of the rows."""
    if not terms:
        return {}
    positive_N, masses_N, groups_N = rows.positive_N[at_N], rows.masses(at_N), rows.groups(at_N)
    refuse_one_class(check_rows(positive_N, sample_CN[0], masses_N), "AUC")
    clicks_N, others_N = masses_N * positive_N, masses_N * ~positive_N

    def score(cells: Cells) -> Floats:
        return np.asarray(sample_CN[list(cells)].mean(axis=0, dtype=np.float64))

    def by_group(values_N: Floats) -> Floats:
        return np.bincount(groups_N, values_N, GROUPS).astype(np.float64)

    influences, deciles = {}, {}
    for term in sorted(terms):
        if term.kind == "auc":
            won_N = pairs_won(positive_N, score(term.estimators[0]), masses_N)
            value = float(clicks_N @ won_N / clicks_N.sum())
            share_N = clicks_N / clicks_N.sum() + others_N / others_N.sum()
            influences[term] = Influence(value, by_group(share_N * (won_N - value)))
        else:
            for cells in term.estimators:
                if cells not in deciles:
                    deciles[cells] = decile(score(cells), masses_N)
            first_N, second_N = (deciles[cells] for cells in term.estimators)
            share_N = masses_N / masses_N.sum()
            value = float(share_N @ (first_N != second_N))
            influences[term] = Influence(value, by_group(share_N * ((first_N != second_N) - value)))
    return influences


def decile(scores_N: Floats, masses_N: Floats) -> npt.NDArray[np.int8]:
    """Return the tenth of all rows, by weight, that each row's score lies in, 0 to 9.

    Rows with the same score get the tenth of their middle.
    """
    order_N, starts = _ties(scores_N)
    masses = np.add.reduceat(masses_N[order_N], starts)
    tenths = np.minimum(10 * (np.cumsum(masses) - masses / 2) / masses.sum(), 9).astype(np.int8)
    tenths_N = np.empty(len(order_N), np.int8)
    tenths_N[order_N] = np.repeat(tenths, np.diff(starts, append=len(order_N)))
    return tenths_N


def _ties(scores_N: Floats) -> tuple[Ints, Ints]:
    """Return the rows in ascending order of score, and where in it each group of equal scores begins."""
    order_N = np.argsort(scores_N)
    sorted_N = scores_N[order_N]
    return order_N, np.flatnonzero(np.append(True, sorted_N[1:] != sorted_N[:-1]))
