"""Train with 1, 2 and 4 threads and with 2 workers: the same run again has the same bytes, the others the same quality.

    python -m benchmarks.reliability.threads [--rows 20000]

The number of threads changes the order of additions and so the last bits (docs/decisions/0004-threads.md), which
training magnifies. `identical` is of the artifact; `logloss_apart` is how far the validation loss of each way is from
that of one thread.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.reliability.ray import checksums
from benchmarks.reliability.running import recap
from recap_ctr.jobs.machine import machine, versions
from recap_ctr.storage.files import read_json

WAYS = {
    "1 thread": ("--threads", "1"),
    "1 thread, again": ("--threads", "1"),
    "2 threads": ("--threads", "2"),
    "2 threads, again": ("--threads", "2"),
    "4 threads": ("--threads", "4"),
    "2 workers": ("--threads", "1", "--workers", "2"),
    "2 workers, again": ("--threads", "1", "--workers", "2"),
}
TOLERANCE = 0.001  # of logloss
TRAIN = (
    "--max-epochs",
    "3",
    "--l2",
    "0.01",
    "--no-baseline",
    "--set",
    "train.update=fast",
    "--device",
    "cpu",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=20_000)
    args = parser.parse_args()
    losses, files = {}, {}
    with TemporaryDirectory() as directory:
        log, data = f"{directory}/clicks.csv", f"{directory}/data"
        recap("synthetic", "--rows", args.rows, "--out", log)
        recap("prepare", log, "--label", "click", "--out", data)
        for number, (way, options) in enumerate(WAYS.items()):
            out = Path(directory) / f"run-{number}"
            recap("train", data, *TRAIN, *options, "--out", out)
            losses[way] = read_json(out / "report.json")["metrics"]["valid"]["raw"]["logloss"]
            # Several workers name the shares of their state at random.
            files[way] = {name: sha for name, sha in checksums(out).items() if name.startswith("artifact/")}
    identical = {way: files[way] == files[f"{way}, again"] for way in WAYS if f"{way}, again" in WAYS}
    apart = {way: round(abs(loss - losses["1 thread"]), 7) for way, loss in losses.items()}
    result = {"rows": args.rows, "logloss": losses, "logloss_apart": apart, "identical": identical}
    print(json.dumps({**result, "tolerance": TOLERANCE, "machine": machine(), "versions": versions()}))
    if not all(identical.values()) or max(apart.values()) > TOLERANCE:
        raise SystemExit("not as promised")


if __name__ == "__main__":
    main()
