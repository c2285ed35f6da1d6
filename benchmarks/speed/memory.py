"""Measure (c): peak memory of `recap prepare` on few and on many rows over the same universe of values.

    python -m benchmarks.speed.memory [--rows 2000000 8000000] [--work DIR]

The data is made once and kept in --work. Peak memory is the resident set of the largest process, file pages that it
has mapped included; a process's value begins at that of its parent, which is why this one stays small.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

from benchmarks.speed.measure import WORK, make, run

WANTED = 1.3  # at most


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs=2, default=[2_000_000, 8_000_000], metavar=("FEW", "MANY"))
    parser.add_argument("--work", type=Path, default=WORK)
    args = parser.parse_args()
    work = args.work.resolve()
    schema = make(work / "criteo.toml", "generate", "criteo", "--schema", "10")
    out = work / "out"
    peaks, seconds = [], []
    for rows in map(str, args.rows):
        tsv = make(work / f"criteo-{rows}.tsv", "generate", "criteo", "--rows", rows)
        shutil.rmtree(out, ignore_errors=True)
        usage = run(
            [sys.executable, "-m", "recap_ctr", "prepare", tsv, "--schema", schema, "--out", out, "--json"]
        )
        print(f"{rows} rows: {usage.peak_mib:.0f} MiB, {usage.seconds:.1f} s", file=sys.stderr)
        peaks.append(round(usage.peak_mib))
        seconds.append(round(usage.seconds, 2))
    shutil.rmtree(out, ignore_errors=True)
    result = {
        "rows": args.rows,
        "peak_mib": peaks,
        "seconds": seconds,
        "ratio": round(peaks[1] / peaks[0], 3),
    }
    print(json.dumps({**result, "wanted": WANTED}))


if __name__ == "__main__":
    main()
