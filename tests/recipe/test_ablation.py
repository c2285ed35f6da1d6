"""A student with and without each axis: which runs there are, where they are, and that tables share them."""

from dataclasses import replace
from pathlib import Path

import pytest

from recap_ctr.data.shards import PreparedData
from recap_ctr.errors import InputError
from recap_ctr.recipe.ablation import (
    PLAIN,
    Cell,
    ablation_cells,
    directory_of,
    finished_runs,
    student_run,
    taught_plan,
    train_cells,
)
from tests.support.tiny_recipe import tiny_recipe


@pytest.mark.slow
def test_cells_differ_in_averaging_and_teaching(prepared: PreparedData, tmp_path: Path) -> None:
    recipe = tiny_recipe(prepared, tmp_path)
    plan = recipe.plan()
    teachers = list(recipe.train_teachers(plan))
    cells = ablation_cells(recipe, plan, "recap", ("plain", "ema", "kd", "ema-kd", "ema"), [1, 2], teachers)
    assert list(cells) == ["plain", "ema", "kd", "ema-kd"]
    for training, cell in cells.items():
        assert cell.seeds == [1, 2]
        assert bool(cell.config.train.ema_epochs) == ("ema" in training)
        assert bool(cell.config.teachers) == ("kd" in training)
        assert (cell.config.routes, cell.config.train.l2) == (4, plan.l2)
    assert cells["plain"].config.train.max_epochs == PLAIN["max_epochs"]
    names = {directory_of(recipe, cell.config).name.rpartition("-")[0] for cell in cells.values()}
    assert names == {f"recap-{training}" for training in cells}


def test_a_table_of_distillation_needs_teachers(prepared: PreparedData, tmp_path: Path) -> None:
    recipe = tiny_recipe(prepared, tmp_path)
    with pytest.raises(InputError, match="compares with distillation"):
        ablation_cells(recipe, recipe.plan(), "recap", ("kd",), [1], [])


@pytest.mark.slow
def test_runs_are_trained_once_and_found_again_in_the_order_of_seeds(
    prepared: PreparedData, tmp_path: Path
) -> None:
    recipe = tiny_recipe(prepared, tmp_path)
    config = student_run(recipe, recipe.plan(), "lr", "ema", [])
    assert config.routes == 1, "logistic regression has no routes"
    first = train_cells(recipe, {"two": Cell(config, [2, 1])}, title="runs")
    assert [report.train.seed for report in first["two"].values()] == [2, 1]
    written = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}

    shared = train_cells(recipe, {"a": Cell(config, [1]), "b": Cell(config, [1, 2])}, title="runs")

    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")} == written
    assert shared["a"].items() <= shared["b"].items()
    assert [report.train.seed for report in finished_runs(recipe, config).values()] == [1, 2]
    assert finished_runs(recipe, student_run(recipe, recipe.plan(), "dnn", "ema", [])) == {}


def test_students_of_some_teachers_take_them_in_turn(prepared: PreparedData, tmp_path: Path) -> None:
    recipe, tables = tiny_recipe(prepared, tmp_path), tuple(Path(f"teacher-{number}") for number in (1, 2, 3))
    config = replace(student_run(recipe, recipe.plan(), "recap", "ema", []), teachers=tables[:2])
    assert Cell(config, [1, 2]).run(2) == config.with_seed(2), "teachers are fixed unless there are others"
    taught_by = [Cell(config, [], all_teachers=tables).run(seed) for seed in (1, 2, 3, 4)]
    assert [run.train.seed for run in taught_by] == [1, 2, 3, 4]
    numbers = [tuple(tables.index(table) + 1 for table in run.teachers) for run in taught_by]
    assert numbers == [(1, 2), (2, 3), (3, 1), (1, 2)]


def test_a_taught_student_has_the_plan_of_its_probe(prepared: PreparedData, tmp_path: Path) -> None:
    recipe = tiny_recipe(prepared, tmp_path)
    plan = recipe.plan()
    assert taught_plan(recipe, plan, "recap", []) == plan, "l2 is set, so nothing is probed"
