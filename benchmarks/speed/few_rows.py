"""The path for few rows beside the path for large tables: encoding, the engine, and requests, in turns.

    python -m benchmarks.speed.few_rows [--artifact DIR] [--seconds 10] [--requests]

A RECAP of Criteo's shape (39 fields, 0.9M values), unless another artifact with the same fields is given. The cache is
warmed with other rows of the same law. Each row is then encoded by both paths, one after the other; `cut_over` is the
first number of rows at which the path for large tables takes less time. With `--requests`, two servers that differ
in the path alone get the same requests over one connection each, and an empty endpoint as many.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np
import polars as pl

from benchmarks.reliability.running import Server
from benchmarks.speed.criteo_artifact import rows
from benchmarks.speed.load import Connection, connect, get, post
from benchmarks.speed.measure import ROOT, WORK, make, run
from recap_ctr.data.encode import Encoded
from recap_ctr.data.few_rows import CACHED_VALUES, Columns, FewRows
from recap_ctr.data.source import Block
from recap_ctr.inference.engine import Engine
from recap_ctr.inference.setting import Setting
from recap_ctr.jobs.machine import machine, versions
from recap_ctr.serve.codec import JSON
from recap_ctr.serve.config import ServeConfig
from recap_ctr.serve.supervisor import Supervisor

SIZES = (1, 10, 32, 100, 150, 200, 300, 512)
WARM_ROWS, DRAWN_ROWS = 40_000, 100_000
REQUEST_ROWS = (1, 100)


class LargeTableEngine(Engine):
    """An engine that encodes few rows as it encodes many."""

    def encode(self, rows: pl.DataFrame | Block) -> Encoded:
        return self.encoder.encode(rows if isinstance(rows, Block) else Block(rows, 1, "the rows"))

    def encode_few(self, columns: Columns, height: int) -> Encoded | None:
        return None


def load_large_table_engine(path: Path, threads: int) -> Engine:
    return LargeTableEngine.load(path, threads=threads)


def serve(artifact: Path, threads: int) -> None:
    """Serve as `recap serve` does, with the path for large tables."""
    name = f"benchmarks.speed.few_rows:{load_large_table_engine.__name__}"
    config = ServeConfig(artifact=str(artifact), port=0, threads=threads, loader=name)
    Supervisor(config, None, lambda address, model: None).run()


def parts(size: int) -> Iterator[pl.DataFrame]:
    """Yield the rows after those that warmed the cache, so many at a time."""
    drawn = rows(DRAWN_ROWS)
    for start in range(WARM_ROWS, DRAWN_ROWS - size + 1, size):
        yield drawn.slice(start, size)


@dataclass(frozen=True)
class Taken:
    """Milliseconds of each call, all on the same rows, and processor time of this thread."""

    times: dict[str, list[float]]
    cpu_times: dict[str, list[float]]

    def quantiles(self) -> dict[str, dict[str, float]]:
        """Return the median and the lower decile, which other work on the machine hardly changes, with their ratios.

        The processor time of the path for large tables is not told, because polars has threads of its own.
        """
        figures = {name: self._at(share) for name, share in (("p50", 0.5), ("p10", 0.1))}
        if "few" in self.cpu_times:
            figures["cpu_p50"] = {"few": round(median(self.cpu_times["few"]), 4)}
        return figures

    def _at(self, share: float) -> dict[str, float]:
        figures = {name: round(float(np.quantile(times, share)), 4) for name, times in self.times.items()}
        return with_ratio(figures) if "large" in figures else figures


def in_turns(calls: Mapping[str, Callable[[pl.DataFrame], object]], size: int, seconds: float) -> Taken:
    """Time the calls one after the other on each part of the rows."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    cpu_times: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    for part in parts(size):
        for name, call in calls.items():
            start, cpu_start = time.perf_counter(), time.thread_time()
            call(part)
            cpu_times[name].append(1000 * (time.thread_time() - cpu_start))
            times[name].append(1000 * (time.perf_counter() - start))
        if time.perf_counter() > end:
            break
    return Taken(times, cpu_times)


def warm(encode: Callable[[pl.DataFrame], object]) -> None:
    drawn = rows(DRAWN_ROWS)
    for start in range(0, WARM_ROWS, 100):
        encode(drawn.slice(start, 100))


def encoding(artifact: Path, threads: int, seconds: float) -> dict[str, Any]:
    """Return what both paths take, alone and with scoring, and the memory of the new one."""
    engine = Engine.load(artifact, threads=threads)
    rows(DRAWN_ROWS)  # Drawn before memory is counted.
    tracemalloc.start()
    few = FewRows(engine.encoder)
    index_bytes = tracemalloc.get_traced_memory()[0]
    warm(few.encode_frame)
    bytes_all = tracemalloc.get_traced_memory()[0]
    values_by_cache = len(few)
    tracemalloc.stop()

    def large(part: pl.DataFrame) -> Encoded:
        return engine.encoder.encode(Block(part, 1, "the rows"))

    def small(part: pl.DataFrame) -> Encoded:
        encoded = few.encode_frame(part)
        assert encoded is not None
        return encoded

    share = seconds / len(SIZES)
    sizes = {size: in_turns({"large": large, "few": small}, size, share) for size in SIZES}
    quantiles = {size: taken.quantiles() for size, taken in sizes.items()}
    slower = [size for size, both in quantiles.items() if both["p50"]["ratio"] < 1]
    whole = {
        size: in_turns(
            {"large": lambda part: engine.score(large(part)), "few": lambda part: engine.score(small(part))},
            size,
            share,
        )
        for size in REQUEST_ROWS
    }
    encoded = small(next(parts(1)))
    scoring = {str(setting): partial(score_one, engine, encoded, setting) for setting in engine.settings}
    return {
        "encode_ms": {str(size): both for size, both in quantiles.items()},
        "cut_over": slower[0] if slower else None,
        "engine_ms": {str(size): taken.quantiles() for size, taken in whole.items()},
        "one_row_by_setting_ms": in_turns(scoring, 1, share).quantiles(),
        "index_mib": round(index_bytes / 2**20, 2),
        "cache_mib": round((bytes_all - index_bytes) / 2**20, 2),
        "cache_values": values_by_cache,
        "cache_largest": 2 * CACHED_VALUES,
    }


def score_one(engine: Engine, encoded: Encoded, setting: Setting, _: pl.DataFrame) -> object:
    return engine.score(encoded, setting)


def with_ratio(both: dict[str, float]) -> dict[str, float]:
    return {**both, "ratio": round(both["large"] / both["few"], 2)}


async def ask(ports: dict[str, int], size: int, seconds: float) -> dict[str, Any]:
    """Send the same rows to each server in turn, and ask the first one for nothing."""
    connections: dict[str, Connection] = {name: await connect(port) for name, port in ports.items()}
    nothing = get("/health/live")
    times: dict[str, list[float]] = {name: [] for name in (*ports, "empty")}
    end = time.perf_counter() + seconds
    warming = time.perf_counter() + seconds / 5
    for part in parts(size):
        request = post("/score", msgspec.json.encode({"rows": part.to_dicts()}), JSON)
        sent = {**dict.fromkeys(ports, request), "empty": nothing}
        for name, message in sent.items():
            connection = connections.get(name, connections["few"])
            start = time.perf_counter()
            status = await connection.send(message)
            taken = 1000 * (time.perf_counter() - start)
            if status == 200 and start > warming:
                times[name].append(taken)
        if time.perf_counter() > end:
            break
    for connection in connections.values():
        connection.close()
    p50 = {name: round(median(values), 3) for name, values in times.items()}
    p99 = {name: round(float(np.quantile(values, 0.99)), 3) for name, values in times.items()}
    return {"requests": len(times["few"]), "p50_ms": with_ratio(p50), "p99_ms": with_ratio(p99)}


def requests(artifact: Path, threads: int, seconds: float) -> dict[str, Any]:
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    options = ("--threads", str(threads))
    old = ("-m", "benchmarks.speed.few_rows", "--serve", "--artifact", str(artifact), *options)
    with Server(artifact, *options) as few, Server(artifact, command=old) as large:
        ports = {"large": large.port, "few": few.port}
        return {str(size): asyncio.run(ask(ports, size, seconds)) for size in REQUEST_ROWS}


def figures(artifact: Path, threads: int, seconds: float) -> dict[str, Any]:
    """Return what the engine takes, in a process of its own, and then requests, beside what they may take."""
    command = ("-m", "benchmarks.speed.few_rows", "--artifact", artifact, "--threads", str(threads))
    alone = run([sys.executable, *command, "--seconds", str(seconds)]).answer
    served = requests(artifact, threads, seconds)
    engine = alone["engine_ms"]["1"]["p50"]["few"]
    p50 = served["1"]["p50_ms"]
    return {
        **{name: alone[name] for name in ("encode_ms", "cut_over", "engine_ms", "one_row_by_setting_ms")},
        **{name: value for name, value in alone.items() if name.startswith(("cache", "index"))},
        "requests": served,
        "one_row_over_allowed": round(p50["few"] / (1.5 * engine + p50["empty"]), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--artifact", type=Path)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each part")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--requests", action="store_true", help="measure requests too")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    artifact = args.artifact or make(WORK / "criteo-artifact", "criteo_artifact")
    if args.serve:
        serve(artifact, args.threads)
        return
    measure = figures if args.requests else encoding
    print(
        json.dumps(
            {"machine": machine(), "versions": versions(), **measure(artifact, args.threads, args.seconds)}
        )
    )


if __name__ == "__main__":
    main()
