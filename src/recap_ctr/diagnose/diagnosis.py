"""The diagnosis of a grid of estimators: which figures it asks for.

All means over rows come from one pass (`measure`). Intervals over rows take them to be independent; where one user has
many rows they are too narrow.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, permutations
from typing import Any

import numpy as np
import numpy.typing as npt

from recap_ctr.diagnose.cube import Cube
from recap_ctr.diagnose.figures import (
    Families,
    Grid,
    alone,
    among,
    gain,
    gain_over_last,
    linear,
    share_removed,
    together,
)
from recap_ctr.diagnose.measure import Ask, Estimate, Figure, Mean, measure
from recap_ctr.diagnose.results import (
    ROUNDING,
    Churn,
    Combination,
    Curve,
    CurvePoint,
    Decomposition,
    Diagnosis,
    Family,
    ForecastPoint,
    mistrust,
)
from recap_ctr.diagnose.terms import Kind, num_ranked
from recap_ctr.diagnose.theory import AXES
from recap_ctr.errors import InputError

FEW_RUNS = 3
FORECAST = 16
ZERO = Estimate(0.0, 0.0, 0.0)


def diagnose(
    cube: Cube,
    labels: npt.ArrayLike,
    weights: npt.ArrayLike | None = None,
    seed: int = 0,
) -> Diagnosis:
    """All figures of a cube, in one pass over its rows."""
    return measure(cube, labels, lambda ask: _diagnosis(ask, cube, seed), weights=weights, seed=seed)


def family(
    cube: Cube,
    labels: npt.ArrayLike,
    members: Sequence[tuple[int, int, int]],
    weights: npt.ArrayLike | None = None,
    seed: int = 0,
) -> Family:
    """Any estimators of a cube, given by their positions in runs, steps and routes."""
    if not all(
        0 <= point < size for member in members for point, size in zip(member, cube.shape, strict=True)
    ):
        raise InputError(f"a member lies outside the grid of {cube.shape} runs, steps and routes")
    cells = {int(np.ravel_multi_index(member, cube.shape)) for member in members}
    if len(cells) < max(len(members), 2):
        raise InputError(f"a family of {len(cells)} estimators", fix="give two at least, each of them once")
    grid = Grid(cube.shape)
    these = grid.these([tuple((cell,) for cell in sorted(cells))])
    return measure(
        cube, labels, lambda ask: _family(ask, grid, these, "estimator"), weights=weights, seed=seed
    )


def curve(
    cube: Cube,
    labels: npt.ArrayLike,
    axis: str,
    averaged: Collection[str] = (),
    held: Mapping[str, int] | None = None,
    weights: npt.ArrayLike | None = None,
    seed: int = 0,
) -> Curve:
    """What more estimators along an axis bring, the other axes being averaged or held at a point.

    An axis that is neither is taken at each of its points, and figures are averaged over them.
    """
    grid, held = Grid(cube.shape), dict(held or {})
    if axis not in grid.varied or axis in (*averaged, *held):
        raise InputError(f"there are no two points on the axis {axis!r}", fix="choose another axis")
    if not all(0 <= point < grid.size.get(other, 0) for other, point in held.items()):
        raise InputError(f"the point {held} lies outside the grid of {cube.shape} runs, steps and routes")
    return measure(
        cube,
        labels,
        lambda ask: _curve(ask, grid, axis, tuple(averaged), held, seed),
        weights=weights,
        seed=seed,
    )


def _diagnosis(ask: Ask, cube: Cube, seed: int) -> Diagnosis:
    grid = Grid(cube.shape)
    last = {"trajectory": cube.shape[1] - 1, "route": 0}  # where an axis is held
    found = tuple(_combination(ask, grid, averaged) for averaged in _choices(grid.varied))
    curves, churn = [], []
    for axis in grid.varied:
        others = tuple(other for other in grid.varied if other != axis)
        held = {other: point for other, point in last.items() if other != axis}
        curves.append(_curve(ask, grid, axis, (), held, seed))
        if others:
            curves.append(_curve(ask, grid, axis, others, {}, seed))
        if axis == "run":
            churn = [_churn(ask, grid, averaged, last, seed) for averaged in _choices(others)]
    return Diagnosis(
        num_rows=len(cube),
        num_auc_rows=num_ranked(cube),
        runs=cube.runs,
        steps=cube.steps,
        routes=cube.routes,
        combinations=found,
        decompositions=tuple(
            _decomposition(ask, grid, order) for number in (2, 3) for order in permutations(AXES, number)
        ),
        curves=tuple(curves),
        churn=tuple(churn),
        warnings=tuple(_warnings(found, len(cube.runs))),
    )


def _choices(axes: tuple[str, ...]) -> list[tuple[str, ...]]:
    return [chosen for number in range(len(axes) + 1) for chosen in combinations(axes, number)]


def _combination(ask: Ask, grid: Grid, averaged: tuple[str, ...]) -> Combination:
    left = grid.families((), averaged)
    return Combination(
        averaged,
        loss=ask(Figure((left.mean(alone("loss")),))),
        auc=ask(Figure((left.mean(alone("auc")),))),
        families=tuple(
            _family(ask, grid, grid.families((axis,), averaged), axis, averaged)
            for axis in grid.varied
            if axis not in averaged
        ),
    )


def _family(ask: Ask, grid: Grid, families: Families, axis: str, averaged: tuple[str, ...] = ()) -> Family:
    count, last = families.size, axis == "trajectory"
    removed = families.mean(among("variance"), fades=True)
    tau2 = rho = None
    if axis in ("trajectory", "route") and "run" in grid.varied and "run" not in averaged:
        over_runs = grid.families(("run",), (axis, *averaged)).mean(among("variance"), fades=True)
        tau2, rho = _equicorrelated(ask, removed, count, over_runs, grid.size["run"])
    return Family(
        axis=axis,
        averaged=averaged,
        count=count,
        removed=ask(Figure((removed,), positive=True)),
        variance=ask(Figure((removed,), lambda removed: removed / share_removed(count), positive=True)),
        tau2=tau2,
        rho=rho,
        predicted=ask(Figure((families.mean(among("curved"), fades=True),), positive=True)),
        gain=ask(Figure((families.mean(gain("loss"), fades=True),), positive=True)),
        loss_alone=ask(Figure((families.mean(alone("loss")),))),
        loss_together=ask(Figure((families.mean(together("loss")),))),
        auc_alone=ask(Figure((families.mean(alone("auc")),))),
        auc_together=ask(Figure((families.mean(together("auc")),))),
        auc_gain=ask(Figure((families.mean(gain("auc"), fades=True),))),
        over_last=ask(Figure((families.mean(gain_over_last("loss")),))) if last else None,
        auc_over_last=ask(Figure((families.mean(gain_over_last("auc")),))) if last else None,
    )


def _equicorrelated(
    ask: Ask, removed: Mean, count: int, over_runs: Mean, runs: int
) -> tuple[Estimate, Estimate]:
    """tau² and rho of a run's members, from the variance they lose in their mean and that of their mean over runs."""

    def own(removed: Any) -> Any:
        return removed / share_removed(count)

    def shared(removed: Any, over_runs: Any) -> Any:
        # The mean of a run's members varies over runs by what they share, and by a count-th of what they don't.
        return over_runs / share_removed(runs) - own(removed) / count

    def total(removed: Any, over_runs: Any) -> Any:
        return own(removed) + shared(removed, over_runs)

    def rho(*means: Any) -> Any:
        return shared(*means) / np.maximum(total(*means), ROUNDING**2)

    return ask(Figure((removed, over_runs), total, positive=True)), ask(Figure((removed, over_runs), rho))


def _decomposition(ask: Ask, grid: Grid, order: tuple[str, ...]) -> Decomposition:
    def removed(along: tuple[str, ...], averaged: tuple[str, ...] = ()) -> Estimate:
        if not set(along) & set(grid.varied):
            return ZERO
        families = grid.families(along, averaged)
        least = 2 * families.size // grid.size["run"] if "run" in along else 2  # what two runs have
        return ask(
            Figure((families.mean(among("variance"), least=least, fades=along == ("run",)),), positive=True)
        )

    shares = tuple(removed((axis,), order[:at]) for at, axis in enumerate(order))
    total = removed(order)
    summed = sum(share.value for share in shares)
    if abs(summed - total.value) > max(1e-9 * total.value, ROUNDING**2):
        raise ArithmeticError(f"variances along {', '.join(order)} sum to {summed}, not to {total.value}")
    return Decomposition(order, shares, total)


def _curve(
    ask: Ask, grid: Grid, axis: str, averaged: tuple[str, ...], held: dict[str, int], seed: int
) -> Curve:
    families = grid.families((axis,), averaged, held)
    total, rng = families.size, np.random.default_rng(seed)
    drawn = [families.subsets(count, rng) for count in range(2, total + 1)]
    loss, auc = families.mean(alone("loss")), families.mean(alone("auc"))
    curved = families.mean(among("curved"), fades=True)
    saved = [grid.nothing, *(some.mean(gain("loss"), fades=True) for some in drawn)]
    won = [grid.nothing, *(some.mean(gain("auc"), fades=True) for some in drawn)]

    def predicted(count: int) -> Estimate:
        share = share_removed(count) / share_removed(total)
        return ask(Figure((curved,), lambda curved: share * curved, positive=True))

    points = tuple(
        CurvePoint(
            count,
            loss=ask(Figure((loss, saved[count - 1]), lambda loss, saved: loss - saved)),
            auc=ask(Figure((auc, won[count - 1]), lambda auc, won: auc + won)),
            predicted=predicted(count),
            gain=ask(Figure((saved[count - 1],), positive=True)),
            auc_gain=ask(Figure((won[count - 1],))),
        )
        for count in range(1, total + 1)
    )

    # The AUC won is taken to be proportional to the loss saved, thus to 1 - 1/M: a least-squares line through M = 1.
    shares = [share_removed(count) for count in range(1, total + 1)]
    slope = linear(won, [share / sum(share**2 for share in shares) for share in shares])

    def forecast(count: int) -> ForecastPoint:
        share, part = share_removed(count), share_removed(count) / share_removed(total)
        return ForecastPoint(
            count,
            loss=ask(Figure((loss, curved), lambda loss, curved: loss - part * curved)),
            gain=predicted(count),
            auc=ask(Figure((auc, slope), lambda auc, slope: auc + share * slope)),
        )

    expected = tuple(forecast(count) for count in range(1, FORECAST + 1))
    warning = mistrust(axis, averaged, points[-1].predicted, points[-1].gain)
    notes = [] if warning is None else [warning]
    if not points[-1].auc_gain.low > 0:
        expected = tuple(replace(point, auc=None) for point in expected)
        notes.append(
            f"What the mean of {total} gains in AUC is within the noise of these rows, so no AUC is forecast."
        )
    if axis == "run" and total < FEW_RUNS:
        notes.append(
            f"{total} runs can't tell how much other runs would disagree; the forecast's interval is that of rows."
        )
    return Curve(axis, averaged, held, points, expected, tuple(notes))


def _root(square: Any) -> Any:
    """Of a mean of squares; a draw of it may lie below zero where few rows hold most of the sum."""
    return np.sqrt(np.maximum(square, 0.0))


def _churn(ask: Ask, grid: Grid, averaged: tuple[str, ...], last: dict[str, int], seed: int) -> Churn:
    held = {axis: point for axis, point in last.items() if axis not in averaged}
    pairs = grid.families(("run",), averaged, held).subsets(2, np.random.default_rng(seed))

    def moved(kind: Kind, of: Callable[..., Any] = lambda mean: mean) -> Estimate:
        return ask(Figure((pairs.mean(among(kind), least=2),), of, positive=True))

    return Churn(
        averaged=averaged,
        held=held,
        logit_mean=moved("logit"),
        logit_rms=moved("logit²", _root),
        probability_mean=moved("probability"),
        probability_rms=moved("probability²", _root),
        decile_changes=moved("decile"),
    )


def _warnings(found: Sequence[Combination], runs: int) -> Iterator[str]:
    if runs < FEW_RUNS:
        yield f"Fewer than {FEW_RUNS} runs: how far others would differ from these can't be told, or hardly."
    for combination in found:
        for one in combination.families:
            if one.warning is not None:
                yield one.warning
