"""Families of estimators on the grid, and their figures as linear combinations of terms.

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
"""A family of estimators to compare, each given by the cells whose mean logit it is."""
Score = Literal["loss", "auc"]
MAX_SUBSETS = 64


def share_removed(num_estimators: int) -> float:
    """Return 1 - 1/M: the share of the variance between exchangeable estimators that a mean of M removes (Eq. 5)."""
    return 1 - 1 / num_estimators


@dataclass(frozen=True, eq=False)
class Families:
    """Families of one size: the same estimators at several points of the axes along which they don't vary."""

    members: Sequence[Members]
    num_runs: int
    cells_per_run: int

    @property
    def size(self) -> int:
        """Return the number of estimators in each family."""
        return len(self.members[0])

    def mean(self, form: Callable[[Members], Form], *, min_members: int = 1, grows: bool = False) -> Mean:
        """Return the mean of `form` over the families, with all runs and without each run in turn.

        Without a run it is None if fewer than `min_members` members are left. A figure that `grows` is 0 for one
        member and proportional to 1 - 1/M for M members, so without a run it is scaled up to the full size.
        """

        def average(families: Sequence[Members], scale: float = 1.0) -> Form:
            return combine((form(family), scale / len(families)) for family in families)

        def without(families: Sequence[Members]) -> Form | None:
            size = len(families[0])
            if size < (2 if grows else min_members):
                return None
            return average(families, share_removed(self.size) / share_removed(size) if grows else 1.0)

        return Mean(average(self.members), tuple(without(families) for families in self._without_each_run))

    @cached_property
    def _without_each_run(self) -> list[list[Members]]:
        """Return the families without each run: members lose its cells, and families the members that had no others.

        Only the largest families are kept: if some families never contained the run, those that lost a member to it
        are not comparable with them.
        """
        families_by_run = []
        for run in range(self.num_runs):
            removed = range(run * self.cells_per_run, (run + 1) * self.cells_per_run)
            remaining = {
                cells: tuple(cell for cell in cells if cell not in removed)
                for cells in {*chain(*self.members)}
            }
            families = [
                tuple(remaining[cells] for cells in family if remaining[cells]) for family in self.members
            ]
            largest = max(map(len, families))
            families_by_run.append([family for family in families if len(family) == largest])
        return families_by_run

    def subsets(self, size: int, rng: np.random.Generator, limit: int = MAX_SUBSETS) -> "Families":
        """Return all families of `size` of the members, or `limit` random ones, about as many from each family."""
        if len(self.members) * comb(self.size, size) <= limit:
            subsets = [subset for family in self.members for subset in combinations(family, size)]
            return replace(self, members=subsets)
        drawn: dict[Members, None] = {}
        while len(drawn) < limit:
            family = self.members[len(drawn) % len(self.members)]
            places = np.sort(rng.choice(self.size, size, replace=False))
            drawn[tuple(family[place] for place in places)] = None
        return replace(self, members=list(drawn))


class Grid:
    """The cells of a cube, by their coordinates."""

    def __init__(self, shape: tuple[int, int, int]) -> None:
        self._cells_STR = np.arange(prod(shape)).reshape(shape)
        self.size = dict(zip(AXES, shape, strict=True))
        self.varied = tuple(axis for axis in AXES if self.size[axis] > 1)
        self.zero = Mean({}, ({},) * self.size["run"])

    def families_of(self, members: Sequence[Members]) -> Families:
        """Return families with these members."""
        return Families(members, self.size["run"], self._cells_STR[0].size)

    def families(
        self, along: Collection[str], averaged: Collection[str] = (), held: Mapping[str, int] | None = None
    ) -> Families:
        """Return families of estimators that vary `along` some axes, each the mean over the `averaged` axes.

        There is one family for each point of the other axes; axes in `held` have only that point. Members are in the
        order of their points.
        """
        cells_STR = self._cells_STR
        for axis, point in (held or {}).items():
            cells_STR = cells_STR.take([point], axis=AXES.index(axis))
        others = [axis for axis in AXES if axis not in (*along, *averaged)]
        order = [AXES.index(axis) for axis in (*others, *along, *averaged)]
        sizes = [
            prod(cells_STR.shape[AXES.index(axis)] for axis in axes) for axes in (others, along, averaged)
        ]
        families = cells_STR.transpose(order).reshape(sizes).tolist()
        return self.families_of(
            [tuple(sorted(tuple(sorted(cells)) for cells in family)) for family in families]
        )


def combine(parts: Iterable[tuple[Form, float]]) -> Form:
    """Return the weighted sum of linear combinations."""
    total: Form = {}
    for form, scale in parts:
        for term, share in form.items():
            total[term] = total.get(term, 0.0) + scale * share
    return total


def linear(means: Sequence[Mean], shares: Sequence[float]) -> Mean:
    """Return the weighted sum of means."""

    def total(forms: Sequence[Form | None]) -> Form | None:
        present = [form for form in forms if form is not None]
        return combine(zip(present, shares, strict=True)) if len(present) == len(forms) else None

    form = combine(zip([mean.form for mean in means], shares, strict=True))
    return Mean(form, tuple(total(forms) for forms in zip(*(mean.without for mean in means), strict=True)))


def alone(kind: Score) -> Callable[[Members], Form]:
    """Return the mean loss or AUC of a family's members, as a function of the family."""
    return lambda family: {Term(kind, (cells,)): 1 / len(family) for cells in family}


def together(kind: Score) -> Callable[[Members], Form]:
    """Return the loss or AUC of the members' mean logit (Eq. 2), as a function of the family."""
    return lambda family: {Term(kind, (tuple(sorted(chain(*family))),)): 1.0}


def gain(kind: Score) -> Callable[[Members], Form]:
    """Return how much lower the loss, or higher the AUC, of the mean logit is than its members' mean."""
    return lambda family: _over(kind, alone(kind)(family), family)


def gain_over_last(kind: Score) -> Callable[[Members], Form]:
    """Return how much lower the loss, or higher the AUC, of the mean logit is than the last member's."""
    return lambda family: _over(kind, {Term(kind, (family[-1],)): 1.0}, family)


def _over(kind: Score, before: Form, family: Members) -> Form:
    sign = 1.0 if kind == "loss" else -1.0
    return combine([(before, sign), (together(kind)(family), -sign)])


def among(kind: Kind) -> Callable[[Members], Form]:
    """Return the term of kind `kind` that compares all members, as a function of the family."""
    return lambda family: {Term(kind, family): 1.0}
