"""The cube of a diagnosis: which columns it has, and that nothing is made twice."""

import json
from pathlib import Path

import numpy as np
import pytest

from recap_ctr.data.shards import PreparedData
from recap_ctr.diagnose import Cube, diagnose
from recap_ctr.pages.diagnosis import decomposition_section, decompositions_of
from recap_ctr.recipe.estimator_grid import read_diagnosis, score_grid
from recap_ctr.storage.files import read_json
from tests.conftest import Recap
from tests.support.tiny_recipe import tiny_recipe

pytestmark = pytest.mark.usefixtures("one_process")


@pytest.mark.slow
def test_every_run_has_all_routes_of_its_checkpoints(prepared: PreparedData, tmp_path: Path) -> None:
    recipe = tiny_recipe(prepared, tmp_path, train={"batch_size": 256, "max_epochs": 3})
    plan = recipe.plan()
    tables = score_grid(recipe, plan, runs=2, checkpoints=2, routes=4)

    assert len(tables) == 2
    for number, table in enumerate(tables, start=1):
        steps = sorted({estimator.step or 0 for estimator in table.estimators})
        routes = {estimator.route for estimator in table.estimators}
        assert {estimator.run for estimator in table.estimators} == {f"seed-{number}"}
        assert len(steps) == 2 and len(routes) == 4 and len(table.estimators) == 8
        assert steps[1] - steps[0] == -(-len(prepared.train) // 256)
        assert table.logits_NM.shape == (len(prepared.test), 8)
        assert table.split == "test"
        per_route = np.asarray(table.logits_NM).std(axis=1)
        assert (per_route > 0).all()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    again = score_grid(recipe, plan, runs=2, checkpoints=2, routes=4)
    assert [table.checksum for table in again] == [table.checksum for table in tables]
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == before


def test_the_page_of_a_run_shows_the_decomposition_of_a_diagnosis() -> None:
    rng = np.random.default_rng(0)
    labels_N, logits = rng.integers(0, 2, 400), rng.normal(size=(400, 3, 2, 2))
    record = json.loads(json.dumps(diagnose(Cube.from_array(logits), labels_N).to_json()))
    shown = decomposition_section(decompositions_of(record))
    assert shown is not None
    (chart,) = shown.charts
    assert len(chart.series) == 3 and len(chart.series[0].y) == 6
    assert np.sum([series.y for series in chart.series], axis=0) == pytest.approx(np.ones(6))


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["random", "greedy"])
def test_all_runs_have_the_same_routes(choice: str, prepared: PreparedData, tmp_path: Path) -> None:
    recipe = tiny_recipe(prepared, tmp_path, route_choice=choice, train={"batch_size": 1024, "max_epochs": 1})
    tables = score_grid(recipe, recipe.plan(), runs=2, checkpoints=1, routes=3)
    assert Cube.from_tables(tables).shape == (2, 1, 3)


def test_a_model_without_routes_has_its_checkpoints(prepared: PreparedData, tmp_path: Path) -> None:
    recipe = tiny_recipe(prepared, tmp_path, train={"batch_size": 256, "max_epochs": 2})
    (table,) = score_grid(recipe, recipe.plan(), runs=1, checkpoints=2, model="lr", split="valid")
    assert [estimator.route for estimator in table.estimators] == [None, None]


@pytest.mark.slow
def test_a_diagnosis_is_written_and_printed(prepared: PreparedData, tmp_path: Path, recap: Recap) -> None:
    settings = tmp_path / "recipe.toml"
    settings.write_text(
        "l2 = 0.01\n[model_settings]\ndim = 4\n[train]\nbatch_size = 256\nmax_epochs = 2\n", encoding="utf-8"
    )
    out = tmp_path / "out"
    sizes = ("--runs", "2", "--checkpoints", "2", "--routes", "2")
    done = recap("diagnose", prepared.path, "--config", settings, "--out", out, *sizes)

    assert done.code == 0, done.err
    assert "2 runs × 2 checkpoints × 2 routes" in done.out
    record = read_json(out / "diagnosis.json")
    assert record["kind"] == "diagnosis" and record["num_rows"] == len(prepared.test)
    assert record["data"]["fingerprint"] == prepared.fingerprint
    assert record["findings"] == done.out.splitlines()[: len(record["findings"])]
    html = (out / "diagnosis" / "report.html").read_text()
    for name in ("gain-auc", "gain-loss", "theory", "residual", "decomposition"):
        assert f'<figure id="{name}">' in html
        assert (out / "diagnosis" / "figures" / f"{name}.png").is_file()
    assert read_diagnosis(out, prepared.fingerprint) == record
    assert read_diagnosis(tmp_path, prepared.fingerprint) is None
    assert read_diagnosis(out, "of other data") is None
    assert "Churn" in html
