"""New versions under load: five swaps and one damaged artifact in a minute, and no request may fail.

    python -m benchmarks.reliability.swap [--seconds 60] [--rate 0.7] [--workers 2] [--deadline-ms 250] [--deltas 10]

With `--deltas`, each version comes as a delta on the one before, and a delta that is offered twice is refused.

First the rate that saturates the server is found; then requests of 20 rows come at random times at `--rate` of it: for
a third of the time while nothing changes (`calm`), and then while versions change by SIGHUP. `lost` counts requests
that got no answer or another one than 200 or 429, `mixed` versions that gave more than one answer to the same rows.
The same arrivals would have been refused as often without a swap: `refused_share` is held against `calm_refused_share`.
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
from benchmarks.speed.load import Answers, Connection, closed, open_loop, post
from recap_ctr.inference.delta import is_delta, write_delta
from recap_ctr.jobs.machine import machine, versions
from recap_ctr.serve.codec import JSON

SWAPS = 5
LONGEST_OFFER = 300.0  # Seconds that an offer may take: the load and other work share the cores.
MOST_OVER_CALM = 1.5  # The 99th percentile during swaps over that without them.
CHANCE_ERRORS = 3.0  # Standard errors of the difference of two shares of refusals that chance explains.


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
    begun, pause = time.monotonic(), seconds / (len(offers) + 2)
    done = 0
    for number in range(len(offers) + 1):
        time.sleep(max(begun + pause * (number + 1) - time.monotonic(), 0.0))
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


def mixed_versions(bodies: list[bytes]) -> tuple[int, int]:
    """Return how many versions answered, and how many of them gave different answers to the same rows."""
    scores: dict[str, set[str]] = {}
    for body in bodies:
        answer = json.loads(body)
        if "columns" in answer:
            probability = json.dumps(answer["columns"]["probability"])
            scores.setdefault(f"{answer['model']} {answer['routes']} {answer['depth']}", set()).add(
                probability
            )
    # In any company a row scores the same, but for the last bits of a float.
    apart = [
        float(np.ptp(np.array([json.loads(text) for text in several]), axis=0).max())
        for several in scores.values()
    ]
    models = {name.partition(" ")[0] for name in scores}
    return len(models), sum(distance > 1e-5 for distance in apart)


def compare(answers: Answers, calm: Answers) -> dict[str, float]:
    """Return the latency of scored requests and the share of refused ones, beside those without swaps."""
    (p50, p99), calm_p99 = (
        np.quantile(answers.milliseconds(), (0.5, 0.99)),
        np.quantile(calm.milliseconds(), 0.99),
    )
    return {
        "p50_ms": round(float(p50), 2),
        "p99_ms": round(float(p99), 2),
        "calm_p99_ms": round(float(calm_p99), 2),
        "p99_over_calm": round(float(p99 / calm_p99), 3),
        "refused_share": round(answers.status.count(429) / len(answers.status), 5),
        "calm_refused_share": round(calm.status.count(429) / len(calm.status), 5),
    }


def has_more_refusals(answers: Answers, calm: Answers) -> bool:
    """Return whether more requests were refused than without swaps, beyond chance."""
    counts = [(side.status.count(429), len(side.status)) for side in (answers, calm)]
    (share, calm_share) = (count / total for count, total in counts)
    mean = sum(count for count, _ in counts) / sum(total for _, total in counts)
    error = np.sqrt(mean * (1 - mean) * sum(1 / total for _, total in counts))
    return bool(share - calm_share > CHANCE_ERRORS * error)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=0.7, help="of the rate that saturates")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--deadline-ms", type=float, default=250.0)
    parser.add_argument("--deltas", type=int, default=0, help="versions that come as deltas")
    args = parser.parse_args()
    request = post("/score", msgspec.json.encode({"columns": rows(20).to_dict(as_series=False)}), JSON)
    options = ("--workers", str(args.workers), "--threads", "1", "--deadline-ms", str(args.deadline_ms))
    with TemporaryDirectory() as directory:
        first, offers, bad = make(Path(directory), args.deltas)
        model = Path(directory) / "model"
        shutil.copytree(first, model)
        with Server(model, *options) as server:
            server.wait("worker ready", args.workers)
            seconds = min(5.0, args.seconds / 4)
            warm_up = asyncio.run(closed(server.port, [request], 4, seconds))
            rate = args.rate * warm_up.status.count(200) / (0.9 * seconds)
            calm = asyncio.run(open_loop(server.port, [request], rate, args.seconds / 3, 64))
            changing = threading.Thread(target=change, args=(server, model, offers, bad, args.seconds))
            changing.start()
            answers = asyncio.run(open_loop(server.port, [request], rate, args.seconds, 64, kind=Recording))
            changing.join()
            swapped, refused = server.events("swapped"), server.events("refused")
    answered, mixed = mixed_versions(Recording.bodies)
    result = {
        "seconds": args.seconds,
        "rate": round(rate, 1),
        "workers": args.workers,
        "deadline_ms": args.deadline_ms,
        "requests": len(answers.status),
        "lost": sum(status not in (200, 429) for status in answers.status),
        "swaps": len(swapped),
        "versions_that_answered": answered,
        "mixed": mixed,
        "refused": [event["reason"].replace(directory, "DIR") for event in refused],
        "shadow_rows": [event["shadow"]["rows"] for event in swapped],
        **compare(answers, calm),
        "machine": machine(),
        "versions": versions(),
    }
    print(json.dumps(result))
    is_harmed = result["p99_over_calm"] > MOST_OVER_CALM or has_more_refusals(answers, calm)
    if is_harmed or result["lost"] or mixed or len(swapped) != len(offers) or len(refused) != 1:
        raise SystemExit("not as promised")


if __name__ == "__main__":
    main()
