"""The server on loopback: throughput and latency, beside its engine, an empty endpoint, and a server without the dial.

    python -m benchmarks.speed.serve [--artifact DIR] [--seconds 10] [--rounds 3] [--deadline-ms 100]

A RECAP of Criteo's shape with eight routes, unless another artifact with the same fields is given. Per round and in
turns: the engine alone, encoding and scoring raw rows, 1, 100 and 500 at a time; requests of as many candidates over
four connections, as fast as they are answered; at half of that rate for 100 candidates, requests at random times beside
as many to an endpoint that does nothing; and for both servers twice the rate that saturates the best setting. Generator
and server share the cores. Figures are medians over rounds. Then one row and a hundred by the path for few rows and by
that for large tables, in turns (`few_rows`). `--figure` draws the overload.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np
import polars as pl

from benchmarks.reliability.running import Server
from benchmarks.speed.criteo_artifact import rows
from benchmarks.speed.few_rows import figures
from benchmarks.speed.load import Answers, closed, get, open_loop, post
from benchmarks.speed.measure import WORK, make, run
from recap_ctr.jobs.machine import machine, versions
from recap_ctr.pages.charts import Chart, Series, to_png
from recap_ctr.serve.arrow import STREAM, write
from recap_ctr.serve.codec import JSON

CANDIDATES = (1, 100, 500)
BODIES = 20  # Different requests of each size.
CONNECTIONS = 4


def engine_speed(artifact: Path, threads: int, seconds: float) -> dict[str, Any]:
    """Return rows a second from raw rows to scores, without a server; it runs in a process of its own."""
    from recap_ctr.serve.interface import load_engine

    engine = load_engine(artifact, threads)
    rates = {}
    for count in CANDIDATES:
        frames = candidates(count)
        done, end = 0, 0.0
        for frame in frames[:3]:
            engine.score(engine.encode(frame))
        start = time.perf_counter()
        while end < start + seconds:
            engine.score(engine.encode(frames[done % BODIES]))
            done += 1
            end = time.perf_counter()
        rates[str(count)] = done * count / (end - start)
    return {"rows_per_second": rates}


def candidates(count: int) -> list[pl.DataFrame]:
    """Return the rows of BODIES requests."""
    drawn = rows(BODIES * max(CANDIDATES))
    return [drawn.slice(number * count, count) for number in range(BODIES)]


def requests(count: int, kind: str) -> list[bytes]:
    bodies = []
    for frame in candidates(count):
        if kind == STREAM:
            bodies.append(post("/score", write(frame, STREAM), STREAM))
            continue
        bodies.append(post("/score", msgspec.json.encode({"columns": frame.to_dict(as_series=False)}), JSON))
    return bodies


def quantiles(answers: Answers, status: int = 200) -> dict[str, float]:
    milliseconds = answers.milliseconds(status)
    if not len(milliseconds):
        return {}
    p50, p99 = np.quantile(milliseconds, (0.5, 0.99))
    return {
        "p50_ms": round(float(p50), 3),
        "p99_ms": round(float(p99), 3),
        "p99_over_p50": round(float(p99 / p50), 2),
    }


def overload(port: int, rate: float, seconds: float, deadline_ms: float) -> tuple[dict[str, Any], Answers]:
    answers = asyncio.run(open_loop(port, requests(100, JSON), rate, seconds, connections=256))
    taken, refused = answers.milliseconds(200), answers.milliseconds(429)
    in_time = float((taken <= deadline_ms).mean()) if len(taken) else 0.0
    measured = {
        "rate": round(rate, 1),
        "sent": len(answers.status),
        "accepted": len(taken),
        "refused": len(refused),
        "failed": len(answers.status) - len(taken) - len(refused),
        "accepted_in_time": round(in_time, 5),
        **quantiles(answers),
    }
    if len(refused):
        measured["refusal_p99_ms"] = round(float(np.quantile(refused, 0.99)), 3)
    return measured, answers


def curve(answers: Answers, name: str, seconds: float) -> Series:
    """Return the 99th percentile of the latency of accepted requests, by the second in which they were due."""
    due, status = np.array(answers.due), np.array(answers.status)
    took = 1000 * np.array(answers.seconds)
    x, y = [], []
    for second in range(int(seconds)):
        here = (due >= second) & (due < second + 1) & (status == 200)
        if here.any():
            x.append(float(second))
            y.append(float(np.quantile(took[here], 0.99)))
    return Series(name, tuple(x), tuple(y))


def one_round(args: argparse.Namespace, artifact: Path) -> tuple[dict[str, Any], list[Series]]:
    alone = (
        "--engine",
        "--artifact",
        artifact,
        "--threads",
        str(args.threads),
        "--seconds",
        str(args.seconds / 3),
    )
    engine = run([sys.executable, "-m", "benchmarks.speed.serve", *alone]).answer["rows_per_second"]
    options = (
        "--threads",
        str(args.threads),
        "--workers",
        str(args.workers),
        "--deadline-ms",
        str(args.deadline_ms),
    )
    measured: dict[str, Any] = {
        "engine_rows_per_second": {name: round(value) for name, value in engine.items()}
    }
    with Server(artifact, *options, "--no-dial") as server:
        port = server.port
        for kind, name in ((JSON, "json"), (STREAM, "arrow")):
            for count in CANDIDATES:
                answers = asyncio.run(closed(port, requests(count, kind), CONNECTIONS, args.seconds))
                good = answers.status.count(200)
                per_second = good / (0.9 * args.seconds)
                measured[f"{name} {count}"] = {
                    "requests_per_second": round(per_second, 1),
                    "rows_per_second": round(per_second * count),
                    "of_engine": round(per_second * count / engine[str(count)], 3),
                    "failed": len(answers.status) - good,
                    **quantiles(answers),
                }
        saturation = measured["json 100"]["requests_per_second"]
        calm = asyncio.run(open_loop(port, requests(100, JSON), saturation / 2, args.seconds, 64))
        empty = asyncio.run(open_loop(port, [get("/health/live")], saturation / 2, args.seconds, 64))
        measured["half of saturation"] = {"scored": quantiles(calm), "empty": quantiles(empty)}
        measured["twice saturation, no dial"], undialled = overload(
            port, 2 * saturation, args.seconds, args.deadline_ms
        )
    with Server(artifact, *options) as server:
        measured["twice saturation, dial"], dialled = overload(
            server.port, 2 * saturation, args.seconds, args.deadline_ms
        )
    lines = [curve(dialled, "with the dial", args.seconds), curve(undialled, "without", args.seconds)]
    return measured, lines


def middle(values: list[Any]) -> Any:
    """Return the median of numbers, entry by entry of whatever holds them."""
    if isinstance(values[0], dict):
        return {key: middle([value[key] for value in values if key in value]) for key in values[0]}
    return round(median(values), 5)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--artifact", type=Path)
    parser.add_argument("--small", action="store_true", help="vocabularies of 1,000 values at most")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--deadline-ms", type=float, default=100.0)
    parser.add_argument("--figure", type=Path, help="PNG of the overload")
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    artifact = args.artifact
    if artifact is None:
        small = ["--small"] if args.small else []
        artifact = make(WORK / f"criteo-artifact{''.join(small)}", "criteo_artifact", *small)
    if args.engine:
        print(json.dumps(engine_speed(artifact, args.threads, args.seconds)))
        return
    rounds = [one_round(args, artifact) for _ in range(args.rounds)]
    few = figures(artifact, args.threads, args.seconds)
    if args.figure:
        deadline = Series("deadline", (0.0, args.seconds), (args.deadline_ms,) * 2, dashed=True)
        chart = Chart(
            "serve-overload",
            "Latency at twice the rate that saturates the best setting",
            "seconds",
            "99th percentile, ms",
            (*rounds[-1][1], deadline),
            digits=1,
        )
        args.figure.parent.mkdir(parents=True, exist_ok=True)
        args.figure.write_bytes(to_png(chart))
    settings = {
        name: getattr(args, name) for name in ("seconds", "rounds", "threads", "workers", "deadline_ms")
    }
    print(
        json.dumps(
            {
                **settings,
                "machine": machine(),
                "versions": versions(),
                **middle([measured for measured, _ in rounds]),
                "few_rows": few,
            }
        )
    )


if __name__ == "__main__":
    main()
