"""The forecast: its intervals over simulated runs, its choice, and the way from a forecast to a finished fit."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recap_ctr.axes.logits import Estimator, LogitTable, LogitWriter
from recap_ctr.data.shards import PreparedData
from recap_ctr.diagnose import Cube, Estimate, curve
from recap_ctr.diagnose.results import AxisChoice
from recap_ctr.errors import InputError
from recap_ctr.evaluation.metrics import logloss, sigmoid
from recap_ctr.pages.forecast import forecast_sentences
from recap_ctr.recipe.fit import MARK
from recap_ctr.recipe.forecast import (
    check_forecast,
    choose,
    compare,
    forecast,
    gain_scatter,
    with_run_interval,
    worth_of_arms,
    worth_of_runs,
)
from recap_ctr.storage.claims import take
from recap_ctr.training.report import FitReport
from tests.conftest import Recap
from tests.support.tiny_recipe import tiny_recipe

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_process")]

TINY = {"train": {"batch_size": 256, "max_epochs": 2}, "l2": 0.01}


def axis_choice(count: int, loss: float, minutes: float = 1.0, *, noise: float = 0.0) -> AxisChoice:
    gain = Estimate(0.3 - loss, 0.3 - loss - noise, 0.3 - loss + noise)
    return AxisChoice(count, Estimate(loss, loss, loss), None, gain, minutes, 10, 1.0)


@pytest.mark.parametrize("runs", [2, 3])
def test_the_interval_holds_what_five_runs_measure(runs: int) -> None:
    """Runs are the truth plus random functions of rank 40, whose strength differs from run to run a little."""
    rng, rows, rank, inside = np.random.default_rng(7), 2_000, 40, []
    truth_N = rng.normal(size=rows)
    labels_N = rng.random(rows) < sigmoid(truth_N)
    for _ in range(60):
        shapes_RN = rng.normal(size=(rank, rows)) / np.sqrt(rank)
        noise_NM = (rng.normal(size=(5, rank)) @ shapes_RN * rng.uniform(0.25, 0.35, (5, 1))).T
        logits_NM = truth_N[:, None] + noise_NM
        cube = Cube.from_array(logits_NM[:, :runs, None, None])
        gains = curve(cube, labels_N, "run")
        alone = [logloss(labels_N, logits_NM[:, index]) for index in range(runs)]
        loss = with_run_interval(gains.forecast[4].loss, alone, 5, gain_scatter(gains, 5))
        assert loss.runs_low is not None and loss.runs_high is not None
        inside.append(loss.runs_low <= logloss(labels_N, logits_NM.mean(axis=1)) <= loss.runs_high)
    assert np.mean(inside) >= 0.9


def test_an_interval_grows_to_where_more_disagreement_would_take_it() -> None:
    loss = with_run_interval(Estimate(0.30, 0.29, 0.31), [0.32, 0.32], 5, (0.5, 3.0))
    assert (loss.runs_low, loss.runs_high) == pytest.approx((0.30 - 0.04, 0.30 + 0.01))
    auc = with_run_interval(Estimate(0.92, 0.9, 0.94), [0.90, 0.90], 5, (0.5, 3.0))
    assert (auc.runs_low, auc.runs_high) == pytest.approx((0.92 - 0.01, 0.92 + 0.04))
    level = with_run_interval(Estimate(0.30, 0.29, 0.31), [0.30, 0.32], 10**9, (1.0, 1.0))
    assert level.runs_high == pytest.approx(0.30 + 12.706 * 0.01, rel=1e-3)  # Student's t of one difference


def test_a_teacher_must_be_worth_its_minutes_and_fit_the_budget() -> None:
    teachers = [axis_choice(count, 0.3 + 0.0021 / count, minutes=5.0 * count) for count in range(1, 17)]
    routes = [axis_choice(1, 0.3), axis_choice(2, 0.2999), axis_choice(4, 0.29981), axis_choice(8, 0.2998)]
    free = choose(teachers, routes, 4.0, None)
    # The fifth teacher saves 0.000105, the sixth 0.00007.
    assert free == {"teachers": 5, "routes": 4, "minutes": 25.0}
    assert choose(teachers, routes, 4.0, 16.0)["teachers"] == 3
    assert choose(teachers, routes, 4.0, 6.0) == {"teachers": 0, "routes": 4, "minutes": 4.0}
    assert (
        choose(teachers, [axis_choice(1, 0.3), axis_choice(8, 0.2999, noise=0.0002)], 4.0, None)["routes"]
        == 1
    )


def test_sampled_negatives_are_corrected_for(prepared: PreparedData, tmp_path: Path) -> None:
    """Losses are those of the whole log: logits are shifted, and negatives count for the dropped ones too."""
    valid, rng, rate = prepared.valid, np.random.default_rng(3), 0.1
    level = rng.normal(size=len(valid))
    logits_NM = (level[:, None] + 0.1 * rng.normal(size=(len(valid), 2))).astype(np.float32)
    tables = []
    for index, name in enumerate(("first", "second")):
        with LogitWriter(tmp_path / name, prepared, "valid", [Estimator(name)]) as writer:
            writer.write(logits_NM[:, index : index + 1])
        tables.append(LogitTable(tmp_path / name))
    weights = np.where(np.asarray(valid.labels) == 1, 1.0, 1 / rate)
    worths = worth_of_runs(tables, valid, rate)
    shifted = logits_NM.astype(np.float64) + np.log(rate)
    alone = np.mean([logloss(valid.labels, column, weights) for column in shifted.T])
    together = logloss(valid.labels, shifted.mean(axis=1), weights)
    assert worths[0].loss.value == pytest.approx(alone, abs=1e-6)
    assert worths[1].gain.value == pytest.approx(alone - together, rel=0.05)
    loss, _, gain = compare(valid, logits_NM[:, 1], logits_NM[:, 0], rate)
    assert loss.value == pytest.approx(logloss(valid.labels, shifted[:, 1], weights), abs=1e-6)
    assert gain.value == pytest.approx(logloss(valid.labels, shifted[:, 0], weights) - loss.value, abs=1e-6)


def test_differences_are_those_of_the_same_rows(prepared: PreparedData) -> None:
    valid = prepared.valid
    rng = np.random.default_rng(0)
    base = rng.normal(size=len(valid))
    loss, auc, gain = compare(valid, base, base, 1.0)
    assert gain == Estimate(0.0, 0.0, 0.0)
    assert loss.low == loss.value == loss.high and auc.low == auc.high
    other = base + 0.1 * rng.normal(size=len(valid))
    near, _, gain = compare(valid, other, base, 1.0)
    far, _, _ = compare(valid, rng.normal(size=len(valid)), base, 1.0)
    assert 0 < near.high - near.low < far.high - far.low
    assert near.value == pytest.approx(logloss(valid.labels, other))
    assert gain.value == pytest.approx(loss.value - near.value)


@pytest.fixture(scope="module")
def planned(prepared: PreparedData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a recipe with a forecast."""
    out = tmp_path_factory.mktemp("plan") / "model"
    recipe = tiny_recipe(prepared, out, **TINY, teachers=3, probe={"dropouts": []})
    take(out, MARK)  # as the commands do
    result = forecast(recipe, runs=2, max_teachers=4)  # Those that are recommended will be trained.
    assert [choice.count for choice in result.teachers] == [1, 2, 3, 4]
    assert [choice.count for choice in result.routes][:3] == [1, 2, 4]
    assert result.teachers[3].parameters == 4 * result.teachers[0].parameters
    assert result.teachers[0].minutes <= result.teachers[2].minutes <= result.teachers[3].minutes
    sentences = forecast_sentences(result)
    assert "From 2 runs" in sentences[0] and any("Recommended" in sentence for sentence in sentences)
    assert any("not known before the student is trained" in sentence for sentence in sentences)
    return out


def test_the_probes_arms_are_estimators(prepared: PreparedData, tmp_path: Path) -> None:
    few = {"strengths": [1.0, 10.0, 100.0, 1000.0, 1e4], "rungs": [1], "refinements": [], "rate_factors": []}
    further: dict[str, Any] = {"horizon_factors": [], "dropouts": [], "dim_factors": [], "extend": 0}
    recipe = tiny_recipe(
        prepared, tmp_path, l2=None, train=TINY["train"], probe={**few, **further}, teachers=2
    )
    assert worth_of_arms(recipe) is None  # nothing is probed yet
    recipe.plan()
    arms = worth_of_arms(recipe)

    record = json.loads((recipe.probe_directory / "probe.json").read_text())
    ranked = sorted(record["arms"], key=lambda arm: -max(arm["valid_auc"]))
    names = tuple(f"l2={arm['l2']:.3g},learning_rate=0.001" for arm in ranked[:2])  # of five
    best, second = (
        LogitTable(recipe.probe_directory / "arms" / name / "valid").logits_NM[:, 0].astype(np.float64)
        for name in names
    )
    labels = prepared.valid.labels
    assert arms is not None
    assert arms.names == names
    assert arms.rows == len(prepared.train)
    assert [worth.count for worth in arms.means] == [1, 2]
    assert arms.means[0].gain.value == 0
    together = logloss(labels, (best + second) / 2)
    assert arms.means[1].loss.value == pytest.approx(together)
    assert arms.means[1].gain.value == pytest.approx(logloss(labels, best) - together)
    alone = (logloss(labels, best) + logloss(labels, second)) / 2
    assert arms.forecast[1].gain.value == pytest.approx(alone - together, rel=0.1)  # Eq. 6

    with_l2 = tiny_recipe(prepared, tmp_path, **TINY, probe={**few, **further}, teachers=2)
    assert worth_of_arms(with_l2) is None  # l2 is set: whatever was probed isn't this recipe's


def test_the_recipe_goes_on_from_the_forecast_and_checks_it(planned: Path, prepared: PreparedData) -> None:
    runs = {path: path.stat().st_mtime_ns for path in planned.rglob("best.safetensors")}
    assert len(runs) == 3  # two teachers, one student

    report = tiny_recipe(prepared, planned, **TINY, teachers=3, probe={"dropouts": []}).run()

    kept = {path: path.stat().st_mtime_ns for path in planned.rglob("best.safetensors")}
    assert {path: kept[path] for path in runs} == runs
    assert len(report.teacher_runs) == 3
    sentences = check_forecast(planned, report)
    record = json.loads((planned / "forecast.json").read_text())
    measured = report.ensembles[2].metrics.valid.raw.logloss
    expected = record["teachers"][2]["loss"]
    inside = expected["runs_low"] <= measured <= expected["runs_high"]
    assert sentences[0].startswith("logloss of 3 teachers") and f"{measured:.5f}" in sentences[0]
    assert sentences[0].endswith(": inside." if inside else ": outside.")
    assert check_forecast(planned / "elsewhere", report) == []


@pytest.mark.parametrize(
    ("part", "other"),
    [("data", {"fingerprint": "x"}), ("plan", {"l2": 9.0}), ("recipe", {"teacher_model": "qnn"})],
)
def test_a_forecast_of_other_teachers_is_not_checked(
    part: str, other: dict[str, Any], planned: Path, prepared: PreparedData
) -> None:
    report = tiny_recipe(prepared, planned, **TINY, teachers=3, probe={"dropouts": []}).run()
    values = report.to_json()
    changed = FitReport.model_validate({**values, part: {**values[part], **other}})
    assert check_forecast(planned, report)
    assert check_forecast(planned, changed) == []


def test_fit_keeps_to_the_recommendation(planned: Path, prepared: PreparedData, recap: Recap) -> None:
    choice = json.loads((planned / "forecast.json").read_text())["choice"]
    plans = set(planned.glob("plan-*"))
    done = recap("fit", prepared.path, "--config", planned / "recommended.toml", "--out", planned)
    assert done.code == 0, done.err
    assert set(planned.glob("plan-*")) == plans  # the recorded plan was found
    report: dict[str, Any] = json.loads((planned / "report.json").read_text())
    assert len(report["teacher_runs"]) == choice["teachers"]


def test_the_plan_command_ends_with_sentences_and_the_next_step(
    planned: Path, prepared: PreparedData, recap: Recap, tmp_path: Path
) -> None:
    settings = tmp_path / "recipe.toml"
    settings.write_text(
        "l2 = 0.01\n[model_settings]\ndim = 4\n[teacher_settings]\ndim = 4\n"
        "[train]\nbatch_size = 1024\nmax_epochs = 1\n"
        "[probe]\nhorizon_factors = []\ndropouts = []\n",
        encoding="utf-8",
    )
    done = recap("plan", prepared.path, "--config", settings, "--out", tmp_path / "out", "--budget", "0.1")
    assert done.code == 0, done.err
    assert "mean of 16 teachers" in done.out and "student averaged, 8 routes" in done.out
    assert "Recommended:" in done.out
    assert "Next: recap fit" in done.err
    with pytest.raises(InputError, match="at least two runs"):
        forecast(tiny_recipe(prepared, planned, **TINY), runs=1)
