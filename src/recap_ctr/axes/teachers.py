"""Teachers' logit tables as the targets of a student's distillation loss (Eqs. 12 and 14)."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from recap_ctr.axes.logits import Floats, LogitTable, mean_logit
from recap_ctr.data.shards import PreparedData
from recap_ctr.errors import InputError


def teacher_targets(paths: Sequence[Path], data: PreparedData) -> Floats:
    """Return σ of the teachers' mean logit for each training row, in the shard's order."""
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
    return (1.0 / (1.0 + np.exp(-mean_logit(tables)))).astype(np.float32)
