"""Table 1: which cells are run, which are left alone, and what the table says of them."""

import csv
import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import ttest_1samp, ttest_ind, ttest_rel

from recap_ctr.bench.request import Request, fulfil
from recap_ctr.bench.table1 import (
    ONE_ROUTE,
    Bench,
    best_two,
    cells,
    compare,
    detectable,
    holm,
    latex,
    markdown,
    read_arms,
    to_csv,
    write_tables,
)
from recap_ctr.bench.tables import Arm
from recap_ctr.config import TrainConfig
from recap_ctr.data.shards import PreparedData
from recap_ctr.errors import InputError
from recap_ctr.recipe.stages import recipe_config
from tests.bench.test_scaling import TINY

FAST = '[model]\nname = "{name}"\n[train]\nbatch_size = 256\nmax_epochs = 1\n'


def arm(name: str, *aucs: float, size: int = 100) -> Arm:
    figures = {
        "auc": aucs,
        "logloss": tuple(1 - x for x in aucs),
        "calibrated_logloss": tuple(1 - x for x in aucs),
    }
    return Arm(name, {}, tuple(range(1, len(aucs) + 1)), figures, parameters=size)


ARMS = {
    "lr": arm("LR", 0.70),
    "qnn": arm("QNN", 0.80, 0.802, 0.801),
    "fcn": arm("FCN", 0.79, 0.795, 0.792),
    "recap": arm("RECAP", 0.82, 0.823, 0.8205),
}


def test_ours_is_compared_pairwise_and_corrected() -> None:
    found = compare(ARMS)
    raw = {
        name: ttest_rel(ARMS["recap"].figures["auc"], ARMS[name].figures["auc"]).pvalue
        for name in ("qnn", "fcn")
    }
    smaller, larger = sorted(raw, key=lambda name: raw[name])

    assert found["lr"].p is None
    assert found["lr"].gap == pytest.approx(0.1211666, abs=1e-6)
    assert found[smaller].p == pytest.approx(2 * raw[smaller])
    assert found[larger].p == pytest.approx(max(raw[larger], 2 * raw[smaller]))
    assert found["fcn"].paired


def test_other_numbers_of_runs_are_compared_without_pairs() -> None:
    two = Arm("FCN", {}, (7, 8), {"auc": (0.79, 0.795)})
    found = compare({"fcn": two, "recap": ARMS["recap"]})
    assert not found["fcn"].paired
    assert found["fcn"].p is not None


def test_holm_never_lowers_and_never_exceeds_one() -> None:
    corrected = holm({"a": 0.5, "b": 0.001, "c": 0.02, "d": 0.9})
    assert corrected == pytest.approx({"b": 0.004, "c": 0.06, "a": 1.0, "d": 1.0})


@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_the_test_of_the_table_finds_a_detectable_difference_four_times_in_five(seeds: int) -> None:
    """Simulated: pairs whose differences have the deviation that the formula is given."""
    gaps = np.array([1.0, -1.0, *[0.0] * (seeds - 2)])
    gaps /= gaps.std(ddof=1)
    one = Arm("a", {}, tuple(range(seeds)), {"auc": tuple(0.5 + 0.01 * gaps)})
    least = detectable(one, Arm("b", {}, tuple(range(seeds)), {"auc": (0.4,) * seeds}))
    assert least is not None
    drawn = least + 0.01 * np.random.default_rng(0).normal(size=(20_000, seeds))
    found = ttest_1samp(drawn, 0.0, axis=1).pvalue < 0.05
    assert found.mean() == pytest.approx(0.8, abs=0.012)


def test_without_shared_seeds_the_detectable_difference_is_that_of_two_samples() -> None:
    one, other = arm("a", 0.80, 0.81, 0.82), Arm("b", {}, (7, 8, 9), {"auc": (0.70, 0.71, 0.72)})
    rng = np.random.default_rng(1)
    least = detectable(one, other)
    assert least is not None
    first, second = (at + 0.01 * rng.normal(size=(20_000, 3)) for at in (0.7, 0.7 + least))
    assert (ttest_ind(first, second, axis=1).pvalue < 0.05).mean() == pytest.approx(0.8, abs=0.012)
    assert detectable(one, arm("c", 0.7)) is None


def test_gap_and_p_are_of_the_same_seeds() -> None:
    fcn = arm("FCN", 0.79, 0.792, 0.90, 0.90, 0.90)
    ours = arm("RECAP", 0.80, 0.8021)
    found = compare({"fcn": fcn, "recap": ours})["fcn"]
    assert found.gap == pytest.approx(0.01005)  # not minus 0.055, which is of all seeds
    assert (found.paired, found.seeds) == (True, 2)
    assert found.p is not None and found.p < 0.01
    line = next(one for one in markdown("toy", {"fcn": fcn, "recap": ours}, "").splitlines() if "FCN" in one)
    assert "(2 seeds)" in line and "+1.005" in line


def test_the_star_is_of_the_one_test_against_the_best_baseline() -> None:
    """Its p needs no correction for the comparisons with others, of which the paper has none."""
    arms = {f"m{i}": arm(f"m{i}", 0.6, 0.7, 0.5) for i in range(30)}
    arms |= {"fcn": arm("FCN", 0.79, 0.79, 0.79), "recap": arm("RECAP", 0.80, 0.8021, 0.8012)}
    found = compare(arms)["fcn"]
    assert found.alone is not None and found.p is not None and found.alone < 0.01 < found.p
    assert "80.11*" in latex({"toy": arms}, "")


def test_no_model_that_takes_a_mark_is_left_out() -> None:
    text = latex({"toy": {"lcn": arm("LCN", 0.9), "recap": arm("RECAP", 0.8)}}, "")
    assert r"LCN & \textbf{0.1000} & \textbf{90.00}" in text and r"\underline{80.00}" in text


def test_best_is_bold_second_underlined_and_the_published_stands_beside() -> None:
    text = markdown("ml-1m", ARMS, "A title")
    lines = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("|")}
    assert "**82.117" in lines["RECAP"] and "<u>80.100" in lines["QNN"]
    assert lines["FCN"].endswith("| 90.74 | 0.3001 | 90.76 | 0.3015 |")
    assert (
        "Public log: what a run by the published settings printed" in text
        and "on another random split" in text
    )
    own = markdown("my-clicks", ARMS, "A title")
    assert "Published:" not in own and "Public log:" not in own
    assert "could detect" in text and "conditional" in text
    assert best_two(ARMS, "logloss") == ("recap", "qnn")


def test_latex_has_all_data_sets_side_by_side() -> None:
    text = latex({"one": ARMS, "two_2": {"fcn": ARMS["fcn"]}}, "A caption.")
    row = next(line for line in text.splitlines() if line.startswith("RECAP"))
    assert row.count("&") == 4 and row.count("--") == 2
    assert r"two\_2" in text and r"\underline{80.10}" in text


def test_csv_has_a_line_for_each_model() -> None:
    rows = list(csv.DictReader(io.StringIO(to_csv({"toy": ARMS}))))
    assert [row["model"] for row in rows] == list(ARMS)
    assert float(rows[2]["auc_mean"]) == pytest.approx(0.7923333)
    assert rows[0]["auc_sd"] == ""


@pytest.fixture
def reports(tmp_path: Path, prepared: PreparedData) -> Path:
    """A directory of settings, small enough for a test."""
    own = tmp_path / "reports" / prepared.name
    own.mkdir(parents=True)
    for name in ("lr", "dnn"):
        (own / f"{name}.toml").write_text(FAST.format(name=name))
    (own / "dnn.toml").write_text(FAST.format(name="dnn") + "\n", encoding="utf-8")
    return tmp_path / "reports"


def request(prepared: PreparedData, tmp_path: Path, **changes: Any) -> Request:
    own: dict[str, Any] = {"models": ("lr", "dnn"), "seeds": 1, "quiet": True, "given": TINY}
    return Request(
        "table1", (str(prepared.path),), tmp_path / "out", tmp_path / "reports", **{**own, **changes}
    )


def test_cells_are_files_and_none_is_done_twice(
    prepared: PreparedData, tmp_path: Path, reports: Path
) -> None:
    text = fulfil(request(prepared, tmp_path))
    own = reports / prepared.name
    kept = {path: path.stat().st_mtime_ns for path in own.glob("*/seed-*/report.json")}
    assert [path.parts[-3:-1] for path in sorted(kept)] == [("dnn", "seed-1"), ("lr", "seed-1")]
    assert (own / "table1.md").read_text() == text
    report = json.loads((own / "lr/seed-1/report.json").read_text())
    assert {"versions", "machine", "seconds", "train", "model"} <= set(report)

    assert "by the published training protocol" in text and "default settings" not in text
    shutil.rmtree(tmp_path / "out")  # reports are enough to know that a cell is done
    more = fulfil(request(prepared, tmp_path, seeds=2, models=("lr",)))
    assert all(path.stat().st_mtime_ns == before for path, before in kept.items())
    assert (own / "lr/seed-2/report.json").is_file()
    assert "| DNN | 1 |" in more and "| LR | 2 |" in more


def test_a_cell_with_other_settings_is_done_anew(
    prepared: PreparedData, tmp_path: Path, reports: Path
) -> None:
    fulfil(request(prepared, tmp_path, models=("lr",)))
    settings = reports / prepared.name / "lr.toml"
    settings.write_text(settings.read_text().replace("max_epochs = 1", "max_epochs = 2"))
    assert "lr: 1 missing" in fulfil(request(prepared, tmp_path, models=("lr",), dry_run=True))
    fulfil(request(prepared, tmp_path, models=("lr",)))
    report = json.loads((reports / prepared.name / "lr/seed-1/report.json").read_text())
    assert report["train"]["max_epochs"] == 2


def test_runs_of_other_settings_or_data_are_no_seeds_of_one_arm(
    prepared: PreparedData, tmp_path: Path, reports: Path
) -> None:
    fulfil(request(prepared, tmp_path, models=("lr",), seeds=2))
    second = reports / prepared.name / "lr/seed-2/report.json"
    known = json.loads(second.read_text())

    second.write_text(json.dumps({**known, "train": {**known["train"], "l2": 0.5}}))
    with pytest.raises(InputError, match="different settings: reports of lr/seed-1 and lr/seed-2"):
        read_arms(reports / prepared.name)

    second.unlink()
    other = reports / prepared.name / "dnn/seed-1/report.json"
    other.parent.mkdir(parents=True)
    model = {"name": "dnn", "config": {}}
    other.write_text(json.dumps({**known, "model": model, "data": {"fingerprint": "of other rows"}}))
    with pytest.raises(InputError, match="different data"):
        read_arms(reports / prepared.name)


def test_students_of_other_teachers_are_no_seeds_of_one_arm(tmp_path: Path) -> None:
    own: dict[str, Any] = {
        "data": {"fingerprint": "of these rows"}, "model": {"name": "lr", "config": {}},
        "train": TrainConfig().model_dump(mode="json"), "teachers": ["a", "b"],
    }  # fmt: skip
    others: tuple[dict[str, Any], ...] = (
        {"teachers": ["a"]}, {"routes": {"count": 2, "choice": "late"}}, {"negative_rate": 0.1},
        {"calibration": "isotonic"},
    )  # fmt: skip
    for other in others:
        for seed, changes in ((1, {}), (2, other)):
            path = tmp_path / "lr" / f"seed-{seed}" / "report.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({**own, "train": {**own["train"], "seed": seed}, **changes}))
        with pytest.raises(InputError, match="different settings"):
            read_arms(tmp_path)
    figures = {"raw": {"auc": 0.7, "logloss": 0.5}, "calibrated": {"logloss": 0.5}}
    whole = {**own, "metrics": {"test": figures}, "parameters": 7, "routes": ONE_ROUTE}
    for seed, left_out in ((1, {"routes"}), (2, set[str]())):
        record = {key: value for key, value in whole.items() if key not in left_out}
        path = tmp_path / "lr" / f"seed-{seed}" / "report.json"
        path.write_text(json.dumps({**record, "train": {**own["train"], "seed": seed}}))
    assert read_arms(tmp_path)["lr"].seeds == (1, 2), "a record of before is as by default"


def test_a_file_of_settings_that_names_no_model_is_of_the_one_it_is_named_after(
    prepared: PreparedData, reports: Path
) -> None:
    own = reports / prepared.name
    (own / "dcnv2.toml").write_text("[train]\nl2 = 0.5\n")
    (cell,) = cells(prepared, ["dcnv2"], [1], own)
    assert (cell.config.model, cell.config.train.l2) == ("dcnv2", 0.5)
    (own / "mine.toml").write_text("[train]\nl2 = 0.5\n")
    with pytest.raises(InputError, match="no model 'mine'"):
        cells(prepared, ["mine"], [1], own)


def test_baselines_are_calibrated_and_measured_as_recap_is(prepared: PreparedData, reports: Path) -> None:
    recipe = recipe_config("default", {"negative_rate": 0.1, "calibration": "isotonic"}, "test")
    (cell,) = cells(prepared, ["lr"], [1], reports / prepared.name, recipe=recipe)
    assert (cell.config.negative_rate, cell.config.calibration) == (0.1, "isotonic")


def test_a_finished_cell_of_another_sampling_is_measured_anew(
    prepared: PreparedData, tmp_path: Path, reports: Path
) -> None:
    fulfil(request(prepared, tmp_path, models=("lr",), seeds=1))
    path = reports / prepared.name / "lr/seed-1/report.json"
    weights = next((tmp_path / "out").rglob("lr-*/seed-1/best.safetensors")).stat().st_mtime_ns
    before = json.loads(path.read_text())
    given = {**TINY, "negative_rate": 0.25}
    fulfil(request(prepared, tmp_path, models=("lr",), seeds=1, given=given))
    after = json.loads(path.read_text())
    assert after["negative_rate"] == 0.25
    assert after["metrics"]["test"]["raw"]["logloss"] != before["metrics"]["test"]["raw"]["logloss"]
    assert next((tmp_path / "out").rglob("lr-*/seed-1/best.safetensors")).stat().st_mtime_ns == weights
    assert set(read_arms(path.parents[2], data=prepared)) == {"lr"}
    path.write_text(json.dumps({**after, "data": {**after["data"], "fingerprint": "of other rows"}}))
    assert read_arms(path.parents[2], data=prepared) == {}


def test_averaged_cells_stand_apart(prepared: PreparedData, tmp_path: Path, reports: Path) -> None:
    (reports / prepared.name / "lr.toml").write_text(FAST.format(name="lr"))
    wanted = Bench(prepared, tmp_path, reports / prepared.name, reports / prepared.name).costs(
        ["lr"], 2, averaged=True
    )
    assert [(cost.label, cost.runs, cost.origin) for cost in wanted] == [("lr-ema", 2, "guessed")]


def test_default_settings_are_not_called_published(prepared: PreparedData, tmp_path: Path) -> None:
    quick = Bench(prepared, tmp_path, tmp_path / "reports" / prepared.name)
    one = quick.missing(cells(prepared, ["lr"], [1], None, threads=2))[0]
    assert one.config.threads == 2 and one.config.train == TrainConfig(seed=1)
    own = tmp_path / "reports" / prepared.name / "lr/seed-1"
    own.mkdir(parents=True)
    figures = {"raw": {"auc": 0.7, "logloss": 0.5}, "calibrated": {"logloss": 0.5}}
    report = {
        "data": {"fingerprint": prepared.fingerprint}, "train": one.config.train.model_dump(mode="json"),
        "model": {"name": "lr", "config": {}}, "parameters": 7, "metrics": {"test": figures},
    }  # fmt: skip
    (own / "report.json").write_text(json.dumps(report))
    text = write_tables({prepared.name: own.parents[1]}, tmp_path)
    assert "By default settings, for want of a MODEL.toml: LR" in text
    assert "published training protocol" not in text + (tmp_path / "table1.tex").read_text()


def test_recap_is_a_student_of_the_recipe(prepared: PreparedData, tmp_path: Path) -> None:
    text = fulfil(request(prepared, tmp_path, models=("recap",), seeds=1))
    report = json.loads((tmp_path / "reports" / prepared.name / "recap/seed-1/report.json").read_text())
    assert report["model"]["name"] == "recap" and len(report["teachers"]) == TINY["teachers"]
    assert "| RECAP | 1 |" in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"models": ("fcn", "nope")}, "no model nope"),
        ({"data": ("synthetic", "synthetic")}, "same name"),
    ],
)
def test_what_cannot_be_is_said(
    prepared: PreparedData, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    asked = request(prepared, tmp_path)
    with pytest.raises(InputError, match=message):
        fulfil(Request(**{**vars(asked), **changes}))
    with pytest.raises(InputError, match="belong to table1"):
        fulfil(Request(**{**vars(asked), "table": "ablation"}))
    with pytest.raises(InputError, match="no table"):
        fulfil(Request(**{**vars(asked), "table": "table9"}))
