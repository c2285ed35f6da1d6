"""Train boosted trees on the click rates of values, on numbers and on the order of values and buckets; LightGBM trains
what our own layer runs."""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import torch

from recap_ctr.config import Frozen
from recap_ctr.data.rates import Codes, Cross, choose_crosses, crossable, neutral_where_unseen
from recap_ctr.data.shards import PreparedData, Shard
from recap_ctr.errors import InputError
from recap_ctr.evaluation import metrics
from recap_ctr.jobs.progress import meter
from recap_ctr.models.boosted import MISSING, Boosted, BoostedConfig
from recap_ctr.nn.trees import MAX_LEAVES, pack_trees
from recap_ctr.training import trees
from recap_ctr.training.loop import Trained
from recap_ctr.training.rates import count_rates
from recap_ctr.training.report import Epoch

BOOSTED, TITLE = "boosted", "boosted trees"
Floats = npt.NDArray[np.float32]
MAX_ROUNDS, STOP_AFTER = 1500, 30
MAX_CELLS = 400_000_000  # Cells of the matrix that trees are fitted to; larger logs are sampled at random.
RECORDED = 25  # LightGBM calls callbacks in this order: ours comes after the one that records a round.
MISSING_BUCKET = -1.0
FEWEST_RANKED, MOST_RANKED = 3, 1_000  # The order of so many values is shown to trees, if they are numbers.
SETTINGS = {
    "objective": "binary",
    "metric": "binary_logloss",
    "learning_rate": 0.1,
    "num_leaves": MAX_LEAVES,
    "lambda_l2": 10.0,
    "min_child_samples": 100,
    "max_bin": 127,
    "use_missing": False,
    "verbosity": -1,
    "deterministic": True,
    "force_row_wise": True,
}


def train_boosted(
    config: Frozen,
    data: PreparedData,
    device: torch.device,
    *,
    threads: int,
    seed: int,
    rounds: int | None = None,
    deadline: float | None = None,
    quiet: bool = False,
) -> Trained:
    """Fit the model `boosted`, until the validation logloss has not improved for 30 rounds, or to the `deadline`.

    With `rounds`, train exactly that many, whatever the validation logloss does. Its history is a single epoch.
    """
    assert isinstance(config, BoostedConfig)
    if not trees.is_installed():
        raise InputError("boosted trees need LightGBM", fix="pip install 'recap-ctr[train]'")
    started = time.monotonic()
    columns = _Columns(data, config.crosses)
    booster, train_loss, is_cut = _boost(
        columns, data, threads=threads, seed=seed, rounds=rounds, deadline=deadline, quiet=quiet
    )
    dump = booster.dump_model(num_iteration=booster.best_iteration or None)
    packed = pack_trees([tree["tree_structure"] for tree in dump["tree_info"]])
    changes = {
        "crosses": columns.crosses,
        "buckets": len(columns.table) if columns.pairs else 1,
        "orders": columns.orders,
        "trees": len(packed.leaf_TC),
    }
    model = Boosted(config.model_copy(update=changes), data.layout)
    with torch.no_grad():
        model.figures.weight.copy_(torch.from_numpy(columns.figures))
        if model.table is not None:
            model.table.weight.copy_(torch.from_numpy(columns.table))
    model.forest.fill(packed)
    logits = booster.predict(columns.of(data.valid), raw_score=True, num_threads=threads)
    epoch = Epoch(
        epoch=1,
        step=len(packed.leaf_TC),
        learning_rate=SETTINGS["learning_rate"],
        train_loss=train_loss,
        valid_auc=metrics.auc(data.valid.labels, logits, data.valid.weights),
        valid_logloss=metrics.logloss(data.valid.labels, logits, data.valid.weights),
        seconds=time.monotonic() - started,
    )
    return Trained(model.to(device).eval(), [epoch], 1, epoch.seconds, finished=not is_cut)


def with_codes(config: BoostedConfig, data: PreparedData) -> Shard:
    """Return the training rows with further columns: the codes of the rates that each row may know."""
    if not config.crosses:
        return data.train
    codes = count_rates(data).training_codes(config.crosses)
    return replace(data.train, values=np.concatenate([data.train.values, codes], axis=1, dtype=np.float32))


class _Columns:
    """The columns that trees look at, of training rows and of others."""

    def __init__(self, data: PreparedData, crosses: Sequence[Cross] = ()) -> None:
        """Count the rates of fields that are not buckets, and of pairs; look up the order of buckets and numbers.

        `crosses` may name the pairs; else they are chosen as those of a network on click rates are.
        """
        self._layout = data.layout
        self._buckets = _buckets(data)
        counted = [
            field
            for field in crossable(data.layout)
            if field.name not in self._buckets and not field.is_linear
        ]
        singles: tuple[Cross, ...] = tuple((field.name,) for field in counted)
        if not crosses:
            crosses = choose_crosses(data.train, data.layout, by_time=data.is_in_time_order)
        self.pairs: tuple[Cross, ...] = tuple(cross for cross in crosses if len(cross) > 1)
        self.crosses = singles + self.pairs
        self._counted = counted
        self._rates = count_rates(data)
        ranks = _ranks(data, [field.name for field in counted])
        self.orders = tuple(ranks)
        self._ranked = [field for field in data.layout.fields if field.name in ranks]
        self.figures = np.zeros((data.layout.num_rows, 3 if ranks else 2), np.float32)
        """The figures of each value, as the model keeps them."""
        if singles:
            entries = self._rates.entries(singles)
            entries.fill(self.figures[:, :2], singles, singles, data.layout)
        for field in self._ranked:
            self.figures[field.offset : field.offset + field.size, 2] = ranks[field.name]
        for field in data.layout.fields:
            if field.name in self._buckets:
                self.figures[field.offset : field.offset + field.size, 0] = self._buckets[field.name]

    @cached_property
    def table(self) -> npt.NDArray[np.int32]:
        """Return the packed table of the pairs' rates, as the model keeps it."""
        return self._rates.entries(self.pairs).table(self._rates.rate)

    def of(self, shard: Shard, codes: Codes | None = None) -> Floats:
        """Return the matrix of a shard's rows, with their `codes` if they have any."""
        ids = np.asarray(shard.ids)
        if codes is None:
            starts = [field.start for field in self._counted]
            parts = [self.figures[ids[:, starts], :2].reshape(len(ids), -1)]
            if self.pairs:
                of_pairs = neutral_where_unseen(self._rates.measure(self.pairs, shard).later)
                parts.append(of_pairs.astype(np.float32))
        else:
            parts = [codes.astype(np.float32)]
        for field in crossable(self._layout):
            if field.name in self._buckets:
                parts.append(self.figures[ids[:, field.start], :1])
        parts += [self.figures[ids[:, field.start], 2:] for field in self._ranked]
        for field in self._layout.fields:
            if field.value_column is not None:
                numbers = field.numbers(ids, shard.values)
                parts.append(np.where(np.isnan(numbers), np.float32(MISSING), numbers)[:, None])
        return np.concatenate(parts, axis=1)

    def of_training_rows(self, train: Shard, seed: int) -> tuple[Floats, Shard]:
        """Return the matrix of the training rows and the rows themselves, or of a sample if all would take too much
        memory."""
        codes = neutral_where_unseen(self._rates.training_codes(self.crosses)) if self.crosses else None
        most = MAX_CELLS // max(2 * len(self.crosses) + self._layout.num_fields, 1)
        if len(train) > most:
            chosen = np.sort(np.random.default_rng(seed).choice(len(train), most, replace=False))
            train, codes = train.take(chosen), None if codes is None else codes[chosen]
        return self.of(train, codes), train


def _buckets(data: PreparedData) -> dict[str, Floats]:
    """Return, for each field of numbers cut at quantiles, the number of each value's bucket."""
    buckets: dict[str, Floats] = {}
    sizes = {field.name: field.size for field in data.layout.fields}
    for name, fitted in data.stored_fields.quantiles().items():
        numbers = np.full(sizes[name], MISSING_BUCKET, np.float32)
        numbers[1 : 1 + len(fitted.values)] = fitted.values.cast(pl.Float64).to_numpy()
        buckets[name] = numbers
    return buckets


def _ranks(data: PreparedData, names: Sequence[str]) -> dict[str, Floats]:
    """Return, for each of the named fields whose values are numbers, the rank of each value, MISSING for padding and
    OOV.

    Ids, of which there are more, have no order that says something about the next ones.
    """
    ranks: dict[str, Floats] = {}
    for place in data.layout.fields:
        if place.name not in names or not FEWEST_RANKED <= place.num_values <= MOST_RANKED:
            continue
        fitted = data.stored_fields.field(place.name)
        if fitted.field.hash_buckets:
            continue
        numbers = fitted.values.cast(pl.Float64, strict=False)
        if numbers.null_count() > fitted.values.null_count() or not numbers.is_finite().all():
            continue
        order = np.full(place.size, MISSING, np.float32)
        kept = numbers.is_not_null().to_numpy()
        order[fitted.ids(np.arange(len(numbers), dtype=np.int32))[kept]] = numbers.drop_nulls().rank("dense")
        ranks[place.name] = order
    return ranks


def _boost(
    columns: _Columns,
    data: PreparedData,
    *,
    threads: int,
    seed: int,
    rounds: int | None,
    deadline: float | None,
    quiet: bool,
) -> tuple[Any, float, bool]:
    """Return the booster, its loss on the training rows at its best round, and whether the deadline cut it."""
    import lightgbm

    matrix, rows = columns.of_training_rows(data.train, seed)
    train = lightgbm.Dataset(matrix, rows.labels, weight=rows.weights)
    valid = train.create_valid(columns.of(data.valid), data.valid.labels, weight=data.valid.weights)
    losses: dict[str, dict[str, list[float]]] = {}

    is_cut = False

    def stop_in_time(state: Any) -> None:
        nonlocal is_cut
        is_cut = deadline is not None and time.time() > deadline
        if is_cut:
            raise lightgbm.callback.EarlyStopException(state.iteration, state.evaluation_result_list)

    stop_in_time.order = RECORDED  # type: ignore[attr-defined]
    with meter(TITLE, None, "rows", quiet=quiet) as shown:
        booster = lightgbm.train(
            {**SETTINGS, "num_threads": threads, "seed": seed},
            train,
            rounds or MAX_ROUNDS,
            valid_sets=[train, valid],
            valid_names=["train", "valid"],
            callbacks=[
                lightgbm.record_evaluation(losses),
                trees.show_rounds(shown, len(rows)),
                stop_in_time,
                *([] if rounds else [lightgbm.early_stopping(STOP_AFTER, verbose=False)]),
            ],
        )
    train_losses = losses["train"]["binary_logloss"]
    return booster, train_losses[(booster.best_iteration or len(train_losses)) - 1], is_cut
