"""Fits on a Ray cluster of two nodes on this machine: the same artifact as local processes give, whatever is killed.

    python -m benchmarks.reliability.ray [--rows 3000] [--recipes portfolio] [--ways killed]

Two recipes, the default portfolio and the paper's probe, teachers and student, are fitted by local processes, on the
cluster, on the cluster with a worker of every job killed once, and on the cluster with a node removed in the middle.
`identical` says whether all files of the artifact, and the weights, training states and logit tables of all runs, have
the same bytes as those of the local fit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from recap_ctr.bench.synthetic import draw
from recap_ctr.data.synthetic import SyntheticConfig
from recap_ctr.jobs.machine import machine, versions
from tests.support.ray_cluster import NODE, processes_of, ray_cluster

ROOT = Path(__file__).resolve().parents[2]
EPOCHS = ["--set", "train.max_epochs=3", "--set", "teacher_train.max_epochs=3"]
RECIPES = {
    "portfolio": EPOCHS,
    "teachers": ["--teachers", "2", *EPOCHS, "--set", "probe.rungs=[1,2]"],
}
WAYS = ("ray", "killed", "node removed")
KILL_AFTER = 0.3  # Seconds that a job has run before its worker is killed.
REMOVE_AFTER = 0.5  # And before its node is removed, at least.


def fit(
    data: Path, out: Path, engine: str, options: Sequence[str], disturb: Callable[[threading.Event], None]
) -> float:
    """Fit with `disturb` beside it, which ends when its event is set; return the seconds that it took."""
    command = [sys.executable, "-m", "recap_ctr", "fit", str(data), "--out", str(out), "--threads", "1"]
    command += ["--engine", engine, "--json", *options]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    over, began = threading.Event(), time.monotonic()
    beside = threading.Thread(target=disturb, args=(over,))
    beside.start()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    over.set()
    beside.join()
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    json.loads(done.stdout)  # Nothing else was printed there.
    return round(time.monotonic() - began, 1)


def checksums(out: Path) -> dict[str, str]:
    """Return the hashes of all that must not depend on the engine: the artifact, and the tensors of all runs."""
    files = [*(out / "artifact").rglob("*"), *out.rglob("*.safetensors"), *out.rglob("logits/**/*.npy")]
    return {str(path.relative_to(out)): _checksum(path) for path in sorted(set(files)) if path.is_file()}


def _checksum(path: Path) -> str:
    """Return the hash of a file; the header of a training state is left out, since it has the seconds so far."""
    content = path.read_bytes()
    if path.name == "state.safetensors":
        content = content[8 + int.from_bytes(content[:8], "little") :]
    return hashlib.sha256(content).hexdigest()


def busy_workers() -> dict[int, str]:
    """Return the process ids of this cluster's workers that run a job, with its name."""
    workers = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            title = (path / "cmdline").read_bytes().rstrip(b"\0").decode()
            is_ours = f"RAY_TMPDIR={os.environ['RAY_TMPDIR']}".encode() in (path / "environ").read_bytes()
        except (OSError, UnicodeDecodeError):
            continue
        name = title.removeprefix("ray::")
        if is_ours and name != title and name != "IDLE" and not re.search("Mailbox|Agent$", name):
            workers[int(path.name)] = name
    return workers


class Killer:
    """Kills a worker of every job once, after it has run for a while."""

    def __init__(self) -> None:
        self.killed: list[str] = []

    def __call__(self, over: threading.Event) -> None:
        seen: dict[tuple[int, str], float] = {}
        while not over.wait(0.05):
            for worker, name in busy_workers().items():
                began = seen.setdefault((worker, name), time.monotonic())
                if name not in self.killed and time.monotonic() - began > KILL_AFTER:
                    self.killed.append(name)
                    os.kill(worker, signal.SIGKILL)


def remover(cluster: Any, lost: list[str]) -> Callable[[threading.Event], None]:
    """Return what removes the second node as soon as it has run a job for a while; `lost` gets the job's name."""
    node = next(iter(cluster.worker_nodes))
    raylet = node.all_processes["raylet"][0].process.pid

    def jobs() -> set[tuple[int, str]]:
        return {(worker, name) for worker, name in busy_workers().items() if parent_of(worker) == raylet}

    def remove(over: threading.Event) -> None:
        before: set[tuple[int, str]] = set()
        while not over.wait(REMOVE_AFTER):
            still_running = before & (before := jobs())
            if still_running:
                lost.extend(name for _, name in still_running)
                cluster.remove_node(node, allow_graceful=False)
                return

    return remove


def parent_of(process: int) -> int:
    """Return the process that started another; 0 if it has ended."""
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def idle(over: threading.Event) -> None:
    """Do nothing."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=3000)
    parser.add_argument("--recipes", nargs="+", choices=tuple(RECIPES), default=tuple(RECIPES))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    args = parser.parse_args()
    fits: dict[str, dict[str, Any]] = {}
    with TemporaryDirectory() as name:
        directory = Path(name)
        _, data = draw(
            SyntheticConfig(rows=args.rows, seed=1), directory / "clicks.csv", directory / "data", quiet=True
        )
        with ray_cluster(nodes=2) as cluster:
            ray_directory = os.environ["RAY_TMPDIR"]
            for recipe in args.recipes:
                options = RECIPES[recipe]
                local = directory / f"{recipe}-local"
                seconds = {"local": fit(data.path, local, "local", options, idle)}
                expected = checksums(local)
                killer, lost = Killer(), list[str]()
                ways: dict[str, Callable[[threading.Event], None]] = {
                    "ray": idle,
                    "killed": killer,
                    "node removed": remover(cluster, lost),
                }
                identical = {}
                for way in args.ways:
                    disturb = ways[way]
                    out = directory / f"{recipe}-{way.replace(' ', '-')}"
                    seconds[way] = fit(data.path, out, "ray", options, disturb)
                    identical[way] = checksums(out) == expected
                if lost:
                    cluster.add_node(**NODE)
                fits[recipe] = {
                    "files": len(expected),
                    "identical": identical,
                    "killed": killer.killed,
                    "lost_with_the_node": lost,
                    "seconds": seconds,
                }
    left = processes_of(ray_directory)
    result = {
        "rows": args.rows,
        "fits": fits,
        "processes_left": len(left),
        "machine": machine(),
        "versions": {**versions(), "ray": version("ray")},
    }
    print(json.dumps(result))
    shown = {"ray": "identical", "killed": "killed", "node removed": "lost_with_the_node"}
    is_shown = all(entry[shown[way]] for entry in fits.values() for way in args.ways)
    if left or not is_shown or not all(all(entry["identical"].values()) for entry in fits.values()):
        raise SystemExit("not as promised")


if __name__ == "__main__":
    main()
