"""Engines by name, and a GPU for each local process."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from recap_ctr.data.shards import PreparedData
from recap_ctr.errors import InputError
from recap_ctr.jobs import engines, machine
from recap_ctr.jobs.engines import device_for, executor_for
from recap_ctr.jobs.executor import InThisProcess, Job
from recap_ctr.jobs.local import LocalProcesses
from recap_ctr.training.config import RunConfig
from recap_ctr.training.parallel import run_job
from tests.support import job_functions
from tests.support.killed_runs import run_killed_once


def test_an_executor_is_taken_as_it_is() -> None:
    executor = InThisProcess()
    assert executor_for(executor, 1, "cpu") is executor
    assert device_for(executor, "cpu") == device_for("local", "cpu") == "cpu"


@pytest.mark.parametrize("name", ["", "spark", "Ray", "ray://", "http://localhost:80", "local://x"])
def test_an_unknown_engine_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=r"no engine .*\n  fix: choose local, ray or ray://HOST:PORT"):
        executor_for(name, 1, "cpu")


def test_without_ray_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.delitem(sys.modules, "recap_ctr.jobs.ray", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"needs Ray\n  fix: pip install 'recap-ctr\[ray\]'"):
        executor_for("ray", 1, "cpu")


def test_local_processes_fill_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "num_cores", lambda: 8)
    assert [executor_for("local", threads, "cpu").workers for threads in (1, 3, 16)] == [8, 2, 1]


@pytest.mark.parametrize(
    ("variable", "names"),
    [(None, ("0", "1")), ("", ("0", "1")), ("5,GPU-1f2e", ("5", "GPU-1f2e")), ("3,4,7", ("3", "4"))],
)
def test_gpus_have_the_names_that_the_process_was_started_with(
    variable: str | None, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert machine.visible_gpus() == names
    assert [machine.side_by_side(1, device) for device in ("cuda", "cuda:1", "mps")] == [2, 1, 1]


@pytest.mark.slow
def test_each_local_process_sees_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after one that was killed is replaced."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)
    for module in (engines, machine):
        monkeypatch.setattr(module, "visible_gpus", lambda: ("2", "5"))
    executor = executor_for("local", 1, "cuda")
    assert executor.workers == 2
    jobs = [Job(str(at), job_functions.visible_gpu, {"after": 0.5}) for at in range(2)]
    assert sorted(executor.run(jobs, title="gpus", quiet=True)) == ["2", "5"]
    with pytest.raises(Exception, match="dies"):
        executor.run([Job("dies", job_functions.die, {}), jobs[0]], title="gpus", quiet=True)
    assert sorted(executor.run(jobs, title="gpus", quiet=True)) == ["2", "5"]


@pytest.mark.slow
def test_small_jobs_may_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)
    monkeypatch.setenv("RECAP_JOBS_PER_GPU", "2")
    for module in (engines, machine):
        monkeypatch.setattr(module, "visible_gpus", lambda: ("2", "5"))
    executor = executor_for("local", 1, "cuda")
    assert executor.workers == 4
    jobs = [Job(str(at), job_functions.visible_gpu, {"after": 1.0}) for at in range(4)]
    assert sorted(executor.run(jobs, title="gpus", quiet=True)) == ["2", "2", "5", "5"]


@pytest.mark.parametrize("text", ["0", "two", "", "-1"])
def test_an_impossible_number_of_jobs_on_a_gpu_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECAP_JOBS_PER_GPU", text)
    with pytest.raises(InputError, match=f"RECAP_JOBS_PER_GPU is '{text}'\n  fix: set it to a whole number"):
        machine.jobs_per_gpu()


@pytest.mark.slow
def test_a_run_whose_local_worker_is_killed_goes_on_to_the_same_bits(
    run_config: RunConfig,
    prepared: PreparedData,
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)
    ordinary = run_job(tmp_path / "run", replace(run_config, train_baseline=False), prepared)
    executor = executor_for("local", 1, "cpu")
    (report,) = executor.run([replace(ordinary, function=run_killed_once)], title="runs")
    assert (tmp_path / "run.killed").exists()
    assert "run: its worker was lost; it begins again with another\n" in capfd.readouterr().err
    assert len(report["history"]) == 2
    weights = "artifact/model.safetensors"
    assert (tmp_path / "run" / weights).read_bytes() == (finished / weights).read_bytes()


def test_more_workers_than_gpus_are_refused() -> None:
    with pytest.raises(ValueError, match="2 workers can't each have one of 1 GPUs"):
        LocalProcesses(2, gpus=("0",))
