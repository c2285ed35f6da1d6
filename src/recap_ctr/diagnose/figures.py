"""Families of estimators on the grid, and what is asked of them as combinations of terms.

Shape suffixes: S runs, T points of the trajectory, R routes.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, combinations
from math import comb, prod
from typing import Literal

import numpy as np

from recap_ctr.diagnose.measure import Form, Mean
from recap_ctr.diagnose.terms import Cells, Kind, Term
from recap_ctr.diagnose.theory import AXES

Members = tuple[Cells, ...]
"""A family: estimators that are compared, each given by the cells whose mean logit it is."""
Score = Literal["loss", "auc"]
SUBSETS = 64


def share_removed(num_estimators: int) -> float:
    """1 - 1/M: the part of the variance between exchangeable estimators that the mean of M removes (Eq. 5)."""
    return 1 - 1 / num_estimators


@dataclass(frozen=True, eq=False)
class Families:
    """Families of one size: the same estimators at several points of the axes along which they don't differ."""

    members: Sequence[Members]
    num_runs: int
    cells_per_run: int

    @property
    def size(self) -> int:
        return len(self.members[0])

    def mean(self, form: Callable[[Members], Form], *, least: int = 1, fades: bool = False) -> Mean:
        """`form` averaged over the families; without a run None, if they then have fewer members than `least`.

        A figure that `fades` is 0 for one member and grows like 1 - 1/M, so from families that lack the member of a
        run it is scaled up to those that don't.
        """

        def average(families: Sequence[Members], scale: float = 1.0) -> Form:
            return combine((form(family), scale / len(families)) for family in families)

        def without(left: Sequence[Members]) -> Form | None:
            size = len(left[0])
            if size < (2 if fades else least):
                return None
            return average(left, share_removed(self.size) / share_removed(size) if fades else 1.0)

        return Mean(average(self.members), tuple(without(left) for left in self._without))

    @cached_property
    def _without(self) -> list[list[Members]]:
        """What is left without each run: members lose its cells, families the members that had no others.

        Only the largest families stay. Where some never held the run, those that lost a member to it are not alike.
        """
        found = []
        for run in range(self.num_runs):
            lost = range(run * self.cells_per_run, (run + 1) * self.cells_per_run)
            kept = {
                cells: tuple(cell for cell in cells if cell not in lost) for cells in {*chain(*self.members)}
            }
            left = [tuple(kept[cells] for cells in family if kept[cells]) for family in self.members]
            largest = max(map(len, left))
            found.append([family for family in left if len(family) == largest])
        return found

    def subsets(self, size: int, rng: np.random.Generator, limit: int = SUBSETS) -> "Families":
        """Families of some of the members: all there are, or `limit` random ones, from each about as many."""
        if len(self.members) * comb(self.size, size) <= limit:
            every = [subset for family in self.members for subset in combinations(family, size)]
            return replace(self, members=every)
        drawn: dict[Members, None] = {}
        while len(drawn) < limit:
            family = self.members[len(drawn) % len(self.members)]
            at = np.sort(rng.choice(self.size, size, replace=False))
            drawn[tuple(family[k] for k in at)] = None
        return replace(self, members=list(drawn))


class Grid:
    """The cells of a cube, by their coordinates."""

    def __init__(self, shape: tuple[int, int, int]) -> None:
        self._cells_STR = np.arange(prod(shape)).reshape(shape)
        self.size = dict(zip(AXES, shape, strict=True))
        self.varied = tuple(axis for axis in AXES if self.size[axis] > 1)
        self.nothing = Mean({}, ({},) * self.size["run"])

    def these(self, members: Sequence[Members]) -> Families:
        return Families(members, self.size["run"], self._cells_STR[0].size)

    def families(
        self, along: Collection[str], averaged: Collection[str] = (), held: Mapping[str, int] | None = None
    ) -> Families:
        """Estimators that differ `along` some axes, each the mean over the `averaged` ones.

        There is a family for each point of the axes that are neither; those `held` have one point only. Members are in
        the order of their points.
        """
        cells_STR = self._cells_STR
        for axis, point in (held or {}).items():
            cells_STR = cells_STR.take([point], axis=AXES.index(axis))
        rest = [axis for axis in AXES if axis not in (*along, *averaged)]
        order = [AXES.index(axis) for axis in (*rest, *along, *averaged)]
        sizes = [prod(cells_STR.shape[AXES.index(axis)] for axis in axes) for axes in (rest, along, averaged)]
        families = cells_STR.transpose(order).reshape(sizes).tolist()
        return self.these([tuple(sorted(tuple(sorted(cells)) for cells in family)) for family in families])


def combine(parts: Iterable[tuple[Form, float]]) -> Form:
    """The weighted sum of linear combinations."""
    total: Form = {}
    for form, scale in parts:
        for term, share in form.items():
            total[term] = total.get(term, 0.0) + scale * share
    return total


def linear(means: Sequence[Mean], shares: Sequence[float]) -> Mean:
    """The weighted sum of means."""

    def total(forms: Sequence[Form | None]) -> Form | None:
        known = [form for form in forms if form is not None]
        return combine(zip(known, shares, strict=True)) if len(known) == len(forms) else None

    form = combine(zip([mean.form for mean in means], shares, strict=True))
    return Mean(form, tuple(total(forms) for forms in zip(*(mean.without for mean in means), strict=True)))


def alone(kind: Score) -> Callable[[Members], Form]:
    """Mean over the members of a family."""
    return lambda family: {Term(kind, (cells,)): 1 / len(family) for cells in family}


def together(kind: Score) -> Callable[[Members], Form]:
    """That of the members' mean logit (Eq. 2)."""
    return lambda family: {Term(kind, (tuple(sorted(chain(*family))),)): 1.0}


def gain(kind: Score) -> Callable[[Members], Form]:
    """What the mean logit has over its members: a lower loss, or a higher AUC."""
    return lambda family: _over(kind, alone(kind)(family), family)


def gain_over_last(kind: Score) -> Callable[[Members], Form]:
    """What it has over the last of them."""
    return lambda family: _over(kind, {Term(kind, (family[-1],)): 1.0}, family)


def _over(kind: Score, before: Form, family: Members) -> Form:
    sign = 1.0 if kind == "loss" else -1.0
    return combine([(before, sign), (together(kind)(family), -sign)])


def among(kind: Kind) -> Callable[[Members], Form]:
    """A term of all members of a family."""
    return lambda family: {Term(kind, family): 1.0}
