"""The headline call: from a data frame, a file or prepared data to one model, and what it refuses."""

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import tomli_w

import recap_ctr
from recap_ctr.data.quality import repeated_rows
from recap_ctr.data.shards import PreparedData
from recap_ctr.errors import InputError
from recap_ctr.inference.scorer import Scorer
from recap_ctr.jobs.executor import InThisProcess
from recap_ctr.recipe.config import RecipeConfig
from recap_ctr.recipe.fit import FitResult, fit
from recap_ctr.training.report import FitReport, read_report
from tests.conftest import Recap, contents
from tests.support.tiny_recipe import TINY
from tests.support.trackers import FakeMlflow

CPU: dict[str, Any] = {"device": "cpu", "threads": 1, "executor": InThisProcess()}
NO_TEACHERS = {**TINY, "teachers": 0}


def is_whole(result: FitResult) -> None:
    """Check that a result names files that exist, and a report that can be read."""
    assert read_report(result.out) == result.report
    assert isinstance(result.report, FitReport)
    assert result.artifact == result.out / "artifact"
    assert result.page.is_file() and result.page.suffix == ".html"
    assert result.summary and result.forecast_check == []


@pytest.mark.slow
def test_a_data_frame_is_fitted_once_and_quietly(
    click_log: pl.DataFrame, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    frame, out = click_log.drop("row"), tmp_path / "model"
    result = fit(frame, label="click", out=out, settings=NO_TEACHERS, **CPU)
    is_whole(result)
    assert (out / "schema.toml").is_file()
    assert len(result.data.train) + len(result.data.valid) + len(result.data.test) == len(frame)
    scores = result.load().score_frame(frame.drop("click").head(5))
    assert scores.shape == (5,) and ((scores > 0) & (scores < 1)).all()

    trained = {name: when for name, (_, when) in contents(out).items() if name.endswith(".safetensors")}
    again = fit(frame, label="click", out=out, settings=NO_TEACHERS, **CPU)
    assert again.report == result.report
    after = {name: when for name, (_, when) in contents(out).items() if name.endswith(".safetensors")}
    assert after == trained
    assert capfd.readouterr() == ("", "")


class InterruptedTrees(InThisProcess):
    """An executor that is interrupted before it trains trees, when the regression is there."""

    def run(self, jobs: Any, **arguments: Any) -> list[Any]:
        named = list(jobs)
        for at, job in enumerate(named):
            if job.name.startswith("LightGBM"):
                super().run(named[:at], **arguments)
                raise KeyboardInterrupt
        return super().run(named, **arguments)


@pytest.mark.slow
@pytest.mark.parametrize("teachers", [0, None])
def test_an_interrupted_fit_has_a_page(prepared: PreparedData, tmp_path: Path, teachers: int | None) -> None:
    out, kinds = tmp_path / "model", ("model_settings", "teacher_settings", "train")
    settings = {kind: TINY[kind] for kind in kinds} | ({} if teachers is None else {"teachers": teachers})
    options = {**CPU, "executor": InterruptedTrees(), "command": "recap fit data"}
    with pytest.raises(KeyboardInterrupt):
        fit(prepared, out=out, settings=settings, **options)
    report = read_report(out)
    assert isinstance(report, FitReport) and report.interrupted and report.command == "recap fit data"
    html = (out / "report.html").read_text()
    assert "The fit was interrupted, and this is the best model so far." in html
    assert "recap fit data" in html and report.data.fingerprint in html
    assert Scorer.load(out / "artifact")


@pytest.mark.slow
def test_a_file_is_fitted_by_its_path_with_a_config_file(
    click_log: pl.DataFrame, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, config = tmp_path / "my clicks.csv", tmp_path / "recipe.toml"
    click_log.drop("row").write_csv(log)
    config.write_text(tomli_w.dumps({**TINY, "teachers": 3}))
    result = fit(
        log,
        label="click",
        out=str(tmp_path / "model"),
        config=str(config),
        settings={"teachers": 0, "train": {"batch_size": 512}},
        quiet=False,
        **CPU,
    )
    is_whole(result)
    assert re.fullmatch(r"my-clicks-[0-9a-f]{10}", result.data.path.name)
    assert result.report.teacher_runs == {}
    assert result.report.train.batch_size == 512 and result.report.train.max_epochs == 1
    messages = capsys.readouterr().err
    assert "fields, inferred" in messages and "data: prepared; rows: " in messages


@pytest.mark.slow
def test_a_log_with_a_timestamp_is_fitted_by_time_and_scored_by_its_raw_column(
    click_log: pl.DataFrame, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moments = 1_650_000_000_000 + 1_000_000 * np.arange(click_log.height)
    log = click_log.drop("row").with_columns(ts=moments)
    result = fit(log, label="click", out=tmp_path / "model", settings=NO_TEACHERS, quiet=False, **CPU)
    assert result.data.train.rows.tolist() == list(range(len(result.data.train)))
    assert result.report.data.split == result.data.split
    assert str(result.data.split).startswith("by time; train until 2022-05-12 ")
    assert f"split: {result.data.split}" in capsys.readouterr().err
    assert str(result.data.split) in result.page.read_text()
    derived = {field.name: field.source for field in result.data.schema.fields if field.derive}
    assert derived == {"ts_hour": "ts", "ts_weekday": "ts"}

    scorer, rows = result.load(), log.drop("click").head(200)
    scores = scorer.score_frame(rows)
    dates = rows.with_columns(pl.from_epoch("ts", "ms"))
    np.testing.assert_array_equal(scorer.score_frame(dates), scores)
    moved = rows.rename({"ts": "moment"})
    with pytest.raises(
        InputError, match=r"no column 'ts' \(field \d+ of \d+.*\n.*'moment'\n.*--map ts=moment"
    ):
        scorer.score_frame(moved)
    mapped = Scorer(scorer.engine, {"ts": "moment"})
    np.testing.assert_array_equal(mapped.score_frame(moved), scores)
    with pytest.raises(InputError, match="no field 'ts_hour', which --map names"):
        Scorer(scorer.engine, {"ts_hour": "moment"})


@pytest.mark.slow
def test_a_timestamp_with_gaps_is_named_as_the_reason_for_a_random_split(
    click_log: pl.DataFrame, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moments = 1_650_000_000 + 1_000 * pl.int_range(pl.len())
    log = click_log.drop("row").with_columns(ts=pl.when(pl.int_range(pl.len()) % 100 != 5).then(moments))
    result = fit(log, label="click", out=tmp_path / "model", settings=NO_TEACHERS, quiet=False, **CPU)
    note = "The rows were split at random, NOT by time: 'ts' has no time in 30 of 3,000 rows (1.0%)."
    assert note in capsys.readouterr().err
    assert str(result.report.to_json()["data"]["split_note"]).startswith(note)
    assert note in result.summary and "drop those rows or fill in their times" in result.summary
    assert note.replace("'", "&#x27;") in result.page.read_text()
    with pytest.raises(InputError, match="can't be split by time: 'ts' has no time in 30 of 3,000 rows"):
        fit(log, label="click", out=tmp_path / "other", split="time", settings=NO_TEACHERS, **CPU)


@pytest.mark.slow
def test_prepared_data_are_fitted_as_they_are(prepared: PreparedData, tmp_path: Path) -> None:
    result = fit(prepared, out=tmp_path / "model", config=RecipeConfig(**TINY), **CPU)
    is_whole(result)
    assert result.data is prepared
    assert len(result.report.teacher_runs) == 1
    by_path = fit(prepared.path, out=tmp_path / "model", config=RecipeConfig(**TINY), **CPU)
    assert by_path.report == result.report
    assert sorted(path.name for path in (tmp_path / "model").glob("student-*")) == [
        Path(result.report.student).name
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        *({"label": "click"}, {"schema": "schema.toml"}, {"split": "time"}, {"positive": "yes"}),
        *({"weight": "w"}, {"group": "user"}, {"separator": ";"}, {"drop_unlabelled": True}),
    ],
)
def test_what_is_for_raw_rows_does_not_go_with_prepared_data(
    arguments: dict[str, Any], prepared: PreparedData, tmp_path: Path
) -> None:
    for data in (prepared, prepared.path, [prepared.path]):
        with pytest.raises(InputError, match=r"--label, --schema and --split are for raw files"):
            fit(data, out=tmp_path / "model", **arguments)


@pytest.mark.slow
def test_raw_rows_as_users_have_them(
    click_log: pl.DataFrame, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = pl.col("click").replace_strict({1: "Buy", 0: "view"}, return_dtype=pl.String)
    is_labelled = pl.int_range(pl.len()) % 10 != 3
    log = click_log.drop("row").with_columns(
        click=pl.when(is_labelled).then(words), importance=1.0 + pl.int_range(pl.len()) % 2
    )
    log.drop("tags").write_csv(tmp_path / "log.csv", separator="~")
    result = fit(
        tmp_path / "log.csv",
        label="click",
        positive="buy",
        weight="importance",
        group="user",
        separator="~",
        drop_unlabelled=True,
        out=tmp_path / "model",
        settings=NO_TEACHERS,
        quiet=False,
        **CPU,
    )
    schema = result.data.schema
    assert (schema.positive, schema.weight, schema.group, schema.separator) == (
        "buy",
        "importance",
        "user",
        "~",
    )
    assert result.report.metrics.held_out.raw.group_auc is not None
    assert result.report.repeated == repeated_rows(result.data)
    said = capsys.readouterr().err
    assert f"{len(log) // 10:,} rows without a label were dropped." in said

    # What the schema says of labels and columns holds for later rows, too.
    labelled = log.filter(is_labelled).drop("tags")
    labelled.write_csv(tmp_path / "fresh.csv", separator="~")
    evaluation = recap_ctr.evaluate(result.artifact, tmp_path / "fresh.csv")
    assert evaluation.base_rate == pytest.approx(
        np.average((labelled["click"] == "Buy").to_numpy(), weights=labelled["importance"].to_numpy())
    )
    with pytest.raises(InputError, match="row 4: the label 'click' is missing"):
        recap_ctr.evaluate(result.artifact, tmp_path / "log.csv")


@pytest.mark.slow
def test_what_was_recognised_and_left_out_is_said(
    click_log: pl.DataFrame, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = click_log.drop("row").with_columns(
        click=pl.col("click").replace_strict({1: "yes", 0: "no"}, return_dtype=pl.String),
        price=pl.col("price").cast(pl.String).str.replace(".", ",", literal=True),
    )
    (tmp_path / "logs" / "day=1").mkdir(parents=True)
    log.drop("tags").write_csv(tmp_path / "logs" / "day=1" / "part.csv", separator="\t")
    result = fit(
        tmp_path / "logs", label="click", out=tmp_path / "out", settings=NO_TEACHERS, quiet=False, **CPU
    )
    assert (result.data.schema.positive, result.data.schema.negative) == ("yes", "no")
    said = capsys.readouterr().err
    assert "label 'click': 'yes' counts as a click; pass --positive to choose\n" in said
    assert "day=1/part.csv: the columns are separated by tabs, and are read that way\n" in said
    assert "left out: 'price' (numbers with commas), 'day' (constant)" in said


@pytest.mark.parametrize("key", ["positive", "weight", "group", "separator"])
def test_a_schema_says_it_all(key: str, click_log: pl.DataFrame, tmp_path: Path) -> None:
    schema = recap_ctr.Schema(label="click", fields=(recap_ctr.Field(name="ad", kind="categorical"),))
    options: dict[str, Any] = {key: "x"}
    with pytest.raises(InputError, match=f'--{key} is for a schema that is inferred.*\n.*write {key} = "x"'):
        fit(click_log, schema=schema, out=tmp_path / "model", **options)


def test_raw_rows_need_a_label_or_a_schema(click_log: pl.DataFrame, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="raw rows need a label or a schema"):
        fit(click_log, out=tmp_path / "model")


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for data, name in (("-", "standard input"), (pipe, str(pipe)), (["-"], "standard input")):
        with pytest.raises(InputError, match=f"^{re.escape(name)} can be read only once"):
            fit(data, label="click", out=tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_whole_config_does_not_go_with_settings_or_a_preset(prepared: PreparedData, tmp_path: Path) -> None:
    arguments: list[dict[str, Any]] = [{"settings": {"teachers": 1}}, {"preset": "paper"}]
    for more in arguments:
        with pytest.raises(InputError, match="a RecipeConfig is whole"):
            fit(prepared, out=tmp_path / "model", config=RecipeConfig(), **more)
    assert not (tmp_path / "model").exists()


def test_mistakes_are_found_before_anything_is_written(prepared: PreparedData, tmp_path: Path) -> None:
    for settings, message in (
        ({"model": "recapp"}, "no model 'recapp'"),
        ({"teacher": 3}, "unknown setting"),
    ):
        with pytest.raises(InputError, match=message):
            fit(prepared, out=tmp_path / "model", settings=settings)
    assert not (tmp_path / "model").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("one_process")
def test_the_command_takes_a_raw_table_to_an_artifact(
    click_log: pl.DataFrame, tmp_path: Path, recap: Recap
) -> None:
    log, recipe, out = tmp_path / "clicks.parquet", tmp_path / "recipe.toml", tmp_path / "model"
    click_log.drop("row").write_parquet(log)
    recipe.write_text(tomli_w.dumps({**TINY, "teachers": 3}))
    done = recap("fit", log, "--label", "click", "--config", recipe, "--teachers", "1", "--out", out)
    assert done.code == 0, done.err
    assert "shipped: recap" in done.out
    scores = recap("predict", out, log, "--out", tmp_path / "scores.csv")
    assert scores.code == 0


def test_the_command_names_a_mistyped_model_before_it_prepares_anything(tmp_path: Path, recap: Recap) -> None:
    (tmp_path / "clicks.csv").write_text("click,ad\n1,a\n")
    for option in ("--model", "--teacher-model"):
        done = recap(
            "fit", tmp_path / "clicks.csv", "--label", "click", option, "recapp", "--out", tmp_path / "out"
        )
        assert done.code == 2
        assert "no model 'recapp'" in done.err and "fix: " in done.err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_best_run_is_shipped_where_that_is_wanted(prepared: PreparedData, tmp_path: Path) -> None:
    """One epoch leaves the student behind the logistic regression, which has converged."""
    result = fit(prepared, out=tmp_path / "model", settings={**TINY, "ship": "best"}, **CPU)
    assert result.report.model.name == "lr" and result.load().engine.artifact.name == "lr"
    assert "is better on validation rows than the student" in str(result.report.chosen_because)
    assert result.report.reference is not None
    assert result.report.reference["logistic regression"]["test"].lead == 0


@pytest.mark.slow
def test_a_card_names_the_owner_and_redoes_no_stage(prepared: PreparedData, tmp_path: Path) -> None:
    out, settings = tmp_path / "model", {**NO_TEACHERS, "card": {"owner": "the ads team"}}
    result = fit(prepared, out=out, settings=settings, **CPU)
    assert "Owner: the ads team" in (result.artifact / "MODEL_CARD.md").read_text()

    stages = sorted(path.name for path in out.iterdir())
    again = fit(prepared, out=out, settings={**settings, "card": {"owner": "another team"}}, **CPU)
    assert "Owner: another team" in (again.artifact / "MODEL_CARD.md").read_text()
    assert sorted(path.name for path in out.iterdir()) == stages


@pytest.mark.slow
def test_the_epochs_of_all_runs_of_a_fit_are_tracked(
    prepared: PreparedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = FakeMlflow(monkeypatch)
    result = fit(prepared, out=tmp_path / "model", settings=TINY, track="mlflow", **CPU)
    for name in (result.report.student, *result.report.teacher_runs):
        epochs = read_report(result.out / name).history
        expected = [(epoch.step, epoch.valid_logloss) for epoch in epochs]
        assert mlflow.curve(name, "valid/logloss") == expected
    (parent,) = (run for run in mlflow.runs.values() if run["parent"] is None)
    assert parent["files"] == ["MODEL_CARD.md", "report.json", "report.html"]


def test_an_unknown_tracker_is_refused_before_any_work(prepared: PreparedData, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no tracker 'neptune'"):
        fit(prepared, out=tmp_path / "model", track="neptune", **CPU)  # type: ignore[arg-type]
    assert not (tmp_path / "model").exists()
