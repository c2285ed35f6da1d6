"""Training steps of several programs, interleaved: each is a process that takes steps when it is told to.

A program says `{"ready": true, ...}` on standard output, then answers each line `run N` of standard input with
`{"steps": N, "seconds": ..., "cpu_seconds": ...}`, and ends with its input. Lines that are not JSON are ignored.
Standard library only: the peer's environment imports this file too.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def cpu_seconds(root: int) -> float:
    """CPU time of a process and its living descendants (data loaders are processes of their own)."""
    ticks, parents = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            columns = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        pid = int(stat.parent.name)
        parents[pid] = int(columns[1])
        ticks[pid] = int(columns[11]) + int(columns[12])
    family, fresh = set(), {root}
    while fresh:
        family |= fresh
        fresh = {pid for pid, parent in parents.items() if parent in fresh}
    return sum(ticks.get(pid, 0) for pid in family) / os.sysconf("SC_CLK_TCK")


def serve(step: Callable[[], object], **facts: object) -> None:
    """Take steps as standard input asks for them; whatever libraries print goes to standard error."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    print(json.dumps({"ready": True, **facts}), file=answers)
    for line in sys.stdin:
        command, count = line.split()
        if command != "run":
            raise ValueError(f"unknown command {command!r}; there is only `run N`")
        cpu, start = cpu_seconds(os.getpid()), time.perf_counter()
        for _ in range(int(count)):
            step()
        seconds = time.perf_counter() - start
        used = cpu_seconds(os.getpid()) - cpu
        print(json.dumps({"steps": int(count), "seconds": seconds, "cpu_seconds": used}), file=answers)


class Stepper:
    """The other end: a program that stands still, with all its processes, unless `run` is under way."""

    def __init__(self, command: list[str], threads: int) -> None:
        limits = {f"{name}_NUM_THREADS": str(threads) for name in ("OMP", "MKL", "OPENBLAS")}
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, **limits},
            start_new_session=True,  # a process group of its own, so that its loaders stop with it
        )
        self.facts = self._answer()
        os.killpg(self.process.pid, signal.SIGSTOP)

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise RuntimeError(
            f"{self.process.args!r} ended with code {self.process.wait()}, see its messages above"
        )

    def run(self, steps: int) -> dict[str, Any]:
        """Take some steps and stand still again."""
        assert self.process.stdin is not None
        os.killpg(self.process.pid, signal.SIGCONT)
        self.process.stdin.write(f"run {steps}\n")
        self.process.stdin.flush()
        answer = self._answer()
        os.killpg(self.process.pid, signal.SIGSTOP)
        return answer

    def close(self) -> None:
        """Let the program end, or end it with whatever it started."""
        assert self.process.stdin is not None
        if self.process.poll() is None:
            self.process.stdin.close()
            os.killpg(self.process.pid, signal.SIGCONT)
            try:
                self.process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
