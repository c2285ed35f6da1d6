"""Measure the constants of `recap plan --rows`: what one core takes for a cell, a step, a validation row, a byte.

    python -m benchmarks.speed.scale [--rows 100000] [--steps 6] [--work DIR] [--write]

Times are CPU seconds of one thread, so that other programs on the machine count little. A step's constants are those
that explain the steps of several models, vector sizes and batches best, none of them negative; `fit_error` is the
largest relative error among these steps. --write puts the constants into benchmarks/speed/results/scale.json, and
into the package, where `recap plan` finds them.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.optimize import nnls

from benchmarks.speed.measure import ROOT, WORK, make, run
from benchmarks.speed.ours_train import EncodedRows
from recap_ctr.axes.predict import predict
from recap_ctr.config import TrainConfig
from recap_ctr.evaluation import metrics
from recap_ctr.jobs.machine import machine
from recap_ctr.models.catalogue import parse_model
from recap_ctr.nn.initial import normal_
from recap_ctr.recipe.scale import SPEEDS, model_shape
from recap_ctr.storage.arrays import save_arrays
from recap_ctr.training.loop import Trainer

RESULT = ROOT / "benchmarks" / "speed" / "results" / "scale.json"
CPU = torch.device("cpu")
CASES = (  # Model, vector size, rows of a batch.
    ("fcn", 16, 512),
    ("fcn", 16, 4096),
    ("fcn", 8, 2048),
    ("recap", 16, 2048),
    ("dnn", 16, 4096),
    ("dnn", 8, 512),
    ("fm", 16, 4096),
    ("fm", 16, 512),
)
NUMBERS = 4_000_000
JUDGED = 500_000


def cpu_seconds(call: Callable[[], object], times: int = 1) -> float:
    """Return the CPU time of a call, the median over `times` of them."""
    taken = []
    for _ in range(times):
        start = time.process_time()
        call()
        taken.append(time.process_time() - start)
    return statistics.median(taken)


def prepare(work: Path, rows: int) -> dict[str, float]:
    """Return the time of a cell, by the difference between few and many rows, and the bytes of a value on disk."""
    schema = make(work / "criteo.toml", "generate", "criteo", "--schema", "10")
    seconds, out = [], work / "out"
    for count in (rows // 4, rows):
        tsv = make(work / f"criteo-{count}.tsv", "generate", "criteo", "--rows", str(count))
        shutil.rmtree(out, ignore_errors=True)
        usage = run(
            [sys.executable, "-m", "recap_ctr", "prepare", tsv, "--schema", schema, "--out", out, "--json"]
        )
        seconds.append(usage.cpu_seconds)
        fields = json.loads((out / "manifest.json").read_text())["fields"]
    values = sum(field["size"] for field in fields)
    size = sum(path.stat().st_size for path in (out / "vocabulary").iterdir())
    shutil.rmtree(out)
    return {
        "prepare_cell": (seconds[1] - seconds[0]) / (rows - rows // 4) / len(fields),
        "vocabulary_bytes": size / values,
    }


def steps(data: EncodedRows, count: int) -> dict[str, float]:
    """Return the constants of a step by the `fast` update, and a scored row's share of a trained row's time."""
    fields = data.layout.num_fields
    matrix, seconds, shares = [], [], []
    scored = data.train.take(np.arange(8192))
    for name, dim, batch in CASES:
        config = parse_model(name, {"dim": dim})
        trainer = Trainer(name, config, TrainConfig(batch_size=batch, update="fast"), data, CPU)
        trainer.step()
        taken = cpu_seconds(trainer.step, count)
        shape = model_shape(name, config, fields)
        matrix.append(
            [1.0, batch * shape.row_flops, batch * shape.row_saved_bytes, batch * fields * shape.dim]
        )
        seconds.append(taken)
        if batch == 4096:
            scoring = cpu_seconds(partial(predict, trainer.model, scored, CPU), 3) / len(scored)
            shares.append(scoring * batch / taken)
        print(f"{name}, {dim}, {batch} rows: {1000 * taken:.1f} ms", file=sys.stderr)
    # Relative errors count, so that small steps are explained as well as large ones.
    scaled = np.array(matrix) / np.array(seconds)[:, None]
    size = np.abs(scaled).max(axis=0)
    solution, _ = nnls(scaled / size, np.ones(len(seconds)))
    errors = scaled / size @ solution - 1
    step, flop, saved_byte, vector_number = (solution / size).tolist()
    return {
        "step": step,
        "flop": flop,
        "saved_byte": saved_byte,
        "vector_number": vector_number,
        "forward": statistics.median(shares),
        "fit_error": float(np.abs(errors).max()),
    }


def table(data: EncodedRows, count: int) -> float:
    """Return what the `exact` update adds to a step for each number of the table."""
    taken, config = {}, parse_model("fm", {"dim": 16})
    for update in ("fast", "exact"):
        training = TrainConfig.model_validate({"batch_size": 64, "update": update})
        trainer = Trainer("fm", config, training, data, CPU)
        trainer.step()
        taken[update] = cpu_seconds(trainer.step, count)
    numbers = data.layout.num_rows * model_shape("fm", config, data.layout.num_fields).dim
    return (taken["exact"] - taken["fast"]) / numbers


def distinct(data: EncodedRows) -> tuple[float, float]:
    """Return a and b of U = a · L^b, by least squares over shares of 16 to 16,384 rows."""
    lookups, found = [], []
    for rows in (16, 64, 256, 1024, 4096, 16_384):
        ids = data.train.ids[:rows]
        lookups.append(ids.size)
        found.append(len(np.unique(ids)))
    b, log_a = np.polyfit(np.log(lookups), np.log(found), 1)
    return float(np.exp(log_a)), float(b)


def judge() -> dict[str, float]:
    """Return time and memory of AUC and logloss for each validation row."""
    rng = np.random.default_rng(1)
    labels = (rng.random(JUDGED) < 0.2).astype(np.uint8)
    logits: npt.NDArray[np.float32] = rng.normal(-1.5, 1.0, JUDGED).astype(np.float32)

    def measure() -> None:
        metrics.auc(labels, logits)
        metrics.logloss(labels, logits)

    seconds = cpu_seconds(measure, 3)
    tracemalloc.start()
    measure()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {"judged_row": seconds / JUDGED, "judged_bytes": 4 + peak / JUDGED}


def write_bytes() -> float:
    """Return the time to hash and write a byte of an artifact's weights."""
    array = np.random.default_rng(1).random(NUMBERS, np.float32)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "weights.safetensors"
        return cpu_seconds(lambda: save_arrays(path, {"table": array}, checksum=True), 3) / array.nbytes


def resident_bytes() -> int:
    """Return the memory of this process that is not a mapped file."""
    status = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in status if line.startswith("RssAnon")).split()[1])


def rounded(value: Any) -> Any:
    """Return numbers with four digits."""
    if isinstance(value, tuple):
        return tuple(rounded(each) for each in value)
    return float(f"{value:.4g}") if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=100_000, help="rows that are prepared")
    parser.add_argument("--steps", type=int, default=6, help="steps of each kind")
    parser.add_argument("--work", type=Path, default=WORK)
    parser.add_argument("--write", action="store_true", help="keep the constants")
    args = parser.parse_args()
    torch.set_num_threads(1)
    process_bytes = resident_bytes()
    work = args.work.resolve()
    encoded = make(work / "criteo-100000-encoded", "generate", "criteo", "--rows", "100000", "--encoded")
    data = EncodedRows(encoded)
    numbers = torch.empty(NUMBERS)
    measured = {
        **prepare(work, args.rows),
        **steps(data, args.steps),
        "table_number": table(data, args.steps),
        **judge(),
        "drawn_number": cpu_seconds(lambda: normal_(numbers, 1.0), 3) / NUMBERS,
        "written_byte": write_bytes(),
        "distinct": distinct(data),
        "process_bytes": process_bytes,
    }
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": {**machine(), "cores_measured": 1},
        **{name: rounded(value) for name, value in measured.items()},
    }
    text = json.dumps(result)
    if args.write:
        for path in (RESULT, SPEEDS):
            path.write_text(f"{text}\n")
    print(text)


if __name__ == "__main__":
    main()
