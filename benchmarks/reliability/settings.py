"""Probabilities at every setting of the dial, as served, and the dial after a burst.

    python -m benchmarks.reliability.settings [ARTIFACT ROWS] [--rows 10000]

ROWS is a file of raw labelled rows that the model has not seen; without arguments, rows are drawn, and a model is
trained on others. They are scored over HTTP at every setting on offer; `ratio` is the mean prediction over the click
rate. Then requests come faster than they can be answered in time, and after five idle seconds one more: it must get the
best setting again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.request import urlopen

import msgspec
import numpy as np
import polars as pl

from benchmarks.reliability.running import Server, recap
from benchmarks.speed.load import closed, post
from recap_ctr.data.roles import read_labels
from recap_ctr.data.source import Block, FileSource
from recap_ctr.evaluation.metrics import auc, expected_calibration_error
from recap_ctr.inference.artifact import read_artifact
from recap_ctr.jobs.machine import machine, versions
from recap_ctr.serve.client import Client
from recap_ctr.serve.codec import JSON

ALLOWED = 0.02  # The share by which a setting's mean prediction may differ from that of the full setting.
BURST_SECONDS, IDLE_SECONDS = 3.0, 5.0
BURST_ROWS, CONNECTIONS, DEADLINE_MS = 50, 48, 50
WANTED_IN_TIME, MOST_AUC = (
    0.99,
    0.005,
)  # The share of a burst that is answered in time; what the dial may cost.
DRAWN, TRAIN = (
    60_000,
    ("--model", "recap", "--routes", "8", "--max-epochs", "4", "--l2", "0.01", "--no-baseline"),
)


def train(directory: Path) -> tuple[Path, str]:
    """Train a model on drawn rows; return its artifact, and a file of other rows."""
    log, fresh = directory / "clicks.csv", directory / "fresh.csv"
    recap("synthetic", "--rows", DRAWN, "--out", log)
    drawn = pl.read_csv(log, infer_schema=False)
    drawn.tail(DRAWN // 4).write_csv(fresh)
    drawn.head(-DRAWN // 4).write_csv(directory / "train.csv")
    recap("prepare", directory / "train.csv", "--label", "click", "--out", directory / "data")
    recap("train", directory / "data", *TRAIN, "--out", directory / "run")
    recap("export", directory / "run", "--data", directory / "data")
    return directory / "run" / "artifact", str(fresh)


def first_rows(path: str, count: int) -> pl.DataFrame:
    frames, rows = [], 0
    for block, _ in FileSource([path]).blocks():
        frames.append(block.frame)
        rows += block.frame.height
        if rows >= count:
            break
    return pl.concat(frames).head(count)


def measure(url: str, setting: dict[str, Any], frame: pl.DataFrame, labels: Any) -> dict[str, Any]:
    """Score the rows at one setting, and compare the probabilities with the clicks."""
    choice = {} if setting["depth"] is None else {"routes": setting["routes"], "depth": setting["depth"]}
    with Client(url, deadline_ms=30_000, **choice) as client:
        probability_N = client.score(frame)["probability"].to_numpy()
    return {
        "routes": setting["routes"],
        "depth": setting["depth"],
        "mean_prediction": round(float(probability_N.mean()), 6),
        "ratio": round(float(probability_N.mean() / labels.mean()), 4),
        "calibration_error": round(expected_calibration_error(labels, probability_N), 5),
        "auc": round(auc(labels, probability_N), 5),
    }


def burst(server: Server, url: str, frame: pl.DataFrame) -> dict[str, Any]:
    """Overload the server, leave it idle, and ask once more."""
    with Client(url) as client:
        fields = [name for name in client.fields if name in frame.columns]
    rows = frame.select(fields).head(BURST_ROWS).to_dict(as_series=False)
    request = post("/score", msgspec.json.encode({"columns": rows, "deadline_ms": DEADLINE_MS}), JSON)
    answers = asyncio.run(closed(server.port, [request], CONNECTIONS, BURST_SECONDS))
    accepted_ms = answers.milliseconds(200)
    counters = urlopen(f"{url}/metrics").read().decode()
    time.sleep(IDLE_SECONDS)
    with Client(url, deadline_ms=DEADLINE_MS) as client:
        client.score(frame.head(1))
        lowered_after = client.summary.lowered
    return {
        "requests": len(answers.status),
        "refused": answers.status.count(429),
        "accepted": len(accepted_ms),
        "in_time": round(float((accepted_ms <= DEADLINE_MS).mean()), 5) if len(accepted_ms) else 0.0,
        "lowered": int(float(counters.partition("\nrecap_lowered_total ")[2].partition("\n")[0] or 0)),
        "idle_seconds": IDLE_SECONDS,
        "lowered_after_idle": lowered_after,
    }


def measure_all(artifact: Path, rows_file: str, count: int) -> dict[str, Any]:
    """Return the figures of every setting, and those of a burst."""
    frame = first_rows(rows_file, count)
    schema = read_artifact(artifact).encoder.schema
    labels = read_labels(Block(frame, 1, rows_file), schema.label, schema.positive, schema.negative)
    with Server(artifact, "--threads", "1") as server:
        url = f"http://127.0.0.1:{server.port}"
        with Client(url) as client:
            offered = client.model()["settings"]
        settings = [measure(url, setting, frame, labels) for setting in offered]
        after_burst = burst(server, url, frame)
    click_rate = round(float(np.mean(labels)), 6)
    return {"rows": len(labels), "click_rate": click_rate, "settings": settings, "burst": after_burst}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("artifact", type=Path, nargs="?")
    parser.add_argument("rows_file", metavar="ROWS", nargs="?")
    parser.add_argument("--rows", type=int, default=10_000)
    args = parser.parse_args()
    if args.artifact and args.rows_file:
        result = measure_all(args.artifact, args.rows_file, args.rows)
    else:
        with TemporaryDirectory() as directory:
            result = measure_all(*train(Path(directory)), args.rows)
    print(json.dumps({**result, "machine": machine(), "versions": versions()}))
    means = [setting["mean_prediction"] for setting in result["settings"]]
    aucs = [setting["auc"] for setting in result["settings"]]
    burst_figures = result["burst"]
    is_apart = max(abs(mean / means[0] - 1) for mean in means) > ALLOWED or aucs[0] - min(aucs) > MOST_AUC
    if is_apart or burst_figures["in_time"] < WANTED_IN_TIME or burst_figures["lowered_after_idle"]:
        raise SystemExit("not as promised")


if __name__ == "__main__":
    main()
