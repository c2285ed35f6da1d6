"""The Python calls, from a raw table to scores: as typed and as the command line has them."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest

import recap_ctr
from recap_ctr.jobs.executor import InThisProcess
from tests.conftest import Recap

pytestmark = pytest.mark.slow

SMALL = {"dim": 4, "num_exponential_layers": 1, "num_linear_layers": 1}
TINY = {
    "model": "fcn",
    "model_settings": SMALL,
    "teacher_settings": SMALL,
    "teachers": 2,
    "l2": 1e-4,
    "train": {"max_epochs": 1, "batch_size": 256},
}


@pytest.fixture(scope="module")
def table(click_log: pl.DataFrame) -> pl.DataFrame:
    return click_log.head(1_000)


@pytest.fixture(scope="module")
def csv(table: pl.DataFrame, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("raw") / "clicks.csv"
    table.write_csv(path)
    return path


@pytest.fixture(scope="module")
def fitted(table: pl.DataFrame, tmp_path_factory: pytest.TempPathFactory) -> recap_ctr.FitResult:
    out = tmp_path_factory.mktemp("fit") / "frame"
    return recap_ctr.fit(
        table, label="click", out=out, settings=TINY, threads=1, device="cpu", executor=InThisProcess()
    )


def test_fit_gives_a_model_a_report_and_a_page(fitted: recap_ctr.FitResult) -> None:
    assert isinstance(fitted.report, recap_ctr.FitReport)
    assert len(fitted.report.teacher_runs) == 2
    assert isinstance(fitted.data, recap_ctr.PreparedData)
    assert fitted.data.encoder.schema.row_id == "row"
    assert fitted.page.is_file() and fitted.summary
    assert isinstance(fitted.load(), recap_ctr.Scorer)


def test_a_file_and_a_frame_give_the_same_model(
    fitted: recap_ctr.FitResult, table: pl.DataFrame, csv: Path, tmp_path: Path
) -> None:
    config = recap_ctr.RecipeConfig.model_validate(TINY)

    other = recap_ctr.fit(
        csv,
        label="click",
        out=str(tmp_path / "csv"),
        config=config,
        threads=1,
        device="cpu",
        executor=InThisProcess(),
    )

    first, second = (recap_ctr.predict(result.load(), table)["score"] for result in (fitted, other))
    np.testing.assert_array_equal(first, second)


def test_what_was_prepared_is_fitted_without_preparing_it_again(csv: Path, tmp_path: Path) -> None:
    data = recap_ctr.prepare(csv, label="click", out=tmp_path / "data")

    results = [
        recap_ctr.fit(
            source, out=tmp_path / "fit", settings=TINY, threads=1, device="cpu", executor=InThisProcess()
        )
        for source in (data, tmp_path / "data")
    ]

    assert [result.data.fingerprint for result in results] == [data.fingerprint] * 2
    assert results[0].report == results[1].report
    with pytest.raises(recap_ctr.InputError, match="for raw files"):
        recap_ctr.fit(data, label="click", out=tmp_path / "fit")


# Prepare.


def test_prepare_takes_files_and_frames(table: pl.DataFrame, csv: Path, tmp_path: Path) -> None:
    tables: dict[str, Any] = {
        "file": csv,
        "name": str(csv),
        "files": [csv],
        "polars": table,
        "lazy": table.lazy(),
        "pandas": pd.DataFrame(table.to_dict(as_series=False)),
        "columns": table.to_dict(as_series=False),
    }

    prepared = {
        name: recap_ctr.prepare(rows, label="click", out=tmp_path / name) for name, rows in tables.items()
    }

    assert {type(data) for data in prepared.values()} == {recap_ctr.PreparedData}
    assert len({data.fingerprint for data in prepared.values()}) == 1
    assert [len(prepared["file"].train), len(prepared["file"].valid), len(prepared["file"].test)] == [
        800,
        100,
        100,
    ]


def test_prepare_splits_in_every_way(
    table: pl.DataFrame, click_schema: recap_ctr.Schema, tmp_path: Path
) -> None:
    halves = recap_ctr.prepare(table, schema=click_schema, out=tmp_path / "ratio", ratio=(1, 1, 0))
    (tmp_path / "schema.toml").write_text(click_schema.to_toml())
    parts = recap_ctr.prepare(
        table[:600],
        schema=tmp_path / "schema.toml",
        out=tmp_path / "tables",
        valid=table[600:900],
        test=table[900:],
    )
    column = recap_ctr.prepare(
        table.with_columns(part=pl.Series(["train"] * 700 + ["valid"] * 300)),
        schema=click_schema,
        out=tmp_path / "column",
        split_column="part",
    )

    sizes = [
        [len(shard) for shard in (data.train, data.valid, data.test)] for data in (halves, parts, column)
    ]
    assert sizes == [[500, 500, 0], [600, 300, 100], [700, 300, 0]]


def test_prepare_replaces_other_data_only_by_force(table: pl.DataFrame, tmp_path: Path) -> None:
    first = recap_ctr.prepare(table, label="click", out=tmp_path / "data")
    again = recap_ctr.prepare(table, label="click", out=tmp_path / "data")
    with pytest.raises(recap_ctr.InputError, match=r"prepared from other inputs \(changed: .*split"):
        recap_ctr.prepare(table, label="click", out=tmp_path / "data", seed=2)
    forced = recap_ctr.prepare(table, label="click", out=tmp_path / "data", seed=2, force=True)

    assert again.fingerprint == first.fingerprint != forced.fingerprint


# Load, predict and evaluate.


def test_predict_adds_two_columns_and_keeps_the_rest(
    fitted: recap_ctr.FitResult, table: pl.DataFrame, csv: Path, tmp_path: Path
) -> None:
    scored = recap_ctr.predict(fitted.artifact, table)
    from_file = recap_ctr.predict(fitted.out, csv)
    written = recap_ctr.predict(recap_ctr.load(fitted.artifact), [csv], out=tmp_path / "scores.parquet")

    assert scored.columns == [*table.columns, "score", "logit"]
    assert scored.select(table.columns).equals(table)
    assert scored["score"].is_between(0, 1).all()
    assert written is None
    for other in (from_file, pl.read_parquet(tmp_path / "scores.parquet")):
        np.testing.assert_array_equal(other["score"], scored["score"])


def test_calls_commands_and_classifier_score_alike(
    fitted: recap_ctr.FitResult, table: pl.DataFrame, csv: Path, tmp_path: Path, recap: Recap
) -> None:
    done = recap("predict", fitted.artifact, csv, "--out", tmp_path / "scores.csv")
    classifier = recap_ctr.CTRClassifier.load(fitted.artifact)
    fields = table.select(field.name for field in fitted.data.encoder.schema.fields)

    scores = recap_ctr.predict(fitted.load(), table)["score"].to_numpy()

    assert done.code == 0, done.err
    np.testing.assert_allclose(pl.read_csv(tmp_path / "scores.csv")["score"], scores, rtol=1e-12)
    np.testing.assert_array_equal(classifier.predict_proba(fields)[:, 1], scores)


def test_evaluate_measures_labelled_rows(fitted: recap_ctr.FitResult, table: pl.DataFrame) -> None:
    scorer = fitted.load()

    first, second = (recap_ctr.evaluate(scorer, rows) for rows in (table, table.head(500)))

    assert isinstance(first, recap_ctr.RowsEvaluation)
    assert 0.5 < first.raw.auc < 1.0 and first.base_rate == pytest.approx(table["click"].mean())
    assert (first.rows, second.rows) == (1_000, 500)
    assert (first.values.rows, second.values.rows) == (1_000, 500), "a scorer counts each call anew"


def test_load_maps_columns(fitted: recap_ctr.FitResult, table: pl.DataFrame) -> None:
    renamed = table.rename({"site": "page"})

    scores = recap_ctr.predict(recap_ctr.load(fitted.out, columns={"site": "page"}, threads=1), renamed)

    np.testing.assert_array_equal(scores["score"], recap_ctr.predict(fitted.out, table)["score"])


def test_errors_name_the_field_the_value_and_the_fix(
    fitted: recap_ctr.FitResult, table: pl.DataFrame, tmp_path: Path
) -> None:
    bad_label = table.with_columns(click=pl.Series([2] + [0] * 999))
    for call, message in (
        (
            lambda: recap_ctr.predict(fitted.out, table.drop("ad")),
            r"no column 'ad' \(field 2 of 5 .*\n.*\n  fix: rename",
        ),
        (lambda: recap_ctr.predict(fitted.out, table.head(0)), "there are no rows to score"),
        (
            lambda: recap_ctr.evaluate(fitted.out, bad_label),
            r"row 1: the label 'click' is '2', neither .*\n  fix: ",
        ),
        (lambda: recap_ctr.evaluate(fitted.out, table.drop("click")), "no column 'click'"),
        (lambda: recap_ctr.load(tmp_path), r"holds no artifact\n  fix: "),
        (lambda: recap_ctr.load(fitted.out, routes=9), "neither routes nor depths"),
        (lambda: recap_ctr.prepare(table, out=tmp_path / "data"), r"need a label or a schema\n  fix: "),
        (lambda: recap_ctr.prepare(table, label="clik", out=tmp_path / "data"), "no column 'clik'"),
        (
            lambda: recap_ctr.prepare(tmp_path / "no.csv", label="click", out=tmp_path / "data"),
            "no file .*no.csv",
        ),
        (
            lambda: recap_ctr.prepare(table, label="click", out=tmp_path / "data", test=table),
            r"without --valid\n  fix: ",
        ),
        (
            lambda: recap_ctr.fit(table, label="click", out=tmp_path / "fit", preset="best"),
            "no preset 'best'\n  fix: ",
        ),
        (
            lambda: recap_ctr.fit(table, label="click", out=tmp_path / "fit", settings={"teachers": -1}),
            r"fit: teachers: .* \(value: -1\)",
        ),
    ):
        with pytest.raises(recap_ctr.InputError, match=message):
            call()
