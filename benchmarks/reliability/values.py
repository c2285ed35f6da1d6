"""Floods of values that nobody has seen: memory of preparing stays within its cap, and requests are as quick as others.

    python -m benchmarks.reliability.values [--rows 20000000] [--max-values 2000000] [--seconds 10] [--work DIR]

Preparing: a column in which every value is another one, few rows and many, both with more than `recap prepare` holds in
memory (`--max-values`), with peak memory of both (`ratio`).
Requests: rows of known values, and rows of which every value is new, to one server in turns; `latency_ratio` is that of
their medians, `grown_mib` what the server holds more after the flood.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from benchmarks.reliability.running import Server, resident_mib
from benchmarks.speed.criteo_artifact import rows
from benchmarks.speed.load import connect, post
from benchmarks.speed.measure import WORK, make, run
from recap_ctr.jobs.machine import machine, versions
from recap_ctr.serve.codec import JSON

WANTED_RATIO, WANTED_LATENCY, WANTED_MIB = 1.3, 1.1, 64.0
FEW = 8  # times fewer rows
DRAWN, BLOCK = 5_000, 1_000_000
SCHEMA = """label = "click"
[[fields]]
name = "id"
kind = "categorical"
min_count = 2
"""


def write_rows(path: Path, count: int) -> None:
    """Write rows of which each has a value of its own."""
    unfinished = path.with_suffix(".partial")
    with unfinished.open("w") as file:
        file.write("click,id\n")
        for start in range(0, count, BLOCK):
            numbers = range(start, min(start + BLOCK, count))
            file.write("".join(f"{number % 2},v{number * 2654435761 % 2**32:08x}\n" for number in numbers))
    unfinished.rename(path)


def preparing(work: Path, count: int, max_values: int) -> dict[str, Any]:
    """Return the peak memory of preparing few rows and many, both with more values than are held in memory."""
    schema, out = work / "values.toml", work / "values"
    schema.write_text(SCHEMA)
    peaks, seconds = {}, {}
    for size in (count // FEW, count):
        table = work / f"values-{size}.csv"
        if not table.exists():
            write_rows(table, size)
        shutil.rmtree(out, ignore_errors=True)
        options = ("--schema", schema, "--out", out, "--max-values", str(max_values), "--json")
        usage = run([sys.executable, "-m", "recap_ctr", "prepare", table, *options])
        peaks[str(size)], seconds[str(size)] = round(usage.peak_mib), round(usage.seconds, 1)
    shutil.rmtree(out, ignore_errors=True)
    few, many = peaks.values()
    return {"peak_mib": peaks, "seconds": seconds, "ratio": round(many / few, 3)}


async def ask(port: int, worker: int, seconds: float) -> dict[str, Any]:
    """Send known and new values in turns, 20 rows a request."""
    connection = await connect(port)
    frame, times = rows(DRAWN), {"known": list[float](), "new": list[float]()}
    names = [name for name in frame.columns if name.startswith("C")]
    end, number, warm = time.perf_counter() + seconds, 0, 0.0
    while time.perf_counter() < end:
        known = frame.slice(20 * number % DRAWN, 20).to_dict(as_series=False)
        new = known | {name: [f"{number:x} {name} {i}" for i in range(20)] for name in names}
        for kind, columns in (("known", known), ("new", new)):
            request = post("/score", msgspec.json.encode({"columns": columns}), JSON)
            start = time.perf_counter()
            if await connection.send(request) != 200:
                raise SystemExit("a request failed")
            times[kind].append(time.perf_counter() - start)
        number += 1
        if not warm and time.perf_counter() > end - 0.8 * seconds:
            warm, times = resident_mib(worker), {kind: [] for kind in times}
    connection.close()
    known_ms, new_ms = (1000 * median(values) for values in times.values())
    return {
        "requests": len(times["new"]),
        "known_ms": round(known_ms, 3),
        "new_ms": round(new_ms, 3),
        "latency_ratio": round(new_ms / known_ms, 3),
        "grown_mib": round(resident_mib(worker) - warm, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--max-values", type=int, default=2_000_000, help="of a field, held in memory")
    parser.add_argument("--seconds", type=float, default=10.0, help="of requests")
    parser.add_argument("--work", type=Path, default=WORK)
    args = parser.parse_args()
    if args.rows // FEW <= args.max_values:
        raise SystemExit(f"--rows must be more than {FEW} times --max-values")
    args.work.mkdir(parents=True, exist_ok=True)
    prepared = preparing(args.work.resolve(), args.rows, args.max_values)
    artifact = make(WORK / "criteo-artifact--small", "criteo_artifact", "--small")
    with Server(artifact, "--threads", "1", "--deadline-ms", "30000") as server:
        flood = asyncio.run(ask(server.port, server.workers[0], args.seconds))
    print(
        json.dumps({"preparing": prepared, "requests": flood, "machine": machine(), "versions": versions()})
    )
    if (
        prepared["ratio"] > WANTED_RATIO
        or flood["latency_ratio"] > WANTED_LATENCY
        or flood["grown_mib"] > WANTED_MIB
    ):
        raise SystemExit("not as promised")


if __name__ == "__main__":
    main()
