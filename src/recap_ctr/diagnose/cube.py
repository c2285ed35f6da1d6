"""Logits of all estimators on the grid run × trajectory × route, read from disk in batches of rows.

Shape suffixes: N rows, B rows of a batch, S runs, T points of the trajectory, R routes, C = S·T·R cells,
M columns of a table.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt

from recap_ctr.axes.logits import Estimator, LogitTable
from recap_ctr.diagnose.theory import Floats
from recap_ctr.errors import InputError

Ints = npt.NDArray[np.intp]
Point = tuple[str, int | None, str | None]
"""The coordinates of a cell: run, step and route."""
Value = TypeVar("Value")
MAX_NAMED_CELLS = 5  # cells that an error lists by name


@dataclass(frozen=True, eq=False)
class Cube:
    """One logit for every row and every cell of the grid. Cells are numbered with the route varying fastest."""

    runs: tuple[str, ...]
    steps: tuple[int | None, ...]
    routes: tuple[str | None, ...]
    sources: tuple[npt.NDArray[Any], ...]
    """Arrays or memory-mapped tables, rows × columns each."""
    cells: tuple[Ints, ...]
    """For each source, the cell that each of its columns fills; -1 for an unused column."""
    shift: float = 0.0
    """The correction for sampled negatives, which is added to every logit."""
    route_shares: tuple[float, ...] = ()
    """For 1, 2, ... routes, the share of the variance between leaves that their mean removes; empty if routes have
    leaves of their own, so that the mean of K removes 1 - 1/K. Forecasts need them: see `share_between_leaves`."""

    @classmethod
    def from_tables(
        cls,
        tables: Sequence[LogitTable],
        depth: int | None = None,
        shift: float = 0.0,
        route_shares: tuple[float, ...] = (),
    ) -> Self:
        """Join tables of the same rows. If they hold several depths, `depth` chooses one."""
        for table in tables[1:]:
            _refuse_other_rows(table, tables[0])
        points_by_table = [
            [
                _point(column) if depth is None or column.depth == depth else None
                for column in table.estimators
            ]
            for table in tables
        ]
        points = [point for columns in points_by_table for point in columns if point is not None]
        if not points:
            raise InputError("no estimators to diagnose", fix="give logit tables, and a depth that they hold")
        runs, routes = _distinct(run for run, _, _ in points), _distinct(route for _, _, route in points)
        steps = tuple(sorted({step for _, step, _ in points}, key=lambda step: -1 if step is None else step))
        grid = [(run, step, route) for run in runs for step in steps for route in routes]
        _refuse_gaps(points, grid, (len(runs), len(steps), len(routes)))
        cell_of = {point: cell for cell, point in enumerate(grid)}
        cells = tuple(
            np.array([-1 if point is None else cell_of[point] for point in columns], np.intp)
            for columns in points_by_table
        )
        sources = tuple(table.logits_NM for table in tables)
        return cls(runs, steps, routes, sources, cells, shift, route_shares)

    @classmethod
    def from_array(cls, logits_NSTR: npt.NDArray[Any]) -> Self:
        """Return the cube of an array, rows × runs × steps × routes."""
        if logits_NSTR.ndim != 4 or 0 in logits_NSTR.shape[1:]:
            raise InputError(
                f"logits of shape {logits_NSTR.shape}",
                fix="give rows × runs × steps × routes, at least one of each",
            )
        N, S, T, R = logits_NSTR.shape
        runs, routes = tuple(map(str, range(S))), tuple(map(str, range(R)))
        source_NC = logits_NSTR.reshape(N, S * T * R)
        return cls(runs, tuple(range(T)), routes, (source_NC,), (np.arange(S * T * R),))

    def __len__(self) -> int:
        return len(self.sources[0])

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return the number of runs, steps and routes."""
        return len(self.runs), len(self.steps), len(self.routes)

    @property
    def num_cells(self) -> int:
        """Return the number of estimators."""
        return prod(self.shape)

    def block(self, start: int, stop: int) -> Floats:
        """Return the logits of rows `start` up to `stop`, cells × rows; refuse any that is not finite."""
        logits_CB = np.empty((self.num_cells, min(stop, len(self)) - start))
        for source_NM, cells_M in zip(self.sources, self.cells, strict=True):
            logits_CB[cells_M[cells_M >= 0]] = source_NM[start:stop].T[cells_M >= 0]
        logits_CB += self.shift
        finite_CB = np.isfinite(logits_CB)
        if not finite_CB.all():
            cell, row = np.argwhere(~finite_CB)[0]
            s, t, r = np.unravel_index(cell, self.shape)
            name = _name((self.runs[s], self.steps[t], self.routes[r]))
            raise InputError(
                f"the logit of row {start + row} from {name} is {logits_CB[cell, row]}",
                fix="write the logits of this estimator again",
            )
        return logits_CB


def _refuse_other_rows(table: LogitTable, first: LogitTable) -> None:
    same = (table.data, table.split) == (first.data, first.split) and np.array_equal(
        table.rows_N, first.rows_N
    )
    if not same:
        raise InputError(
            f"{table.path} holds other rows than {first.path}",
            fix="join only logit tables of the same data and split",
        )


def _refuse_gaps(points: Sequence[Point], grid: Sequence[Point], shape: tuple[int, int, int]) -> None:
    """Refuse columns unless they fill each cell of the grid once."""
    empty = dict.fromkeys(grid, True)
    for point in points:
        if not empty.pop(point, False):
            raise InputError(
                f"two columns hold the logits of {_name(point)}",
                fix="give each table once, and choose one depth if there are several",
            )
    if empty:
        names = "; ".join(_name(point) for point in list(empty)[:MAX_NAMED_CELLS])
        more = f" (and {len(empty) - MAX_NAMED_CELLS} more)" if len(empty) > MAX_NAMED_CELLS else ""
        runs, steps, routes = shape
        raise InputError(
            f"the grid of {runs} runs × {steps} steps × {routes} routes lacks {names}{more}",
            fix="write these logits, or give tables in which all runs have the same steps and routes",
        )


def _distinct(values: Iterable[Value]) -> tuple[Value, ...]:
    return tuple(dict.fromkeys(values))


def _point(estimator: Estimator) -> Point:
    return estimator.run, estimator.step, estimator.route


def _name(point: Point) -> str:
    """Return a cell in words, without the coordinates that are None."""
    run, step, route = point
    words = [f"run {run}", "" if step is None else f"step {step}", "" if route is None else f"route {route}"]
    return ", ".join(word for word in words if word)
