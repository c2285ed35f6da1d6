"""Several workers train one model: the same weights as one, whatever their number, also after one of them died."""

import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from recap_ctr.axes.logits import LogitTable
from recap_ctr.axes.predict import predict
from recap_ctr.config import TrainConfig
from recap_ctr.data.shards import PreparedData
from recap_ctr.errors import InputError
from recap_ctr.inference.torch_backend import load_artifact
from recap_ctr.jobs.engines import RETRIES
from recap_ctr.jobs.executor import Executor, InThisProcess, Job, JobError, LostWorkerError
from recap_ctr.jobs.local import LocalProcesses
from recap_ctr.models.catalogue import parse_model
from recap_ctr.nn.group import Group, joined
from recap_ctr.nn.weights import load_tensors
from recap_ctr.storage.claims import claim
from recap_ctr.storage.objects import CACHE
from recap_ctr.storage.places import input_directory
from recap_ctr.training import workers
from recap_ctr.training.config import RunConfig
from recap_ctr.training.report import REPORT
from recap_ctr.training.run import run
from recap_ctr.training.workers import (
    checks_data,
    loopback,
    run_on_workers,
    torchrun_group,
    worker_jobs,
)
from tests.support.object_store import s3_server
from tests.support.worker_functions import (
    CPU,
    command_of_torchrun,
    join_by_torchrun,
    run_and_be_killed_once,
    run_and_die,
    take_steps,
    trainer_in_double,
)

ROOT = Path(__file__).parents[2]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "fcn": ("fcn", {"dim": 4, "num_exponential_layers": 1, "num_linear_layers": 2}),
    "recap": ("recap", {"dim": 4, "depth": 2, "train_depths": [1, 2], "num_adapters": 4, "lora_rank": 2}),
    "recap-row": (
        "recap",
        {"dim": 4, "depth": 2, "train_depths": [1, 2], "num_adapters": 4, "lora_rank": 2, "sampling": "row"},
    ),
    "dnn": ("dnn", {"dim": 4, "units": [8, 8]}),
    "qnn": ("qnn", {"dim": 4}),
    "afn": ("afn", {"dim": 4, "units": [8]}),
}
TRAIN = {"batch_size": 101, "learning_rate": 1e-2, "l2": 1e-3, "clip": 0.1, "ema": 0.5}


def case(name: str, update: str, steps: int = 4, **changes: Any) -> dict[str, Any]:
    model, settings = MODELS[name]
    train = {**TRAIN, "update": update, **changes}
    return {
        "name": f"{name}-{update}",
        "model": model,
        "settings": settings,
        "train": train,
        "steps": steps,
        "logits": name == "fcn",
    }


@pytest.fixture(scope="module")
def pool() -> Iterator[LocalProcesses]:
    """Return processes that all tests share: each imports torch once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
        patch.setenv("OMP_NUM_THREADS", "1")
        yield LocalProcesses(3)


def take_steps_on(
    pool: LocalProcesses, size: int, data: PreparedData, out: Path, cases: list[dict[str, Any]]
) -> list[float]:
    """Take the steps of all cases on `size` workers, and return the sums of their losses."""
    meeting = out / f"meeting-{time.monotonic_ns()}"
    out.mkdir(exist_ok=True)
    arguments = {"meeting": str(meeting), "data": str(data.path), "out": str(out), "cases": cases}
    jobs = [
        Job(f"worker {rank}", take_steps, {"rank": rank, "size": size, **arguments}) for rank in range(size)
    ]
    losses: list[list[float]] = pool.run(jobs, title="test", quiet=True)
    assert all(entry == losses[0] for entry in losses)
    return losses[0]


def largest_difference(first: Path, second: Path) -> float:
    ours, theirs = load_tensors(first)[0], load_tensors(second)[0]
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


@pytest.mark.slow
def test_two_workers_train_what_one_trains(
    pool: LocalProcesses, prepared: PreparedData, tmp_path: Path
) -> None:
    """The last case has a batch of one row, of which one worker has none."""
    cases = [case(name, update) for name in MODELS for update in ("exact", "fast")]
    size = len(prepared.train) - 1
    cases.append({**case("dnn", "fast", 3, batch_size=size), "name": "one-row"})

    losses = take_steps_on(pool, 2, prepared, tmp_path / "two", cases)

    for entry, loss in zip(cases, losses, strict=True):
        trainer = trainer_in_double(entry["model"], entry["settings"], entry["train"], str(prepared.path))
        for _ in range(entry["steps"]):
            trainer.step()
        assert trainer.progress.loss_sum == pytest.approx(loss, abs=1e-10), entry["name"]
        weights = load_tensors(tmp_path / "two" / entry["name"] / "weights.safetensors")[0]
        for name, weight in trainer.model.state_dict().items():
            np.testing.assert_allclose(weights[name], weight, atol=1e-7, err_msg=f"{entry['name']} {name}")
        if entry["logits"]:
            table = LogitTable(tmp_path / "two" / entry["name"] / "logits")
            expected = predict(trainer.model.float(), prepared.valid, CPU)
            np.testing.assert_allclose(table.logits_NM[:, 0], expected, atol=1e-5)


@pytest.mark.slow
def test_any_number_of_workers_goes_on_from_the_state_of_any_other(
    pool: LocalProcesses, prepared: PreparedData, tmp_path: Path
) -> None:
    """Three workers, then two, then one, then three; against one all the way."""
    entry = case("fcn", "fast", steps=2)
    out = tmp_path / "relay"
    for size in (3, 2):
        take_steps_on(pool, size, prepared, out, [entry])
        parts = sorted((out / entry["name"]).glob("state-*.safetensors"))
        assert len(parts) == size, "the parts of the state before are gone"

    def trainer() -> Any:
        return trainer_in_double(entry["model"], entry["settings"], entry["train"], str(prepared.path))

    parts[0].rename(tmp_path / "lost")
    with pytest.raises(InputError, match=r"a part of .*state.safetensors is missing"):
        trainer().resume(out / entry["name"])
    (tmp_path / "lost").rename(parts[0])
    alone = trainer()
    alone.resume(out / entry["name"])
    assert alone.progress.step == 4
    for _ in range(2):
        alone.step()
    alone.save(out / entry["name"])
    assert not list((out / entry["name"]).glob("state-*"))
    take_steps_on(pool, 3, prepared, out, [entry])

    whole = trainer()
    for _ in range(8):
        whole.step()
    weights = load_tensors(out / entry["name"] / "weights.safetensors")[0]
    for name, weight in whole.model.state_dict().items():
        np.testing.assert_allclose(weights[name], weight, atol=1e-9, err_msg=name)


@pytest.fixture(scope="module")
def config(run_config: RunConfig) -> RunConfig:
    train = run_config.train.model_copy(update={"ema": 0.9, "checkpoints": 1})
    return replace(run_config, train=train)


@pytest.fixture(scope="module")
def single(config: RunConfig, prepared: PreparedData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of one worker."""
    out = tmp_path_factory.mktemp("single") / "run"
    run(config, prepared, out, quiet=True)
    return out


def check_same_run(out: Path, single: Path, data: PreparedData) -> None:
    """Check that a run has the weights, the figures and the files of another, apart from its state."""
    assert (
        largest_difference(out / "artifact/model.safetensors", single / "artifact/model.safetensors") < 1e-5
    )
    names = {path.relative_to(out).as_posix() for path in out.rglob("*")}
    parts = {name for name in names if name.startswith(("state-", "best-"))}
    assert names - parts == {path.relative_to(single).as_posix() for path in single.rglob("*")}
    ours, theirs = (predict(load_artifact(path).model, data.test, CPU) for path in (out, single))
    np.testing.assert_allclose(ours, theirs, atol=1e-4)


@pytest.mark.slow
def test_the_run_of_two_workers_is_an_ordinary_run(
    pool: LocalProcesses,
    config: RunConfig,
    prepared: PreparedData,
    single: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "run"
    report = run_on_workers(config, prepared, out, 2, executor=pool)
    check_same_run(out, single, prepared)
    shown = capfd.readouterr().err
    assert "worker 1: epoch 2: train loss" in shown and "worker 2: epoch" not in shown
    assert report.reference is not None and report.fields is not None

    assert run_on_workers(config, prepared, out, 2, executor=pool) == report
    assert "is up to date" in capfd.readouterr().err
    assert run(config, prepared, out, quiet=True) == report, "one worker finds nothing to do either"


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch, s3_server(patch) as url:
        patch.setenv(CACHE, str(tmp_path_factory.mktemp("cache")))
        yield url


@pytest.mark.slow
@pytest.mark.parametrize("place", ["here", "store"])
def test_workers_of_torchrun_write_one_run(
    place: str, pool: LocalProcesses, prepared: PreparedData, bucket: str, tmp_path: Path
) -> None:
    """Also to a store, to which the first of them takes what all have written."""
    out = str(tmp_path / "run") if place == "here" else f"{bucket}/run"
    command = ["train", str(prepared.path), "--max-epochs", "1", "--no-baseline", "--set", "model.dim=2"]
    command += ["--json", "--device", "cpu", "--out", out]
    variables = {name: os.environ[name] for name in os.environ if name.startswith(("AWS_", CACHE))}
    variables |= {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": loopback(),
    }
    jobs = [
        Job(
            f"{rank}",
            command_of_torchrun,
            {"command": command, "variables": {**variables, "RANK": str(rank)}},
        )
        for rank in range(2)
    ]
    first, second = pool.run(jobs, title="test", quiet=True)
    assert json.loads(first)["kind"] == "report" and second == ""
    assert load_artifact(Path(out)).name == "fcn"
    names = {path.name for path in input_directory(Path(out)).iterdir()}
    assert {"report.json", "state.safetensors", "history.csv"} <= names
    assert sum(name.startswith("state-") for name in names) == 2, "a part of the state for each worker"


@pytest.mark.slow
def test_workers_that_torchrun_restarts_do_not_look_for_those_before(
    pool: LocalProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun has one store for all attempts, with the addresses of workers that are gone."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "GLOO_SOCKET_IFNAME": loopback(),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }

    def join(workers: LocalProcesses, attempt: int) -> list[float]:
        names = {**variables, "TORCHELASTIC_RESTART_COUNT": str(attempt)}
        jobs = [
            # The first one is there early, when the other one's address is still the old one.
            Job(f"{rank}", join_by_torchrun, {"variables": {**names, "RANK": str(rank)}, "after": 2.0 * rank})
            for rank in range(2)
        ]
        sums: list[float] = workers.run(jobs, title="test", quiet=True)
        return sums

    assert join(LocalProcesses(2), 0) == [1.0, 1.0]  # These processes end here.
    assert join(pool, 1) == [1.0, 1.0]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_variables_of_torchrun() -> None:
    assert torchrun_group({}) is None
    assert torchrun_group({"WORLD_SIZE": "1", "RANK": "0"}) is None
    group = torchrun_group({"WORLD_SIZE": "4", "RANK": "3", "MASTER_ADDR": "a", "MASTER_PORT": "1"})
    assert group is not None and (group.rank, group.size, group.local_size) == (3, 4, 1)
    with pytest.raises(InputError, match="MASTER_ADDR, MASTER_PORT"):
        torchrun_group({"WORLD_SIZE": "4", "RANK": "3"})
    workers = [{"WORLD_SIZE": "2", "RANK": rank, "MASTER_ADDR": "a", "MASTER_PORT": "1"} for rank in "01"]
    assert [checks_data(variables) for variables in ({}, *workers)] == [True, True, False]


@pytest.mark.slow
def test_a_worker_that_dies_ends_the_others_and_the_next_call_goes_on(
    config: RunConfig, prepared: PreparedData, single: Path, tmp_path: Path, pool: LocalProcesses
) -> None:
    out = tmp_path / "run"
    with worker_jobs(config, prepared, out, 2, force=False, quiet=True) as jobs:
        dying = [Job(job.name, run_and_die, {"saves": 6, **job.arguments}) for job in jobs]
        with pytest.raises(JobError, match="ended without a result, with code -9"):
            pool.run(dying, title="test", quiet=True)
    _, metadata = load_tensors(out / "state.safetensors")
    assert json.loads(metadata["progress"])["step"] == 5, "the state before the one that was never whole"
    assert not (out / "report.json").exists()

    run_on_workers(config, prepared, out, 2, executor=pool, quiet=True)

    check_same_run(out, single, prepared)


@pytest.mark.slow
def test_workers_begin_again_together(
    config: RunConfig,
    prepared: PreparedData,
    single: Path,
    tmp_path: Path,
    pool: LocalProcesses,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(workers, "run_as_worker", run_and_be_killed_once)
    out = tmp_path / "run"
    run_on_workers(config, prepared, out, 2, executor=pool)
    assert (tmp_path / "run.killed").exists()
    shown = capfd.readouterr().err
    assert "worker 2 ended without a result, with code -9; all 2 workers begin again" in shown
    assert "worker 1: resuming after step 5" in shown
    check_same_run(out, single, prepared)


def test_workers_that_are_lost_each_time_are_an_error(
    config: RunConfig, prepared: PreparedData, tmp_path: Path
) -> None:
    """A run of before is replaced once, and what the workers left since then is not."""
    out, forces = tmp_path / "run", []
    claim(out, {"other": 1}, finished=REPORT, force=False)

    class Losing(InThisProcess):
        def together(self, count: int) -> AbstractContextManager[Executor]:
            assert count == 2
            return nullcontext(self)

        def run(self, jobs: Sequence[Job], **_: Any) -> list[Any]:
            forces.append(jobs[0].arguments["force"])
            if len(forces) == 2:
                claim(out, config.training_inputs(prepared), finished=REPORT, force=True)
            raise LostWorkerError("worker 1 is gone")

    with pytest.raises(LostWorkerError, match="worker 1 is gone"):
        run_on_workers(config, prepared, out, 2, executor=Losing(), force=True)
    assert forces == [True, True, False, False] and len(forces) == RETRIES + 1


def test_a_directory_that_others_do_not_see_is_refused(
    config: RunConfig, prepared: PreparedData, tmp_path: Path
) -> None:
    """As with a local directory on two machines: the first worker has made its own."""

    class Second(Group):
        def sum_(self, tensor: Tensor) -> Tensor:
            return tensor

    with joined(Second(1, 2)), pytest.raises(InputError, match=r"1 of 2 workers don't see .*/run"):
        run(config, prepared, tmp_path / "run", quiet=True)


@pytest.mark.slow
def test_what_one_worker_alone_can_do_is_refused(
    pool: LocalProcesses, prepared: PreparedData, tmp_path: Path
) -> None:
    config = RunConfig("lr", parse_model("lr", {}), TrainConfig(update="convex"))
    with pytest.raises(InputError, match="trained by one worker"):
        run_on_workers(config, prepared, tmp_path / "run", 2, executor=pool, quiet=True)
    with pytest.raises(ValueError, match="only 3 can"):
        run_on_workers(config, prepared, tmp_path / "run", 4, executor=pool)
