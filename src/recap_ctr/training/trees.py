"""Boosted trees on the same encoded rows: LightGBM with early stopping, where it is installed."""

import time
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from recap_ctr.data.shards import PreparedData, Shard
from recap_ctr.jobs.progress import Meter, meter

Floats = npt.NDArray[np.float64]
TITLE = "LightGBM"
MAX_ROUNDS, STOP_AFTER = 2000, 50
SAMPLE_ROWS, SAMPLE_TREES = 10_000, 40  # Scoring this many shows how long scoring takes.
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


class TreeColumns:
    """Encoded rows in the form that trees take: ids of categories, numbers, and the order of numbers cut at
    quantiles."""

    def __init__(self, data: PreparedData) -> None:
        """Learn from the fitted fields which columns have an order."""
        self._layout = data.layout
        quantiles = data.stored_fields.quantiles()
        self._ranks: dict[int, Floats] = {}
        """By column, the bucket number of each id within its field; NaN for missing and unseen ones."""
        for field in data.layout.fields:
            if field.name in quantiles:
                buckets = quantiles[field.name].values.cast(pl.Float64).to_numpy()
                self._ranks[field.start] = np.concatenate([[np.nan], buckets, [np.nan]])

    @property
    def categories(self) -> list[int]:
        """Return the columns whose numbers have no order."""
        return [
            column
            for field in self._layout.fields
            if field.value_column is None and field.start not in self._ranks
            for column in range(field.start, field.start + field.width)
        ]

    def of(self, shard: Shard) -> npt.NDArray[np.float32]:
        """Return one column per id column."""
        columns = np.array(shard.ids, np.float32)
        for field in self._layout.fields:
            if field.value_column is not None:
                columns[:, field.start] = field.numbers(np.asarray(shard.ids), shard.values)
            elif field.start in self._ranks:
                ids = np.asarray(shard.ids)[:, field.start]
                columns[:, field.start] = self._ranks[field.start][ids - field.offset]
            else:
                columns[:, field.start : field.start + field.width] -= field.offset
        return columns


@dataclass(frozen=True, eq=False)
class TreeFit:
    """Boosted trees, kept up to the round that was best on validation."""

    columns: TreeColumns
    booster: Any
    is_cut: bool = False
    """Whether the deadline came before the validation logloss had stopped improving."""

    def logits(self, shard: Shard) -> Floats:
        """Return one logit per row."""
        return np.asarray(self.booster.predict(self.columns.of(shard), raw_score=True))


def show_rounds(shown: Meter, rows: int) -> Any:
    """Return a callback of LightGBM that shows each round over `rows` training rows, with its validation logloss."""

    def show(state: Any) -> None:
        loss = next(entry[2] for entry in state.evaluation_result_list if entry[0] == "valid")
        shown.advance(rows, 1, f"round {state.iteration + 1}, valid logloss {loss:.5f}")

    return show


def fit_trees(
    data: PreparedData,
    *,
    threads: int = 1,
    seed: int = 1,
    deadline: float | None = None,
    quiet: bool = False,
) -> TreeFit:
    """Fit boosted trees, until the validation logloss has not improved for 50 rounds.

    With a `deadline`, a value of `time.time`, training stops early enough to score all rows before it.
    """
    import lightgbm

    columns = TreeColumns(data)
    sample = columns.of(data.valid.take(np.arange(min(len(data.valid), SAMPLE_ROWS))))
    rows = sum(len(shard) for shard in (data.train, data.valid, data.test))
    seconds_of_a_tree, is_cut = 0.0, False

    def stop_in_time(state: Any) -> None:
        nonlocal seconds_of_a_tree, is_cut
        if deadline is None:
            return
        trees = state.iteration + 1
        if trees == SAMPLE_TREES:
            started = time.time()
            state.model.predict(sample, raw_score=True)
            seconds_of_a_tree = (time.time() - started) / trees / len(sample) * rows
        is_cut = time.time() + trees * seconds_of_a_tree > deadline
        if is_cut:
            raise lightgbm.callback.EarlyStopException(state.iteration, state.evaluation_result_list)

    train = lightgbm.Dataset(
        columns.of(data.train),
        data.train.labels,
        weight=data.train.weights,
        categorical_feature=columns.categories,
    )
    valid = train.create_valid(columns.of(data.valid), data.valid.labels, weight=data.valid.weights)
    with meter(TITLE, None, "rows", quiet=quiet) as shown:
        booster = lightgbm.train(
            {**SETTINGS, "num_threads": threads, "seed": seed},
            train,
            MAX_ROUNDS,
            valid_sets=[valid],
            valid_names=["valid"],
            callbacks=[
                show_rounds(shown, len(data.train)),
                lightgbm.early_stopping(STOP_AFTER, verbose=False),
                stop_in_time,
            ],
        )
    return TreeFit(columns, booster, is_cut)
