"""Measure (a): `recap prepare` of Criteo-layout rows against fuxictr's own preprocessing, in turns.

    python -m benchmarks.speed.prepare [--rows 1000000] [--rounds 3] [--peer DIR] [--work DIR]

Needs the peer (`peer_install`). The data is made once and kept in --work; what the peer gets is the same rows as CSV
files with a header, already split 8:1:1, while `recap prepare` reads the raw file and splits it itself.

`ratio` is the peer's wall time to ours, `cpu_ratio` that of CPU time, medians over rounds. Of the peer we count the
preprocessing alone (imports and the start of Ray left out), of ours the whole command; `process_ratio` compares
whole commands. The vocabularies differ a little, since the two splits do.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path

from benchmarks.speed.measure import WORK, Usage, make, run
from benchmarks.speed.peer_install import PEER, interpreter

WANTED = 3.0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer", type=Path, default=PEER)
    parser.add_argument("--work", type=Path, default=WORK)
    args = parser.parse_args()
    work, rows = args.work.resolve(), str(args.rows)
    tsv = make(work / f"criteo-{rows}.tsv", "generate", "criteo", "--rows", rows)
    csv = make(work / f"criteo-{rows}-csv", "generate", "criteo", "--rows", rows, "--split", tsv)
    schema = make(work / "criteo.toml", "generate", "criteo", "--schema", "10")
    out = work / "out"
    recap = [sys.executable, "-m", "recap_ctr", "prepare", tsv, "--schema", schema, "--out", out, "--json"]
    peer = [interpreter(args.peer), "-m", "benchmarks.speed.peer_prepare", "--data", csv, "--out", out]

    ours: list[Usage] = []
    theirs: list[Usage] = []
    for number in range(args.rounds):
        sides = [(recap, ours), (peer, theirs)]
        for command, results in sides if number % 2 == 0 else reversed(sides):
            shutil.rmtree(out, ignore_errors=True)
            usage = run([*command])
            results.append(usage)
            print(f"round {number + 1}, {command[2]}: {usage.seconds:.1f} s", file=sys.stderr)
    shutil.rmtree(out, ignore_errors=True)

    def middle(values: Iterable[float]) -> float:
        return round(statistics.median(values), 3)

    pairs = list(zip(ours, theirs, strict=True))
    ratios = [round(b.answer["seconds"] / a.seconds, 3) for a, b in pairs]
    result = {
        "rows": args.rows,
        "rounds": args.rounds,
        "ratio": middle(ratios),
        "ratio_range": [min(ratios), max(ratios)],
        "wanted": WANTED,
        "process_ratio": middle(b.seconds / a.seconds for a, b in pairs),
        "cpu_ratio": middle(b.answer["cpu_seconds"] / a.cpu_seconds for a, b in pairs),
        "seconds": middle(a.seconds for a in ours),
        "cpu_seconds": middle(a.cpu_seconds for a in ours),
        "peer_seconds": middle(b.answer["seconds"] for b in theirs),
        "peer_process_seconds": middle(b.seconds for b in theirs),
        "peer_cpu_seconds": middle(b.answer["cpu_seconds"] for b in theirs),
        "vocabulary": sum(ours[-1].answer["vocabulary"].values()),
        "peer_vocabulary": theirs[-1].answer["vocabulary"],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
