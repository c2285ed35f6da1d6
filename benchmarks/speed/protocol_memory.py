"""Peak memory and speed of `recap prepare --dataset criteo-x4` on generated files of Criteo's layout.

    python -m benchmarks.speed.protocol_memory [--rows 10000000 ...] [--temporary DIR]

Each file is made, prepared by the protocol with its checks off, and removed again; a row takes 230 bytes of text, and
as much once more while it is prepared. `mib_per_million_rows` is how peak memory grows from the first number of rows
to the last.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.speed.measure import make, run


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000_000])
    parser.add_argument("--temporary", type=Path, help="where to put the files meanwhile")
    args = parser.parse_args()
    peaks, speeds = [], []
    for rows in args.rows:
        with TemporaryDirectory(dir=args.temporary) as directory:
            raw, out = Path(directory) / "raw", Path(directory) / "out"
            make(raw / "train.txt", "generate", "criteo", "--rows", str(rows))
            command = [
                sys.executable,
                "-m",
                "recap_ctr",
                "prepare",
                "--dataset",
                "criteo-x4",
                "--no-check",
                "--quiet",
            ]
            usage = run([*command, "--raw", raw, "--out", out, "--json"])
        peaks.append(round(usage.peak_mib))
        speeds.append(round(rows / usage.seconds))
        print(f"{rows:,} rows: {speeds[-1]:,} rows/s, peak {peaks[-1]} MiB", file=sys.stderr)
    result: dict[str, object] = {"rows": args.rows, "peak_mib": peaks, "rows_per_second": speeds}
    if len(peaks) > 1:
        growth = (peaks[-1] - peaks[0]) / (args.rows[-1] - args.rows[0])
        result["mib_per_million_rows"] = round(growth * 1e6, 1)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
