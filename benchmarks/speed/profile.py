"""Where the time of our training step goes: CPU time by operator, as shares of the step.

python -m benchmarks.speed.profile --shape criteo --update fast --data DIR   # DIR from generate --encoded
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.speed.ours_train import CONFIGS, build

PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_")


def main() -> None:
    """Profile some steps, and print one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", choices=CONFIGS, required=True)
    parser.add_argument("--update", choices=("exact", "fast"), required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    trainer = build(args.shape, args.update, args.data, 4096)
    for _ in range(4):
        trainer.step()
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        for _ in range(args.steps):
            trainer.step()
    times = {event.key: event.self_cpu_time_total for event in recorded.key_averages()}
    total = sum(times.values())
    largest = sorted(times, key=lambda key: -times[key])[:12]
    result = {
        "shape": args.shape,
        "update": args.update,
        "milliseconds_a_step": round(total / args.steps / 1e3),
        "matrix_products": round(sum(times.get(name, 0) for name in PRODUCTS) / total, 3),
        "shares": {name: round(times[name] / total, 3) for name in largest},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
