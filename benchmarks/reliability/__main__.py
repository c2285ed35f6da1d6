"""Measure the rows of the table of promises (docs/reliability.md), and keep each answer in a file of its own.

    python -m benchmarks.reliability [ROW ...] [--quick] [--out DIR]

All rows, or those that are named, one command after the other; `--quick` takes fewer cases. A command that is bounded
in time goes on where it stopped when it is called again. `python -m benchmarks.summary --write` makes the table.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.reliability.promises import ROWS, Measurement
from recap_ctr.storage.files import write_json

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "results"


def measure(measurement: Measurement, out: Path, *, is_quick: bool) -> bool:
    """Run a command, and keep what it says; return whether all is as promised."""
    module, *arguments = (*measurement.command, *(measurement.quick if is_quick else ()))
    command = [sys.executable, "-m", f"benchmarks.reliability.{module}", *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    begun = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    lines = done.stdout.splitlines()
    if not lines:
        print(f"{measurement.name}: no answer", file=sys.stderr)
        return False
    said = {
        "command": shlex.join(["python", "-m", f"benchmarks.reliability.{module}", *arguments]),
        "date": datetime.now(UTC).date().isoformat(),
        "quick": is_quick,
        "as_promised": done.returncode == 0,
        "took_seconds": round(time.monotonic() - begun),
    }
    write_json(out / f"{measurement.name}.json", {**json.loads(lines[-1]), **said})
    return done.returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    numbers = [row.number for row in ROWS]
    parser.add_argument(
        "rows", type=int, nargs="*", choices=[[], *numbers], metavar="ROW", help="default: all"
    )
    parser.add_argument("--quick", action="store_true", help="fewer cases")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    broken = []
    for row in ROWS:
        for measurement in row.measurements if not args.rows or row.number in args.rows else ():
            print(f"row {row.number}: {measurement.name}", file=sys.stderr)
            if not measure(measurement, args.out, is_quick=args.quick):
                broken.append(f"{row.number} ({measurement.name})")
    if broken:
        raise SystemExit(f"not as promised: {', '.join(broken)}")


if __name__ == "__main__":
    main()
