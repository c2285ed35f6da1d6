"""What scoring costs: measured in one process, interleaved, because machines are noisy."""

import time
from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np
import torch
from torch import nn

from recap_ctr.axes.predict import predict
from recap_ctr.data.shards import Shard

ROWS = 16_384


def scoring_seconds(
    models: Mapping[str, Sequence[nn.Module]], shard: Shard, device: torch.device, repeats: int = 12
) -> dict[str, float]:
    """Of each entry's models, one after the other, for a row; medians over rounds.

    On a CPU it is the process's own time, which others disturb less. Rows of a small shard are taken again. Each round
    begins with another entry: what comes first finds the caches cold.
    """
    part = shard.take(np.arange(ROWS) % len(shard))
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in models}
    names = list(models)
    for repeat in range(repeats + 1):
        first = repeat % len(names)
        for name in names[first:] + names[:first]:
            began = clock()
            for model in models[name]:
                predict(model, part, device)
            if repeat:  # the first round warms up
                seconds[name].append(clock() - began)
    return {name: median(times) / ROWS for name, times in seconds.items()}


def relative_costs(
    models: Mapping[str, Sequence[nn.Module]], shard: Shard, device: torch.device, repeats: int = 12
) -> dict[str, float]:
    """The same, over that of the first entry."""
    seconds = scoring_seconds(models, shard, device, repeats)
    unit = next(iter(seconds.values()))
    return {name: time / unit for name, time in seconds.items()}
