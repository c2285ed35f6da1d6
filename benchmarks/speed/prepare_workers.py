"""Measure `recap prepare` with several workers against one process, in turns, on the same file.

    python -m benchmarks.speed.prepare_workers [--rows 1000000] [--rounds 3] [--workers 2] [--work DIR]

The data is made once and kept in --work. Both sides write the same bytes, which is checked. `memory_mib` is the largest
sum of the resident sets of all processes of the command, looked at twenty times a second: pages that several of them
have mapped count several times. Times are those of whole commands, imports included.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import sys
import threading
from pathlib import Path

from benchmarks.speed.measure import WORK, Usage, make, run

SECONDS_BETWEEN = 0.05
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--work", type=Path, default=WORK)
    args = parser.parse_args()
    work, rows = args.work.resolve(), str(args.rows)
    tsv = make(work / f"criteo-{rows}.tsv", "generate", "criteo", "--rows", rows)
    schema = make(work / "criteo.toml", "generate", "criteo", "--schema", "10")
    out = work / "out-workers"
    command = [sys.executable, "-m", "recap_ctr", "prepare", tsv, "--schema", schema, "--out", out]
    sides: dict[str, list[str | Path]] = {
        "one": [*command, "--threads", "1", "--json", "--quiet"],
        "many": [*command, "--threads", "1", "--json", "--quiet", "--workers", str(args.workers)],
    }
    usages: dict[str, list[Usage]] = {name: [] for name in sides}
    memory: dict[str, list[float]] = {name: [] for name in sides}
    contents = set()
    for number in range(args.rounds):
        for name in sides if number % 2 == 0 else reversed(sides):
            shutil.rmtree(out, ignore_errors=True)
            watch = MemoryWatch()
            usages[name].append(run(sides[name]))
            memory[name].append(watch.end())
            contents.add(digest(out))
            print(f"round {number + 1}, {name}: {usages[name][-1].seconds:.1f} s", file=sys.stderr)
    shutil.rmtree(out, ignore_errors=True)
    ratios = [round(a.seconds / b.seconds, 3) for a, b in zip(usages["one"], usages["many"], strict=True)]
    result: dict[str, object] = {
        "rows": args.rows,
        "rounds": args.rounds,
        "workers": args.workers,
        "same_bytes": len(contents) == 1,
        "ratio": statistics.median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
    }
    for name in sides:
        result[name] = {
            "rows_per_second": round(args.rows / statistics.median(usage.seconds for usage in usages[name])),
            "seconds": round(statistics.median(usage.seconds for usage in usages[name]), 2),
            "cpu_seconds": round(statistics.median(usage.cpu_seconds for usage in usages[name]), 2),
            "largest_process_mib": round(max(usage.peak_mib for usage in usages[name])),
            "memory_mib": round(max(memory[name])),
        }
    print(json.dumps(result))


class MemoryWatch:
    """Watches the memory of all processes below this one, until `end`."""

    def __init__(self) -> None:
        self._peak, self._ended = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def end(self) -> float:
        """Return the largest sum of resident sets so far, in MiB."""
        self._ended.set()
        self._thread.join()
        return self._peak / 2**20

    def _watch(self) -> None:
        while not self._ended.wait(SECONDS_BETWEEN):
            self._peak = max(self._peak, sum(map(resident_bytes, descendants(os.getpid()))))


def descendants(process: int) -> set[int]:
    """Return the processes that this one has started, and those that they have started."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # It has ended.
                continue
            parents[int(entry.name)] = int(fields[1])
    below: set[int] = set()
    while more := {child for child, parent in parents.items() if parent in below | {process}} - below:
        below |= more
    return below


def resident_bytes(process: int) -> int:
    """Return the size of a process's resident set; 0 if it has ended."""
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * PAGE_BYTES
    except OSError:
        return 0


def digest(directory: Path) -> str:
    """Return a hash of all files below a directory."""
    total = hashlib.sha256()
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        total.update(path.relative_to(directory).as_posix().encode())
        with path.open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


if __name__ == "__main__":
    main()
