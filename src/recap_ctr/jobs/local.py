"""Run jobs as processes of this machine, several at a time. They end when this process ends, however it ends."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from recap_ctr.errors import InputError
from recap_ctr.jobs.executor import Job
from recap_ctr.jobs.progress import Board, board

Event = tuple[int, dict[str, Any]]


class JobError(RuntimeError):
    """A job ended in a way that the user can't put right."""


@dataclass(frozen=True)
class LocalProcesses:
    """Run each job in a process of its own, `workers` of them at a time."""

    workers: int

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"{self.workers} workers would never finish")

    def run(
        self,
        jobs: Sequence[Job],
        *,
        title: str,
        quiet: bool = False,
        done: Callable[[int, Any], None] | None = None,
    ) -> list[Any]:
        """Run all jobs and return their results in order. The first failure ends them all.

        Messages and progress of all jobs show on one board; jobs may print nothing else to standard output. `done` is
        called with each job's index and result as soon as it has ended.
        """
        results: dict[int, Any] = {}
        events: SimpleQueue[Event] = SimpleQueue()
        running: dict[int, subprocess.Popen[bytes]] = {}
        waiting = list(range(len(jobs)))
        with board(title, len(jobs), quiet=quiet) as shown:
            try:
                while waiting or running:
                    while waiting and len(running) < self.workers:
                        index = waiting.pop(0)
                        running[index] = _start(jobs[index], index, events)
                    index, event = events.get()
                    if event["kind"] != "end":
                        _receive(jobs[index], index, event, shown, results)
                        continue
                    code = _wait(running.pop(index))
                    if code or index not in results:
                        raise JobError(f"{jobs[index].name} ended without a result, with code {code}")
                    shown.finish(jobs[index].name)
                    if done is not None:
                        done(index, results[index])
            finally:
                for process in running.values():
                    process.kill()
                for process in running.values():
                    _wait(process)
        return [results[index] for index in range(len(jobs))]


def _receive(job: Job, index: int, event: dict[str, Any], shown: Board, results: dict[int, Any]) -> None:
    """Show what a job reports, keep its result, or raise the error that it met."""
    match event["kind"]:
        case "progress" | "say":
            shown.receive(job.name, event)
        case "result":
            results[index] = event["value"]
        case "input error":
            raise InputError(f"{job.name}: {event['message']}", fix=event["fix"])


def _wait(process: "subprocess.Popen[bytes]") -> int:
    """Wait for the process to end, and return its exit code."""
    assert process.stdin is not None
    code = process.wait()
    with suppress(BrokenPipeError):
        process.stdin.close()
    return code


def _start(job: Job, index: int, events: "SimpleQueue[Event]") -> "subprocess.Popen[bytes]":
    """Start a process for the job; a thread puts what it reports into `events`."""
    # -P: no file of the current directory is mistaken for a module.
    command = [sys.executable, "-P", "-m", "recap_ctr.jobs.worker"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    call = json.dumps({"function": job.dotted_name, "arguments": job.arguments})
    with suppress(BrokenPipeError):  # It died at once; its exit code tells more.
        process.stdin.write(call.encode() + b"\n")
        process.stdin.flush()  # It stays open: when it closes, the worker knows that this process is gone.
    out = process.stdout

    def listen() -> None:
        with out:
            for line in out:
                with suppress(ValueError):  # The worker was killed in the middle of a line.
                    events.put((index, json.loads(line)))
        events.put((index, {"kind": "end"}))

    threading.Thread(target=listen, daemon=True).start()
    return process
