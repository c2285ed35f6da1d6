"""A million requests, a tenth of them bad: memory, file descriptors and threads of the server stay as they were.

    python -m benchmarks.reliability.soak [--requests 1000000] [--seconds 540] [--connections 8] [--work DIR]

One-row requests come as fast as they are answered. Bad ones are bodies that can't be scored, packed bombs, false
lengths, and senders that leave in the middle. `--work` keeps the count: the command goes on with a new server until
`--requests` is reached, and stops after `--seconds` at the latest. Each server is measured after its first requests
(`--warm-up`) and at its end; `stretches` has what was added in between.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.reliability.running import Server, resident_mib
from benchmarks.speed.criteo_artifact import rows
from benchmarks.speed.load import connect, post
from benchmarks.speed.measure import WORK as ARTIFACTS
from benchmarks.speed.measure import make
from recap_ctr.jobs.machine import machine, versions
from recap_ctr.serve.codec import JSON
from recap_ctr.storage.files import read_json, write_json

WORK = Path(__file__).parent / ".work"
BODIES, BAD = 2_000, 0.1
MOST_MIB = 2.0


def good_requests() -> list[bytes]:
    return [post("/score", msgspec.json.encode({"rows": [row]}), JSON) for row in rows(BODIES).to_dicts()]


def bad_requests() -> list[bytes]:
    """Requests that get an answer, none of them 200."""
    bomb = gzip.compress(b" " * (64 << 20))
    packed = f"POST /score HTTP/1.1\r\nhost: localhost\r\ncontent-type: {JSON}\r\ncontent-encoding: gzip\r\n"
    bodies = (b"{", b'{"rows": [{"C1": 1}, 2]}', b'{"rows": [{"no such field": 1}]}', b"[" * 10_000, b"\xff")
    return [
        *(post("/score", body, JSON) for body in bodies),
        post("/score", b"{}", "text/plain"),
        f"{packed}content-length: {len(bomb)}\r\n\r\n".encode() + bomb,
        post("/score", b"{}", JSON).replace(b"content-length: 2", b"content-length: " + b"9" * 40),
    ]


def state_of(server: Server) -> dict[str, float]:
    """Return what a server's processes hold."""
    pids = [server.pid, *server.workers]
    return {
        "resident_mib": sum(resident_mib(pid) for pid in pids),
        "descriptors": sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids),
        "threads": sum(len(list(Path(f"/proc/{pid}/task").iterdir())) for pid in pids),
    }


async def send(port: int, count: int, end: float, connections: int) -> Counter[str]:
    """Send requests until there were `count`, or the time is over; return how many got which status."""
    good, bad, statuses = good_requests(), bad_requests(), Counter[str]()

    async def go(number: int) -> None:
        rng, connection = random.Random(number), await connect(port)
        while statuses.total() < count and time.monotonic() < end:
            if not connection.is_open:
                connection = await connect(port)
            if rng.random() >= BAD:
                statuses[str(await connection.send(rng.choice(good)))] += 1
            elif rng.random() < 0.5:
                statuses[f"bad: {await connection.send(rng.choice(bad))}"] += 1
                connection.close()  # The server may close it after a bad request, which would be known too late.
            else:
                whole = rng.choice(good)
                connection.write(whole[: rng.randrange(1, len(whole))])
                connection.close()
                statuses["bad: left"] += 1
        connection.close()

    await asyncio.gather(*(go(number) for number in range(connections)))
    return statuses


def stretch(artifact: Path, args: argparse.Namespace, count: int, end: float) -> dict[str, Any]:
    """Send requests to a new server; return what was answered, and what the server holds more than after the first."""
    with Server(artifact, "--threads", "1", "--deadline-ms", "30000") as server:
        first = asyncio.run(send(server.port, min(args.warm_up, count), end, args.connections))
        time.sleep(1.0)
        before = state_of(server)
        rest = asyncio.run(send(server.port, count - first.total(), end, args.connections))
        time.sleep(1.0)
        after = state_of(server)
        died = len(server.events("worker died"))
    added = {name: round(after[name] - before[name], 2) for name in before}
    statuses = first + rest
    return {"requests": statuses.total(), "statuses": dict(statuses), "workers_died": died, "added": added}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--warm-up", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=540.0, help="of this call")
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--work", type=Path, default=WORK)
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    artifact = make(ARTIFACTS / "criteo-artifact--small", "criteo_artifact", "--small")
    args.work.mkdir(parents=True, exist_ok=True)
    record = args.work / "soak.json"
    stretches = read_json(record)["stretches"] if record.exists() else []
    if (left := args.requests - sum(entry["requests"] for entry in stretches)) <= 0:
        stretches, left = [], args.requests
    stretches.append(stretch(artifact, args, left, end))
    write_json(record, {"stretches": stretches})
    statuses = sum((Counter(entry["statuses"]) for entry in stretches), Counter[str]())
    result = {
        "requests": statuses.total(),
        "wanted": args.requests,
        "statuses": dict(statuses),
        "server_errors": sum(count for name, count in statuses.items() if name.rpartition(" ")[2][0] == "5"),
        "unanswered": statuses["0"] + statuses["bad: 0"],
        "workers_died": sum(entry["workers_died"] for entry in stretches),
        "stretches": [{**entry["added"], "requests": entry["requests"]} for entry in stretches],
        "machine": machine(),
        "versions": versions(),
    }
    print(json.dumps(result))
    grown = any(
        entry["resident_mib"] > MOST_MIB or entry["descriptors"] > 0 or entry["threads"] > 0
        for entry in result["stretches"]
    )
    if grown or result["server_errors"] or result["workers_died"] or statuses["0"]:
        raise SystemExit("not as promised")


if __name__ == "__main__":
    main()
