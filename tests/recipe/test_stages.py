"""The stages of a fit: what each does, which are redone, and that a killed fit ends with the same bits."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w

from recap_ctr.axes.logits import LogitTable
from recap_ctr.data.shards import PreparedData
from recap_ctr.evaluation import metrics
from recap_ctr.inference.artifact import ExportedGraph, add_graphs, read_artifact
from recap_ctr.inference.scorer import Scorer
from recap_ctr.inference.setting import Setting
from recap_ctr.jobs.executor import InThisProcess
from recap_ctr.models.catalogue import parse_model
from recap_ctr.recipe.config import recipe_config
from recap_ctr.recipe.probe import FURTHER, Arm
from recap_ctr.recipe.runner import Runner
from recap_ctr.recipe.stages import Plan, Recipe
from recap_ctr.storage.files import read_json
from recap_ctr.storage.hashes import sha256
from recap_ctr.training import pool
from recap_ctr.training.report import FitReport, read_report
from tests.conftest import Recap
from tests.support.tiny_recipe import tiny_recipe

SMALL: dict[str, Any] = {
    "model_settings": {"dim": 4, "depth": 2, "train_depths": [2], "depth_weights": [1.0], "num_adapters": 4},
    "teacher_settings": {"dim": 4, "num_exponential_layers": 1, "num_linear_layers": 1},
    "teachers": 2,
    "routes": 4,
    "train": {"batch_size": 256, "max_epochs": 2},
    "student_factors": [],
    "probe": {
        "strengths": [1.0, 100.0],
        "rungs": [1],
        "refinements": [],
        "rate_factors": [],
        "horizon_factors": [],
        "dropouts": [],
    },
}
# The command, whose jobs share the process that imports torch: tests of `jobs` kill processes of their own.
IN_ONE_PROCESS = """
from recap_ctr.cli.main import main
from recap_ctr.jobs.executor import InThisProcess
from recap_ctr.jobs.local import LocalProcesses

LocalProcesses.run = InThisProcess.run
main()
"""
TWO_AT_A_TIME = Runner(InThisProcess(workers=2), quiet=True)


def small_recipe(data: PreparedData, out: Path, *, budget: float | None = None, **changes: Any) -> Recipe:
    config = recipe_config("default", {**SMALL, **changes}, "test")
    return Recipe(config, data, out, runner=TWO_AT_A_TIME, budget=budget, quiet=True)


@dataclass(frozen=True)
class Finished:
    """A finished fit; tests may add stages to it."""

    out: Path
    report: FitReport

    @property
    def first_artifact(self) -> Path:
        """A copy of the artifact, which later fits in the directory leave alone."""
        return self.out.with_name("first")


@pytest.fixture(scope="module")
def done(prepared: PreparedData, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    out = tmp_path_factory.mktemp("recipe") / "model"
    result = Finished(out, small_recipe(prepared, out).run())
    shutil.copytree(out / "artifact", result.first_artifact)
    return result


def stages(out: Path) -> dict[str, int]:
    """Return every file of every stage with the time of its last change."""
    return {
        str(path.relative_to(out)): path.stat().st_mtime_ns
        for path in out.rglob("*")
        if path.is_file() and path.parent != out and "artifact" not in path.relative_to(out).parts[:1]
    }


@pytest.mark.slow
def test_the_report_compares_the_student_with_its_teachers(done: Finished, prepared: PreparedData) -> None:
    out, report = done.out, done.report
    assert report == read_report(out)
    assert report.to_json() == read_json(out / "report.json")
    assert len(report.teacher_runs) == 2
    tables = [LogitTable(out / name / "logits" / "test") for name in report.teacher_runs]
    together = np.mean([table.logits_NM[:, 0] for table in tables], axis=0)
    auc = report.ensembles[1].metrics.on("test").raw.auc
    assert auc == pytest.approx(metrics.auc(prepared.test.labels, together), abs=1e-9)
    alone = np.mean([teacher.metrics.on("test").raw.auc for teacher in report.teacher_runs.values()])
    student = report.metrics.on("test").raw.auc
    if report.recovered is not None:
        assert report.recovered == pytest.approx((student - alone) / (auc - alone))
    assert report.model.name == "recap"
    assert len(report.teachers) == 2
    assert report.routes.count == 4


@pytest.mark.slow
def test_teachers_and_student_have_seeds_of_their_own(done: Finished) -> None:
    seeds = [teacher.seed for teacher in done.report.teacher_runs.values()]
    assert len({*seeds, done.report.train.seed}) == 3


@pytest.mark.slow
def test_a_second_call_changes_nothing(done: Finished, prepared: PreparedData) -> None:
    out, report = done.out, done.report
    before = stages(out)
    assert small_recipe(prepared, out).run() == report
    assert stages(out) == before


@pytest.mark.slow
def test_a_changed_setting_redoes_what_depends_on_it_and_nothing_else(
    done: Finished, prepared: PreparedData
) -> None:
    out, report = done.out, done.report
    before = stages(out)

    other = small_recipe(prepared, out, train={**SMALL["train"], "kd_weight": 0.5}, teachers=1).run()
    after = stages(out)

    assert {name: after[name] for name in before} == before  # the old stages are left alone
    new = {name.split("/")[0].split("-")[0] for name in after.keys() - before.keys()}
    assert new == {"plan", "student"}
    assert len(other.teacher_runs) == 1
    assert other.recovered is None
    fewer = small_recipe(prepared, out, teachers=1).run()
    again = stages(out)
    new = {name.split("/")[0].split("-")[0] for name in again.keys() - after.keys()}
    assert new <= {"plan", "student"}  # M is chosen afterwards: no teacher is trained again
    assert set(fewer.teacher_runs) < set(report.teacher_runs)


@pytest.mark.slow
def test_calibration_and_routes_train_nothing_again_and_graphs_are_kept_where_the_model_is(
    done: Finished, prepared: PreparedData, tmp_path: Path
) -> None:
    out = Path(shutil.copytree(done.out, tmp_path / "model"))
    weights = {path: path.stat().st_mtime_ns for path in out.rglob("state.safetensors")}
    small_recipe(prepared, out).run()  # ships the student of these settings, whatever other tests have done
    graph = ExportedGraph(Setting(1, 2), b"a graph", "float32", 0.0)
    add_graphs(read_artifact(out / "artifact"), [graph])

    again = small_recipe(prepared, out).run()
    assert read_artifact(out / "artifact").graphs == (Setting(1, 2),)  # nothing changed, so nothing is lost

    other = small_recipe(prepared, out, calibration="isotonic", negative_rate=0.5, routes=3).run()
    assert {path: path.stat().st_mtime_ns for path in out.rglob("state.safetensors")} == weights
    assert (other.calibration, other.routes.count) == ("isotonic", 3)
    assert other.teacher_runs.keys() == again.teacher_runs.keys()
    assert read_artifact(out / "artifact").graphs == ()  # they were of another model
    # Sampled negatives shift logits, for the ensemble's forecast as for its measured loss.
    assert other.averaging is not None
    alone = [teacher.metrics.on("test").raw.logloss for teacher in other.teacher_runs.values()]
    assert other.averaging.points[0].loss.value == pytest.approx(sum(alone) / len(alone), abs=1e-6)


@pytest.mark.slow
def test_a_taught_student_gets_a_regulariser_of_its_own(done: Finished, prepared: PreparedData) -> None:
    out, report = done.out, done.report
    before = stages(out)

    other = small_recipe(prepared, out, student_factors=[1.0, 0.1]).run()

    new = {name.split("/")[0].rpartition("-")[0] for name in stages(out).keys() - before.keys()}
    same = other.train.l2 == report.train.l2
    assert new == {"plan", "probe-recap", *([] if same else ["student-recap"])}
    (probed,) = out.glob("probe-recap-*/probe.json")
    record = json.loads(probed.read_text())
    factors = [arm["l2"] / report.train.l2 for arm in record["arms"]]
    assert factors[:2] == pytest.approx([1.0, 0.1], rel=1e-2), "further ones only beyond an end of the grid"
    assert other.train.l2 == record["found"]["l2"]
    assert other.teacher_runs == report.teacher_runs


def test_what_the_probe_found_reaches_teachers_and_student(prepared: PreparedData, tmp_path: Path) -> None:
    recipe = small_recipe(prepared, tmp_path / "model")
    plan = Plan(0.01, 1e-3, 2, 7, (), horizon=3.0, dropout=0.3, dim=8)
    models = {"fcn": recipe.teacher_model_config, "recap": recipe.config.model_config_of("recap")}
    for model, config in models.items():
        run = recipe.run_config(plan, model, config, recipe.student_training)
        settings = run.model_config.model_dump()
        assert (settings["dim"], settings["linear_dropout"], settings["exponential_dropout"]) == (8, 0.3, 0.3)
        assert (run.train.ema_epochs, run.train.l2) == ((3.0,), 0.01)
    plain = recipe.student_training.model_copy(update={"ema_epochs": ()})
    assert recipe.run_config(plan, "fcn", models["fcn"], plain).train.ema_epochs == ()


def test_the_probe_leaves_alone_what_the_user_has_decided(prepared: PreparedData, tmp_path: Path) -> None:
    def challenged(**changes: Any) -> set[str]:
        settings = {"teacher_settings": {}, "model_settings": {}, "probe": {}, **changes}
        probe = small_recipe(prepared, tmp_path / "model", **settings).open_questions()
        return set(probe.identity()) & set(FURTHER)

    assert challenged() == set(FURTHER)
    assert challenged(model_settings={"dim": 8}) == {"horizon_factors", "dropouts"}
    assert challenged(teacher_settings={"linear_dropout": 0.0}) == {"horizon_factors", "dim_factors"}
    assert challenged(train={"ema_epochs": [2.0]}) == {"dropouts", "dim_factors"}
    assert not set(recipe_config("paper", {}, "test").probe.identity()) & set(FURTHER)


@pytest.mark.slow
def test_a_short_budget_leaves_challenges_out_and_says_so(prepared: PreparedData, tmp_path: Path) -> None:
    probe = {**SMALL["probe"], "dropouts": [0.3]}
    plan = small_recipe(prepared, tmp_path / "model", probe=probe, budget=1e-6).plan()
    assert "the probe of dropout" in plan.given_up
    assert plan.dropout is None


@pytest.mark.slow
def test_the_probe_is_skipped_where_l2_is_set(prepared: PreparedData, tmp_path: Path) -> None:
    report = small_recipe(prepared, tmp_path / "model", l2=0.01, teachers=0).run()
    assert report.train.l2 == 0.01
    assert report.teacher_runs == {}
    assert not list((tmp_path / "model").glob("probe-*"))


@pytest.mark.slow
def test_auto_takes_the_better_student_on_validation(prepared: PreparedData, tmp_path: Path) -> None:
    report = small_recipe(prepared, tmp_path / "model", l2=0.01, teachers=1, model="auto").run()
    aucs = {name: figures.valid.raw.auc for name, figures in report.students.items()}
    assert len(aucs) == 2
    assert aucs[report.student] == max(aucs.values())


def test_a_budget_gives_up_teachers_then_epochs_and_says_so(
    prepared: PreparedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planned(budget: float, seconds: float) -> Plan:
        out = tmp_path / f"{budget}-{seconds}"
        recipe = small_recipe(prepared, out, budget=budget, l2=0.01, teachers=5, train={})
        monkeypatch.setattr("recap_ctr.recipe.stages.epoch_seconds", lambda config, data: seconds)
        out.mkdir(parents=True)
        plan = recipe.plan()
        monkeypatch.setattr("recap_ctr.recipe.stages.epoch_seconds", lambda config, data: 1e9)
        assert recipe.plan() == plan  # time is measured once
        return plan

    plenty = planned(60, 1.0)
    assert (plenty.teachers, plenty.max_epochs, plenty.given_up) == (5, 60, ())
    less = planned(3, 1.0)  # three waves and a student of 60 epochs would take four minutes
    assert 2 <= less.teachers <= 5 and less.given_up
    assert less.max_epochs is not None and less.max_epochs < 60
    least = planned(0.1, 10.0)
    assert least.teachers == 2 and least.max_epochs == 6
    assert any("budget itself" in text for text in least.given_up)


def bits(root: Path) -> dict[str, str]:
    return {str(path.relative_to(root)): sha256(path) for path in sorted(root.rglob("*")) if path.is_file()}


def command(data: Path, out: Path, recipe: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", IN_ONE_PROCESS, "fit", str(data), "--config", str(recipe), "--out", str(out)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.slow
def test_killed_in_each_stage_it_ends_with_the_same_bits(
    prepared: PreparedData, done: Finished, tmp_path: Path
) -> None:
    recipe, out = tmp_path / "recipe.toml", tmp_path / "model"
    recipe.write_text(tomli_w.dumps(SMALL))
    for stage in ("probe-*/arms/*", "teachers-*/*", "student-*"):
        process = command(prepared.path, out, recipe)
        deadline = time.monotonic() + 120
        while not list(out.glob(f"{stage}/*")) and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        assert not (out / "report.json").is_file()

    last = command(prepared.path, out, recipe)
    _, messages = last.communicate(timeout=300)

    assert last.returncode == 0, messages.decode()
    assert bits(out / "artifact") == bits(done.first_artifact)


class Stopping(InThisProcess):
    """An executor that raises an exception before the first job whose name begins with some text."""

    def __init__(self, text: str, error: type[BaseException] = KeyboardInterrupt) -> None:
        super().__init__(workers=2)
        self.__dict__ |= {"text": text, "error": error}

    def run(self, jobs: Any, **arguments: Any) -> list[Any]:
        if any(job.name.startswith(self.__dict__["text"]) for job in jobs):
            raise self.__dict__["error"]
        return super().run(jobs, **arguments)


def stopped(data: PreparedData, out: Path, executor: Stopping, **changes: Any) -> None:
    recipe = small_recipe(data, out, **changes)
    recipe.runner = Runner(executor, quiet=True)
    with pytest.raises(executor.__dict__["error"]):
        recipe.run()


@pytest.mark.slow
def test_the_regression_is_shipped_before_anything_slower(prepared: PreparedData, tmp_path: Path) -> None:
    out = tmp_path / "model"
    for job in ("LightGBM", "l2="):
        stopped(prepared, out, Stopping(job, RuntimeError))
        assert read_artifact(out / "artifact").manifest["model"]["name"] == "lr"
    stopped(prepared, out, Stopping("student", RuntimeError))
    aucs = [read_report(run.parent).metrics.valid.raw.auc for run in out.glob("teachers-*/*/report.json")]
    (linear,) = out.glob("reference-lr-*")
    shipped = read_artifact(out / "artifact").manifest["metrics"]["valid"]["raw"]["auc"]
    assert len(aucs) == 2 and shipped == max(*aucs, read_report(linear).metrics.valid.raw.auc)


@pytest.mark.slow
def test_interrupted_in_each_stage_it_ships_the_best_so_far_and_ends_with_the_same_bits(
    prepared: PreparedData, done: Finished, tmp_path: Path
) -> None:
    out = tmp_path / "model"
    for job in ("LightGBM", "l2=", "teacher-1", "student"):
        stopped(prepared, out, Stopping(job))
        report = read_report(out)
        assert isinstance(report, FitReport) and report.interrupted
        assert Scorer.load(out / "artifact")
        assert len(report.teacher_runs) == (2 if job == "student" else 0)
    finished = small_recipe(prepared, out).run()
    assert "interrupted" not in finished.to_json()
    assert bits(out / "artifact") == bits(done.first_artifact)
    stopped(prepared, out, Stopping("student"), train={**SMALL["train"], "kd_weight": 0.5})
    assert bits(out / "artifact") == bits(done.first_artifact), "that of a finished fit stays"
    assert read_report(out) == finished


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["teachers-*/*", "student-*"])
def test_ctrl_c_packs_half_trained_runs_and_they_go_on_to_the_same_bits(
    stage: str, prepared: PreparedData, done: Finished, tmp_path: Path
) -> None:
    recipe, out = tmp_path / "recipe.toml", tmp_path / "model"
    recipe.write_text(tomli_w.dumps(SMALL))
    process = command(prepared.path, out, recipe)
    deadline = time.monotonic() + 120
    while not list(out.glob(f"{stage}/state.safetensors")) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    _, messages = process.communicate(timeout=120)
    assert process.returncode == 130, messages.decode()
    assert f"{out / 'artifact'} is the best so far" in messages.decode()
    report = read_report(out)
    assert isinstance(report, FitReport) and report.interrupted
    assert report.teacher_runs if stage.startswith("teachers") else report.students
    assert Scorer.load(out / "artifact")

    last = command(prepared.path, out, recipe)
    _, messages = last.communicate(timeout=300)
    assert last.returncode == 0, messages.decode()
    assert bits(out / "artifact") == bits(done.first_artifact)


@pytest.mark.slow
def test_a_short_budget_cuts_references_and_says_so(prepared: PreparedData, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"l2": 0.01, "teachers": 0, "train": {"batch_size": 256, "max_epochs": 1}}
    report = small_recipe(prepared, tmp_path / "fit", budget=0.001, **changes).run()
    assert report.reference is not None and len(report.reference) == 2
    assert all(split.cut for by_split in report.reference.values() for split in by_split.values())
    longer = small_recipe(prepared, tmp_path / "fit", **changes).run()
    assert longer.reference is not None
    assert not any(split.cut for by_split in longer.reference.values() for split in by_split.values())


def test_a_directory_with_something_else_in_it_is_left_alone(
    prepared: PreparedData, tmp_path: Path, recap: Recap
) -> None:
    (tmp_path / "artifact").mkdir()
    (tmp_path / "artifact" / "thesis.txt").write_text("mine")
    for command in (("fit",), ("bench", "ablation", "--data")):
        done = recap(*command, prepared.path, "--out", tmp_path)
        assert done.code == 2
        assert "holds something else" in done.err
    assert (tmp_path / "artifact" / "thesis.txt").read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 1


def test_sizes_of_vectors_are_tried_that_students_can_have(prepared: PreparedData, tmp_path: Path) -> None:
    def tried(**changes: Any) -> tuple[float, ...]:
        settings = {"model_settings": {}, "teacher_settings": {}, **changes}
        return small_recipe(prepared, tmp_path, **settings).open_questions().dim_factors

    assert tried() == (0.5, 2.0)
    assert tried(probe={"dim_factors": [1.0625, 2.0]}) == (2.0,), "17 numbers have no two halves"
    assert tried(model="lr") == (0.5, 2.0)
    lr = Arm(0.1, 1e-3, dim=8).model_config("lr", parse_model("lr", {}))
    assert lr == parse_model("lr", {}), "which has no vectors"


def test_the_plan_of_a_rehearsal_is_not_recorded(prepared: PreparedData, tmp_path: Path) -> None:
    config = recipe_config("default", {**SMALL, "l2": 0.01}, "test")
    rehearsal = Runner(InThisProcess(), quiet=True, keeps_plans=False)
    plan = Recipe(config, prepared, tmp_path / "model", runner=rehearsal, quiet=True).plan()
    assert (plan.l2, plan.teachers, plan.given_up) == (0.01, 2, ())
    assert not (tmp_path / "model").exists()


def test_students_learn_from_recombined_rows_that_teachers_scored_once(
    prepared: PreparedData, tmp_path: Path
) -> None:
    out = tmp_path / "fit"
    report = tiny_recipe(prepared, out, teachers=2, recombined=2).run()
    assert report.pool is not None
    assert (report.pool.rows, report.pool.teachers) == (2 * len(prepared.train), 2)
    assert report.train.recombined == 2
    tables = {path: path.stat().st_mtime_ns for path in out.glob("teachers-*/*/logits/recombined-*/*.npy")}
    assert len({path.parent for path in tables}) == 2
    students = set(out.glob("student-*"))

    other = tiny_recipe(prepared, out, teachers=2, recombined=2, seed=2).run()
    assert other.pool == report.pool
    plain = tiny_recipe(prepared, out, teachers=2).run()
    assert plain.pool is None and plain.metrics != report.metrics
    assert {path: path.stat().st_mtime_ns for path in tables} == tables, "no teacher scored them again"
    assert len(set(out.glob("student-*")) - students) == 2
    assert len(list(out.glob("teachers-*/teacher-*"))) == 2


def test_with_one_side_students_learn_from_training_rows_alone(
    prepared: PreparedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "sides_of", lambda train, layout: (("site", "ad"),))
    assert tiny_recipe(prepared, tmp_path / "fit", recombined=1).run().pool is None
