"""Jobs as local processes, so many at a time; they end when this process ends, however it ends."""

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
from recap_ctr.jobs.progress import board


@dataclass(frozen=True)
class Job:
    """A call of `function`, named as "module:function" of this package, with arguments that JSON can hold."""

    name: str
    function: str
    arguments: dict[str, Any]


class JobError(RuntimeError):
    """A job ended in a way that is not the user's to put right."""


def run_jobs(
    jobs: Sequence[Job],
    *,
    workers: int,
    title: str,
    quiet: bool = False,
    done: Callable[[int, Any], None] | None = None,
) -> list[Any]:
    """Run all jobs, at most `workers` at a time, and return their results in order. The first failure ends them all.

    What a job says and how far it is shows on one board; nothing else may print to the jobs' standard output. `done`
    is told each job's place and result as soon as it has ended.
    """
    if workers < 1:
        raise ValueError(f"{workers} workers would never finish")
    results: dict[int, Any] = {}
    events: SimpleQueue[tuple[int, dict[str, Any]]] = SimpleQueue()
    running: dict[int, subprocess.Popen[bytes]] = {}
    waiting = list(range(len(jobs)))
    with board(title, len(jobs), quiet=quiet) as shown:
        try:
            while waiting or running:
                while waiting and len(running) < workers:
                    at = waiting.pop(0)
                    running[at] = _start(jobs[at], at, events)
                at, event = events.get()
                match event["kind"]:
                    case "progress":
                        shown.progress(jobs[at].name, event["done"], event["total"], event["note"])
                    case "say":
                        shown.relay(jobs[at].name, event["text"])
                    case "result":
                        results[at] = event["value"]
                    case "input error":
                        raise InputError(f"{jobs[at].name}: {event['message']}", fix=event["fix"])
                    case "end":
                        code = _end(running.pop(at))
                        if code or at not in results:
                            raise JobError(f"{jobs[at].name} ended without a result, with code {code}")
                        shown.finish(jobs[at].name)
                        if done is not None:
                            done(at, results[at])
        finally:
            for process in running.values():
                process.kill()
            for process in running.values():
                _end(process)
    return [results[at] for at in range(len(jobs))]


def _end(process: subprocess.Popen[bytes]) -> int:
    assert process.stdin is not None
    code = process.wait()
    with suppress(BrokenPipeError):
        process.stdin.close()
    return code


def _start(job: Job, at: int, events: "SimpleQueue[tuple[int, dict[str, Any]]]") -> subprocess.Popen[bytes]:
    # -P: no file of the directory we happen to stand in is taken for a module.
    command = [sys.executable, "-P", "-m", "recap_ctr.jobs.worker"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    call = json.dumps({"function": job.function, "arguments": job.arguments})
    with suppress(BrokenPipeError):  # it died at once, which its exit code tells better
        process.stdin.write(call.encode() + b"\n")
        process.stdin.flush()  # it stays open: its end tells the worker that this process is gone
    out = process.stdout

    def listen() -> None:
        with out:
            for line in out:
                with suppress(ValueError):  # killed in the middle of a line
                    events.put((at, json.loads(line)))
        events.put((at, {"kind": "end"}))

    threading.Thread(target=listen, daemon=True).start()
    return process
