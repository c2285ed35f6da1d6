"""Jobs on a Ray cluster of two nodes: the same results as elsewhere, also when a worker is killed."""

import importlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from recap_ctr.data.prepare import Preparation, write_prepared_data
from recap_ctr.data.shards import PreparedData
from recap_ctr.data.source import FileSource
from recap_ctr.errors import InputError
from recap_ctr.jobs.engines import device_for, executor_for
from recap_ctr.jobs.executor import Executor, Job, JobError, LostWorkerError
from recap_ctr.jobs.machine import versions
from recap_ctr.jobs.progress import say
from recap_ctr.nn.weights import load_tensors
from recap_ctr.storage.locks import locked
from recap_ctr.training import workers
from recap_ctr.training.config import RunConfig
from recap_ctr.training.parallel import run_job
from recap_ctr.training.workers import run_on_workers
from tests.support import job_functions
from tests.support.killed_runs import run_killed_once
from tests.support.preparing import EVERY_KIND, contents, every_kind
from tests.support.ray_cluster import ray_cluster
from tests.support.worker_functions import lose_the_other, meet, run_and_be_killed_once

if TYPE_CHECKING:
    from recap_ctr.jobs.ray import RayTasks

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def engine() -> Iterator[Executor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
        with ray_cluster(nodes=2):
            yield executor_for("ray", 1, "cpu")


def test_prepared_data_have_the_same_bytes(engine: Executor, tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    table = every_kind(400)
    for start in range(0, 400, 100):
        table.slice(start, 100).write_csv(tmp_path / "raw" / f"{start}.csv")
    preparation = Preparation(EVERY_KIND, {"all": FileSource([tmp_path / "raw"])})
    for name, executor in (("one", None), ("many", engine)):
        write_prepared_data(preparation, tmp_path / name, quiet=True, executor=executor)
    assert contents(tmp_path / "one") == contents(tmp_path / "many")


def job(name: str, function: Callable[..., Any], **arguments: object) -> Job:
    return Job(name, function, arguments)


def test_results_come_in_order_and_messages_under_their_names(
    engine: Executor, capfd: pytest.CaptureFixture[str]
) -> None:
    assert engine.workers == 2
    values = [{"a": [1, None, "ü"]}, "x" * 100_000, 3.0]
    jobs = [
        job(str(at), job_functions.echo, value=value, after=0.4 - 0.2 * at) for at, value in enumerate(values)
    ]
    ended: dict[int, Any] = {}
    results = engine.run([*jobs, job("talks", say, text="epoch [1] {ü}")], title="t", done=ended.__setitem__)
    assert results == [*values, None] == [ended[index] for index in range(4)]
    shown = capfd.readouterr()
    assert shown.out == ""
    assert "talks: epoch [1] {ü}\n" in shown.err and "t: 4 of 4 done" in shown.err


def test_no_jobs(engine: Executor) -> None:
    assert engine.run([], title="none") == []


def test_bad_input_is_told_once_and_as_it_is(engine: Executor, tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    refuses = job(
        "seed 2",
        job_functions.refuse_and_count,
        calls=str(calls),
        message="row 3: no 'ü'",
        fix="rename it",
    )
    with pytest.raises(InputError) as caught:
        engine.run([refuses, job("endless", job_functions.echo, value=1, after=600)], title="t", quiet=True)
    assert (caught.value.message, caught.value.fix) == ("seed 2: row 3: no 'ü'", "rename it")
    assert calls.read_text() == "called\n"


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (job_functions.fail, "KeyError: 'a mistake of ours'"),
        (job_functions.stop, "SystemExit: 0"),
        (job_functions.not_json, "TypeError: .* not JSON"),
    ],
)
def test_a_mistake_of_ours_is_shown_with_its_traceback(
    function: Callable[..., Any], message: str, engine: Executor, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(JobError, match=f"^seed 1 ended without a result: {message}"):
        engine.run([job("seed 1", function)], title="t")
    assert "Traceback" in capfd.readouterr().err


def test_a_killed_worker_is_replaced(
    engine: Executor, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    dies = job("seed 1", job_functions.die_once, mark=str(tmp_path / "mark"))
    assert engine.run([dies, job("other", job_functions.echo, value=1)], title="t") == ["alive", 1]
    shown = capfd.readouterr()
    assert shown.out == "" and "seed 1: its worker was lost; it goes on with another" in shown.err


def test_a_job_that_kills_its_workers_is_an_error(engine: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recap_ctr.jobs.ray.RETRIES", 0)
    with pytest.raises(JobError, match="seed 1 lost its worker 1 times"):
        engine.run([job("seed 1", job_functions.die)], title="t", quiet=True)


def test_a_job_waits_for_a_lost_worker_to_let_go(engine: Executor, tmp_path: Path) -> None:
    held = threading.Event()

    def hold() -> None:
        with locked(tmp_path / "run"):
            held.set()
            time.sleep(0.5)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    writes = job("writes", job_functions.write_locked, directory=str(tmp_path / "run"))
    assert engine.run([writes], title="t", quiet=True) == ["written"]
    holder.join()


def test_a_run_that_is_killed_goes_on_to_the_same_bits(
    engine: Executor, run_config: RunConfig, prepared: PreparedData, finished: Path, tmp_path: Path
) -> None:
    config = replace(run_config, train_baseline=False)
    ordinary = run_job(tmp_path / "run", config, prepared)
    (report,) = engine.run([replace(ordinary, function=run_killed_once)], title="t", quiet=True)
    assert (tmp_path / "run.killed").exists()
    assert len(report["history"]) == 2
    weights = "artifact/model.safetensors"
    assert (tmp_path / "run" / weights).read_bytes() == (finished / weights).read_bytes()


def test_jobs_that_need_each_other_run_at_the_same_time(engine: "RayTasks", tmp_path: Path) -> None:
    with engine.together(2) as side_by_side:
        jobs = [job(f"{rank}", meet, rank=rank, size=2, directory=str(tmp_path)) for rank in range(2)]
        assert side_by_side.run(jobs, title="t", quiet=True) == [2, 2]
        with pytest.raises(LostWorkerError, match="seed 1 lost its worker 1 times"):
            side_by_side.run([job("seed 1", job_functions.die)], title="t", quiet=True)
        with pytest.raises(LostWorkerError, match="seed 2: worker 0 lost contact"):
            side_by_side.run([job("seed 2", lose_the_other, rank=0)], title="t", quiet=True)
    assert engine.capacity == 2


def test_a_job_works_where_its_command_was_given(
    engine: "RayTasks", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user names data and --out by relative paths, also on a cluster that was started elsewhere."""
    (tmp_path / "rows").write_text("7")
    monkeypatch.chdir(tmp_path)
    assert engine.run([job("reads", job_functions.read, path="rows")], title="t", quiet=True) == ["7"]


def test_ranks_train_one_model_and_begin_again_when_one_is_killed(
    engine: "RayTasks",
    run_config: RunConfig,
    prepared: PreparedData,
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(workers, "run_as_worker", run_and_be_killed_once)
    config = replace(run_config, train_baseline=False)
    out = tmp_path / "run"
    report = run_on_workers(config, prepared, out, 2, executor=engine, shared=tmp_path)
    assert (tmp_path / "run.killed").exists() and len(report.history) == 2
    assert "all 2 workers begin again from the last state" in capfd.readouterr().err
    ours, theirs = (load_tensors(path / "artifact/model.safetensors")[0] for path in (out, finished))
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, rtol=0, atol=1e-5)


def test_small_jobs_may_share_a_gpu(engine: "RayTasks", monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [
        {"Alive": True, "Resources": {"CPU": 8.0, "GPU": 2.0}},
        {"Alive": True, "Resources": {"CPU": 3.0}},
    ]
    monkeypatch.setattr("recap_ctr.jobs.ray.ray.nodes", lambda: nodes)
    assert [replace(engine, num_gpus=1, per_gpu=count).capacity for count in (1, 3, 9)] == [2, 6, 8]
    assert engine.capacity == 11


def test_other_versions_on_the_cluster_are_refused(engine: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recap_ctr.jobs.ray.versions", lambda: {**versions(), "torch": "1.0"})
    message = (
        r"seed 1: a machine of the cluster has torch .*, and this one 1\.0\n  fix: install the same versions"
    )
    with pytest.raises(InputError, match=message):
        engine.run([job("seed 1", job_functions.echo, value=1)], title="t", quiet=True)


def test_a_cluster_without_the_package_is_an_error(
    engine: Executor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").write_text("def perform(*arguments): return 'never'")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("recap_ctr.jobs.ray.perform", importlib.import_module("only_here").perform)
    with pytest.raises(JobError, match=r"seed 1 could not begin on a machine .* No module named 'only_here'"):
        engine.run([job("seed 1", job_functions.echo, value=1)], title="t", quiet=True)


def test_what_the_cluster_lacks_is_refused(engine: Executor) -> None:
    assert device_for("ray", None) == "cpu"
    with pytest.raises(
        InputError, match=r"no node of the Ray cluster at .* has 2 cores\n  fix: choose fewer"
    ):
        executor_for("ray", 2, "cpu")
    with pytest.raises(InputError, match="has 1 cores and 1 GPU"):
        executor_for("ray", 1, device_for("ray", "cuda"))
    with pytest.raises(InputError, match="no device 'mps' on a Ray cluster"):
        device_for("ray", "mps")
