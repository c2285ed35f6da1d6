"""Logits of all estimators on the grid run × trajectory × route, read from disk in blocks of rows.

Shape suffixes: N rows, B rows of a block, S runs, T points of the trajectory, R routes, C cells (S·T·R of them),
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
Value = TypeVar("Value")
NAMED = 5  # cells that an error lists by name


@dataclass(frozen=True, eq=False)
class Cube:
    """One logit for every row and every cell of the grid. Cells count up along routes first, then steps, then runs."""

    runs: tuple[str, ...]
    steps: tuple[int | None, ...]
    routes: tuple[str | None, ...]
    sources: tuple[npt.NDArray[Any], ...]
    """Rows × columns each; arrays, or memory-mapped tables."""
    cells: tuple[Ints, ...]
    """Of each source, the cell that each of its columns fills; -1 for a column left out."""
    shift: float = 0.0
    """Added to every logit: the correction for sampled negatives."""

    @classmethod
    def from_tables(cls, tables: Sequence[LogitTable], depth: int | None = None, shift: float = 0.0) -> Self:
        """Join tables of the same rows. `depth` picks columns where estimators were read at several depths."""
        for table in tables[1:]:
            _refuse_other_rows(table, tables[0])
        kept = [
            [one if depth is None or one.depth == depth else None for one in table.estimators]
            for table in tables
        ]
        found = [one for columns in kept for one in columns if one is not None]
        if not found:
            raise InputError("no estimators to diagnose", fix="give logit tables, and a depth that they hold")
        runs, routes = _distinct(one.run for one in found), _distinct(one.route for one in found)
        steps = tuple(sorted({one.step for one in found}, key=lambda step: -1 if step is None else step))
        number = {
            point: cell
            for cell, point in enumerate(
                (run, step, route) for run in runs for step in steps for route in routes
            )
        }
        free = dict(number)
        for one in found:
            if free.pop((one.run, one.step, one.route), None) is None:
                raise InputError(
                    f"two columns hold the logits of {_name(one.run, one.step, one.route)}",
                    fix="give each table once, and name one depth where there are several",
                )
        if free:
            names = "; ".join(_name(*point) for point in list(free)[:NAMED])
            more = f" (and {len(free) - NAMED} more)" if len(free) > NAMED else ""
            raise InputError(
                f"the grid of {len(runs)} runs × {len(steps)} steps × {len(routes)} routes lacks {names}{more}",
                fix="make these logits, or leave out the runs, steps or routes that are not there for all",
            )

        def cell(one: Estimator | None) -> int:
            return -1 if one is None else number[one.run, one.step, one.route]

        cells = tuple(np.array([cell(one) for one in columns], np.intp) for columns in kept)
        return cls(runs, steps, routes, tuple(table.logits_NM for table in tables), cells, shift)

    @classmethod
    def from_array(cls, logits_NSTR: npt.NDArray[Any]) -> Self:
        if logits_NSTR.ndim != 4 or 0 in logits_NSTR.shape[1:]:
            raise InputError(
                f"logits of shape {logits_NSTR.shape}",
                fix="give rows × runs × steps × routes, one of each at least",
            )
        N, S, T, R = logits_NSTR.shape
        runs, routes = tuple(map(str, range(S))), tuple(map(str, range(R)))
        source_NC = logits_NSTR.reshape(N, S * T * R)
        return cls(runs, tuple(range(T)), routes, (source_NC,), (np.arange(S * T * R),))

    def __len__(self) -> int:
        return len(self.sources[0])

    @property
    def shape(self) -> tuple[int, int, int]:
        return len(self.runs), len(self.steps), len(self.routes)

    @property
    def num_cells(self) -> int:
        return prod(self.shape)

    def block(self, start: int, stop: int) -> Floats:
        """Cells × rows from `start` up to `stop`, all finite."""
        logits_CB = np.empty((self.num_cells, min(stop, len(self)) - start))
        for source_NM, cells_M in zip(self.sources, self.cells, strict=True):
            logits_CB[cells_M[cells_M >= 0]] = source_NM[start:stop].T[cells_M >= 0]
        logits_CB += self.shift
        finite_CB = np.isfinite(logits_CB)
        if not finite_CB.all():
            cell, row = np.argwhere(~finite_CB)[0]
            s, t, r = np.unravel_index(cell, self.shape)
            name = _name(self.runs[s], self.steps[t], self.routes[r])
            raise InputError(
                f"the logit of row {start + row} from {name} is {logits_CB[cell, row]}",
                fix="make the logits of this estimator anew",
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


def _distinct(values: Iterable[Value]) -> tuple[Value, ...]:
    return tuple(dict.fromkeys(values))


def _name(run: str, step: int | None, route: str | None) -> str:
    """A cell, in words; coordinates without a choice are left out."""
    words = [f"run {run}", "" if step is None else f"step {step}", "" if route is None else f"route {route}"]
    return ", ".join(word for word in words if word)
