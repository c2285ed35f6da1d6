"""Train the network on click rates: count, choose the pairs of fields, then the ordinary training loop."""

import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from recap_ctr.config import Frozen, TrainConfig
from recap_ctr.data.layout import Layout
from recap_ctr.data.rates import Codes, choose_crosses
from recap_ctr.data.rates import Rates as Counted
from recap_ctr.data.shards import PreparedData, Shard
from recap_ctr.errors import InputError
from recap_ctr.models.rates import Rates, RatesConfig
from recap_ctr.models.recap import RecapConfig
from recap_ctr.training.loop import Trained, train

RATES = "rates"


@dataclass(frozen=True)
class CodedRows:
    """Rows as the network on click rates reads them, with codes in place of ids."""

    layout: Layout
    train: Shard
    valid: Shard


def count_rates(data: PreparedData) -> Counted:
    """Return the rates over the training rows, in folds that suit the split."""
    return Counted(data.train, data.layout, by_time=data.is_in_time_order)


def training_rows(config: RatesConfig, data: PreparedData) -> Shard:
    """Return the training rows with codes in place of ids: what each row may know of its click rates."""
    return _coded(data.train, count_rates(data).training_codes(config.crosses))


def _coded(shard: Shard, codes: Codes) -> Shard:
    return replace(shard, ids=np.empty((len(shard), 0), np.int32), values=codes)  # type: ignore[arg-type]


def with_rates(
    config: Frozen, rates: nn.Module, data: PreparedData
) -> tuple[RecapConfig, CodedRows, dict[str, torch.Tensor]]:
    """Return what is needed to train RECAP's towers beside a trained network on click rates.

    That is the config with the network, the rows with what each may know of its rates, and the network's weights,
    which are trained further.
    """
    assert isinstance(config, RecapConfig) and isinstance(rates, Rates)
    coded = training_rows(rates.config, data)
    values = np.concatenate([data.train.values, coded.values], axis=1, dtype=np.float32)
    weights = {f"rates.{name}": weight for name, weight in rates.state_dict().items()}
    rows = CodedRows(data.layout, replace(data.train, values=values), data.valid)
    return config.model_copy(update={"rates": rates.config}), rows, weights


def train_rates(
    config: Frozen,
    training: TrainConfig,
    data: PreparedData,
    out: Path,
    *,
    device: torch.device,
    length: float | None = None,
    until: int | None = None,
    deadline: float | None = None,
    quiet: bool = False,
) -> Trained:
    """Train the model `rates` in the directory `out`; the crosses are chosen if the config names none."""
    assert isinstance(config, RatesConfig)
    started = time.monotonic()
    crosses = config.crosses or tuple(choose_crosses(data.train, data.layout, by_time=data.is_in_time_order))
    if not crosses:
        raise InputError("no field has one value a row, so there are no rates of values")
    measured = count_rates(data).measure(crosses, data.valid)
    rows = CodedRows(data.layout, _coded(data.train, measured.training), _coded(data.valid, measured.later))
    counting = time.monotonic() - started
    named = config.model_copy(update={"crosses": crosses})
    trained = train(
        RATES,
        named,
        training,
        rows,
        out,
        device=device,
        length=length,
        until=until,
        deadline=deadline,
        quiet=quiet,
    )
    model = Rates(named.model_copy(update={"buckets": len(measured.table)}), data.layout)
    model.load_state_dict({**trained.model.state_dict(), "table.weight": torch.from_numpy(measured.table)})
    return replace(trained, model=model.to(device).eval(), seconds=trained.seconds + counting)
