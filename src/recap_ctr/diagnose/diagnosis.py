"""The diagnosis of a grid of estimators, as figures that one pass over the rows measures (`measure`).

Intervals over rows assume that rows are independent. If one user has many rows, they are too narrow.
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
from recap_ctr.diagnose.measure import Estimate, EstimateFigure, Figure, Mean, measure
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
    second_order_warning,
)
from recap_ctr.diagnose.terms import Kind, num_ranked
from recap_ctr.diagnose.theory import AXES
from recap_ctr.errors import InputError

MIN_RUNS = 3  # fewer can't show how much other runs would differ
FORECAST_COUNT = 16  # estimators up to which gains are forecast at least
ZERO = Estimate(0.0, 0.0, 0.0)


def diagnose(
    cube: Cube,
    labels: npt.ArrayLike,
    weights: npt.ArrayLike | None = None,
    seed: int = 0,
) -> Diagnosis:
    """Return all figures of a cube, measured in one pass over its rows."""
    return measure(
        cube, labels, lambda estimate: _diagnosis(estimate, cube, seed), weights=weights, seed=seed
    )


def family(
    cube: Cube,
    labels: npt.ArrayLike,
    members: Sequence[tuple[int, int, int]],
    weights: npt.ArrayLike | None = None,
    seed: int = 0,
) -> Family:
    """Return the figures of any estimators of a cube, given by their positions in runs, steps and routes."""
    if not all(
        0 <= point < size for member in members for point, size in zip(member, cube.shape, strict=True)
    ):
        raise InputError(f"a member is outside the grid of {cube.shape} runs, steps and routes")
    cells = {int(np.ravel_multi_index(member, cube.shape)) for member in members}
    if len(cells) < max(len(members), 2):
        raise InputError(
            f"a family of {len(cells)} different estimators", fix="give at least two, each of them once"
        )
    grid = Grid(cube.shape)
    families = grid.families_of([tuple((cell,) for cell in sorted(cells))])
    return measure(
        cube,
        labels,
        lambda estimate: family_figures(estimate, grid, families, "estimator"),
        weights=weights,
        seed=seed,
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
    """Return the gain from averaging more estimators along an axis; other axes are averaged or held at a point.

    For an axis that is neither, figures are means over its points.
    """
    grid, held = Grid(cube.shape), dict(held or {})
    if axis not in grid.varied or axis in (*averaged, *held):
        raise InputError(f"the axis {axis!r} has no two points to compare", fix="choose another axis")
    if not all(0 <= point < grid.size.get(other, 0) for other, point in held.items()):
        raise InputError(f"the point {held} is outside the grid of {cube.shape} runs, steps and routes")
    return measure(
        cube,
        labels,
        lambda estimate: _curve(estimate, grid, axis, tuple(averaged), held, seed, cube.route_shares),
        weights=weights,
        seed=seed,
    )


def _diagnosis(estimate: EstimateFigure, cube: Cube, seed: int) -> Diagnosis:
    grid = Grid(cube.shape)
    default_point = {"trajectory": cube.shape[1] - 1, "route": 0}  # where an axis is held
    all_combinations = tuple(_combination(estimate, grid, averaged) for averaged in _choices(grid.varied))
    curves, churn = [], []
    for axis in grid.varied:
        others = tuple(other for other in grid.varied if other != axis)
        held = {other: point for other, point in default_point.items() if other != axis}
        curves.append(_curve(estimate, grid, axis, (), held, seed, cube.route_shares))
        if others:
            curves.append(_curve(estimate, grid, axis, others, {}, seed, cube.route_shares))
        if axis == "run":
            churn = [
                churn_figures(estimate, grid, averaged, default_point, seed) for averaged in _choices(others)
            ]
    return Diagnosis(
        num_rows=len(cube),
        num_auc_rows=num_ranked(cube),
        runs=cube.runs,
        steps=cube.steps,
        routes=cube.routes,
        combinations=all_combinations,
        decompositions=tuple(
            decomposition_figures(estimate, grid, order)
            for number in (2, 3)
            for order in permutations(AXES, number)
        ),
        curves=tuple(curves),
        churn=tuple(churn),
        warnings=tuple(_warnings(all_combinations, len(cube.runs))),
    )


def _choices(axes: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return all subsets of some axes, from none of them to all."""
    return [subset for number in range(len(axes) + 1) for subset in combinations(axes, number)]


def _combination(estimate: EstimateFigure, grid: Grid, averaged: tuple[str, ...]) -> Combination:
    remaining = grid.families((), averaged)
    return Combination(
        averaged,
        loss=estimate(Figure((remaining.mean(alone("loss")),))),
        auc=estimate(Figure((remaining.mean(alone("auc")),))),
        families=tuple(
            family_figures(estimate, grid, grid.families((axis,), averaged), axis, averaged)
            for axis in grid.varied
            if axis not in averaged
        ),
    )


def family_figures(
    estimate: EstimateFigure, grid: Grid, families: Families, axis: str, averaged: tuple[str, ...] = ()
) -> Family:
    """Return the figures of families that vary along `axis`, with the axes `averaged`."""
    count, has_last = families.size, axis == "trajectory"
    removed = families.mean(among("variance"), grows=True)
    tau2 = rho = None
    if axis in ("trajectory", "route") and "run" in grid.varied and "run" not in averaged:
        over_runs = grid.families(("run",), (axis, *averaged)).mean(among("variance"), grows=True)
        tau2, rho = _equicorrelated(estimate, removed, count, over_runs, grid.size["run"])
    return Family(
        axis=axis,
        averaged=averaged,
        count=count,
        removed=estimate(Figure((removed,), positive=True)),
        variance=estimate(Figure((removed,), lambda removed: removed / share_removed(count), positive=True)),
        tau2=tau2,
        rho=rho,
        predicted=estimate(Figure((families.mean(among("curved"), grows=True),), positive=True)),
        gain=estimate(Figure((families.mean(gain("loss"), grows=True),), positive=True)),
        loss_alone=estimate(Figure((families.mean(alone("loss")),))),
        loss_together=estimate(Figure((families.mean(together("loss")),))),
        auc_alone=estimate(Figure((families.mean(alone("auc")),))),
        auc_together=estimate(Figure((families.mean(together("auc")),))),
        auc_gain=estimate(Figure((families.mean(gain("auc"), grows=True),))),
        over_last=estimate(Figure((families.mean(gain_over_last("loss")),))) if has_last else None,
        auc_over_last=estimate(Figure((families.mean(gain_over_last("auc")),))) if has_last else None,
    )


def _equicorrelated(
    estimate: EstimateFigure, removed: Mean, count: int, over_runs: Mean, runs: int
) -> tuple[Estimate, Estimate]:
    """Return tau² and rho of a run's members.

    `removed` is the variance that averaging the members of a run removes; `over_runs` is the one that averaging runs
    removes from the means of their members.
    """

    def separate(removed: Any) -> Any:
        return removed / share_removed(count)

    def shared(removed: Any, over_runs: Any) -> Any:
        # Over runs, the mean of the members varies by what they share, and by 1 / count of what they don't.
        return over_runs / share_removed(runs) - separate(removed) / count

    def total(removed: Any, over_runs: Any) -> Any:
        return separate(removed) + shared(removed, over_runs)

    def rho(*means: Any) -> Any:
        return shared(*means) / np.maximum(total(*means), ROUNDING**2)

    means = removed, over_runs
    return estimate(Figure(means, total, positive=True)), estimate(Figure(means, rho))


def decomposition_figures(estimate: EstimateFigure, grid: Grid, order: tuple[str, ...]) -> Decomposition:
    """Return the variance along the axes of `order`, split among them in that order."""

    def removed(along: tuple[str, ...], averaged: tuple[str, ...] = ()) -> Estimate:
        if not set(along) & set(grid.varied):
            return ZERO
        families = grid.families(along, averaged)
        # Without a run, a family must still have the members of two runs.
        min_members = 2 * families.size // grid.size["run"] if "run" in along else 2
        variance = families.mean(among("variance"), min_members=min_members, grows=along == ("run",))
        return estimate(Figure((variance,), positive=True))

    shares = tuple(removed((axis,), order[:at]) for at, axis in enumerate(order))
    total = removed(order)
    summed = sum(share.value for share in shares)
    if abs(summed - total.value) > max(1e-9 * total.value, ROUNDING**2):
        raise ArithmeticError(f"variances along {', '.join(order)} sum to {summed}, not to {total.value}")
    return Decomposition(order, shares, total)


def _curve(
    estimate: EstimateFigure,
    grid: Grid,
    axis: str,
    averaged: tuple[str, ...],
    held: dict[str, int],
    seed: int,
    route_shares: tuple[float, ...],
) -> Curve:
    families = grid.families((axis,), averaged, held)
    total, rng = families.size, np.random.default_rng(seed)
    drawn = [families.subsets(count, rng) for count in range(2, total + 1)]
    loss, auc = families.mean(alone("loss")), families.mean(alone("auc"))
    curved = families.mean(among("curved"), grows=True)
    saved = [grid.zero, *(subsets.mean(gain("loss"), grows=True) for subsets in drawn)]
    won = [grid.zero, *(subsets.mean(gain("auc"), grows=True) for subsets in drawn)]

    def predicted(count: int) -> Estimate:
        share = share_removed(count) / share_removed(total)
        return estimate(Figure((curved,), lambda curved: share * curved, positive=True))

    points = tuple(
        CurvePoint(
            count,
            loss=estimate(Figure((loss, saved[count - 1]), lambda loss, saved: loss - saved)),
            auc=estimate(Figure((auc, won[count - 1]), lambda auc, won: auc + won)),
            predicted=predicted(count),
            gain=estimate(Figure((saved[count - 1],), positive=True)),
            auc_gain=estimate(Figure((won[count - 1],))),
        )
        for count in range(1, total + 1)
    )

    # The AUC gain is assumed proportional to the loss saved, so to 1 - 1/M: a least-squares line through M = 1.
    shares = [share_removed(count) for count in range(1, total + 1)]
    slope = linear(won, [share / sum(share**2 for share in shares) for share in shares])

    def forecast(count: int) -> ForecastPoint:
        part = _part_of_measured(count, total, route_shares if axis == "route" else ())
        share = part * share_removed(total)
        return ForecastPoint(
            count,
            loss=estimate(Figure((loss, curved), lambda loss, curved: loss - part * curved)),
            gain=estimate(Figure((curved,), lambda curved: part * curved, positive=True)),
            auc=estimate(Figure((auc, slope), lambda auc, slope: auc + share * slope)),
        )

    forecasts = tuple(forecast(count) for count in range(1, most_forecast(total) + 1))
    if not _has_auc_gain(points[-1]):
        forecasts = tuple(replace(point, auc=None) for point in forecasts)
    notes = tuple(_curve_notes(axis, averaged, points[-1]))
    return Curve(axis, averaged, held, points, forecasts, notes)


def most_forecast(measured: int) -> int:
    """Return how many estimators gains are forecast for: at least twice as many as were measured."""
    return max(FORECAST_COUNT, 2 * measured)


def _part_of_measured(count: int, total: int, shares: Sequence[float]) -> float:
    """Return what the mean of `count` removes, relative to the mean of all `total` that were measured.

    `shares` are those of routes that share leaves; without them, estimators are exchangeable.
    """
    if len(shares) < total or not shares[total - 1]:
        return share_removed(count) / share_removed(total)
    return shares[min(count, len(shares)) - 1] / shares[total - 1]


def _has_auc_gain(point: CurvePoint) -> bool:
    """Return whether the AUC gain is above the noise of the rows."""
    return point.auc_gain.low > 0


def _curve_notes(axis: str, averaged: tuple[str, ...], last: CurvePoint) -> Iterator[str]:
    """Yield the limits of a curve's forecast, given its last measured point."""
    warning = second_order_warning(axis, averaged, last.predicted, last.gain)
    if warning is not None:
        yield warning
    if not _has_auc_gain(last):
        yield f"The AUC gain of the mean of {last.count} is within the noise of these rows, so no AUC is forecast."
    if axis == "run" and last.count < MIN_RUNS:
        yield (
            f"{last.count} runs can't show how much other runs would differ;"
            " the forecast's interval is for other rows."
        )


def _root(square: Any) -> Any:
    """Return the root of a mean of squares; a bootstrap draw of it can be negative if few rows dominate."""
    return np.sqrt(np.maximum(square, 0.0))


def churn_figures(
    estimate: EstimateFigure, grid: Grid, averaged: tuple[str, ...], default_point: dict[str, int], seed: int
) -> Churn:
    """Return how much scores differ between runs; axes that are not `averaged` are held at `default_point`."""
    held = {axis: point for axis, point in default_point.items() if axis not in averaged}
    pairs = grid.families(("run",), averaged, held).subsets(2, np.random.default_rng(seed))

    def moved(kind: Kind, of: Callable[..., Any] = lambda mean: mean) -> Estimate:
        return estimate(Figure((pairs.mean(among(kind), min_members=2),), of, positive=True))

    return Churn(
        averaged=averaged,
        held=held,
        logit_mean=moved("logit"),
        logit_rms=moved("logit²", _root),
        probability_mean=moved("probability"),
        probability_rms=moved("probability²", _root),
        decile_changes=moved("decile"),
    )


def _warnings(all_combinations: Sequence[Combination], num_runs: int) -> Iterator[str]:
    if num_runs < MIN_RUNS:
        yield f"Fewer than {MIN_RUNS} runs: they hardly show how much other runs would differ."
    for combination in all_combinations:
        for family in combination.families:
            if family.warning is not None:
                yield family.warning
