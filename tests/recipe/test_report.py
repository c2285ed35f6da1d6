"""The report of a fit: ensembles of the first teachers, and what averaging them gains."""

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from recap_ctr.axes.logits import LogitTable
from recap_ctr.data.shards import PreparedData
from recap_ctr.evaluation import metrics
from recap_ctr.recipe.choice import Choice
from recap_ctr.recipe.report import fit_report, measure_ensembles
from recap_ctr.recipe.stages import Plan, Recipe
from recap_ctr.training.parallel import Runs, teacher_tables
from tests.support.tiny_recipe import tiny_recipe


@pytest.fixture(scope="module")
def recipe(prepared: PreparedData, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    return tiny_recipe(prepared, tmp_path_factory.mktemp("report"), teachers=2)


@pytest.fixture(scope="module")
def plan(recipe: Recipe) -> Plan:
    return recipe.plan()


@pytest.fixture(scope="module")
def teachers(recipe: Recipe, plan: Plan) -> Runs:
    return recipe.train_teachers(plan)


@pytest.fixture(scope="module")
def students(recipe: Recipe, plan: Plan, teachers: Runs) -> Runs:
    return recipe.train_students(plan, list(teachers))


@pytest.mark.slow
def test_ensembles_are_the_mean_logits_of_the_first_teachers(
    recipe: Recipe, teachers: Runs, prepared: PreparedData
) -> None:
    ensembles = measure_ensembles(recipe.config, prepared, list(teachers))
    assert [ensemble.teachers for ensemble in ensembles] == [1, 2]
    columns = [LogitTable(path).logits_NM[:, 0] for path in teacher_tables(list(teachers), "test")]
    for count, ensemble in enumerate(ensembles, start=1):
        auc = metrics.auc(prepared.test.labels, np.mean(columns[:count], axis=0))
        assert ensemble.metrics.on("test").raw.auc == pytest.approx(auc, abs=1e-9)
    first = next(iter(teachers.values()))
    assert ensembles[0].metrics.valid.raw.auc == pytest.approx(first.metrics.valid.raw.auc, abs=1e-9)


@pytest.mark.slow
def test_the_report_is_the_students_with_what_it_was_made_of(
    recipe: Recipe, plan: Plan, teachers: Runs, students: Runs, prepared: PreparedData
) -> None:
    ((chosen, student),) = students.items()
    choice = Choice(chosen, "a reason")
    report = fit_report(recipe.config, asdict(plan), prepared, recipe.out, teachers, students, choice, {})
    assert (report.chosen_because, report.reference) == ("a reason", {})
    assert (report.metrics, report.model, report.train) == (student.metrics, student.model, student.train)
    assert report.student == chosen.name
    assert report.students == {chosen.name: student.metrics}
    assert [teacher.seed for teacher in report.teacher_runs.values()] == [1001, 1002]
    assert all((recipe.out / name).is_dir() for name in report.teacher_runs)
    assert report.fields is not None and student.fields is None
    assert report.recipe == recipe.config.model_dump(mode="json")
    assert report.plan["given_up"] == []
    first = next(iter(teachers.values()))
    assert report.size_against_teacher == student.parameters / first.parameters
    assert report.averaging is not None
    gain = report.averaging.points[1].gain.value
    alone = np.mean([teacher.metrics.on("test").raw.logloss for teacher in teachers.values()])
    assert gain == pytest.approx(alone - report.ensembles[1].metrics.on("test").raw.logloss, abs=1e-6)


@pytest.mark.slow
def test_one_teacher_has_nothing_to_be_averaged_with(
    recipe: Recipe, plan: Plan, teachers: Runs, students: Runs, prepared: PreparedData
) -> None:
    chosen = next(iter(students))
    one_teacher = dict(list(teachers.items())[:1])
    choice = Choice(chosen, None)
    report = fit_report(recipe.config, asdict(plan), prepared, recipe.out, one_teacher, students, choice, {})
    assert len(report.ensembles) == 1
    assert (report.recovered, report.size_against_teacher, report.averaging) == (None, None, None)
    assert Path(report.student) == chosen.relative_to(recipe.out)
