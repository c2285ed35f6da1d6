import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import tomli_w

from recap_ctr.axes.logits import LogitTable
from recap_ctr.data.shards import PreparedData
from recap_ctr.errors import InputError
from recap_ctr.evaluation import metrics
from recap_ctr.inference.artifact import ExportedGraph, add_graphs, read_artifact
from recap_ctr.inference.setting import Setting
from recap_ctr.models.catalogue import parse_model
from recap_ctr.recipe.probe import FURTHER, Arm
from recap_ctr.recipe.stages import PRESETS, Plan, Recipe, batch_size, recipe_config, train_config
from recap_ctr.storage.hashes import sha256
from tests.conftest import Recap

pytestmark = pytest.mark.usefixtures("one_process")

TINY: dict[str, Any] = {
    "model_settings": {"dim": 4, "depth": 2, "train_depths": [2], "depth_weights": [1.0], "num_adapters": 4},
    "teacher_settings": {"dim": 4, "num_exponential_layers": 1, "num_linear_layers": 1},
    "teachers": 2,
    "routes": 4,
    "train": {"batch_size": 256, "max_epochs": 2},
    "student_factors": [],
    "probe": {
        "strengths": [1.0, 100.0], "rungs": [1], "refinements": [], "rate_factors": [], "horizon_factors": [],
        "dropouts": [],
    },
}  # fmt: skip


def cook(data: PreparedData, out: Path, **changes: Any) -> Recipe:
    return Recipe(recipe_config("default", {**TINY, **changes}, "test"), data, out, workers=2, quiet=True)


@pytest.fixture(scope="module")
def done(
    one_process: None, prepared: PreparedData, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """A finished recipe; tests may add stages to it."""
    out = tmp_path_factory.mktemp("recipe") / "model"
    report = cook(prepared, out).run()
    shutil.copytree(out / "artifact", out.with_name("first"))
    return out, report


def stages(out: Path) -> dict[str, int]:
    """Every file of every stage with the moment it was last written."""
    return {
        str(path.relative_to(out)): path.stat().st_mtime_ns
        for path in out.rglob("*")
        if path.is_file() and path.parent != out and "artifact" not in path.relative_to(out).parts[:1]
    }


def test_the_report_compares_the_student_with_its_teachers(
    done: tuple[Path, dict[str, Any]], prepared: PreparedData
) -> None:
    out, report = done
    assert report == json.loads((out / "report.json").read_text())
    assert len(report["teacher_runs"]) == 2
    tables = [LogitTable(out / name / "logits" / "test") for name in report["teacher_runs"]]
    together = np.mean([table.logits_NM[:, 0] for table in tables], axis=0)
    auc = report["ensembles"][1]["metrics"]["test"]["raw"]["auc"]
    assert auc == pytest.approx(metrics.auc(prepared.test.labels, together), abs=1e-9)
    alone = np.mean([one["metrics"]["test"]["raw"]["auc"] for one in report["teacher_runs"].values()])
    own = report["metrics"]["test"]["raw"]["auc"]
    if report["recovered"] is not None:
        assert report["recovered"] == pytest.approx((own - alone) / (auc - alone))
    assert report["model"]["name"] == "recap"
    assert len(report["teachers"]) == 2
    assert report["routes"]["count"] == 4


def test_teachers_and_student_have_seeds_of_their_own(done: tuple[Path, dict[str, Any]]) -> None:
    _, report = done
    seeds = [one["seed"] for one in report["teacher_runs"].values()]
    assert len({*seeds, report["train"]["seed"]}) == 3


def test_a_second_call_changes_nothing(done: tuple[Path, dict[str, Any]], prepared: PreparedData) -> None:
    out, report = done
    before = stages(out)
    assert cook(prepared, out).run() == report
    assert stages(out) == before


def test_a_changed_setting_redoes_what_depends_on_it_and_nothing_else(
    done: tuple[Path, dict[str, Any]], prepared: PreparedData
) -> None:
    out, report = done
    before = stages(out)

    other = cook(prepared, out, train={**TINY["train"], "kd_weight": 0.5}, teachers=1).run()
    after = stages(out)

    assert {name: after[name] for name in before} == before  # the old stages stand
    new = {name.split("/")[0].split("-")[0] for name in after.keys() - before.keys()}
    assert new == {"plan", "student"}
    assert len(other["teacher_runs"]) == 1
    assert other["recovered"] is None
    fewer = cook(prepared, out, teachers=1).run()
    again = stages(out)
    new = {name.split("/")[0].split("-")[0] for name in again.keys() - after.keys()}
    assert new <= {"plan", "student"}  # M is chosen afterwards: no teacher is trained again
    assert set(fewer["teacher_runs"]) < set(report["teacher_runs"])


def test_calibration_and_routes_train_nothing_again_and_graphs_are_kept_where_the_model_is(
    done: tuple[Path, dict[str, Any]], prepared: PreparedData, tmp_path: Path
) -> None:
    out = Path(shutil.copytree(done[0], tmp_path / "model"))
    weights = {path: path.stat().st_mtime_ns for path in out.rglob("state.safetensors")}
    cook(prepared, out).run()  # ships the student of these settings, whatever tests before have done
    graph = ExportedGraph(Setting(1, 2), b"a graph", "float32", 0.0)
    add_graphs(read_artifact(out / "artifact"), [graph])

    again = cook(prepared, out).run()
    assert read_artifact(out / "artifact").graphs == (Setting(1, 2),)  # nothing changed, so nothing is lost

    other = cook(prepared, out, calibration="isotonic", negative_rate=0.5, routes=3).run()
    assert {path: path.stat().st_mtime_ns for path in out.rglob("state.safetensors")} == weights
    assert (other["calibration"], other["routes"]["count"]) == ("isotonic", 3)
    assert other["teacher_runs"].keys() == again["teacher_runs"].keys()
    assert read_artifact(out / "artifact").graphs == ()  # they were of another model
    # Sampled negatives shift logits, for the ensemble's forecast as for its measured loss.
    one = other["averaging"]["points"][0]["loss"]["value"]
    alone = [run["metrics"]["test"]["raw"]["logloss"] for run in other["teacher_runs"].values()]
    assert one == pytest.approx(sum(alone) / len(alone), abs=1e-6)


def test_a_taught_student_gets_a_regulariser_of_its_own(
    done: tuple[Path, dict[str, Any]], prepared: PreparedData
) -> None:
    out, report = done
    before = stages(out)

    other = cook(prepared, out, student_factors=[1.0, 0.1]).run()

    new = {name.split("/")[0].rpartition("-")[0] for name in stages(out).keys() - before.keys()}
    assert new == {
        "plan",
        "probe-recap",
        *([] if other["train"]["l2"] == report["train"]["l2"] else ["student-recap"]),
    }
    (probed,) = out.glob("probe-recap-*/probe.json")
    found = json.loads(probed.read_text())
    assert [arm["l2"] / report["train"]["l2"] for arm in found["arms"]] == pytest.approx([1.0, 0.1], rel=1e-2)
    assert other["train"]["l2"] == found["found"]["l2"]
    assert other["teacher_runs"] == report["teacher_runs"]


def test_what_the_probe_found_reaches_teachers_and_student(prepared: PreparedData, tmp_path: Path) -> None:
    recipe = cook(prepared, tmp_path / "model")
    plan = Plan(0.01, 1e-3, 2, 7, (), horizon=3.0, dropout=0.3, dim=8)
    for model, config in (("fcn", recipe.teacher_config), ("recap", recipe.config.settings_of("recap"))):
        run = recipe.run_config(plan, model, config, recipe.settings)
        own = run.model_config.model_dump()
        assert (own["dim"], own["linear_dropout"], own["exponential_dropout"]) == (8, 0.3, 0.3)
        assert (run.train.ema_epochs, run.train.l2) == ((3.0,), 0.01)
    plain = recipe.settings.model_copy(update={"ema_epochs": ()})
    assert recipe.run_config(plan, "fcn", recipe.teacher_config, plain).train.ema_epochs == ()


def test_the_probe_leaves_alone_what_the_user_has_decided(prepared: PreparedData, tmp_path: Path) -> None:
    def challenged(**changes: Any) -> set[str]:
        asked = {"teacher_settings": {}, "model_settings": {}, "probe": {}, **changes}
        return set(cook(prepared, tmp_path / "model", **asked)._open_questions().identity()) & set(FURTHER)

    assert challenged() == set(FURTHER)
    assert challenged(model_settings={"dim": 8}) == {"horizon_factors", "dropouts"}
    assert challenged(teacher_settings={"linear_dropout": 0.0}) == {"horizon_factors", "dim_factors"}
    assert challenged(train={"ema_epochs": [2.0]}) == {"dropouts", "dim_factors"}
    assert not set(recipe_config("paper", {}, "test").probe.identity()) & set(FURTHER)


def test_a_short_budget_leaves_challenges_out_and_says_so(prepared: PreparedData, tmp_path: Path) -> None:
    config = recipe_config("default", {**TINY, "probe": {**TINY["probe"], "dropouts": [0.3]}}, "test")
    plan = Recipe(config, prepared, tmp_path / "model", workers=2, budget=1e-6, quiet=True).plan()
    assert "the probe of dropout" in plan.given_up
    assert plan.dropout is None


def test_probe_is_skipped_where_l2_is_given(prepared: PreparedData, tmp_path: Path) -> None:
    report = cook(prepared, tmp_path / "model", l2=0.01, teachers=0).run()
    assert report["train"]["l2"] == 0.01
    assert report["teacher_runs"] == {}
    assert not list((tmp_path / "model").glob("probe-*"))


def test_auto_takes_the_better_student_on_validation(prepared: PreparedData, tmp_path: Path) -> None:
    report = cook(prepared, tmp_path / "model", l2=0.01, teachers=1, model="auto").run()
    found = {name: one["valid"]["raw"]["auc"] for name, one in report["students"].items()}
    assert len(found) == 2
    assert found[report["student"]] == max(found.values())


def test_a_budget_gives_up_teachers_then_epochs_and_says_so(
    prepared: PreparedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planned(budget: float, seconds: float) -> Any:
        config = recipe_config("default", {**TINY, "l2": 0.01, "teachers": 5, "train": {}}, "test")
        recipe = Recipe(
            config, prepared, tmp_path / f"{budget}-{seconds}", workers=2, budget=budget, quiet=True
        )
        monkeypatch.setattr("recap_ctr.recipe.stages.epoch_seconds", lambda config, data: seconds)
        recipe.out.mkdir(parents=True)
        found = recipe.plan()
        monkeypatch.setattr("recap_ctr.recipe.stages.epoch_seconds", lambda config, data: 1e9)
        assert recipe.plan() == found  # the clock is asked once
        return found

    plenty = planned(60, 1.0)
    assert (plenty.teachers, plenty.max_epochs, plenty.given_up) == (5, 60, ())
    less = planned(3, 1.0)  # three waves and a student of 60 epochs would take four minutes
    assert 2 <= less.teachers <= 5 and less.max_epochs < 60 and less.given_up
    least = planned(0.1, 10.0)
    assert least.teachers == 2 and least.max_epochs == 6
    assert any("budget itself" in text for text in least.given_up)


def test_settings_are_checked_before_anything_is_done(prepared: PreparedData, tmp_path: Path) -> None:
    for changes, message in (
        ({"model": "nothing"}, "no model 'nothing'"),
        ({"routes": 0}, "routes"),
        ({"train": {"l2": 1.0}}, "l2 stands beside"),
        ({"train": {"epochs": 1}}, "epochs"),
        ({"probe": {"strength": [1.0]}}, "unknown setting"),
    ):
        with pytest.raises(InputError, match=message):
            cook(prepared, tmp_path / "model", **changes)
    with pytest.raises(InputError, match="no preset"):
        recipe_config("best", {}, "test")
    assert not (tmp_path / "model").exists()


def test_the_papers_preset_is_what_the_paper_states() -> None:
    config = recipe_config("paper", {"teachers": 3}, "test")
    student, teacher = train_config(config, 10**6), train_config(config, 10**6, teacher=True)
    assert config.teachers == 3 and PRESETS["paper"]["teachers"] == 5
    assert student.ema == 0.9995 and student.kd_weight == 1.0 and not student.ema_epochs
    assert teacher.ema is None and not teacher.ema_epochs and teacher.schedule == "plateau"
    settings = config.settings_of("recap")
    assert (settings.num_adapters, settings.lora_rank) == (8, 96)  # type: ignore[attr-defined]


def test_the_papers_preset_survives_toml() -> None:
    config = recipe_config("paper", {}, "test")
    back = recipe_config("default", tomllib.loads(config.to_toml()), "test")
    assert back == config
    assert train_config(back, 10**6, teacher=True).ema is None


def test_a_model_of_the_teachers_kind_is_built_like_them() -> None:
    config = recipe_config("default", {"teacher_settings": {"dim": 8}, "model_settings": {"dim": 4}}, "test")
    assert [getattr(config.settings_of(name), "dim", None) for name in ("fcn", "recap", "qnn")] == [8, 4, 16]
    own = recipe_config("default", {"model": "fcn", "teacher_settings": {"dim": 8}}, "test")
    assert getattr(own.settings_of("fcn"), "dim", None) == 16


def test_small_data_get_small_batches() -> None:
    sizes = [batch_size(rows) for rows in (10, 10_000, 50_000, 200_000, 10**8)]
    assert sizes == sorted(sizes) and sizes[0] == 128 and sizes[-1] == 4096


def bits(root: Path) -> dict[str, str]:
    return {str(path.relative_to(root)): sha256(path) for path in sorted(root.rglob("*")) if path.is_file()}


def command(data: Path, out: Path, recipe: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "recap_ctr", "fit", str(data), "--config", str(recipe), "--out", str(out)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_killed_in_each_stage_it_ends_with_the_same_bits(
    prepared: PreparedData, done: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    recipe, out = tmp_path / "recipe.toml", tmp_path / "model"
    recipe.write_text(tomli_w.dumps(TINY))
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
    _, said = last.communicate(timeout=300)

    assert last.returncode == 0, said.decode()
    assert bits(out / "artifact") == bits(done[0].with_name("first"))


def test_fit_takes_a_raw_table_to_an_artifact(click_log: pl.DataFrame, tmp_path: Path, recap: Recap) -> None:
    log, recipe, out = tmp_path / "clicks.parquet", tmp_path / "recipe.toml", tmp_path / "model"
    click_log.drop("row").write_parquet(log)
    recipe.write_text(tomli_w.dumps({**TINY, "l2": 0.01}))
    said = recap(
        "fit", str(log), "--label", "click", "--config", str(recipe), "--teachers", "1", "--out", str(out)
    )
    assert "student: recap" in said.out
    scores = recap("predict", str(out), str(log), "--out", str(tmp_path / "scores.csv"))
    assert scores.code == 0


def test_a_mistyped_model_is_told_before_anything_is_prepared(tmp_path: Path, recap: Recap) -> None:
    (tmp_path / "clicks.csv").write_text("click,ad\n1,a\n")
    for option in ("--model", "--teacher-model"):
        done = recap(
            "fit", tmp_path / "clicks.csv", "--label", "click", option, "recapp", "--out", tmp_path / "out"
        )
        assert done.code == 2
        assert "no model 'recapp'" in done.err and "fix: known are" in done.err
    assert not (tmp_path / "out").exists()


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
    def asked(**changes: Any) -> tuple[float, ...]:
        given = {**TINY, "model_settings": {}, "teacher_settings": {}, **changes}
        config = recipe_config("default", given, "test")
        return Recipe(config, prepared, tmp_path, quiet=True)._open_questions().dim_factors

    assert asked() == (0.5, 2.0)
    assert asked(probe={"dim_factors": [1.0625, 2.0]}) == (2.0,), "17 numbers have no two halves"
    assert asked(model="lr") == (0.5, 2.0)
    lr = Arm(0.1, 1e-3, dim=8).model_config("lr", parse_model("lr", {}))
    assert lr == parse_model("lr", {}), "which has no vectors"
