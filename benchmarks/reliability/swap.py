"""New versions under load: five swaps and one damaged artifact in a minute, and no request may fail.

    python -m benchmarks.reliability.swap [--seconds 60] [--rate 0.7] [--workers 2] [--deltas 10]

With `--deltas`, each version comes as a delta on the one before, and a delta that is offered twice is refused.

First the rate that saturates the server is found; then requests of 20 rows come at random times at `--rate` of it,
while versions change by SIGHUP. `lost` counts requests that got no answer or another one than 200, `mixed` versions
that gave more than one answer to the same rows.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import signal
import threading
import time
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar

import msgspec
import numpy as np

from benchmarks.reliability.running import Server
from benchmarks.speed.criteo_artifact import rows, write
from benchmarks.speed.load import Connection, closed, open_loop, post
from recap_ctr.inference.delta import is_delta, write_delta
from recap_ctr.jobs.machine import machine, versions
from recap_ctr.serve.codec import JSON

SWAPS = 5
LONGEST_OFFER = 300.0  # Seconds that an offer may take: the load and other work share the cores.


class Recording(Connection):
    """Keeps the answers' bodies, too."""

    bodies: ClassVar[list[bytes]] = []

    def answered(self, body: bytes) -> None:
        self.bodies.append(body)


def replace(target: Path, source: Path, *, damaged: bool = False) -> None:
    """Put a copy of an artifact in place of another, as a careless copy would."""
    shutil.rmtree(target)
    shutil.copytree(source, target)
    if damaged:
        weights = target / "model.safetensors"
        content = bytearray(weights.read_bytes())
        content[len(content) // 2] ^= 1
        weights.write_bytes(content)


def change(server: Server, model: Path, offers: list[Path], bad: Path, seconds: float) -> None:
    """Offer versions, and in the middle a bad one, spread over the time."""
    pause = seconds / (len(offers) + 2)
    done = 0
    for number in range(len(offers) + 1):
        time.sleep(pause)
        if number == len(offers) // 2:
            replace(model, bad, damaged=not is_delta(bad))
            server.signal(signal.SIGHUP)
            server.wait("refused", seconds=LONGEST_OFFER)
            continue
        replace(model, offers[done])
        done += 1
        server.signal(signal.SIGHUP)
        server.wait("swapped", done, seconds=LONGEST_OFFER)


def make(directory: Path, deltas: int) -> tuple[Path, list[Path], Path]:
    """Write the artifact to start with; return it, what is offered after it, and a bad offer."""
    made = [directory / f"seed-{seed}" for seed in range(deltas + 1 if deltas else 3)]
    for seed, path in enumerate(made):
        write(path, seed, small=True, graphs=not deltas)
    if not deltas:
        return made[0], [made[number % len(made)] for number in range(1, SWAPS + 1)], made[0]
    offers = [directory / f"delta-{number}" for number in range(deltas)]
    for (before, after), delta in zip(pairwise(made), offers, strict=True):
        write_delta(before, after, delta)
    return made[0], offers, offers[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=0.7, help="of the rate that saturates")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--deltas", type=int, default=0, help="versions that come as deltas")
    args = parser.parse_args()
    asked = {"columns": rows(20).to_dict(as_series=False), "deadline_ms": 30_000}
    request = post("/score", msgspec.json.encode(asked), JSON)
    with TemporaryDirectory() as directory:
        first, offers, bad = make(Path(directory), args.deltas)
        model = Path(directory) / "model"
        shutil.copytree(first, model)
        with Server(
            model, "--workers", str(args.workers), "--threads", "1", "--deadline-ms", "30000"
        ) as server:
            server.wait("worker ready", args.workers)
            warm_up = asyncio.run(closed(server.port, [request], 4, min(5.0, args.seconds / 4)))
            saturation = warm_up.status.count(200) / (0.9 * min(5.0, args.seconds / 4))
            changing = threading.Thread(target=change, args=(server, model, offers, bad, args.seconds))
            changing.start()
            rate = args.rate * saturation
            answers = asyncio.run(open_loop(server.port, [request], rate, args.seconds, 64, kind=Recording))
            changing.join()
            swapped, refused = server.events("swapped"), server.events("refused")
    scores: dict[str, set[str]] = {}
    for body in Recording.bodies:
        answer = json.loads(body)
        scores.setdefault(answer["model"], set()).add(
            json.dumps(answer["columns"]["probability"], sort_keys=True)
        )
    # In any company a row scores the same, but for the last bits of a float.
    apart = {
        name: float(np.ptp(np.array([json.loads(text) for text in several]), axis=0).max())
        for name, several in scores.items()
    }
    p50, p99 = np.quantile(answers.milliseconds(), (0.5, 0.99))
    result = {
        "seconds": args.seconds,
        "rate": round(rate, 1),
        "workers": args.workers,
        "requests": len(answers.status),
        "lost": len(answers.status) - answers.status.count(200),
        "swaps": len(swapped),
        "versions_that_answered": len(scores),
        "mixed": sum(distance > 1e-5 for distance in apart.values()),
        "refused": [event["reason"].replace(directory, "DIR") for event in refused],
        "shadow_rows": [event["shadow"]["rows"] for event in swapped],
        "p50_ms": round(float(p50), 2),
        "p99_ms": round(float(p99), 2),
        "machine": machine(),
        "versions": versions(),
    }
    print(json.dumps(result))
    if result["lost"] or result["mixed"] or len(swapped) != len(offers) or len(refused) != 1:
        raise SystemExit("not as promised")


if __name__ == "__main__":
    main()
