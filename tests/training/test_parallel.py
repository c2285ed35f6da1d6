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
from recap_ctr.data.prepare import Preparation, prepare
from recap_ctr.data.shards import PreparedData
from recap_ctr.data.source import FrameSource
from recap_ctr.data.split import Split
from recap_ctr.inference.torch_backend import load_artifact
from recap_ctr.models.catalogue import parse_model
from recap_ctr.schema import Schema
from recap_ctr.training.run import LOGITS, RunConfig, read_report, run_many, teach, teacher_tables
from tests.conftest import contents
from tests.inference.test_shipped_routes import BACKBONE, routed_config

CPU = torch.device("cpu")
SPLITS = ("train", "valid", "test")


def taught(config: RunConfig, data: PreparedData, out: Path) -> dict[str, Any]:
    """As the engine calls it: with what JSON can hold."""
    arguments = json.loads(json.dumps({"data": str(data.path), "config": config.to_json(), "out": str(out)}))
    return teach(**arguments)


@pytest.fixture(scope="module")
def teacher(prepared: PreparedData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of RECAP on two routes, with its tables. Copy it before changing anything."""
    out = tmp_path_factory.mktemp("teach") / "run"
    taught(routed_config(routes=2), prepared, out)
    return out


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
    assert taught(routed_config(routes=2), prepared, teacher) == read_report(teacher)
    assert contents(teacher) == before


def test_only_what_is_missing_is_written(teacher: Path, prepared: PreparedData, tmp_path: Path) -> None:
    out = Path(shutil.copytree(teacher, tmp_path / "run"))
    before = contents(out)
    shutil.rmtree(out / LOGITS / "valid")
    taught(routed_config(routes=2), prepared, out)
    after = contents(out)
    changed = {name.rpartition("/")[0] for name in after if after[name] != before[name]}
    assert after.keys() == before.keys()
    assert changed == {f"{LOGITS}/valid"}
    assert all(after[name][0] == before[name][0] for name in after)


def test_without_test_rows_there_is_no_such_table(
    run_config: RunConfig, click_log: pl.DataFrame, click_schema: Schema, tmp_path: Path
) -> None:
    source = FrameSource(click_log.head(600))
    data, _ = prepare(
        Preparation(click_schema, {"all": source}, Split(ratio=(4, 1, 0))), tmp_path / "data", quiet=True
    )
    taught(replace(run_config, reference=False), data, tmp_path / "run")
    assert {path.name for path in (tmp_path / "run" / LOGITS).iterdir()} == {"train", "valid"}
    table = LogitTable(tmp_path / "run" / LOGITS / "train")
    assert table.estimators == (Estimator("fcn-seed-1"),)


def test_a_table_names_the_routes_there_are_not_those_asked_for(
    prepared: PreparedData, tmp_path: Path
) -> None:
    """One adapter for each step: there is only one way."""
    only = parse_model("recap", BACKBONE | {"num_adapters": 2})
    config = routed_config(routes=8)
    train = config.train.model_copy(update={"max_epochs": 1})
    report = taught(replace(config, model_config=only, train=train), prepared, tmp_path / "run")
    assert list(report["metrics_by_routes"]) == ["1"]
    assert LogitTable(tmp_path / "run" / LOGITS / "valid").estimators == (Estimator("recap-seed-1"),)


def test_runs_side_by_side_are_those_of_one_process(
    run_config: RunConfig,
    prepared: PreparedData,
    finished: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    configs = {
        tmp_path / f"teacher-{seed}": replace(run_config.with_(seed=seed), reference=False) for seed in (1, 2)
    }

    reports = run_many(configs, prepared, title="teachers", workers=2, quiet=True)

    assert capfd.readouterr() == ("", "")
    assert list(reports) == list(configs)
    for seed, (out, report) in enumerate(reports.items(), start=1):
        assert report == read_report(out)
        assert report["train"]["seed"] == seed
        for split in SPLITS:
            LogitTable(out / LOGITS / split).check(prepared)
    one, two = reports.values()
    assert one["metrics"] == read_report(finished)["metrics"] != two["metrics"]
    weights = "artifact/model.safetensors"
    assert (tmp_path / "teacher-1" / weights).read_bytes() == (finished / weights).read_bytes()
    tables = [LogitTable(path) for path in teacher_tables(list(configs), "train")]
    assert mean_logit(tables).shape == (len(prepared.train),)
