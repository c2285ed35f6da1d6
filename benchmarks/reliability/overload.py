"""Open loop at 2, 5 and 10 times what the server can do: what is answered in time, and how soon the rest is refused.

    python -m benchmarks.reliability.overload [--seconds 10] [--rows 100] [--deadline-ms 100]

The capacity is what is answered in time at the cheapest setting, over a few connections, as fast as answers come.
Then requests come at random times at a multiple of that rate, over many connections; beside them, a hundred a second
all the time, requests to an endpoint that does nothing: their time is what the machine adds to everything. `goodput` is
the share of the capacity that was answered within the deadline, `refusal_p99_ms` stands beside `empty_p99_ms`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.reliability.running import Server
from benchmarks.speed.criteo_artifact import rows
from benchmarks.speed.load import Answers, closed, get, open_loop, post
from benchmarks.speed.measure import WORK, make
from recap_ctr.jobs.machine import machine, versions
from recap_ctr.serve.codec import JSON

MULTIPLES = (2, 5, 10)
BODIES, CONNECTIONS, EMPTY_RATE = 20, 256, 100.0
WANTED_GOODPUT, WANTED_IN_TIME, WANTED_REFUSAL_MS = 0.95, 0.999, 5.0


def bodies(count: int, path: str = "/score") -> list[bytes]:
    frames = [rows(BODIES * count).slice(number * count, count) for number in range(BODIES)]
    return [
        post(path, msgspec.json.encode({"columns": frame.to_dict(as_series=False)}), JSON) for frame in frames
    ]


def in_time(answers: Answers, deadline_ms: float) -> int:
    return int((answers.milliseconds() <= deadline_ms).sum())


async def both(port: int, requests: list[bytes], rate: float, seconds: float) -> tuple[Answers, Answers]:
    """Send requests and, beside them, some to an endpoint that does nothing."""
    loaded = open_loop(port, requests, rate, seconds, CONNECTIONS)
    empty = open_loop(port, [get("/health/live")], EMPTY_RATE, seconds, 16)
    return tuple(await asyncio.gather(loaded, empty))  # type: ignore[return-value]


def at(
    port: int, requests: list[bytes], capacity: float, multiple: int, args: argparse.Namespace
) -> dict[str, Any]:
    loaded, empty = asyncio.run(both(port, requests, multiple * capacity, args.seconds))
    accepted, refused = loaded.milliseconds(200), loaded.milliseconds(429)
    good = in_time(loaded, args.deadline_ms)
    return {
        "sent": len(loaded.status),
        "accepted": len(accepted),
        "refused": len(refused),
        "failed": len(loaded.status) - len(accepted) - len(refused),
        "goodput": round(good / args.seconds / capacity, 3),
        "accepted_in_time": round(good / max(len(accepted), 1), 5),
        "refusal_p99_ms": round(float(np.quantile(refused, 0.99)), 2) if len(refused) else None,
        "empty_p99_ms": round(float(np.quantile(empty.milliseconds(), 0.99)), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--artifact", type=Path)
    parser.add_argument("--seconds", type=float, default=10.0, help="at each multiple")
    parser.add_argument("--rows", type=int, default=100)
    parser.add_argument("--deadline-ms", type=float, default=100.0)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    artifact = args.artifact or make(WORK / "criteo-artifact", "criteo_artifact")
    options = ("--threads", str(args.threads), "--deadline-ms", str(args.deadline_ms))
    with Server(artifact, *options) as server:
        # Four connections keep the scoring thread busy, and none of them has to wait for its deadline.
        calm = asyncio.run(closed(server.port, bodies(args.rows, "/score?routes=1&depth=2"), 4, args.seconds))
        capacity = in_time(calm, args.deadline_ms) / (0.9 * args.seconds)
        requests = bodies(args.rows)
        figures = {
            f"{multiple}x": at(server.port, requests, capacity, multiple, args) for multiple in MULTIPLES
        }
    result = {
        "rows": args.rows,
        "deadline_ms": args.deadline_ms,
        "capacity": round(capacity, 1),
        **figures,
        "machine": machine(),
        "versions": versions(),
    }
    print(json.dumps(result))
    for figure in figures.values():
        late = (figure["refusal_p99_ms"] or 0.0) - figure["empty_p99_ms"] > WANTED_REFUSAL_MS
        poor = figure["goodput"] < WANTED_GOODPUT or figure["accepted_in_time"] < WANTED_IN_TIME
        if figure["failed"] or poor or late:
            raise SystemExit("not as promised")


if __name__ == "__main__":
    main()
