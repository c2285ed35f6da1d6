"""What scoring with torch models costs."""

import time
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median

import numpy as np
import torch
from torch import nn

from recap_ctr.axes.predict import predict
from recap_ctr.data.shards import Shard
from recap_ctr.inference.stopwatch import interleaved_seconds

ROWS = 16_384


def scoring_seconds(
    models: Mapping[str, Sequence[nn.Module]], shard: Shard, device: torch.device, repeats: int = 12
) -> dict[str, float]:
    """Return the median seconds per row of each entry, whose models score one after the other.

    On a CPU this is CPU time of the process, which other processes disturb less. Rows of a small shard are repeated.
    """
    rows = shard.take(np.arange(ROWS) % len(shard))
    calls = {name: partial(_score, entry, rows, device) for name, entry in models.items()}
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    times = interleaved_seconds(calls, rounds=repeats, clock=clock)
    return {name: median(seconds) / ROWS for name, seconds in times.items()}


def _score(models: Sequence[nn.Module], rows: Shard, device: torch.device) -> None:
    for model in models:
        predict(model, rows, device)


def relative_costs(
    models: Mapping[str, Sequence[nn.Module]], shard: Shard, device: torch.device, repeats: int = 12
) -> dict[str, float]:
    """Return the seconds per row of each entry, divided by those of the first one."""
    seconds = scoring_seconds(models, shard, device, repeats)
    unit = next(iter(seconds.values()))
    return {name: cost / unit for name, cost in seconds.items()}
