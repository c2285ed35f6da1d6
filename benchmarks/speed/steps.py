"""Training steps of several programs, interleaved: each program is a process that takes steps on request.

A program writes `{"ready": true, ...}` to standard output, then answers each line `run N` of standard input with
`{"steps": N, "seconds": ..., "cpu_seconds": ...}`, and ends when its input ends. Lines that are not JSON are ignored.
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
    """Return the CPU time of a process and its living descendants, such as the processes of a data loader."""
    ticks, parents = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            columns = stat.read_text().rpartition(")")[2].split()
        except OSError:  # The process has just ended.
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
    """Take steps as standard input asks for them; send what libraries print to standard error.

    `facts` go into the first answer.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    print(json.dumps({"ready": True, **facts}), file=answers)
    for line in sys.stdin:
        command, count = line.split()
        if command != "run":
            raise ValueError(f"unknown command {command!r}: write `run N`")
        cpu, start = cpu_seconds(os.getpid()), time.perf_counter()
        for _ in range(int(count)):
            step()
        seconds = time.perf_counter() - start
        used = cpu_seconds(os.getpid()) - cpu
        print(json.dumps({"steps": int(count), "seconds": seconds, "cpu_seconds": used}), file=answers)


class Stepper:
    """A program that serves steps; all its processes are stopped except during `run`."""

    def __init__(self, command: list[str], threads: int) -> None:
        limits = {f"{name}_NUM_THREADS": str(threads) for name in ("OMP", "MKL", "OPENBLAS")}
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, **limits},
            start_new_session=True,  # A new process group, so that its loaders stop with it.
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
            f"{self.process.args!r} ended with code {self.process.wait()}; see its messages above"
        )

    def run(self, steps: int) -> dict[str, Any]:
        """Take `steps` steps, stop the program again, and return its answer."""
        assert self.process.stdin is not None
        os.killpg(self.process.pid, signal.SIGCONT)
        self.process.stdin.write(f"run {steps}\n")
        self.process.stdin.flush()
        answer = self._answer()
        os.killpg(self.process.pid, signal.SIGSTOP)
        return answer

    def close(self) -> None:
        """Let the program end; after 30 seconds kill it and all processes that it started."""
        assert self.process.stdin is not None
        if self.process.poll() is None:
            self.process.stdin.close()
            os.killpg(self.process.pid, signal.SIGCONT)
            try:
                self.process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
