"""Run jobs in processes of this machine, several at a time. They end when this process ends, however it ends."""

import json
import os
import subprocess
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import Any

from recap_ctr.errors import InputError
from recap_ctr.jobs.executor import Executor, Job, JobError, LostWorkerError
from recap_ctr.jobs.machine import num_cores
from recap_ctr.jobs.progress import board

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "POLARS_MAX_THREADS")

Event = tuple["_Worker", dict[str, Any]]


class LocalProcesses:
    """Run jobs in `workers` processes, one after the other in each, because importing torch takes seconds."""

    def __init__(self, workers: int, *, gpus: Sequence[str] = (), retries: int = 0) -> None:
        """Set up the processes; with `gpus`, named as CUDA names them, each process sees one of them alone.

        A job whose worker is killed, such as by a system without memory, begins again up to `retries` times.
        """
        if workers < 1:
            raise ValueError(f"{workers} workers would never finish")
        if gpus and len(gpus) < workers:
            raise ValueError(f"{workers} workers can't each have one of {len(gpus)} GPUs")
        self.workers, self._gpus, self._retries = workers, tuple(gpus), retries
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._idle: list[_Worker] = []
        weakref.finalize(self, _end_all, self._idle)

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
        busy: dict[_Worker, int] = {}
        waiting = list(range(len(jobs)))
        lost = Counter[int]()
        with board(title, len(jobs), quiet=quiet) as shown:
            try:
                while waiting or busy:
                    while waiting and len(busy) < self.workers:
                        worker = self._next_worker(busy)
                        busy[worker] = waiting.pop(0)
                        worker.take(jobs[busy[worker]])
                    worker, event = self._events.get()
                    if worker not in busy:
                        continue
                    index = busy[worker]
                    job = jobs[index]
                    match event["kind"]:
                        case "progress" | "say" | "epoch":
                            shown.receive(job.name, event)
                        case "input error":
                            raise InputError(f"{job.name}: {event['message']}", fix=event["fix"])
                        case "lost worker":
                            raise LostWorkerError(f"{job.name}: {event['message']}")
                        case "end":
                            code = worker.wait()
                            lost[index] += 1
                            if code >= 0 or lost[index] > self._retries:
                                kind = JobError if code >= 0 else LostWorkerError
                                raise kind(f"{job.name} ended without a result, with code {code}")
                            del busy[worker]
                            waiting.insert(0, index)
                            shown.say(f"{job.name}: its worker was lost; it begins again with another")
                        case "result":
                            results[index] = event["value"]
                            del busy[worker]
                            self._idle.append(worker)
                            shown.finish(job.name)
                            if done is not None:
                                done(index, results[index])
            finally:
                _end_all(list(busy))
        return [results[index] for index in range(len(jobs))]

    @contextmanager
    def together(self, count: int) -> Iterator[Executor]:
        """Yield what runs `count` jobs at once, and replaces no lost worker."""
        if self.workers < count:
            raise ValueError(f"{count} workers need to run side by side, and only {self.workers} can")
        retries, self._retries = self._retries, 0
        try:
            yield self
        finally:
            self._retries = retries

    def _next_worker(self, busy: Iterable["_Worker"]) -> "_Worker":
        """Return an idle worker that is alive, or a new one, on the GPU that the fewest of the `busy` ones have."""
        while self._idle:
            worker = self._idle.pop()
            if worker.process.poll() is None:
                return worker
            worker.wait()
        taken = Counter(worker.gpu for worker in busy)
        gpu = min(self._gpus, key=lambda gpu: taken[gpu], default=None)
        return _Worker(self._events, gpu, max(num_cores() // self.workers, 1))


class _Worker:
    """A process that takes jobs one after the other; a thread puts what it reports into `events`."""

    def __init__(self, events: "SimpleQueue[Event]", gpu: str | None, cores: int) -> None:
        self.gpu = gpu
        # -P: no file of the current directory is mistaken for a module.
        command = [sys.executable, "-P", "-m", "recap_ctr.jobs.worker"]
        # Libraries that would take all cores have this worker's share of them, unless the user has decided.
        environment = {**dict.fromkeys(THREAD_VARIABLES, str(cores)), **os.environ}
        if gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = gpu
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        threading.Thread(target=self._listen, args=(events,), daemon=True).start()

    def take(self, job: Job) -> None:
        """Begin a job."""
        assert self.process.stdin is not None
        call = json.dumps({"function": job.dotted_name, "arguments": job.arguments})
        with suppress(BrokenPipeError):  # It died; its exit code tells more.
            self.process.stdin.write(call.encode() + b"\n")
            self.process.stdin.flush()  # It stays open: when it closes, the worker knows that this process is gone.

    def wait(self) -> int:
        """Wait for the process to end, and return its exit code."""
        assert self.process.stdin is not None
        code = self.process.wait()
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        return code

    def _listen(self, events: "SimpleQueue[Event]") -> None:
        assert self.process.stdout is not None
        with self.process.stdout as out:
            for line in out:
                with suppress(ValueError):  # The worker was killed in the middle of a line.
                    events.put((self, json.loads(line)))
        events.put((self, {"kind": "end"}))


def _end_all(workers: list[_Worker]) -> None:
    """Kill the processes, and wait until they are gone."""
    for worker in workers:
        worker.process.kill()
    for worker in workers:
        worker.wait()
    workers.clear()
