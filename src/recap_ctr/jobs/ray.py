"""Run jobs as tasks of a Ray cluster: one that runs already, or one on this machine that ends with this process.

A task is the dotted name of a job's function and its arguments as JSON. When its worker or its node is lost, Ray begins
the task again elsewhere, and a job that keeps its state in a directory goes on from there: all machines must see that
directory under the same path. Progress and messages come through an actor, results as the tasks' return values.
"""

import json
import logging
import os
import secrets
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from recap_ctr.errors import InputError
from recap_ctr.jobs.executor import Job, JobError, LostWorkerError
from recap_ctr.jobs.machine import interface_of, jobs_per_gpu, num_cores, versions
from recap_ctr.jobs.progress import Board, board, say, sent_to
from recap_ctr.plugins import resolve
from recap_ctr.storage.locks import BusyError

RETRIES = 3  # If a job loses more workers than this, the job itself is what kills them.
POLL_SECONDS = 0.2
BUSY_SECONDS = 60.0  # A worker that Ray has given up may still hold its directory for a while.
ACTOR_SECONDS = 20.0
WAIT_SECONDS = 10.0  # After which it is said that a cluster has no room yet.
STORE_BYTES = (
    128 << 20
)  # This is enough for a cluster that we start: results are small, and rows never go through Ray.
INTERFACE = "GLOO_SOCKET_IFNAME"
CARRIED = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "POLARS_MAX_THREADS", INTERFACE, "NCCL_SOCKET_IFNAME")
"""Variables that workers have as this process does: they decide threads, and so the last bits of sums, and networks."""


@dataclass(frozen=True)
class Cluster:
    """A connection to a Ray cluster; a process has one at most."""

    address: str

    @classmethod
    def connect(cls, address: str | None) -> Self:
        """Connect to the cluster at `address`, or start one on this machine that ends with this process."""
        if not ray.is_initialized():
            options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
            if address is None:
                options |= {
                    "num_cpus": num_cores(),
                    "include_dashboard": False,
                    "object_store_memory": STORE_BYTES,
                }
            try:
                ray.init(address=address or "local", **options)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise InputError(
                    f"no Ray cluster at {address}: {str(error).partition(chr(10))[0]}",
                    fix="give the address that `ray start --head` printed, on a machine of that cluster",
                ) from None
            # Ray prints on standard output, where results go, that a worker was lost. The board says so anyway.
            ray._private.worker._worker_logs_enabled = False
        return cls(address or "this machine")

    def executor(self, threads: int, device: str) -> "RayTasks":
        """Return an executor for jobs of `threads` threads, with a GPU each if they compute on one."""
        tasks = RayTasks(
            num_cpus=threads, num_gpus=int(device.partition(":")[0] == "cuda"), per_gpu=jobs_per_gpu()
        )
        if not tasks.capacity:
            raise InputError(
                f"no node of the Ray cluster at {self.address} has {tasks.needs}",
                fix="choose fewer --threads or another --device, or add a node",
            )
        return tasks

    def pick_device(self, name: str | None) -> str:
        """Return the named device; by default cuda if the cluster has GPUs, else cpu."""
        if name is None:
            return "cuda" if ray.cluster_resources().get("GPU") else "cpu"
        if name not in ("cpu", "cuda"):
            raise InputError(f"no device {name!r} on a Ray cluster", fix="choose cpu or cuda")
        return name


@dataclass(frozen=True)
class RayTasks:
    """Run jobs as tasks of the cluster that this process is connected to, each with cores and GPUs of its own."""

    num_cpus: int
    num_gpus: int = 0
    per_gpu: int = 1
    """How many jobs share a GPU. Those that need each other don't."""
    reserved: Any = None
    """The placement group of jobs that run at the same time, one part for each. None begins again alone."""

    @property
    def workers(self) -> int:
        """Return how many jobs run at a time; one at least, for which a node may yet have to come."""
        return max(self.capacity, 1)

    @property
    def capacity(self) -> int:
        """Return how many jobs the nodes that are alive have cores and GPUs for."""
        return sum(self._fit(node["Resources"]) for node in ray.nodes() if node["Alive"])

    def _fit(self, resources: dict[str, float]) -> int:
        """Return how many jobs fit on one node."""
        count = resources.get("CPU", 0) // self.num_cpus
        return int(min(count, resources.get("GPU", 0) * self.per_gpu) if self.num_gpus else count)

    @property
    def needs(self) -> str:
        """Return in words what a node must have."""
        return f"{self.num_cpus} cores" + (f" and {self.num_gpus} GPU" if self.num_gpus else "")

    @contextmanager
    def together(self, count: int) -> Iterator[Self]:
        """Yield what runs `count` jobs at once, and replaces no lost worker; wait until the cluster has room for them.

        Either all of them get their cores and GPUs or none does, so that two such groups never wait for each other.
        """
        part = {"CPU": self.num_cpus} | ({"GPU": self.num_gpus} if self.num_gpus else {})
        group = placement_group([part] * count)
        try:
            if not group.wait(timeout_seconds=WAIT_SECONDS):
                say(f"waiting for nodes with room for {count} workers of {self.needs} each")
                ray.get(group.ready())
            yield replace(self, reserved=group, per_gpu=1)
        finally:
            remove_placement_group(group)

    def run(
        self,
        jobs: Sequence[Job],
        *,
        title: str,
        quiet: bool = False,
        done: Callable[[int, Any], None] | None = None,
    ) -> list[Any]:
        """Run all jobs and return their results in order. The first failure ends them all; a lost worker is none.

        Messages and progress of all jobs show on one board. `done` is called with each job's index and result as soon
        as it has ended.
        """
        if not jobs:
            return []
        results: dict[int, Any] = {}
        news = _News()
        pending = {self._begin(index, job, news): index for index, job in enumerate(jobs)}
        with board(title, len(jobs), quiet=quiet) as shown:
            try:
                while pending:
                    ended, _ = ray.wait(list(pending), timeout=POLL_SECONDS)
                    news.show(shown)
                    for task in ended:
                        index = pending.pop(task)
                        results[index] = _result(jobs[index].name, task, shown, self._retries)
                        shown.finish(jobs[index].name)
                        if done is not None:
                            done(index, results[index])
                    if not (ended or self.capacity):
                        news.tell_once(shown, f"{title}: waiting for a node with {self.needs}")
            finally:
                for task in pending:
                    ray.cancel(task, force=True)
        return [results[index] for index in range(len(jobs))]

    @property
    def _retries(self) -> int:
        """Return how often a job whose worker is lost begins again."""
        return RETRIES if self.reserved is None else 0

    def _begin(self, index: int, job: Job, news: "_News") -> Any:
        """Hand a job to the cluster, and return its task."""
        place = None if self.reserved is None else PlacementGroupSchedulingStrategy(self.reserved, index)
        task: Any = ray.remote(perform).options(
            name=job.name,
            num_cpus=self.num_cpus,
            num_gpus=self.num_gpus / self.per_gpu,
            max_retries=self._retries,
            scheduling_strategy=place,
        )
        environment = {name: os.environ[name] for name in CARRIED if name in os.environ}
        call = {
            "function": job.dotted_name,
            "arguments": job.arguments,
            "versions": versions(),
            "directory": str(Path.cwd()),
            "is_alone": self.reserved is None,
        }
        return task.remote(json.dumps(call), environment, news.mailbox, (news.run, job.name))


def perform(call: str, environment: dict[str, str], mailbox: Any, sender: tuple[str, str]) -> str:
    """Do a job on a worker; return as JSON its result, or the error that ended it. Progress goes to the mailbox."""
    os.environ.update(environment)
    job = json.loads(call)

    def send(event: dict[str, Any]) -> Any:
        return mailbox.put.remote(*sender, json.dumps(event))

    def deliver(event: dict[str, Any]) -> None:
        """Send an event, and wait until it and all before it have come."""
        with suppress(RayError):
            ray.get(send(event), timeout=ACTOR_SECONDS)

    with sent_to(send):
        deliver({"kind": "begin"})  # A worker that is killed at once must have been seen, too.
        try:
            _refuse_other_versions(job["versions"])
            with suppress(
                OSError
            ):  # Paths may be relative to the command's; without it, they must be absolute.
                os.chdir(job["directory"])
            if not job["is_alone"]:
                _use_own_network()
            value = _call_when_free(resolve(job["function"]), job["arguments"], wait=job["is_alone"])
            outcome = json.dumps({"kind": "result", "value": value})
        except InputError as error:
            outcome = json.dumps({"kind": "input error", "message": error.message, "fix": error.fix})
        except LostWorkerError as error:
            outcome = json.dumps({"kind": "lost worker", "message": str(error)})
        except (Exception, SystemExit):
            outcome = json.dumps({"kind": "failure", "traceback": traceback.format_exc()})
    deliver({"kind": "end"})
    return outcome


def _refuse_other_versions(expected: dict[str, str]) -> None:
    """Refuse to work with other versions than the command has: the result could be another one."""
    here = versions()
    differing = [name for name in sorted({*expected, *here}) if expected.get(name) != here.get(name)]
    if differing:
        name = differing[0]
        raise InputError(
            f"a machine of the cluster has {name} {here.get(name, 'not at all')}, and this one {expected.get(name)}",
            fix="install the same versions on all machines",
        )


def _use_own_network() -> None:
    """Let the jobs of a group talk over the network by which their nodes reach each other, unless the user decides.

    Otherwise a machine's name would decide, which often leads to itself alone.
    """
    if INTERFACE not in os.environ and (interface := interface_of(ray.util.get_node_ip_address())):
        os.environ[INTERFACE] = interface


def _call_when_free(function: Callable[..., Any], arguments: dict[str, Any], *, wait: bool) -> Any:
    """Call a function; where another process writes its output, wait: it may be a worker that is about to end."""
    deadline = time.monotonic() + (BUSY_SECONDS if wait else 0.0)
    while True:
        try:
            return function(**arguments)
        except BusyError:
            if time.monotonic() > deadline:
                raise
            time.sleep(POLL_SECONDS)


def _result(name: str, task: Any, shown: Board, retries: int) -> Any:
    """Return the result of a task that has ended, or raise the error that ended it, its `retries` included."""
    try:
        outcome = json.loads(ray.get(task))
    except RayTaskError as error:
        reason = str(error).strip().splitlines()[-1]
        raise JobError(
            f"{name} could not begin on a machine of the cluster; is the same recap-ctr[train,ray] there? {reason}"
        ) from None
    except RayError as error:
        lost = f"{name} lost its worker {retries + 1} times ({type(error).__name__})"
        raise LostWorkerError(f"{lost}; it may need more memory than there is") from None
    match outcome["kind"]:
        case "input error":
            raise InputError(f"{name}: {outcome['message']}", fix=outcome["fix"])
        case "lost worker":
            raise LostWorkerError(f"{name}: {outcome['message']}")
        case "failure":
            shown.say(f"{name}: {outcome['traceback']}")
            raise JobError(f"{name} ended without a result: {outcome['traceback'].splitlines()[-1]}")
    return outcome["value"]


class Mailbox:
    """The actor that keeps what the workers report until it is taken."""

    def __init__(self) -> None:
        self._events: list[tuple[str, str, str]] = []

    def put(self, run: str, name: str, event: str) -> None:
        """Keep an event, as JSON, of the job `name` of one call of `RayTasks.run`."""
        self._events.append((run, name, event))

    def take(self, run: str) -> list[tuple[str, str]]:
        """Return the events that have come since the last call; forget those of runs before."""
        events, self._events = self._events, []
        return [(name, event) for sender, name, event in events if sender == run]


class _News:
    """What the workers report during one call of `RayTasks.run`, and how it is shown."""

    def __init__(self) -> None:
        self.run = secrets.token_hex(8)
        # On this node, so that it is lost only with this process; without cores, so that no job waits for it.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        actor: Any = ray.remote(Mailbox)
        self.mailbox = actor.options(
            name="mailbox", get_if_exists=True, num_cpus=0, max_restarts=-1, scheduling_strategy=here
        ).remote()
        self._begun: set[str] = set()
        self._shown_messages: set[str] = set()

    def show(self, shown: Board) -> None:
        """Show all that has come since the last call."""
        with suppress(RayError):  # What a restarted actor has lost were messages, never results.
            for name, text in ray.get(self.mailbox.take.remote(self.run), timeout=ACTOR_SECONDS):
                event = json.loads(text)
                if event["kind"] == "begin":
                    if name in self._begun:
                        shown.say(f"{name}: its worker was lost; it goes on with another")
                    self._begun.add(name)
                elif event["kind"] != "end":
                    shown.receive(name, event)

    def tell_once(self, shown: Board, text: str) -> None:
        """Show a message, unless it was shown before."""
        if text not in self._shown_messages:
            self._shown_messages.add(text)
            shown.say(text)
