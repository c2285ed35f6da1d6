"""SIGKILL, which no one can catch: the same command ends with the same bits, and half an artifact never loads.

One process imports torch, which takes seconds, and forks a child for every attempt; polars, whose threads would not
survive a fork, is imported by the child.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from recap_ctr.data.shards import PreparedData
from recap_ctr.errors import InputError
from recap_ctr.inference.torch_backend import load_artifact
from recap_ctr.nn.weights import load_tensors
from tests.conftest import contents

pytestmark = pytest.mark.slow

DRIVER = """
import os, random, shutil, signal, sys, time
from pathlib import Path

import numpy.random, pydantic, rich.progress, safetensors.torch, torch.optim.adam  # the slow ones, before any fork

data, base = Path(sys.argv[1]), Path(sys.argv[2])
rng = random.Random(int(sys.argv[3]))
snapshots = iter(range(1_000))


def work(out, settings, before=lambda: None):
    from recap_ctr.training import loop as train
    from recap_ctr.config import TrainConfig
    from recap_ctr.data.shards import PreparedData
    from recap_ctr.models.catalogue import parse_model
    from recap_ctr.training.config import RunConfig
    from recap_ctr.training.run import run

    train.SAVE_SECONDS = -1.0  # after every step
    model = parse_model("fcn", {"dim": 4, "num_exponential_layers": 1, "num_linear_layers": 1})
    config = TrainConfig(batch_size=128, learning_rate=1e-2, max_epochs=2, **settings)
    before()
    (out.parent / f"{out.name}.ready").touch()
    run(RunConfig("fcn", model, config, train_baseline=False), PreparedData(data), out, quiet=True)


def attempt(out, settings, before=lambda: None, kill_after=None):
    ready = out.parent / f"{out.name}.ready"
    ready.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work(out, settings, before)
            code = 0
        finally:
            os._exit(code)
    if kill_after is not None:
        over = os.WEXITED | os.WNOHANG | os.WNOWAIT
        while not (ready.exists() and (out / "inputs.json").exists()) and not os.waitid(os.P_PID, child, over):
            time.sleep(0.001)
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    if status:
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status
        shutil.copytree(out, base / "snapshots" / f"{next(snapshots):04d}", dirs_exist_ok=True)
    return status == 0


def timed_kills(name, settings, wanted):
    start = time.monotonic()
    attempt(base / f"{name}-whole", settings)
    duration = time.monotonic() - start
    kills = 0
    for _ in range(40):
        # The first half of a run's time is enough: what follows the last kill is the rest of it.
        finished = attempt(base / name, settings, kill_after=rng.uniform(0, duration / 2))
        kills += not finished
        if kills == wanted:
            break
        if finished:
            shutil.rmtree(base / name)
    attempt(base / name, settings)
    print(name, kills, flush=True)


def kills_at_every_write(settings):
    # The training is done; what remains is the artifact and the report. The child dies before its k-th call.
    out = base / "writes"
    attempt(base / "writes-whole", settings)
    shutil.copytree(base / "writes-whole", out)

    def dies_at(k):
        import recap_ctr.storage.files as storage
        calls = iter(range(1, 10_000))

        def counted(function):
            def wrapper(*arguments, **settings):
                if next(calls) == k:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*arguments, **settings)
            return wrapper

        os.fsync, Path.replace, Path.rename = map(counted, (os.fsync, Path.replace, Path.rename))
        storage._exchange, shutil.rmtree = counted(storage._exchange), counted(shutil.rmtree)

    kills, k = 0, 0
    while True:
        k += 5
        (out / "report.json").unlink(missing_ok=True)
        if k % 2:  # with and without an older artifact in its place
            shutil.rmtree(out / "artifact", ignore_errors=True)
        if attempt(out, settings, lambda: dies_at(k)):
            break
        kills += 1
    print("writes", kills, flush=True)


kind = sys.argv[4]
if kind == "writes":
    kills_at_every_write({"update": "fast"})
else:
    settings = {"exact": {"update": "exact", "ema": 0.9}, "fast": {"update": "fast"}}[kind]
    timed_kills(kind, settings, 3)
"""


def kill(kind: str, prepared: PreparedData, base: Path) -> int:
    """Let the driver kill runs of a kind in a directory; return how many kills it did."""
    (base / "snapshots").mkdir()
    command = [sys.executable, "-c", DRIVER, str(prepared.path), str(base), "7", kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    name, kills = done.stdout.split()
    assert name == kind
    return int(kills)


def check_snapshots(base: Path, whole: dict[str, bytes]) -> tuple[int, int]:
    """Load what each kill left: an artifact is whole or refused. Return how many were each."""
    loadable = refused = 0
    for snapshot in sorted((base / "snapshots").iterdir()):
        for directory in (snapshot / "artifact", *snapshot.glob(".artifact.*.partial")):
            try:
                load_artifact(directory)
            except InputError:
                refused += 1
            else:
                loadable += 1
                assert data_of(directory) == whole
    return loadable, refused


def state(run: Path) -> dict[str, Any]:
    tensors, metadata = load_tensors(run / "state.safetensors")
    progress = json.loads(metadata["progress"])
    clockless = [{**line, "seconds": 0} for line in progress["history"]]
    return {name: value.numpy().tobytes() for name, value in tensors.items()} | {
        "progress": progress | {"seconds": 0, "history": clockless}
    }


def data_of(directory: Path) -> dict[str, bytes]:
    return {name: data for name, (data, _) in contents(directory).items()}


@pytest.mark.parametrize("kind", ["exact", "fast"])
def test_a_killed_run_ends_with_the_same_bits(kind: str, prepared: PreparedData, tmp_path: Path) -> None:
    assert kill(kind, prepared, tmp_path) == 3
    run, whole = tmp_path / kind, tmp_path / f"{kind}-whole"
    assert state(run) == state(whole)
    assert (run / "best.safetensors").read_bytes() == (whole / "best.safetensors").read_bytes()
    assert data_of(run / "artifact") == data_of(whole / "artifact")
    # A run that was killed by the clock may have written its artifact already.
    check_snapshots(tmp_path, data_of(whole / "artifact"))


def test_killed_before_any_write_the_artifact_is_whole_or_absent(
    prepared: PreparedData, tmp_path: Path
) -> None:
    assert kill("writes", prepared, tmp_path) > 4
    whole = data_of(tmp_path / "writes-whole" / "artifact")
    assert data_of(tmp_path / "writes" / "artifact") == whole
    assert not list((tmp_path / "writes").glob(".artifact.*"))
    loadable, refused = check_snapshots(tmp_path, whole)
    assert loadable > 0 < refused
