"""Boosted trees on the same encoded rows: LightGBM with early stopping, where the extra `peers` is installed."""

import time
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt

from recap_ctr.data.layout import Layout
from recap_ctr.data.shards import PreparedData, Shard

Floats = npt.NDArray[np.float64]
MAX_ROUNDS, STOP_AFTER = 2000, 50
SETTINGS = {
    "objective": "binary",
    "metric": "binary_logloss",
    "learning_rate": 0.05,
    "num_leaves": 63,
    "verbosity": -1,
    "deterministic": True,
    "force_row_wise": True,
}


def is_installed() -> bool:
    """Return whether LightGBM can be imported."""
    return find_spec("lightgbm") is not None


@dataclass(frozen=True, eq=False)
class TreeFit:
    """Boosted trees, kept up to the round that was best on validation."""

    layout: Layout
    booster: Any

    def logits(self, shard: Shard) -> Floats:
        """Return one logit per row."""
        return np.asarray(self.booster.predict(_features(shard, self.layout), raw_score=True))


def fit_trees(
    data: PreparedData, *, threads: int = 1, seed: int = 1, deadline: float | None = None
) -> TreeFit:
    """Fit boosted trees, until the validation logloss has not improved for 50 rounds.

    At the `deadline`, a time of `time.time`, the rounds so far are kept.
    """
    import lightgbm

    def stop_in_time(state: Any) -> None:
        if deadline is not None and time.time() > deadline:
            raise lightgbm.callback.EarlyStopException(state.iteration, state.evaluation_result_list)

    categories = [
        column
        for field in data.layout.fields
        if field.value_column is None
        for column in range(field.start, field.start + field.width)
    ]
    train = lightgbm.Dataset(
        _features(data.train, data.layout),
        data.train.labels,
        weight=data.train.weights,
        categorical_feature=categories,
    )
    valid = train.create_valid(
        _features(data.valid, data.layout), data.valid.labels, weight=data.valid.weights
    )
    booster = lightgbm.train(
        {**SETTINGS, "num_threads": threads, "seed": seed},
        train,
        MAX_ROUNDS,
        valid_sets=[valid],
        callbacks=[lightgbm.early_stopping(STOP_AFTER, verbose=False), stop_in_time],
    )
    return TreeFit(data.layout, booster)


def _features(shard: Shard, layout: Layout) -> npt.NDArray[np.float32]:
    """Return one column per id column: the id within its field, or the number of a numeric field."""
    columns = np.array(shard.ids, np.float32)
    for field in layout.fields:
        if field.value_column is not None:
            is_missing = np.asarray(shard.ids)[:, field.start] != field.offset + 1
            columns[:, field.start] = np.where(is_missing, np.nan, shard.values[:, field.value_column])
        else:
            columns[:, field.start : field.start + field.width] -= field.offset
    return columns
