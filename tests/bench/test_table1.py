"""Table 1: which runs are done, which are left alone, and which reports make an arm."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from recap_ctr.bench.request import Request, fulfil
from recap_ctr.bench.table1 import Table1, Treatment, read_arms
from recap_ctr.bench.table1_text import write_tables
from recap_ctr.config import TrainConfig
from recap_ctr.data.shards import PreparedData
from recap_ctr.errors import InputError
from recap_ctr.recipe.config import recipe_config
from recap_ctr.storage.files import read_json
from recap_ctr.training.report import read_report
from tests.support.bench_files import report_values
from tests.support.tiny_recipe import TINY

FAST = '[model]\nname = "{name}"\n[train]\nbatch_size = 256\nmax_epochs = 1\n'


@pytest.fixture
def reports(tmp_path: Path, prepared: PreparedData) -> Path:
    """The data set's directory of reports, with settings that are small enough for a test."""
    directory = tmp_path / "reports" / prepared.name
    directory.mkdir(parents=True)
    for name in ("lr", "dnn"):
        (directory / f"{name}.toml").write_text(FAST.format(name=name))
    return directory


def request(prepared: PreparedData, tmp_path: Path, **changes: Any) -> Request:
    defaults: dict[str, Any] = {"models": ("lr", "dnn"), "seeds": 1, "quiet": True, "settings": TINY}
    return Request(
        "table1", (str(prepared.path),), tmp_path / "out", tmp_path / "reports", **{**defaults, **changes}
    )


def write_values(reports: Path, label: str, values: dict[str, Any]) -> None:
    path = reports / label / f"seed-{values['train']['seed']}" / "report.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values))


@pytest.mark.slow
def test_cells_are_files_and_none_is_done_twice(
    prepared: PreparedData, tmp_path: Path, reports: Path
) -> None:
    text = fulfil(request(prepared, tmp_path))
    kept = {path: path.stat().st_mtime_ns for path in reports.glob("*/seed-*/report.json")}
    assert [path.parts[-3:-1] for path in sorted(kept)] == [("dnn", "seed-1"), ("lr", "seed-1")]
    assert (reports / "table1.md").read_text() == text
    report = json.loads((reports / "lr/seed-1/report.json").read_text())
    assert {"versions", "machine", "seconds", "train", "model"} <= set(report)

    assert "Baselines by their own training protocol" in text and "| LR | a file | 1 |" in text
    shutil.rmtree(tmp_path / "out")  # The reports are enough to know which runs are done.
    more = fulfil(request(prepared, tmp_path, seeds=2, models=("lr",)))
    assert all(path.stat().st_mtime_ns == before for path, before in kept.items())
    assert (reports / "lr/seed-2/report.json").is_file()
    assert "| DNN | a file | 1 |" in more and "| LR | a file | 2 |" in more


@pytest.mark.slow
def test_a_cell_with_other_settings_is_done_again(
    prepared: PreparedData, tmp_path: Path, reports: Path
) -> None:
    fulfil(request(prepared, tmp_path, models=("lr",)))
    settings = reports / "lr.toml"
    settings.write_text(settings.read_text().replace("max_epochs = 1", "max_epochs = 2"))
    assert "lr: 1 missing" in fulfil(request(prepared, tmp_path, models=("lr",), dry_run=True))
    fulfil(request(prepared, tmp_path, models=("lr",)))
    assert read_report(reports / "lr/seed-1").train.max_epochs == 2


@pytest.mark.slow
def test_runs_of_other_settings_or_data_are_no_seeds_of_one_arm(
    prepared: PreparedData, tmp_path: Path, reports: Path
) -> None:
    fulfil(request(prepared, tmp_path, models=("lr",), seeds=2))
    second = reports / "lr/seed-2/report.json"
    values = read_json(second)

    second.write_text(json.dumps({**values, "train": {**values["train"], "l2": 0.5}}))
    with pytest.raises(InputError, match="different settings: reports of lr/seed-1 and lr/seed-2"):
        read_arms(reports)

    second.unlink()
    other_data = {**values["data"], "fingerprint": "of other rows"}
    write_values(reports, "dnn", {**values, "model": {"name": "dnn", "config": {}}, "data": other_data})
    with pytest.raises(InputError, match="different data"):
        read_arms(reports)


@pytest.mark.parametrize(
    "changes",
    [
        {"teachers": ["a"]},
        {"routes": {"count": 2, "choice": "late"}},
        {"negative_rate": 0.1},
        {"calibration": "isotonic"},
    ],
    ids=lambda changes: str(*changes),
)
def test_students_of_other_teachers_are_no_seeds_of_one_arm(changes: dict[str, Any], tmp_path: Path) -> None:
    taught = {"teachers": ["a", "b"]}
    write_values(tmp_path, "lr", report_values(1, **taught))
    write_values(tmp_path, "lr", report_values(2, **{**taught, **changes}))
    with pytest.raises(InputError, match="different settings"):
        read_arms(tmp_path)


def test_an_older_report_that_leaves_out_a_default_is_of_the_same_arm(tmp_path: Path) -> None:
    whole = TrainConfig(seed=2).model_dump(mode="json")
    write_values(tmp_path, "lr", report_values(1))
    write_values(tmp_path, "lr", report_values(2, routes={"count": 1, "choice": "late"}, train=whole))
    assert read_arms(tmp_path)["lr"].seeds == (1, 2)


def test_a_file_of_settings_that_names_no_model_is_of_the_one_it_is_named_after(
    prepared: PreparedData, tmp_path: Path, reports: Path
) -> None:
    table = Table1(prepared, tmp_path / "out", reports)
    (reports / "dcnv2.toml").write_text("[train]\nl2 = 0.5\n")
    config = table.baselines(["dcnv2"], 1)["dcnv2"].config
    assert (config.model, config.train.l2) == ("dcnv2", 0.5)
    (reports / "mine.toml").write_text("[train]\nl2 = 0.5\n")
    with pytest.raises(InputError, match="no model 'mine'"):
        table.baselines(["mine"], 1)


def test_baselines_are_calibrated_and_measured_as_recap_is(
    prepared: PreparedData, tmp_path: Path, reports: Path
) -> None:
    recipe = recipe_config("default", {"negative_rate": 0.1, "calibration": "isotonic"}, "test")
    config = Table1(prepared, tmp_path / "out", reports, recipe).baselines(["lr"], 1)["lr"].config
    assert (config.negative_rate, config.calibration) == (0.1, "isotonic")


@pytest.mark.slow
def test_a_finished_cell_of_another_sampling_is_measured_again(
    prepared: PreparedData, tmp_path: Path, reports: Path
) -> None:
    fulfil(request(prepared, tmp_path, models=("lr",)))
    weights = next((tmp_path / "out").rglob("lr-*/seed-1/best.safetensors")).stat().st_mtime_ns
    before = read_report(reports / "lr/seed-1")
    sampled = {**TINY, "negative_rate": 0.25}
    fulfil(request(prepared, tmp_path, models=("lr",), settings=sampled))
    after = read_report(reports / "lr/seed-1")
    assert after.negative_rate == 0.25
    assert after.metrics.on("test").raw.logloss != before.metrics.on("test").raw.logloss
    assert next((tmp_path / "out").rglob("lr-*/seed-1/best.safetensors")).stat().st_mtime_ns == weights
    assert set(read_arms(reports, data=prepared)) == {"lr"}
    values = after.to_json()
    write_values(reports, "lr", {**values, "data": {**values["data"], "fingerprint": "of other rows"}})
    assert read_arms(reports, data=prepared) == {}


def test_averaged_cells_have_a_label_of_their_own(
    prepared: PreparedData, tmp_path: Path, reports: Path
) -> None:
    costs = Table1(prepared, tmp_path, reports).costs(["lr"], 2, Treatment.AVERAGED)
    assert [(cost.label, cost.runs, cost.origin) for cost in costs] == [("lr-ema", 2, "guessed")]


def test_tuned_baselines_have_the_probes_of_recap(
    prepared: PreparedData, tmp_path: Path, reports: Path
) -> None:
    """The teachers' probe and the student's, at the recipe's own schedule; then runs with a label of their own."""
    recipe = recipe_config("default", {"train": {"batch_size": 512, "max_epochs": 3}}, "test")
    costs = Table1(prepared, tmp_path, reports, recipe).costs(["dnn"], 2, Treatment.TUNED)
    assert [(cost.label, cost.runs) for cost in costs] == [
        ("probe of dnn", 1),
        ("probe of dnn", 1),
        ("dnn-tuned", 2),
    ]


@pytest.mark.slow
def test_a_tuned_baseline_is_trained_as_its_probe_says(prepared: PreparedData, tmp_path: Path) -> None:
    probe = {"strengths": [1.0, 1e5], "rungs": [1], "refinements": [], "max_rows": 500}
    further = {"rate_factors": [], "horizon_factors": [], "dropouts": [], "dim_factors": [], "confirm": 0}
    settings = {
        "probe": {**probe, **further},
        "train": {"batch_size": 256, "max_epochs": 1},
        "student_factors": [1.0, 0.1],
    }
    text = fulfil(request(prepared, tmp_path, models=("lr",), settings=settings, treatment=Treatment.TUNED))
    report = read_report(tmp_path / "reports" / prepared.name / "lr-tuned/seed-1")
    probed = [read_json(path)["found"]["l2"] for path in (tmp_path / "out").rglob("probe-lr-*/probe.json")]
    assert [report.train.l2] == probed and report.train.ema_epochs
    assert "| LR | tuned | 1 |" in text and "tuned as RECAP is" in text
    assert set(read_arms(tmp_path / "reports" / prepared.name, Treatment.TUNED)) == {"lr"}
    assert read_arms(tmp_path / "reports" / prepared.name) == {}


def test_default_settings_are_not_called_published(prepared: PreparedData, tmp_path: Path) -> None:
    reports = tmp_path / "reports" / prepared.name
    table = Table1(prepared, tmp_path, reports, threads=2)
    config = table.missing(table.baselines(["lr"], 1))["lr"].config.with_seed(1)
    assert config.threads == 2 and config.train == TrainConfig(seed=1)
    data = {"name": prepared.name, "fingerprint": prepared.fingerprint}
    write_values(reports, "lr", report_values(1, data=data, train=config.train.model_dump(mode="json")))
    text = write_tables({prepared.name: reports}, tmp_path)
    assert "| LR | defaults | 1 |" in text and "no fair rival" in text
    (reports / "lr.toml").write_text('origin = "published"\n')
    text = write_tables({prepared.name: reports}, tmp_path)
    assert "| LR | published | 1 |" in text and "no fair rival" not in text


@pytest.mark.slow
def test_recap_is_a_student_of_the_recipe(prepared: PreparedData, tmp_path: Path) -> None:
    text = fulfil(request(prepared, tmp_path, models=("recap",)))
    report = read_report(tmp_path / "reports" / prepared.name / "recap/seed-1")
    assert report.model.name == "recap" and len(report.teachers) == TINY["teachers"]
    assert "| RECAP | tuned | 1 |" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"models": ("fcn", "nope")}, "no model nope"),
        ({"data": ("synthetic", "synthetic")}, "same name"),
        ({"table": "ablation"}, "belong to table1"),
        ({"table": "table9"}, "no table"),
    ],
)
def test_what_cannot_be_made_is_refused(
    prepared: PreparedData, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        fulfil(Request(**{**vars(request(prepared, tmp_path)), **changes}))
