"""Time and peak memory of diagnosing a logit table of 40 estimators.

    python -m benchmarks.speed.diagnose [--rows 5000000] [--grid 8 5 1] [--temporary DIR]

The table (160 bytes a row) is made in a temporary directory by a process of its own, and diagnosed in another, which
reads it from disk; `peak_mib` is that of the latter, pages of the table that the system keeps for it included.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.speed.measure import run

CHUNK = 1 << 16


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--grid", type=int, nargs=3, default=[8, 5, 1], help="runs, checkpoints, routes")
    parser.add_argument("--temporary", type=Path, help="where to put the table meanwhile")
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--diagnose", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.make:
        make(args.make, args.rows, tuple(args.grid))
    elif args.diagnose:
        diagnose(args.diagnose)
    else:
        with TemporaryDirectory(dir=args.temporary) as directory:
            command: list[str | Path] = [sys.executable, "-m", "benchmarks.speed.diagnose"]
            size = [str(number) for number in ("--rows", args.rows, "--grid", *args.grid)]
            run([*command, *size, "--make", directory])
            usage = run([*command, "--diagnose", directory])
        result = {
            "rows": args.rows,
            "grid": args.grid,
            "seconds": round(usage.seconds, 1),
            "cpu_seconds": round(usage.cpu_seconds, 1),
            "peak_mib": round(usage.peak_mib),
            **usage.answer,
        }
        print(json.dumps(result))


def make(out: Path, rows: int, grid: tuple[int, int, int]) -> None:
    """Signal, and noise of each axis; labels drawn from the signal."""
    from types import SimpleNamespace
    from typing import Any

    import numpy as np

    from recap_ctr.axes.logits import Estimator, LogitWriter

    rng = np.random.default_rng(0)
    S, T, R = grid
    estimators = [Estimator(f"seed-{s}", t, f"{r}") for s in range(S) for t in range(T) for r in range(R)]
    labels_N = np.lib.format.open_memmap(out / "labels.npy", "w+", np.uint8, (rows,))

    class Shard:
        rows = np.arange(labels_N.size)

        def __len__(self) -> int:
            return int(labels_N.size)

    data: Any = SimpleNamespace(fingerprint="synthetic", valid=Shard())
    with LogitWriter(out / "table", data, "valid", estimators) as writer:
        for start in range(0, rows, CHUNK):
            B = min(CHUNK, rows - start)
            signal_B = rng.normal(-1.5, 1.2, B).astype(np.float32)
            logits_BSTR = np.tile(signal_B[:, None, None, None], (1, S, T, R))
            for spread, shape in ((0.15, (S, 1, 1)), (0.08, (S, T, 1)), (0.03, (S, T, R))):
                logits_BSTR += np.float32(spread) * rng.standard_normal((B, *shape), np.float32)
            writer.write(logits_BSTR.reshape(B, -1))
            labels_N[start : start + B] = rng.random(B) < 1 / (1 + np.exp(-signal_B))
    labels_N.flush()
    print("{}")


def diagnose(directory: Path) -> None:
    import numpy as np

    from recap_ctr.axes.logits import LogitTable
    from recap_ctr.diagnose import Cube, findings
    from recap_ctr.diagnose import diagnose as diagnose_cube

    cube = Cube.from_tables([LogitTable(directory / "table")])
    diagnosis = diagnose_cube(cube, np.load(directory / "labels.npy", mmap_mode="r"))
    print(*findings(diagnosis), sep="\n", file=sys.stderr)
    print(json.dumps({"figures": json.dumps(diagnosis.to_json()).count("runs_low")}))


if __name__ == "__main__":
    main()
