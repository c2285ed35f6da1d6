"""The paper's Tables 2 and 3: which runs they are made of, and which figures of them they show."""

from dataclasses import replace
from pathlib import Path

import pytest

from recap_ctr.bench.scaling import TABLES, cells, copy_reports, note_on_l2, render, scaling
from recap_ctr.data.shards import PreparedData
from recap_ctr.errors import InputError
from recap_ctr.recipe.ablation import own_cell
from recap_ctr.recipe.config import recipe_config
from recap_ctr.recipe.probe import ProbeResult
from recap_ctr.recipe.runner import Runner
from recap_ctr.training.parallel import teacher_tables
from recap_ctr.training.report import RunReport, read_report
from tests.support.bench_files import report_of, split_figures
from tests.support.tiny_recipe import tiny_recipe


def report(seed: int, on_one_route: float, on_every_route: float) -> RunReport:
    """Return a report of a model whose AUC on one route differs from that on all eight."""
    single, every = (
        {split: split_figures(auc, 1 - auc, 1 - auc) for split in ("valid", "test")}
        for auc in (on_one_route, on_every_route)
    )
    return report_of(seed, metrics=every, metrics_by_routes={"1": single, "8": every})


def test_one_training_serves_the_entries_with_and_without_routes() -> None:
    reports = {
        "raw": [report(1, 0.80, 0.81), report(2, 0.80, 0.82)],
        "raw-fixed": [report(1, 0.79, 0.9), report(2, 0.79, 0.9)],
        "plain": [report(1, 0.82, 0.9), report(2, 0.82, 0.9)],
        "ema": [report(1, 0.83, 0.9), report(2, 0.83, 0.9)],
        "raw-kd": [report(1, 0.84, 0.9), report(2, 0.84, 0.9)],
        "ema-kd": [report(1, 0.5, 0.86), report(2, 0.5, 0.87)],
    }
    markdown, latex = render("ablation", reports)
    lines = {
        line.split("|")[1].strip(" *").partition(" (")[0]: line
        for line in markdown.splitlines()
        if line.startswith("|")
    }
    assert "80.000" in lines["Recursive backbone"] and "(l2 " in lines["Recursive backbone"]
    assert "79.000" in lines["one route in training, too"]
    assert "82.000" in lines["by the plateau rule"]
    assert "81.500" in lines["+ route scaling"]
    assert "83.000" in lines["+ trajectory scaling"]
    assert "84.000" in lines["+ cross-run scaling"]
    assert "50.000" in lines["RECAP on one route"]
    assert "86.500" in lines["RECAP"]
    assert "\\checkmark" in latex and "86.500" in latex


def test_every_entry_of_the_papers_tables_is_there() -> None:
    entries = {tuple(entry.marks.values()) for entry in TABLES["ablation"].entries}
    assert {(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1)} <= entries
    entries = {tuple(entry.marks.values()) for entry in TABLES["fcn-scaling"].entries}
    assert entries == {(0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0)}
    taught = {(entry.teachers, entry.own_l2) for entry in TABLES["teachers"].entries if entry.marks["KD"]}
    assert taught == {(1, True), (1, False), (None, True), (None, False)}


def test_entries_differ_from_the_first_in_one_thing(prepared: PreparedData, tmp_path: Path) -> None:
    recipe = tiny_recipe(prepared, tmp_path)
    plan = recipe.plan()
    wanted = cells("ablation", recipe, plan, list(recipe.train_teachers(plan)), 1)
    base = wanted["raw"].config
    assert base.train.ema is None and not base.train.ema_epochs and not base.teachers
    averaged = wanted["ema"].config
    assert averaged == replace(
        base, train=base.train.model_copy(update={"ema_epochs": averaged.train.ema_epochs})
    )
    taught = wanted["raw-kd"].config
    assert taught.teachers and replace(taught, teachers=()) == base
    fixed = wanted["raw-fixed"].config
    assert all(len(fixed.model_config.choices(step)) == 1 for step in range(fixed.model_config.depth))  # type: ignore[attr-defined]
    assert replace(fixed, model_config=base.model_config) == base


def test_one_teacher_is_another_for_each_seed(prepared: PreparedData, tmp_path: Path) -> None:
    recipe = tiny_recipe(prepared, tmp_path, teachers=3)
    plan = recipe.plan()
    teachers = list(recipe.train_teachers(plan))
    wanted = cells("teachers", recipe, plan, teachers, 4)
    tables = teacher_tables(teachers, "train")
    for name in ("ema-kd-from-1", "ema-kd-from-1-shared-l2"):
        taught_by = [wanted[name].run(seed).teachers for seed in wanted[name].seeds]
        assert taught_by == [(tables[at],) for at in (0, 1, 2, 0)]
    assert {wanted["ema-kd"].run(seed).teachers for seed in (1, 2)} == {tables}
    assert wanted["ema"].run(2).teachers == ()


def test_the_table_of_teachers_says_whose_students_it_has() -> None:
    values = {split: split_figures(0.8, 0.2, 0.2) for split in ("valid", "test")}
    taught = {
        entry.runs: [
            report_of(seed, metrics=values, teachers=[f"{seed}"] if entry.teachers else ["1", "2"])
            for seed in (1, 2)
        ]
        for entry in TABLES["teachers"].entries
    }
    for text in render("teachers", taught, "Last."):
        assert (
            "the student of seed s learns from teacher s, in turn" in text and "first of them. Last." in text
        )


def test_a_table_says_where_no_line_has_an_l2_of_its_own() -> None:
    """As with the paper's preset, whose student has the regulariser of its teachers."""
    assert note_on_l2(recipe_config("default", {}, "test"), {}).endswith("its very training found.")
    assert "no student_factors" in note_on_l2(recipe_config("paper", {}, "test"), {})
    assert "that is set" in note_on_l2(recipe_config("default", {"l2": 0.01}, "test"), {})


def test_a_table_says_where_a_probe_ended_at_the_edge(
    prepared: PreparedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny_recipe(prepared, tmp_path, l2=None)
    answer = ProbeResult(3e-7, 1e-3, 0.9, 1.0, None, 0.0, 0.0, edge="weakest")
    monkeypatch.setattr(Runner, "probe", lambda runner, race: answer)
    plan = recipe.plan()
    own_cell(recipe, plan, "recap", "ema", [1], [])
    note = note_on_l2(recipe.config, recipe.edges)
    assert note.endswith(
        "Where it is 3e-07, this was the weakest that was tried, and the best may lie beyond."
    )


@pytest.mark.slow
def test_it_trains_what_is_missing_and_writes_reports_and_table(
    prepared: PreparedData, tmp_path: Path
) -> None:
    out, reports = tmp_path / "bench", tmp_path / "reports"
    text = scaling("fcn-scaling", tiny_recipe(prepared, out), 1, reports)

    assert (reports / "fcn-scaling" / "fcn-scaling.md").read_text() == text
    assert (reports / "fcn-scaling" / "fcn-scaling.tex").is_file()
    copies = {
        path.parent.parent.name: read_report(path.parent)
        for path in sorted(reports.glob("fcn-scaling/runs/*/seed-1/report.json"))
    }
    assert set(copies) == {"fcn-raw", "fcn-plain", "fcn-ema", "fcn-raw-kd", "fcn-ema-kd"}
    for training, copy in copies.items():
        assert bool(copy.teachers) == ("kd" in training)
        assert bool(copy.train.ema_epochs) == ("ema" in training)
        assert copy.train.schedule == ("plateau" if "plain" in training else "constant")
    written = {path: path.stat().st_mtime_ns for path in out.rglob("best.safetensors")}
    assert scaling("fcn-scaling", tiny_recipe(prepared, out), 1, reports) == text
    assert {path: path.stat().st_mtime_ns for path in out.rglob("best.safetensors")} == written


def test_tables_keep_the_reports_of_their_own_runs_alone(tmp_path: Path) -> None:
    """Trainings of one name have other settings in another table, and a table made anew has other seeds."""
    at_plans_l2, at_own_l2 = (report_of(1, train={"seed": 1, "l2": l2}) for l2 in (0.01, 0.03))
    second = report_of(2, train={"seed": 2, "l2": 0.03})
    copy_reports({"recap-ema": {Path("c"): at_own_l2, Path("d"): second}}, tmp_path / "ablation")
    copy_reports({"recap-ema": {Path("a"): at_plans_l2}}, tmp_path / "overview")
    copied = tmp_path / "ablation" / "runs" / "recap-ema"
    assert read_report(copied / "seed-1").train.l2 == 0.03 and (copied / "seed-2").is_dir()
    assert read_report(tmp_path / "overview" / "runs" / "recap-ema" / "seed-1").train.l2 == 0.01
    copy_reports({"recap-ema": {Path("a"): at_plans_l2}}, tmp_path / "ablation")
    assert [path.name for path in copied.iterdir()] == ["seed-1"]
    assert read_report(copied / "seed-1").train.l2 == 0.01


def test_it_needs_teachers(prepared: PreparedData, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="at least one teacher"):
        scaling("fcn-scaling", tiny_recipe(prepared, tmp_path, teachers=0), 1, tmp_path / "reports")
