"""The levels of a log over time: its click rate from one stretch of rows to the next."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from recap_ctr.data.shards import PreparedData, Shard
from recap_ctr.evaluation.levels import Levels, lasting_share, level
from recap_ctr.evaluation.sampling import negative_rate_shift

MAX_STRETCHES = 20


def levels_of(data: PreparedData, newest: Sequence[Shard], negative_rate: float = 1.0) -> Levels | None:
    """Return the levels of a log whose `newest` rows calibrate; None if these are no later than the others.

    A stretch has as many rows as calibrate, or more where the log is long.
    """
    if not data.is_in_time_order:
        return None
    columns = zip(*(_in_time_order(shard) for shard in (data.train, *newest)), strict=True)
    labels_N, weights_N = (np.concatenate(column) for column in columns)
    count = min(len(labels_N) // max(sum(map(len, newest)), 1), MAX_STRETCHES)
    stretches = [np.array_split(column, max(count, 1)) for column in (labels_N, weights_N)]
    return Levels(
        level(data.train.labels, data.train.weights) + negative_rate_shift(negative_rate),
        lasting_share(np.array([level(*stretch) for stretch in zip(*stretches, strict=True)])),
    )


def _in_time_order(shard: Shard) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return labels and weights, the oldest rows first."""
    assert shard.times is not None
    order = np.argsort(np.asarray(shard.times), kind="stable")
    weights = np.ones(len(shard)) if shard.weights is None else np.asarray(shard.weights, np.float64)
    return np.asarray(shard.labels, np.float64)[order], weights[order]
