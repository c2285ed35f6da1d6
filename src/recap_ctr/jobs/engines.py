"""Where jobs run, by name: `local`, processes of this machine; `ray`, a Ray cluster; `ray://HOST:PORT`, that one."""

import os
import secrets
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from recap_ctr.errors import InputError, did_you_mean
from recap_ctr.jobs.executor import Executor
from recap_ctr.jobs.local import LocalProcesses
from recap_ctr.jobs.machine import jobs_per_gpu, pick_device, side_by_side, visible_gpus

if TYPE_CHECKING:
    from recap_ctr.jobs.ray import Cluster, RayTasks

LOCAL, RAY = "local", "ray"
RETRIES = 3  # If a job loses more workers than this, the job itself is what kills them.
ADDRESS, SCHEME = "RAY_ADDRESS", "ray://"
LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


def executor_for(engine: Executor | str, threads: int, device: str) -> Executor:
    """Return the executor for jobs of `threads` threads on a device: `engine` itself, or that of the named engine."""
    if not isinstance(engine, str):
        return engine
    if engine == LOCAL:
        gpus = visible_gpus() * jobs_per_gpu() if device == "cuda" else ()
        return LocalProcesses(side_by_side(threads, device), gpus=gpus, retries=RETRIES)
    return cluster_for(engine, threads, device)


def cluster_for(engine: str, threads: int, device: str) -> "RayTasks":
    """Return what runs jobs of `threads` threads on the cluster of a Ray engine, also several that need each other."""
    return _cluster(engine).executor(threads, device)


def workers_for(engine: Executor | str, workers: int | None, threads: int | None = None) -> Executor | None:
    """Return the executor for jobs that need no GPU; None if this process should do them itself.

    `workers` is the number of processes on this machine; without it, this process works. A cluster has as many workers
    as it has cores for `threads`. Jobs must be able to begin again, because a killed worker is replaced.
    """
    if engine == LOCAL:
        return None if workers is None else LocalProcesses(workers, retries=RETRIES)
    if workers is not None and isinstance(engine, str):
        raise InputError(
            "--workers is for processes of this machine; a cluster has as many as its cores allow",
            fix="remove --workers or --engine",
        )
    return executor_for(engine, threads or 1, "cpu")


def device_for(engine: Executor | str, name: str | None) -> str:
    """Return the device that jobs compute on: one of this machine, or of the cluster that runs them."""
    if not isinstance(engine, str) or engine == LOCAL:
        return pick_device(name)
    return _cluster(engine).pick_device(name)


def _cluster(engine: str) -> "Cluster":
    """Connect to the cluster of a Ray engine: the named one, the one that runs already, or else one of our own."""
    scheme, _, address = engine.partition("://")
    if scheme != RAY or (engine != RAY and not address):
        raise InputError(
            f"no engine {engine!r}{did_you_mean(engine, (LOCAL, RAY))}",
            fix=f"choose {LOCAL}, {RAY} or {SCHEME}HOST:PORT",
        )
    address = address or os.environ.get(ADDRESS, "") or _address_on_this_machine()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Otherwise Ray sends statistics to its makers.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if not address:
        _keep_to_this_machine()
    try:
        from recap_ctr.jobs.ray import Cluster
    except ModuleNotFoundError as error:
        if error.name != RAY:
            raise
        raise InputError("this engine needs Ray", fix="pip install 'recap-ctr[ray]'") from None
    return Cluster.connect(address or None)


def _address_on_this_machine() -> str:
    """Return the address that `ray start` left on this machine; nothing if there is none."""
    file = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir(), "ray", "ray_current_cluster")
    return file.read_text().strip() if file.is_file() else ""


def _keep_to_this_machine() -> None:
    """Let a cluster that we start listen on loopback only, and require a token that only its processes have.

    Ray reads these variables when it is imported. The first one works on Linux too, whatever its name says.
    """
    if RAY in sys.modules and os.environ.get(LOOPBACK) != "0":
        raise InputError(
            "Ray was imported before it could be kept to this machine",
            fix=f"set {LOOPBACK}=0 and RAY_AUTH_MODE=token before importing ray, or name a cluster: ray://HOST:PORT",
        )
    os.environ[LOOPBACK] = "0"
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
