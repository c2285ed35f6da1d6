"""What a command costs: wall time, CPU time and peak memory (Linux).

This uses the standard library only. A child's peak memory starts at that of its parent, so a process that measures must
be small, and must generate its data in other processes.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "benchmarks" / "speed" / ".work"


class Usage(NamedTuple):
    """What one run of a command cost, and its answer."""

    seconds: float
    cpu_seconds: float
    """CPU time of the command and of the children it waited for."""
    peak_mib: float
    """Peak memory of its largest process."""
    answer: dict[str, Any]
    """The JSON object on the last line of the command's standard output."""


def run(command: list[str | Path]) -> Usage:
    """Run a command in the root of the repository, and return what it cost."""
    start = time.perf_counter()
    process = subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    lines = process.stdout.read().splitlines()
    _, status, used = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{shlex.join(map(str, command))} ended with code {process.returncode}")
    return Usage(seconds, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024, json.loads(lines[-1]))


def make(out: Path, module: str, *arguments: str | Path) -> Path:
    """Return `out`, after running the module that writes it if it does not exist; it is never there in part."""
    if not out.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        unfinished = out.with_name(f"{out.name}.partial")
        run([sys.executable, "-m", f"benchmarks.speed.{module}", *arguments, "--out", unfinished])
        unfinished.rename(out)
    return out
