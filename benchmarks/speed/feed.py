"""Measure how many rows a second can be brought to the device that trains: it should never wait for them.

    python -m benchmarks.speed.feed [--rows 4000000] [--batches 4096 65536] [--work DIR]

Rows of 39 ids are files in the system's cache. They become tensors of batches in the way in which training gathers
them, shuffled whole and in windows; the copy to a GPU is not in it. `rows_per_cpu_second` counts the CPU time of all
threads, so it is what one core can feed; `rows_per_second` is by the clock, where other work on the machine shows.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

from benchmarks.speed.measure import WORK
from benchmarks.speed.window_memory import open_rows, write_rows
from recap_ctr.config import TrainConfig
from recap_ctr.data.shards import Shard
from recap_ctr.jobs.machine import machine
from recap_ctr.nn.group import Group
from recap_ctr.training.ahead import Direct, Place
from recap_ctr.training.feed import WINDOW_ROWS, feed_of

WANTED = 2_000_000
"""Rows that one core should feed in a second."""


def epoch(rows: Shard, batch_size: int, window_rows: int) -> dict[str, int]:
    """Gather the batches of an epoch, and return how many of its rows came in a second."""
    config = TrainConfig(batch_size=batch_size, max_epochs=1)
    feed = feed_of(rows, config, None, Group(), window_rows)
    batches = Direct(feed, torch.device("cpu"), lambda step: Place(0, step, slice(0, batch_size)))
    steps = len(rows) // batch_size
    start, cpu_start = time.perf_counter(), time.process_time()
    for step in range(steps):
        batches.take(step)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    return {
        "rows_per_second": round(steps * batch_size / seconds),
        "rows_per_cpu_second": round(steps * batch_size / cpu_seconds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--batches", type=int, nargs="+", default=[4096, 65_536], help="rows of a batch")
    parser.add_argument("--work", type=Path, default=WORK)
    args = parser.parse_args()
    torch.set_num_threads(1)
    directory = args.work.resolve() / f"window-{args.rows}"
    if not directory.exists():
        write_rows(directory, args.rows)
    rows = open_rows(directory).train
    fed = {
        f"{name}, batches of {size}": epoch(rows, size, window_rows)
        for size in args.batches
        for name, window_rows in (("shuffled", 0), ("windowed", WINDOW_ROWS))
    }
    slowest = min(entry["rows_per_cpu_second"] for entry in fed.values())
    result = {"rows": args.rows, **fed, "wanted": WANTED, "reached": slowest >= WANTED, "machine": machine()}
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
