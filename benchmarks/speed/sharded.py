"""Measure training on several workers: equality with one worker, bytes and memory, resuming, and a limit of memory.

    python -m benchmarks.speed.sharded equal    # weights after 50 steps on 2 and 4 workers, against one
    python -m benchmarks.speed.sharded resume   # the state of 4 workers, gone on with by 2, 3 and 1
    python -m benchmarks.speed.sharded bytes    # bytes, memory and time of a step on 1, 2 and 4 workers
    python -m benchmarks.speed.sharded limit    # a table that trains on four processes and not on one
    python -m benchmarks.speed.sharded auc      # AUC after three epochs on 1, 2 and 4 workers

Everything is made in --work, and removed at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.speed import sharded_worker
from benchmarks.speed.measure import ROOT, WORK
from recap_ctr.jobs.executor import Job
from recap_ctr.jobs.local import LocalProcesses
from recap_ctr.nn.weights import load_tensors

MODELS: dict[str, dict[str, Any]] = {
    "fcn": {"dim": 8},
    "recap": {"dim": 8},
    "dnn": {"dim": 8, "units": [64, 64]},
    "qnn": {"dim": 8},
}
WANTED = 1e-5
NUDGES = 6
BARE = {"dim": 16, "units": [16], "batch_norm": False, "dropout": 0.0}
"""A model that is little more than its table."""


def case(model: str, update: str, out: Path, *, double: bool, **changes: Any) -> dict[str, Any]:
    """Return a training of 50 steps of 512 rows with 10 fields and 20,000 values."""
    defaults = {
        "name": out.name,
        "model": model,
        "settings": MODELS[model],
        "rows": [512 * 50, 10, 20_000],
        "train": {"batch_size": 512, "update": update, "l2": 1e-4},
        "double": double,
        "steps": 50,
        "out": str(out),
    }
    return {**defaults, **changes}


def on_workers(
    pool: LocalProcesses, size: int, work: Path, function: Any, arguments: dict[str, Any]
) -> list[Any]:
    """Return what each of `size` workers returns."""
    meeting = str(work / f"meeting-{time.monotonic_ns()}")
    common = {"size": size, "meeting": meeting, **arguments}
    jobs = [Job(f"worker {rank + 1}", function, {"rank": rank, **common}) for rank in range(size)]
    return pool.run(jobs, title=f"{size} workers", quiet=True)


def largest_difference(ours: str, theirs: str, without: list[str]) -> float:
    """Return the largest difference of two files of weights."""
    first, second = (load_tensors(Path(out) / "weights.safetensors")[0] for out in (ours, theirs))
    names = first.keys() - set(without)
    return max(float((first[name].double() - second[name].double()).abs().max()) for name in names)


def equal(work: Path) -> dict[str, Any]:
    """Compare weights after 50 steps, in double precision all of them, in single those that have an effect.

    In single precision, rounding alone moves some weights further than that: `nudged` is one worker against itself with
    every first weight a unit in the last place larger or smaller, the largest of several draws.
    """
    results: dict[str, dict[str, float]] = {}
    pool = LocalProcesses(4)
    nudges = [(1, draw) for draw in range(1, NUDGES + 1)]
    for size, nudge in [(1, 0), (2, 0), (4, 0), *nudges]:
        title = f"nudge {nudge}" if nudge else f"{size} workers"
        print(title, file=sys.stderr)
        cases = [
            case(
                model,
                update,
                work / title / f"{model}-{update}-{kind}",
                double=kind == "double",
                nudge=nudge,
            )
            for model, update, kind in product(MODELS, ("exact", "fast"), ("double", "single"))
        ]
        ineffective = on_workers(pool, size, work, sharded_worker.take_steps, {"cases": cases})[0]
        for entry in cases if size > 1 or nudge else ():
            name = entry["name"]
            without = [] if entry["double"] else ineffective[name]
            difference = largest_difference(entry["out"], str(work / "1 workers" / name), without)
            row = results.setdefault(name, {})
            column = "nudged" if nudge else title
            row[column] = max(row.get(column, 0.0), float(f"{difference:.1e}"))
    worst = {
        title: max(entry[title] for name, entry in results.items() if name.endswith("double"))
        for title in ("2 workers", "4 workers")
    }
    return {"largest_difference": results, "worst_in_double_precision": worst, "wanted": WANTED}


def resume(work: Path) -> dict[str, Any]:
    """Compare 25 steps on 4 workers and 25 on others with 50 on one, in double precision."""
    pool = LocalProcesses(4)
    results = {}
    for update in ("exact", "fast"):
        train = {"batch_size": 512, "update": update, "l2": 1e-4, "ema": 0.9}
        whole = case("fcn", update, work / f"one-{update}", double=True, train=train)
        on_workers(pool, 1, work, sharded_worker.take_steps, {"cases": [whole]})
        half = case("fcn", update, work / f"half-{update}", double=True, train=train, steps=25, save=True)
        on_workers(pool, 4, work, sharded_worker.take_steps, {"cases": [half]})
        for size in (1, 2, 3):
            rest = case("fcn", update, work / f"rest-{update}-{size}", double=True, train=train, steps=25)
            on_workers(
                pool, size, work, sharded_worker.take_steps, {"cases": [{**rest, "resume": half["out"]}]}
            )
            difference = largest_difference(rest["out"], whole["out"], [])
            results[f"{update}, 4 then {size}"] = float(f"{difference:.1e}")
    return {"largest_difference": results, "wanted": WANTED}


def bare(vocabulary: int, out: Path) -> dict[str, Any]:
    """Return a training with 39 fields, batches of 4096 and vectors of 16 numbers."""
    train = {"batch_size": 4096, "update": "fast", "l2": 1e-5}
    rows = [4096 * 21, 39, vocabulary]
    return case("dnn", "fast", out, double=False, settings=BARE, rows=rows, train=train, steps=20)


def bytes_and_memory(work: Path) -> dict[str, Any]:
    """Measure steps on 1, 2 and 4 workers with small and large vocabularies; each with new processes."""
    results = []
    for vocabulary, size in product((2_000_000, 20_000_000), (1, 2, 4)):
        arguments = {"case": bare(vocabulary, work / "state"), "limit_mib": None}
        measured = on_workers(LocalProcesses(size), size, work, sharded_worker.measure, arguments)
        shutil.rmtree(work / "state")
        entry = {
            "vocabulary": vocabulary,
            "workers": size,
            "look_up_kib_per_step": round(sum(one["look_up_kib_per_step"] for one in measured)),
            "sums_kib_per_step": round(sum(one["sums_kib_per_step"] for one in measured)),
            **{key: [one[key] for one in measured] for key in ("table_mib", "peak_mib")},
            "ms_per_step": max(one["ms_per_step"] for one in measured),
        }
        print(json.dumps(entry), file=sys.stderr)
        results.append(entry)
    return {"steps": results}


def limit(work: Path, limit_mib: int, vocabulary: int) -> dict[str, Any]:
    """Train a table under a limit of memory, set on each process (RLIMIT_DATA), on one process and on four."""
    results: dict[str, Any] = {"vocabulary": vocabulary, "limit_mib": limit_mib}
    for size in (1, 4):
        arguments = {"case": bare(vocabulary, work / "state"), "limit_mib": limit_mib}
        results[f"{size} workers"] = on_workers(
            LocalProcesses(size), size, work, sharded_worker.measure, arguments
        )
    return results


def auc(work: Path, rows: int) -> dict[str, Any]:
    """Compare AUC after three epochs on synthetic clicks with its standard error."""
    from recap_ctr.bench.synthetic import synthetic_schema
    from recap_ctr.config import TrainConfig
    from recap_ctr.data.prepare import Preparation, write_prepared_data
    from recap_ctr.data.source import FrameSource
    from recap_ctr.data.synthetic import SyntheticConfig, SyntheticData
    from recap_ctr.models.catalogue import parse_model
    from recap_ctr.training.config import RunConfig
    from recap_ctr.training.run import run
    from recap_ctr.training.workers import run_on_workers

    frame = SyntheticData(SyntheticConfig(rows=rows, num_fields=8, max_values=1_000, seed=3)).frame()
    source = FrameSource(frame.drop("bayes_logit"))
    data = write_prepared_data(Preparation(synthetic_schema(8), {"all": source}), work / "data", quiet=True)[
        0
    ]
    results: dict[str, Any] = {}
    pool = LocalProcesses(4)
    for model, update in product(MODELS, ("exact", "fast")):
        train = TrainConfig(batch_size=1024, update=update, l2=1e-4, max_epochs=3)
        config = RunConfig(
            model, parse_model(model, MODELS[model]), train, train_baseline=False, report_fields=False
        )
        figures = {}
        for size in (1, 2, 4):
            out = work / f"{model}-{update}-{size}"
            if size == 1:
                report = run(config, data, out, quiet=True)
            else:
                report = run_on_workers(config, data, out, size, executor=pool, quiet=True)
            measured = report.metrics.held_out.raw
            figures[str(size)] = round(measured.auc, 6)
            figures["standard_error"] = round(measured.auc_error or 0.0, 6)
        print(model, update, figures, file=sys.stderr)
        results[f"{model}-{update}"] = figures
    return {"rows": rows, "auc_by_workers": results}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=["equal", "resume", "bytes", "limit", "auc"])
    parser.add_argument("--work", type=Path, default=WORK)
    parser.add_argument("--limit", type=int, default=1024, help="MiB of each process, for `limit`")
    parser.add_argument("--vocabulary", type=int, default=8_000_000, help="rows of the table, for `limit`")
    parser.add_argument("--rows", type=int, default=40_000, help="rows of `auc`")
    args = parser.parse_args()
    work = args.work.resolve() / "sharded"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    os.environ["OMP_NUM_THREADS"] = "1"
    measures = {
        "equal": lambda: equal(work),
        "resume": lambda: resume(work),
        "bytes": lambda: bytes_and_memory(work),
        "limit": lambda: limit(work, args.limit, args.vocabulary),
        "auc": lambda: auc(work, args.rows),
    }
    result = measures[args.what]()
    shutil.rmtree(work)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
