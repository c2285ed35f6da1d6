"""The planner: its intervals over simulated runs, its choice, and the way from a forecast to a finished recipe."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recap_ctr.axes.logits import Estimator, LogitTable, LogitWriter
from recap_ctr.data.shards import PreparedData
from recap_ctr.diagnose import Cube, Estimate, curve
from recap_ctr.errors import InputError
from recap_ctr.evaluation.metrics import logloss, sigmoid
from recap_ctr.recipe import forecast as planner
from recap_ctr.recipe.forecast import (
    Arms,
    Forecast,
    Line,
    Worth,
    _scatter,
    check,
    choose,
    compared,
    forecast,
    of_arms,
    of_runs,
    over_runs,
    words,
)
from recap_ctr.storage.claims import take
from tests.bench.test_scaling import recipe
from tests.conftest import Recap

pytestmark = pytest.mark.usefixtures("one_process")

TINY = {"train": {"batch_size": 256, "max_epochs": 2}, "l2": 0.01}
ZERO = Estimate(0.0, 0.0, 0.0)


def line(count: int, loss: float, minutes: float = 1.0, *, noise: float = 0.0) -> Line:
    gain = Estimate(0.3 - loss, 0.3 - loss - noise, 0.3 - loss + noise)
    return Line(count, Estimate(loss, loss, loss), None, gain, minutes, 10, 1.0)


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
        seen = curve(cube, labels_N, "run")
        alone = [logloss(labels_N, logits_NM[:, i]) for i in range(runs)]
        found = over_runs(seen.forecast[4].loss, alone, 5, _scatter(seen, 5))
        assert found.runs_low is not None and found.runs_high is not None
        inside.append(found.runs_low <= logloss(labels_N, logits_NM.mean(axis=1)) <= found.runs_high)
    assert np.mean(inside) >= 0.9


def test_an_interval_grows_to_where_more_disagreement_would_take_it() -> None:
    loss = over_runs(Estimate(0.30, 0.29, 0.31), [0.32, 0.32], 5, (0.5, 3.0))
    assert (loss.runs_low, loss.runs_high) == pytest.approx((0.30 - 0.04, 0.30 + 0.01))
    auc = over_runs(Estimate(0.92, 0.9, 0.94), [0.90, 0.90], 5, (0.5, 3.0))
    assert (auc.runs_low, auc.runs_high) == pytest.approx((0.92 - 0.01, 0.92 + 0.04))
    level = over_runs(Estimate(0.30, 0.29, 0.31), [0.30, 0.32], 10**9, (1.0, 1.0))
    assert level.runs_high == pytest.approx(0.30 + 12.706 * 0.01, rel=1e-3)  # Student's t of one difference


def test_a_teacher_must_be_worth_its_minutes_and_fit_the_budget() -> None:
    teachers = [line(m, 0.3 + 0.0021 / m, minutes=5.0 * m) for m in range(1, 17)]
    routes = [line(1, 0.3), line(2, 0.2999), line(4, 0.29981), line(8, 0.2998)]
    free = choose(teachers, routes, 4.0, None)
    assert free == {
        "teachers": 5,
        "routes": 4,
        "minutes": 25.0,
    }  # the fifth saves 0.000105, the sixth 0.00007
    assert choose(teachers, routes, 4.0, 16.0)["teachers"] == 3
    assert choose(teachers, routes, 4.0, 6.0) == {"teachers": 0, "routes": 4, "minutes": 4.0}
    assert choose(teachers, [line(1, 0.3), line(8, 0.2999, noise=0.0002)], 4.0, None)["routes"] == 1


def test_sampled_negatives_are_corrected_for(prepared: PreparedData, tmp_path: Path) -> None:
    """Losses are those of the whole log: of shifted logits, and of negatives that count for those that were dropped."""
    valid, rng, rate = prepared.valid, np.random.default_rng(3), 0.1
    level = rng.normal(size=len(valid))
    logits_NM = (level[:, None] + 0.1 * rng.normal(size=(len(valid), 2))).astype(np.float32)
    tables = []
    for at in range(2):
        with LogitWriter(tmp_path / str(at), prepared, "valid", [Estimator(str(at))]) as writer:
            writer.write(logits_NM[:, at : at + 1])
        tables.append(LogitTable(tmp_path / str(at)))
    weights = np.where(np.asarray(valid.labels) == 1, 1.0, 1 / rate)
    found = of_runs(tables, valid, rate)
    shifted = logits_NM.astype(np.float64) + np.log(rate)
    alone = np.mean([logloss(valid.labels, shifted[:, at], weights) for at in range(2)])
    together = logloss(valid.labels, shifted.mean(axis=1), weights)
    assert found[0].loss.value == pytest.approx(alone, abs=1e-6)
    assert found[1].gain.value == pytest.approx(alone - together, rel=0.05)
    loss, _, gain = compared(valid, logits_NM[:, 1], logits_NM[:, 0], rate)
    assert loss.value == pytest.approx(logloss(valid.labels, shifted[:, 1], weights), abs=1e-6)
    assert gain.value == pytest.approx(logloss(valid.labels, shifted[:, 0], weights) - loss.value, abs=1e-6)


def test_differences_are_those_of_the_same_rows(prepared: PreparedData) -> None:
    valid = prepared.valid
    rng = np.random.default_rng(0)
    base = rng.normal(size=len(valid))
    loss, auc, gain = compared(valid, base, base, 1.0)
    assert gain == Estimate(0.0, 0.0, 0.0)
    assert loss.low == loss.value == loss.high and auc.low == auc.high
    other = base + 0.1 * rng.normal(size=len(valid))
    near, _, gain = compared(valid, other, base, 1.0)
    far, _, _ = compared(valid, rng.normal(size=len(valid)), base, 1.0)
    assert 0 < near.high - near.low < far.high - far.low
    assert near.value == pytest.approx(logloss(valid.labels, other))
    assert gain.value == pytest.approx(loss.value - near.value)


@pytest.fixture(scope="module")
def planned(one_process: None, prepared: PreparedData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    cooking = recipe(
        prepared, tmp_path_factory.mktemp("plan") / "model", **TINY, teachers=3, probe={"dropouts": []}
    )
    take(cooking.out, "recipe.json")  # as the commands do
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "TEACHERS", 4)  # those that are recommended will be trained
        found = forecast(cooking, runs=2)
    assert [one.count for one in found.teachers] == [1, 2, 3, 4]
    assert [one.count for one in found.routes][:3] == [1, 2, 4]
    assert found.teachers[3].parameters == 4 * found.teachers[0].parameters
    assert found.teachers[0].minutes <= found.teachers[2].minutes <= found.teachers[3].minutes
    said = words(found)
    assert "From 2 runs" in said[0] and any("Recommended" in one for one in said)
    assert any("not known before one is trained" in one for one in said)
    return cooking.out


def test_the_probes_arms_are_estimators(prepared: PreparedData, tmp_path: Path) -> None:
    few = {"strengths": [1.0, 10.0, 100.0, 1000.0, 1e4], "rungs": [1], "refinements": [], "rate_factors": []}
    further: dict[str, list[float]] = {"horizon_factors": [], "dropouts": [], "dim_factors": []}
    cooking = recipe(prepared, tmp_path, l2=None, train=TINY["train"], probe={**few, **further}, teachers=2)
    assert of_arms(cooking) is None  # nothing is probed yet
    cooking.plan()
    found = of_arms(cooking)

    probed = cooking.probe_directory
    ranked = sorted(
        json.loads((probed / "probe.json").read_text())["arms"], key=lambda one: -max(one["valid_auc"])
    )
    best, second = (
        LogitTable(probed / "arms" / f"l2={one['l2']:.3g},learning_rate=0.001" / "valid")
        .logits_NM[:, 0]
        .astype(np.float64)
        for one in ranked[:2]
    )
    labels = prepared.valid.labels
    assert found is not None
    assert found.names == tuple(f"l2={one['l2']:.3g},learning_rate=0.001" for one in ranked[:2])  # of five
    assert found.rows == len(prepared.train)
    assert [one.count for one in found.means] == [1, 2]
    assert found.means[0].gain.value == 0
    assert found.means[1].loss.value == pytest.approx(logloss(labels, (best + second) / 2))
    assert found.means[1].gain.value == pytest.approx(
        logloss(labels, best) - logloss(labels, (best + second) / 2)
    )
    alone = (logloss(labels, best) + logloss(labels, second)) / 2
    assert found.forecast[1].gain.value == pytest.approx(alone - found.means[1].loss.value, rel=0.1)  # Eq. 6

    given = recipe(prepared, tmp_path, **TINY, probe={**few, **further}, teachers=2)
    assert of_arms(given) is None  # l2 is given: whatever was probed isn't this recipe's


def test_words_set_the_probe_beside_the_teachers() -> None:
    def arms(saved: float) -> Arms:
        means = Worth(1, Estimate(0.32, 0.32, 0.32), None, ZERO), line(3, 0.32 - saved)
        return Arms(
            ("a", "b", "c"), 300_000, (means[0], replace(means[1], gain=Estimate(saved, 0, 1))), (line(1, 0.3),) * 5
        )  # fmt: skip

    lines = tuple(line(m, 0.3 + 0.0021 / m) for m in range(1, 17))
    choice = {"teachers": 5, "routes": 1, "minutes": 3.0}
    known = Forecast(2, 1000, lines, (line(1, 0.3),), (line(1, 0.31), line(1, 0.3)), None, choice, ())
    assert not any("probe's" in one for one in words(known))
    for saved, verb in ((0.001, "saves 0.00100"), (-0.002, "costs 0.00200")):
        said = words(replace(known, arms=arms(saved)))
        assert (
            f"3 better arms, trained on 300,000 rows each, are estimators, too: their mean {verb}" in said[1]
        )


def test_the_recipe_goes_on_from_the_forecast_and_checks_it(planned: Path, prepared: PreparedData) -> None:
    runs = {path: path.stat().st_mtime_ns for path in planned.rglob("best.safetensors")}
    assert len(runs) == 3  # two teachers, one student

    report = recipe(prepared, planned, **TINY, teachers=3, probe={"dropouts": []}).run()

    kept = {path: path.stat().st_mtime_ns for path in planned.rglob("best.safetensors")}
    assert {path: kept[path] for path in runs} == runs
    assert len(report["teacher_runs"]) == 3
    said = check(planned, report)
    record = json.loads((planned / "forecast.json").read_text())
    measured = report["ensembles"][2]["metrics"]["valid"]["raw"]
    expected = record["teachers"][2]["loss"]
    inside = expected["runs_low"] <= measured["logloss"] <= expected["runs_high"]
    assert said[0].startswith("logloss of 3 teachers") and f"{measured['logloss']:.5f}" in said[0]
    assert said[0].endswith(": inside." if inside else ": outside.")
    assert check(planned / "elsewhere", report) == []
    for part, other in (
        ("data", {"fingerprint": "x"}),
        ("plan", {"l2": 9.0}),
        ("recipe", {"teacher_model": "qnn"}),
    ):
        assert check(planned, {**report, part: {**report[part], **other}}) == []  # of other teachers


def test_fit_keeps_to_the_recommendation(planned: Path, prepared: PreparedData, recap: Recap) -> None:
    choice = json.loads((planned / "forecast.json").read_text())["choice"]
    plans = set(planned.glob("plan-*"))
    done = recap("fit", prepared.path, "--config", planned / "recommended.toml", "--out", planned)
    assert done.code == 0, done.err
    assert set(planned.glob("plan-*")) == plans  # the recorded plan was found
    report: dict[str, Any] = json.loads((planned / "report.json").read_text())
    assert len(report["teacher_runs"]) == choice["teachers"]


def test_plan_command_ends_in_words_and_the_next_step(
    planned: Path, prepared: PreparedData, recap: Recap, tmp_path: Path
) -> None:
    settings = tmp_path / "recipe.toml"
    settings.write_text(
        "l2 = 0.01\n[model_settings]\ndim = 4\n[teacher_settings]\ndim = 4\n"
        "[train]\nbatch_size = 1024\nmax_epochs = 1\n",
        encoding="utf-8",
    )
    done = recap("plan", prepared.path, "--config", settings, "--out", tmp_path / "out", "--budget", "0.1")
    assert done.code == 0, done.err
    assert "mean of 16 teachers" in done.out and "student averaged, 8 routes" in done.out
    assert "Recommended:" in done.out
    assert "Next: recap fit" in done.err
    with pytest.raises(InputError, match="two at least"):
        forecast(recipe(prepared, planned, **TINY), runs=1)
