"""Teachers' logit tables as the targets of a student's distillation loss (Eqs. 12 and 14)."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from recap_ctr.axes.logits import BLOCK_ROWS, Floats, LogitTable, mean_logit
from recap_ctr.data.shards import PreparedData
from recap_ctr.errors import InputError

Columns = Callable[[slice], npt.NDArray[np.integer[Any]]]
"""Returns the columns of neighbouring training rows."""


class TeacherTargets:
    """σ of the teachers' mean logit for each training row, in the shard's order, computed for the rows asked for.

    With `columns_of`, a row learns from one teacher: column m from teacher m, and where there are more columns than
    teachers, from the first teachers again.
    """

    def __init__(self, tables: Sequence[LogitTable], columns_of: Columns | None) -> None:
        self._tables, self._columns_of = tables, columns_of

    def __getitem__(self, rows: slice) -> Floats:
        """Return the targets of neighbouring rows."""
        start, stop, _ = rows.indices(len(self._tables[0]))
        blocks = [self._block(slice(at, min(at + BLOCK_ROWS, stop))) for at in range(start, stop, BLOCK_ROWS)]
        return np.concatenate(blocks) if blocks else np.zeros(0, np.float32)

    def _block(self, rows: slice) -> Floats:
        if self._columns_of is None:
            logits_N = mean_logit(self._tables, rows)
        else:
            columns_N = self._columns_of(rows)
            logits_NM = np.stack([mean_logit([table], rows) for table in self._tables], axis=1)
            logits_N = logits_NM[np.arange(len(columns_N)), columns_N % len(self._tables)]
        return (1.0 / (1.0 + np.exp(-logits_N))).astype(np.float32)


def teacher_targets(
    paths: Sequence[Path], data: PreparedData, columns_of: Columns | None = None
) -> TeacherTargets:
    """Return the targets that the tables of teachers give; refuse tables of other rows."""
    tables = [LogitTable(path) for path in paths]
    for table in tables:
        table.check(data)
        if table.split != "train":
            raise InputError(
                f"{table.path} holds {table.split} rows; a student learns from training rows",
                fix="write the teacher's logits with --split train",
            )
        if not _holds_rows(table, data.train.rows):
            raise InputError(
                f"{table.path} does not hold the rows of the training shard",
                fix="write the teacher's logits again, on these data",
            )
    return TeacherTargets(tables, columns_of)


def _holds_rows(table: LogitTable, rows: npt.NDArray[np.int64]) -> bool:
    """Return whether a table has these rows in this order."""
    return len(table) == len(rows) and all(
        np.array_equal(table.rows_N[at : at + BLOCK_ROWS], rows[at : at + BLOCK_ROWS])
        for at in range(0, len(rows), BLOCK_ROWS)
    )
