"""Teachers' logit tables as the targets of a student's distillation loss (Eqs. 12 and 14)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from recap_ctr.axes.logits import Floats, LogitTable, mean_logit
from recap_ctr.data.shards import PreparedData
from recap_ctr.errors import InputError


def teacher_targets(
    paths: Sequence[Path], data: PreparedData, columns_N: npt.NDArray[np.integer[Any]] | None = None
) -> Floats:
    """Return σ of the teachers' mean logit for each training row, in the shard's order.

    With `columns_N`, a number for each row, it is that of one teacher: column m learns from teacher m, and where there
    are more columns than teachers, from the first teachers again.
    """
    tables = [LogitTable(path) for path in paths]
    for table in tables:
        table.check(data)
        if table.split != "train":
            raise InputError(
                f"{table.path} holds {table.split} rows; a student learns from training rows",
                fix="write the teacher's logits with --split train",
            )
        if not np.array_equal(table.rows_N, data.train.rows):
            raise InputError(
                f"{table.path} does not hold the rows of the training shard",
                fix="write the teacher's logits again, on these data",
            )
    if columns_N is None:
        logits_N = mean_logit(tables)
    else:
        logits_NM = np.stack([mean_logit([table]) for table in tables], axis=1)
        logits_N = logits_NM[np.arange(len(columns_N)), columns_N % len(tables)]
    return (1.0 / (1.0 + np.exp(-logits_N))).astype(np.float32)
