"""Runs that leave logit tables for students, one of them or several side by side."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from recap_ctr.axes.logits import Estimator, LogitTable, mean_logit
from recap_ctr.axes.predict import predict
from recap_ctr.config import TrainConfig
from recap_ctr.data.prepare import Preparation, write_prepared_data
from recap_ctr.data.shards import PreparedData
from recap_ctr.data.source import FrameSource
from recap_ctr.data.split import Split
from recap_ctr.inference.torch_backend import load_artifact
from recap_ctr.jobs.executor import InThisProcess
from recap_ctr.jobs.local import LocalProcesses
from recap_ctr.models.catalogue import parse_model
from recap_ctr.schema import Schema
from recap_ctr.training.config import LOGITS, RunConfig
from recap_ctr.training.loop import Trainer, is_begun
from recap_ctr.training.parallel import packed_early, run_and_write_logits, run_many, teacher_tables
from recap_ctr.training.report import RunReport, parse_report, read_report
from tests.conftest import contents

CPU = torch.device("cpu")
SPLITS = ("train", "valid", "test")
BACKBONE: dict[str, Any] = {
    "dim": 4,
    "depth": 2,
    "train_depths": [1, 2],
    "num_adapters": 6,
    "lora_rank": 2,
}


def routed_config(routes: int) -> RunConfig:
    train = TrainConfig(batch_size=256, learning_rate=3e-2, l2=1e-4, max_epochs=2, ema_epochs=(0.5,))
    backbone = parse_model("recap", BACKBONE)
    return RunConfig("recap", backbone, train, train_baseline=False, report_fields=False, routes=routes)


def run_as_job(config: RunConfig, data: PreparedData, out: Path) -> RunReport:
    """Run as a worker does: with arguments, and a result, that JSON can hold."""
    arguments = json.loads(json.dumps({"data": str(data.path), "config": config.to_json(), "out": str(out)}))
    return parse_report(json.loads(json.dumps(run_and_write_logits(**arguments))))


@pytest.fixture(scope="module")
def teacher(prepared: PreparedData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a finished run of RECAP on two routes, with its tables. Copy it before changing anything."""
    out = tmp_path_factory.mktemp("teach") / "run"
    run_as_job(routed_config(routes=2), prepared, out)
    return out


@pytest.mark.slow
def test_tables_hold_what_the_artifact_gives_on_every_row(teacher: Path, prepared: PreparedData) -> None:
    model = load_artifact(teacher).model
    assert sorted(path.name for path in (teacher / LOGITS).iterdir()) == sorted(SPLITS)
    for split in SPLITS:
        table, shard = LogitTable(teacher / LOGITS / split), getattr(prepared, split)
        table.check(prepared)
        assert table.split == split
        assert table.estimators == (Estimator("recap-seed-1", route="mean of 2"),)
        assert np.array_equal(table.rows_N, shard.rows)
        assert table.logits_NM[:, 0].tobytes() == predict(model, shard, CPU).tobytes()


def test_the_second_time_there_is_nothing_to_do(teacher: Path, prepared: PreparedData) -> None:
    before = contents(teacher)
    assert run_as_job(routed_config(routes=2), prepared, teacher) == read_report(teacher)
    assert contents(teacher) == before


def test_only_what_is_missing_is_written(teacher: Path, prepared: PreparedData, tmp_path: Path) -> None:
    out = Path(shutil.copytree(teacher, tmp_path / "run"))
    before = contents(out)
    shutil.rmtree(out / LOGITS / "valid")
    run_as_job(routed_config(routes=2), prepared, out)
    after = contents(out)
    changed = {name.rpartition("/")[0] for name in after if after[name] != before[name]}
    assert after.keys() == before.keys()
    assert changed == {f"{LOGITS}/valid"}
    assert all(after[name][0] == before[name][0] for name in after)


def test_without_test_rows_there_is_no_such_table(
    run_config: RunConfig, click_log: pl.DataFrame, click_schema: Schema, tmp_path: Path
) -> None:
    source = FrameSource(click_log.head(600))
    data, _ = write_prepared_data(
        Preparation(click_schema, {"all": source}, Split(ratio=(4, 1, 0))), tmp_path / "data", quiet=True
    )
    run_as_job(replace(run_config, train_baseline=False), data, tmp_path / "run")
    assert {path.name for path in (tmp_path / "run" / LOGITS).iterdir()} == {"train", "valid"}
    table = LogitTable(tmp_path / "run" / LOGITS / "train")
    assert table.estimators == (Estimator("fcn-seed-1"),)


@pytest.mark.slow
def test_a_table_names_the_number_of_routes_that_exist(prepared: PreparedData, tmp_path: Path) -> None:
    """One adapter for each step: there is only one way."""
    only = parse_model("recap", BACKBONE | {"num_adapters": 2})
    config = routed_config(routes=8)
    train = config.train.model_copy(update={"max_epochs": 1})
    report = run_as_job(replace(config, model_config=only, train=train), prepared, tmp_path / "run")
    assert list(report.metrics_by_routes) == ["1"]
    assert LogitTable(tmp_path / "run" / LOGITS / "valid").estimators == (Estimator("recap-seed-1"),)


@pytest.mark.slow
def test_runs_side_by_side_are_those_of_one_process(
    run_config: RunConfig,
    prepared: PreparedData,
    finished: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    configs = {
        tmp_path / f"teacher-{seed}": replace(run_config.with_seed(seed), train_baseline=False)
        for seed in (1, 2)
    }
    ended: dict[Path, RunReport] = {}

    reports = run_many(
        configs,
        prepared,
        title="teachers",
        executor=LocalProcesses(2),
        quiet=True,
        done=ended.__setitem__,
    )

    assert capfd.readouterr() == ("", "")
    assert list(reports) == list(configs) and ended == reports
    for seed, (out, report) in enumerate(reports.items(), start=1):
        assert report == read_report(out)
        assert report.train.seed == seed
        for split in SPLITS:
            LogitTable(out / LOGITS / split).check(prepared)
    first, second = reports.values()
    assert first.metrics == read_report(finished).metrics != second.metrics
    weights = "artifact/model.safetensors"
    assert (tmp_path / "teacher-1" / weights).read_bytes() == (finished / weights).read_bytes()
    tables = [LogitTable(path) for path in teacher_tables(list(configs), "train")]
    assert mean_logit(tables).shape == (len(prepared.train),)


@pytest.mark.slow
def test_a_run_is_shown_by_a_short_name(
    run_config: RunConfig, prepared: PreparedData, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = replace(run_config, train_baseline=False, report_fields=False)
    directories = [tmp_path / "fcn-ema-0123456789" / "seed-1", tmp_path / "student-fcn-abcdef0123"]
    configs = dict.fromkeys(directories, config)
    reports = run_many(configs, prepared, title="runs", executor=InThisProcess())
    shown = capfd.readouterr().err
    assert "runs: 1 of 2 done (fcn-ema seed-1)" in shown and "runs: 2 of 2 done (student-fcn)" in shown
    assert len({report.metrics.valid.raw.auc for report in reports.values()}) == 1


def test_no_runs_need_no_executor(prepared: PreparedData) -> None:
    assert run_many({}, prepared, title="runs") == {}


def test_a_run_without_a_validation_is_not_packed_early(
    prepared: PreparedData, run_config: RunConfig, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    out.mkdir()
    trainer = Trainer(run_config.model, run_config.model_config, run_config.train, prepared, CPU)
    trainer.step()
    trainer.save(out)
    trainer.selected = trainer.model
    trainer.save_selected(out)
    with packed_early({out: run_config}, prepared, executor=InThisProcess(), quiet=True) as packed:
        assert packed == {} and not is_begun(out)
    trainer.end_epoch(1.0)
    trainer.save(out)
    assert is_begun(out)
