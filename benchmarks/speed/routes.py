"""What K routes cost at scoring: RECAP at Criteo's shape, by the route tree and by one pass per route, beside FCNs.

    python -m benchmarks.speed.routes [--threads 1] [--rounds 3]

Batch 4096, 39 fields of 16, rank 96, eight adapters a tower, depth 4. All settings take turns in each round; a figure
is the median over rounds of the time relative to RECAP with one route in the same round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from recap_ctr.axes.routes import late_routes, random_routes, route_logits
from recap_ctr.data.layout import Layout
from recap_ctr.models.fcn import FCN, FCNConfig
from recap_ctr.models.recap import Recap, RecapConfig, Route
from recap_ctr.nn.interface import Inputs

ROWS, FIELDS, VALUES = 4096, 39, 1_000
COUNTS = (1, 2, 4, 8, 16, 32)
NAIVE = 8  # Beyond this many routes, one pass per route only shows more of the same.


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    layout = Layout.of_sizes([VALUES] * FIELDS)
    rng = np.random.default_rng(0)
    ids = rng.integers(1, VALUES, (ROWS, FIELDS)) + VALUES * np.arange(FIELDS)
    inputs = Inputs(torch.from_numpy(ids.astype(np.int32)), torch.empty(ROWS, 0))
    # Free adapters, so that eight leaves can branch at the last step.
    config = RecapConfig(lora_rank=96, binding="free")
    recap = Recap(config, layout).eval()
    fcns = [FCN(FCNConfig(), layout).eval() for _ in range(5)]

    def naive(routes: list[Route]) -> Tensor:
        return torch.stack([recap(inputs, route).logit_B for route in routes])

    runs: dict[str, Callable[[], object]] = {
        "one FCN": lambda: fcns[0](inputs),
        "five FCNs": lambda: [fcn(inputs) for fcn in fcns],
    }
    for count in COUNTS:
        for kind, routes in (
            ("late", late_routes(config, count)),
            ("random", random_routes(config, count, seed=0)),
        ):
            runs[f"{kind} tree {count}"] = lambda routes=routes: route_logits(recap, inputs, routes)  # type: ignore[misc]
            if count <= NAIVE:
                runs[f"{kind} naive {count}"] = lambda routes=routes: naive(routes)  # type: ignore[misc]
    times: dict[str, list[float]] = {name: [] for name in runs}
    with torch.inference_mode():
        for _ in range(args.rounds + 1):
            for name, run in runs.items():
                start = time.perf_counter()
                run()
                times[name].append(time.perf_counter() - start)
    unit = times["late tree 1"][1:]  # the first round warms up
    relative = {
        name: round(statistics.median(t / single for t, single in zip(seconds[1:], unit, strict=True)), 2)
        for name, seconds in times.items()
    }
    print(
        json.dumps(
            {
                "threads": args.threads,
                "rounds": args.rounds,
                "seconds_of_one": round(statistics.median(unit), 4),
                "relative": relative,
            }
        )
    )


if __name__ == "__main__":
    main()
