"""Several workers train one model: in processes of this machine, or wherever torchrun starts them."""

import os
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from recap_ctr.data.shards import PreparedData
from recap_ctr.errors import InputError
from recap_ctr.jobs.engines import LOCAL, RETRIES, cluster_for
from recap_ctr.jobs.executor import Job, LostWorkerError, SideBySide
from recap_ctr.jobs.local import LocalProcesses
from recap_ctr.jobs.progress import say
from recap_ctr.nn.group import Group, joined
from recap_ctr.storage.claims import is_claimed
from recap_ctr.storage.locks import locked
from recap_ctr.storage.places import output_directory, working_directory
from recap_ctr.training.config import RunConfig
from recap_ctr.training.report import RunReport, parse_report
from recap_ctr.training.run import run

TIMEOUT = timedelta(minutes=10)
"""How long to wait for a worker that is alive but doesn't answer. A dead worker is noticed at once."""
PATIENCE = 2.0
"""How long a worker that lost another one waits before it says so: the other one's own words tell more."""
TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
CHECKED, FIRST_TIMEOUT = "data are checked", timedelta(days=1)
"""For the first worker of torchrun, which checks the data before it joins; if it fails, torchrun ends the others."""
ATTEMPT = "TORCHELASTIC_RESTART_COUNT"
INTERFACE = "GLOO_SOCKET_IFNAME"


@contextmanager
def torchrun_member(device: str) -> Iterator[Group]:
    """Be one of the workers that torchrun started while the context is open; a process that it did not start is alone.

    What a run writes is the work of the first worker, whose `output` all of them use.
    """
    group = torchrun_group()
    if group is None:
        yield Group()
    else:
        with member(group, device):
            yield group


@contextmanager
def output(place: Path, group: Group) -> Iterator[Path]:
    """Yield the directory to work in for a run's output.

    One that belongs in a store is brought here by the first worker, who also takes back what changes.
    """
    if group.is_first:
        with output_directory(place) as directory:
            group.wait()
            yield directory
    else:
        group.wait()
        yield working_directory(place)


def train_where(
    config: RunConfig,
    data: PreparedData,
    out: Path,
    group: Group,
    workers: int,
    engine: str,
    *,
    force: bool,
    quiet: bool,
) -> RunReport:
    """Do a run in this process, on several workers of an engine, or as one of the `group` that torchrun started.

    The reports of that group's workers other than the first lack what only the first one computes.
    """
    if group.size > 1 and (workers > 1 or engine != LOCAL):
        raise InputError("torchrun has started the workers already", fix="remove --workers and --engine")
    if engine != LOCAL:
        cluster = cluster_for(engine, config.threads, config.device)
        return run_on_workers(
            config,
            data,
            out,
            workers,
            force=force,
            quiet=quiet,
            executor=cluster,
            shared=out.absolute().parent,
        )
    if workers > 1:
        return run_on_workers(config, data, out, workers, force=force, quiet=quiet)
    return run(config, data, out, force=force, quiet=quiet)


def run_on_workers(
    config: RunConfig,
    data: PreparedData,
    out: Path,
    workers: int,
    *,
    force: bool = False,
    quiet: bool = False,
    executor: SideBySide | None = None,
    shared: Path | None = None,
) -> RunReport:
    """Do a run on several workers, each with a share of every batch and of the tables' rows.

    Without an `executor`, they are processes of this machine. If it runs them on several machines, `shared` is a
    directory that all of them see, and so must be `data` and `out`. Workers need each other: when one is lost, all of
    them begin again, up to three times, and go on from the last saved state.
    """
    if executor is None:
        executor = LocalProcesses(workers)
    for attempt in range(RETRIES + 1):
        try:
            return _attempt(config, data, out, workers, force, quiet, executor, shared)
        except LostWorkerError as error:
            if attempt == RETRIES:
                raise
            say(f"{error}; all {workers} workers begin again from the last state")
            force = force and not is_claimed(out, config.training_inputs(data))  # That is its own work.
            with locked(out, wait=True):  # The first worker may be about to end.
                pass
    raise AssertionError("the last attempt returns or raises")


def _attempt(
    config: RunConfig,
    data: PreparedData,
    out: Path,
    workers: int,
    force: bool,
    quiet: bool,
    executor: SideBySide,
    shared: Path | None,
) -> RunReport:
    """Do a run on workers of which none may be lost."""
    with (
        executor.together(workers) as side_by_side,
        worker_jobs(config, data, out, workers, force=force, quiet=quiet, shared=shared) as jobs,
    ):
        results = side_by_side.run(jobs, title=f"training on {workers} workers", quiet=quiet)
    return parse_report(results[0], str(out))


@contextmanager
def worker_jobs(
    config: RunConfig,
    data: PreparedData,
    out: Path,
    workers: int,
    *,
    force: bool,
    quiet: bool,
    shared: Path | None = None,
) -> Iterator[list[Job]]:
    """Yield the jobs of a run's workers, which must run side by side while the context is open.

    They find each other through a file in a new directory, so that nothing of an earlier attempt gets in their way.
    """
    with tempfile.TemporaryDirectory(prefix=".recap-workers-", dir=shared) as directory:
        arguments = {
            "size": workers,
            "same_machine": shared is None,
            "meeting": str(Path(directory) / "meeting"),
            "config": config.to_json(),
            "data": str(data.path.absolute()),
            "out": str(out.absolute()),
            "force": force,
            "quiet": quiet,
        }
        yield [
            Job(f"worker {rank + 1}", run_as_worker, {"rank": rank, **arguments}) for rank in range(workers)
        ]


def run_as_worker(
    rank: int,
    size: int,
    same_machine: bool,
    meeting: str,
    config: dict[str, Any],
    data: str,
    out: str,
    force: bool,
    quiet: bool,
) -> dict[str, Any]:
    """Do this worker's part of a run. The workers find each other through the file `meeting`. The arguments are plain,
    so that a job can have them."""
    settings = RunConfig.from_json(config)
    if same_machine:
        os.environ.setdefault(INTERFACE, loopback())  # Nobody else may connect.
    group = Group(rank, size, local_size=size if same_machine else 1)
    try:
        with member(group, settings.device, meeting=Path(meeting)):
            prepared = PreparedData(Path(data), verify=False)  # Who started the workers has checked it.
            return run(settings, prepared, Path(out), force=force, quiet=quiet).to_json()
    except LostWorkerError:
        time.sleep(PATIENCE)
        raise


def loopback() -> str:
    """Return the name of the network interface that only this machine reaches."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name.startswith("lo")), "lo")


def torchrun_group(environment: Mapping[str, str] = os.environ) -> Group | None:
    """Return the group that the variables of torchrun put this process in; None if they are not set."""
    if int(environment.get("WORLD_SIZE", "1")) == 1:
        return None
    missing = [name for name in TORCHRUN if name not in environment]
    if missing:
        raise InputError(
            f"WORLD_SIZE is {environment['WORLD_SIZE']}, and {', '.join(missing)} not set",
            fix="start the workers with torchrun, or unset WORLD_SIZE",
        )
    rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    return Group(rank, size, local_size=int(environment.get("LOCAL_WORLD_SIZE", "1")))


@contextmanager
def member(group: Group, device: str, *, meeting: Path | None = None) -> Iterator[Group]:
    """Be one of the workers while the context is open.

    They find each other through a file, or else by the variables of torchrun. Tensors on GPUs travel by nccl, one GPU
    for each worker of a machine; all others by gloo.
    """
    if device == "cuda":
        local = os.environ.get("LOCAL_RANK", group.rank % group.local_size)
        torch.cuda.set_device(int(local) % torch.cuda.device_count())
    try:
        place = {"store": _store_of_torchrun(group)} if meeting is None else {"init_method": meeting.as_uri()}
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
            rank=group.rank,
            world_size=group.size,
            timeout=TIMEOUT,
            **place,
        )
    except (dist.DistError, RuntimeError) as error:
        raise InputError(
            f"worker {group.rank + 1} of {group.size} can't reach the others: {str(error).splitlines()[0]}",
            fix=f"check that all were started, and {INTERFACE}, the network interface to use",
        ) from error
    try:
        with joined(group):
            yield group
    finally:
        dist.destroy_process_group()


def _store_of_torchrun(group: Group) -> Store:
    """Return where the workers of torchrun find each other.

    torchrun keeps its store when it restarts workers, and in it the addresses of those that are gone; so each attempt
    has names of its own. Only on one machine is the number of restarts the same for all workers.
    """
    store, _, _ = next(rendezvous("env://", group.rank, group.size, timeout=TIMEOUT))
    attempt = os.environ.get(ATTEMPT, "0") if group.local_size == group.size else "0"
    store = PrefixStore(f"attempt {attempt}", store)
    if group.is_first:
        store.set(CHECKED, "yes")
    else:
        store.wait([CHECKED], FIRST_TIMEOUT)
    return store


def checks_data(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process compares data with their checksums, for which it must read all of them.

    Of the workers of torchrun it is the first one alone; the others wait for it before they join.
    """
    group = torchrun_group(environment)
    return group is None or group.is_first
