"""The last stage of a fit: the chosen model learns from all rows; its figures stay those from before."""

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import recap_ctr
from recap_ctr.axes.logits import LogitTable
from recap_ctr.data.shards import PreparedData
from recap_ctr.evaluation import metrics
from recap_ctr.evaluation.calibrate import fit_affine
from recap_ctr.inference.artifact import is_same_model, read_artifact
from recap_ctr.jobs.executor import InThisProcess
from recap_ctr.recipe import portfolio, refit
from recap_ctr.recipe.choice import Choice
from recap_ctr.recipe.config import RecipeConfig
from recap_ctr.recipe.fit import FitResult, fit
from recap_ctr.recipe.refit import LastStage
from recap_ctr.recipe.work import Work
from recap_ctr.schema import Schema
from recap_ctr.training.report import read_report
from tests.support.tiny_recipe import TINY

SETTINGS: dict[str, Any] = {
    "model_settings": TINY["model_settings"],
    "teacher_settings": TINY["teacher_settings"],
    "portfolio": [],
    "l2": 0.01,
    "learning_rate": 0.002,
    "train": {"batch_size": 256, "max_epochs": 2},
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def log(click_log: pl.DataFrame, prepared: PreparedData) -> pl.DataFrame:
    """The click log, in which the ad `late` comes in held-out rows only, always with a click."""
    held_out = np.isin(np.arange(len(click_log)), np.concatenate([prepared.valid.rows, prepared.test.rows]))
    is_late = pl.Series(held_out & (np.arange(len(click_log)) % 5 == 0))
    return click_log.with_columns(
        pl.when(is_late).then(pl.lit("late")).otherwise("ad").alias("ad"),
        pl.when(is_late).then(1).otherwise("click").cast(click_log["click"].dtype).alias("click"),
    )


def fitted(log: pl.DataFrame, schema: Schema, out: Path, **arguments: Any) -> FitResult:
    settings = {**SETTINGS, **arguments.pop("settings", {})}
    executor = arguments.pop("executor", InThisProcess())
    return fit(log, schema=schema, out=out, settings=settings, threads=1, executor=executor, **arguments)


@pytest.fixture(scope="module")
def done(log: pl.DataFrame, click_schema: Schema, tmp_path_factory: pytest.TempPathFactory) -> FitResult:
    return fitted(log, click_schema, tmp_path_factory.mktemp("refit") / "fit", keep_state=True)


def held_out_losses(result: FitResult, log: pl.DataFrame) -> tuple[float, float]:
    """Return the logloss of the measured model and of the shipped one on the test rows."""
    data, report = result.data, result.report
    rows = log[data.test.rows.tolist()]
    shipped = recap_ctr.predict(result.load(), rows.drop("click"))["score"].to_numpy()
    tables = result.out / report.student / "logits" / "test"
    measured = report.metrics.on("test").calibrated.logloss
    assert len(LogitTable(tables)) == len(rows)
    return measured, metrics.logloss(rows["click"].to_numpy(), metrics.logit(shipped))


def test_what_ships_has_learnt_from_all_rows(done: FitResult, log: pl.DataFrame) -> None:
    summary = done.report.refit
    assert summary is not None and summary.rows == len(log) and summary.added["ad"] == 1
    measured, shipped = held_out_losses(done, log)
    assert shipped < measured, "it has seen these rows by now"
    late = log.filter(pl.col("ad") == "late").drop("click")
    known, unknown = (
        recap_ctr.predict(done.load(), late.with_columns(ad=pl.lit(ad)))["score"].to_numpy()
        for ad in ("late", "never")
    )
    assert known.mean() > unknown.mean(), "a value of the held-out rows has a vector of its own"


def test_teachers_learn_from_all_rows_first(
    log: pl.DataFrame, click_schema: Schema, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        portfolio, "choose_shipped", lambda data, students, others: Choice(next(iter(students)), None)
    )
    monkeypatch.setattr(portfolio, "prefer_simple", lambda choice, *_: choice)
    done = fitted(log, click_schema, tmp_path / "fit")
    assert done.report.refit is not None and done.report.refit.teachers == 1
    assert "after its teacher" in done.summary
    directory = done.out / done.report.refit.directory
    [teacher] = directory.glob("teacher-*")
    whole = LogitTable(teacher / "logits" / "train")
    measured = LogitTable(done.out / teacher.name.removeprefix("teacher-") / "logits" / "valid")
    rows = np.flatnonzero(np.isin(whole.rows_N, measured.rows_N))
    losses = [
        metrics.logloss(done.data.valid.labels, logits)
        for logits in (whole.logits_NM[rows, 0], measured.logits_NM[:, 0])
    ]
    assert losses[0] < losses[1], "it has learned from these rows by now"


@pytest.mark.parametrize(("seconds", "learn"), [(1e-9, False), (1e9, True)])
def test_without_time_for_them_teachers_stay_as_they_were(
    seconds: float, learn: bool, prepared: PreparedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was decided stays decided when the same command runs again."""
    stage = LastStage(Work(RecipeConfig(), prepared, tmp_path, budget=1.0), None, {})
    monkeypatch.setattr(stage, "teachers_of", lambda _: [tmp_path / "teacher"])
    monkeypatch.setattr(stage, "runs_of", lambda _: [])
    monkeypatch.setattr(stage, "teacher_seconds", lambda _: 30.0)
    monkeypatch.setattr(stage, "seconds", lambda _: 5.0)
    monkeypatch.setattr(stage.work.clock, "until", lambda *_: seconds)
    assert stage.teachers_learn(tmp_path / "student") is learn
    later = LastStage(Work(RecipeConfig(), prepared, tmp_path, budget=1.0), None, {})
    assert later.teachers_learn(tmp_path / "student") is learn


def test_the_figures_are_those_of_the_run_that_was_measured(done: FitResult) -> None:
    measured = read_report(done.out / done.report.student)
    assert done.report.metrics == measured.metrics
    manifest = read_artifact(done.artifact).manifest
    assert manifest["training"]["all_rows"] is True and manifest["data"]["rows"] == 3_000
    assert "no rows are left to measure it on" in done.summary
    assert "These figures are from before" in (done.artifact / "MODEL_CARD.md").read_text()


def test_calibration_is_that_of_the_measured_model_on_all_held_out_rows(done: FitResult) -> None:
    measured, shipped = (
        read_artifact(path).manifest for path in (done.out / done.report.student / "artifact", done.artifact)
    )
    held_out = {"valid": done.data.valid, "test": done.data.test}
    tables = done.out / done.report.student / "logits"
    logits = np.concatenate([LogitTable(tables / split).logits_NM[:, 0] for split in held_out])
    labels = np.concatenate([shard.labels for shard in held_out.values()])
    expected = fit_affine(labels, logits)
    assert shipped["calibration"]["scale"] == pytest.approx(expected.scale, rel=1e-4)
    assert shipped["calibration"]["shift"] == pytest.approx(expected.shift, rel=1e-4)
    assert shipped["calibration"]["scale"] != pytest.approx(measured["calibration"]["scale"], rel=1e-3)
    for before, after in zip(measured["dial"], shipped["dial"], strict=True):
        assert before["calibration"] != after["calibration"]
        assert {**before, "calibration": None} == {**after, "calibration": None}


def test_again_nothing_is_trained_or_written(
    done: FitResult, log: pl.DataFrame, click_schema: Schema
) -> None:
    files = {path: path.stat().st_mtime_ns for path in done.out.rglob("*.safetensors")}
    again = fitted(log, click_schema, done.out, keep_state=True)
    assert again.report.refit == done.report.refit
    assert {path: path.stat().st_mtime_ns for path in done.out.rglob("*.safetensors")} == files


def test_an_update_goes_on_from_all_rows(done: FitResult, log: pl.DataFrame, tmp_path: Path) -> None:
    rows = log.sample(600, seed=1).with_columns(row=pl.int_range(600) + 10_000)
    result = recap_ctr.update(done.out, rows, out=tmp_path / "next", settings={"passes": 1})
    assert result.report.rows["trained"] == 480, "no rows of the fit were left to train on"
    assert "late" not in result.report.added


def test_an_update_knows_a_hashed_field_that_is_spelt_otherwise(
    log: pl.DataFrame, click_schema: Schema, tmp_path: Path
) -> None:
    """No rows are pending after the last stage, so what buckets held before is kept beside them."""
    hashed = {"site": {"hash_buckets": 2_000}}
    fields = tuple(field.model_copy(update=hashed.get(field.name, {})) for field in click_schema.fields)
    schema = click_schema.model_copy(update={"fields": fields})
    result = fitted(log, schema, tmp_path / "fit", keep_state=True)
    assert result.report.refit is not None
    rows = log.sample(600, seed=1).with_columns(row=pl.int_range(600) + 10_000)
    respelt = rows.with_columns(pl.col("site").str.to_uppercase())
    said = [
        recap_ctr.update(result.out, new, out=tmp_path / name, settings={"passes": 1}).report.gate.reasons
        for name, new in (("same", rows), ("respelt", respelt))
    ]
    is_told = [any(reason.startswith("field 'site'") for reason in reasons) for reasons in said]
    assert is_told == [False, True]


def test_switched_off_the_measured_model_ships(
    log: pl.DataFrame, click_schema: Schema, tmp_path: Path
) -> None:
    result = fitted(log, click_schema, tmp_path / "fit", settings={"refit": False})
    assert result.report.refit is None and "no rows are left" not in result.summary
    assert is_same_model(result.artifact, result.out / result.report.student / "artifact")


def test_prepared_data_keep_their_vocabularies(prepared: PreparedData, tmp_path: Path) -> None:
    result = fit(prepared, out=tmp_path / "fit", settings=SETTINGS, threads=1, executor=InThisProcess())
    assert result.report.refit is not None and result.report.refit.added == {}
    assert read_artifact(result.artifact).encoder.layout == prepared.layout


def test_a_model_that_does_not_know_its_rows_does_not_ship(
    log: pl.DataFrame, click_schema: Schema, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refit, "TOLERANCE", 0.0)
    result = fitted(log, click_schema, tmp_path / "fit")
    assert result.report.refit is None
    assert any("did not get better" in what for what in result.report.plan["given_up"])
    assert is_same_model(result.artifact, result.out / result.report.student / "artifact")


class Interrupted(InThisProcess):
    """An executor that is interrupted once, before the jobs of the last stage."""

    is_over = False

    def run(self, jobs: Any, **arguments: Any) -> list[Any]:
        if arguments["title"] == refit.ALL_ROWS and not self.is_over:
            self.is_over = True
            raise KeyboardInterrupt
        return super().run(jobs, **arguments)


def test_interrupted_the_measured_model_is_there_and_the_rerun_goes_on(
    done: FitResult, log: pl.DataFrame, click_schema: Schema, tmp_path: Path
) -> None:
    executor = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        fitted(log, click_schema, tmp_path / "fit", executor=executor)
    assert "all_rows" not in read_artifact(tmp_path / "fit" / "artifact").manifest["training"]
    result = fitted(log, click_schema, tmp_path / "fit", executor=executor)
    assert result.report.metrics == done.report.metrics
    first, second = (
        recap_ctr.predict(each.load(), log.head(50).drop("click"))["score"] for each in (done, result)
    )
    assert first.equals(second)
