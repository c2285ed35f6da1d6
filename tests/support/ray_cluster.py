"""A Ray cluster of several nodes on this machine, on loopback alone, that leaves nothing behind."""

import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

VARIABLES = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Addresses of loopback, on Linux too.
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 << 20}


@contextmanager
def ray_cluster(nodes: int) -> Iterator[Any]:
    """Yield a `ray.cluster_utils.Cluster` of nodes with one core each; RAY_ADDRESS leads to it."""
    before = dict(os.environ)
    directory = tempfile.mkdtemp(prefix="ray")  # Short: sockets have short names.
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(16))
    os.environ |= {**VARIABLES, "RAY_TMPDIR": directory}
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    try:
        for _ in range(nodes - 1):
            cluster.add_node(**NODE)
        os.environ["RAY_ADDRESS"] = cluster.address
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
        os.environ.clear()
        os.environ |= before
        left = processes_of(directory, patience=10)
        shutil.rmtree(directory, ignore_errors=True)
        assert not left, f"processes are left: {left}"


def processes_of(directory: str, patience: float = 0.0) -> list[str]:
    """Return the commands that name `directory` and are still there after `patience` seconds."""
    end = time.monotonic() + patience
    while (commands := _commands(directory)) and time.monotonic() < end:
        time.sleep(0.1)
    return commands


def _commands(directory: str) -> list[str]:
    commands = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            environment = (path / "environ").read_bytes()
            command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # It has ended.
            continue
        if f"RAY_TMPDIR={directory}".encode() in environment and path.name != str(os.getpid()) and command:
            commands.append(command)
    return commands
