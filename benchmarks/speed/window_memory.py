"""Measure peak memory and speed of training on few and on many rows, shuffled whole and in windows.

    python -m benchmarks.speed.window_memory [--rows 2000000 20000000] [--window 1048576] [--work DIR]

Each training is a process of its own: a small DNN, whose step hides little of what reading costs, 39 fields, one
teacher's logits, two validations an epoch, one epoch, one thread and the one that reads. Rows and logits
are files; the vocabulary and the validation rows are the same for few and many. Peak memory is what the process has of
its own (RssAnon, sampled each 5 ms): pages of files that it has mapped are the system's, and not counted. What it has
more than before it opened the rows is printed beside it. Rows a second are by the clock; other work on the machine
shows in them, and CPU time, of both threads, is printed beside them.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.speed.measure import WORK, run
from benchmarks.speed.scale import resident_bytes
from recap_ctr.config import TrainConfig
from recap_ctr.data.layout import Layout
from recap_ctr.data.shards import Shard
from recap_ctr.models.catalogue import parse_model
from recap_ctr.training.feed import WINDOW_ROWS
from recap_ctr.training.loop import train

MAX_MEMORY, MIN_SPEED = 1.2, 0.8
"""What is wanted of windows: memory of many rows to that of few, and speed to that of rows shuffled whole."""
FIELDS, VALUES, VALID = 39, 100, 20_000
CHUNK = 100_000


@dataclass(frozen=True)
class MappedRows:
    """Rows in files, with what the trainer reads."""

    layout: Layout
    train: Shard
    valid: Shard


class MappedTargets:
    """A teacher's probabilities in a file."""

    def __init__(self, path: Path) -> None:
        self._values = np.load(path, mmap_mode="r")

    def __getitem__(self, rows: slice) -> np.ndarray:
        return np.array(self._values[rows])


def write_rows(directory: Path, rows: int) -> None:
    """Write the files of `rows` training rows."""
    directory.mkdir(parents=True)
    shapes = {
        "ids": (np.int32, (rows, FIELDS)),
        "labels": (np.uint8, (rows,)),
        "targets": (np.float32, (rows,)),
    }
    files = {
        name: np.lib.format.open_memmap(directory / f"{name}.npy", mode="w+", dtype=dtype, shape=shape)
        for name, (dtype, shape) in shapes.items()
    }
    rng = np.random.default_rng(1)
    for start in range(0, rows, CHUNK):
        part = slice(start, min(start + CHUNK, rows))
        count = part.stop - start
        files["ids"][part] = rng.integers(0, VALUES, (count, FIELDS)) + VALUES * np.arange(FIELDS)
        files["labels"][part] = rng.random(count) < 0.2
        files["targets"][part] = rng.random(count)


def open_rows(directory: Path) -> MappedRows:
    """Return the rows that `write_rows` wrote."""
    ids, labels = (np.load(directory / f"{name}.npy", mmap_mode="r") for name in ("ids", "labels"))
    empty = np.empty((len(labels), 0), np.float32)
    numbers = np.broadcast_to(np.int64(0), len(labels))  # Training does not read them.
    shard = Shard(ids, empty, labels, numbers, None, None, None)
    return MappedRows(Layout.of_sizes([VALUES] * FIELDS), shard, shard.take(np.arange(VALID)))


def train_once(directory: Path, window: int) -> None:
    """Train for an epoch, and print the peak."""
    torch.set_num_threads(1)
    peak, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            peak[0] = max(peak[0], resident_bytes())

    config = TrainConfig(batch_size=4096, max_epochs=1, update="fast", validations=2, window_rows=window)
    model = parse_model("dnn", {"dim": 4, "units": (16,)})
    rows, targets = open_rows(directory), MappedTargets(directory / "targets.npy")
    watcher = threading.Thread(target=watch)
    before = resident_bytes()
    watcher.start()
    start, cpu_start = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory() as out:
        train("dnn", model, config, rows, Path(out), device=torch.device("cpu"), targets=targets, quiet=True)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    done.set()
    watcher.join()
    peaks = {"peak_mib": peak[0], "over_start_mib": peak[0] - before}
    mib = {name: round(size / 2**20, 1) for name, size in peaks.items()}
    speed = {"rows_per_second": round(len(rows.train) / seconds), "cpu_seconds": round(cpu_seconds, 2)}
    print(json.dumps({**mib, **speed}))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs=2, default=[2_000_000, 20_000_000], metavar=("FEW", "MANY"))
    parser.add_argument("--window", type=int, default=WINDOW_ROWS)
    parser.add_argument("--work", type=Path, default=WORK)
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train is not None:
        train_once(args.train, args.window)
        return
    result: dict[str, Any] = {"rows": args.rows, "window_rows": args.window}
    for name, window in (("shuffled", 0), ("windowed", args.window)):
        answers = []
        for rows in args.rows:
            directory = args.work.resolve() / f"window-{rows}"
            if not directory.exists():
                write_rows(directory, rows)
            module = "benchmarks.speed.window_memory"
            usage = run([sys.executable, "-m", module, "--train", directory, "--window", str(window)])
            answers.append(usage.answer)
        columns = {key: [answer[key] for answer in answers] for key in answers[0]}
        few, many = columns["peak_mib"]
        few_over, many_over = columns["over_start_mib"]
        ratios = {"ratio": round(many / few, 3), "over_start_ratio": round(many_over / few_over, 3)}
        result[name] = {**columns, **ratios}
    slow, fast = (result[name]["rows_per_second"][1] for name in ("windowed", "shuffled"))
    memory, speed = result["windowed"]["ratio"], round(slow / fast, 3)
    result["memory"] = {"ratio": memory, "at_most": MAX_MEMORY, "reached": memory <= MAX_MEMORY}
    result["speed"] = {"ratio": speed, "at_least": MIN_SPEED, "reached": speed >= MIN_SPEED}
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
