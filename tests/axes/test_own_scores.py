"""Scores that a user has: from a column or a file, as logits of the right rows, or refused by name."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from recap_ctr.axes.logits import LogitTable
from recap_ctr.axes.own_scores import OWN_SCORES, write_own_scores
from recap_ctr.data.shards import PreparedData
from recap_ctr.data.table import Table, open_table
from recap_ctr.errors import InputError
from recap_ctr.evaluation import metrics
from recap_ctr.jobs.executor import InThisProcess
from recap_ctr.recipe.fit import fit
from tests.support.tiny_recipe import TINY


@pytest.fixture
def log(click_log: pl.DataFrame) -> pl.DataFrame:
    """The click log with probabilities of a model that knows a little."""
    rng = np.random.default_rng(0)
    logits = 1.5 * (click_log["click"].to_numpy() - 0.5) + rng.normal(size=click_log.height)
    return click_log.with_columns(pl.Series("old_model", metrics.sigmoid(logits)))


def prepared_from(rows: pl.DataFrame, out: Path, scores: str | None) -> tuple[Table, PreparedData]:
    table = open_table(rows, label="click", scores=scores)
    return table, table.prepared(out, table.split_rule("random"), quiet=True)[0]


def test_a_column_of_probabilities_becomes_logits_of_its_rows(log: pl.DataFrame, tmp_path: Path) -> None:
    table, data = prepared_from(log, tmp_path / "data", "old_model")
    assert "old_model" not in [field.name for field in data.encoder.schema.fields]
    assert table.inferred is not None and "'old_model' (scores)" in table.inferred.describe_left_out()

    tables = write_own_scores("old_model", table, data, tmp_path)
    expected = metrics.logit(log["old_model"].to_numpy())
    for split in ("train", "valid", "test"):
        written = LogitTable(tables / split)
        written.check(data)
        assert written.estimators[0].run == OWN_SCORES
        rows = getattr(data, split).rows
        assert np.allclose(written.logits_NM[:, 0], expected[rows], atol=1e-4)
    assert write_own_scores("old_model", table, data, tmp_path) == tables


def test_a_file_is_joined_by_the_column_that_names_the_rows(log: pl.DataFrame, tmp_path: Path) -> None:
    """In any order; scores beyond 0 and 1 are logits."""
    rows = log.drop("old_model")
    table, data = prepared_from(rows, tmp_path / "data", None)
    logits = np.linspace(-5, 5, rows.height)
    scores = pl.DataFrame({"row": rows["row"], "logit": logits}).sample(fraction=1.0, shuffle=True, seed=1)
    scores.write_csv(tmp_path / "scores.csv")
    tables = write_own_scores(str(tmp_path / "scores.csv"), table, data, tmp_path)
    assert np.allclose(LogitTable(tables / "test").logits_NM[:, 0], logits[data.test.rows], atol=1e-4)


def test_rows_without_a_label_are_left_out_with_their_scores(log: pl.DataFrame, tmp_path: Path) -> None:
    clicks = pl.Series("click", [None if at % 7 == 0 else value for at, value in enumerate(log["click"])])
    table = open_table(log.with_columns(clicks), label="click", scores="old_model", drop_unlabelled=True)
    data, _ = table.prepared(tmp_path / "data", table.split_rule("random"), quiet=True)
    tables = write_own_scores("old_model", table, data, tmp_path)
    kept = metrics.logit(log["old_model"].to_numpy()[np.arange(log.height) % 7 != 0])
    assert np.allclose(LogitTable(tables / "valid").logits_NM[:, 0], kept[data.valid.rows], atol=1e-4)


def refused(rows: pl.DataFrame, scores: str, out: Path, *messages: str) -> None:
    table, data = prepared_from(rows, out / "data", None)
    with pytest.raises(InputError) as caught:
        write_own_scores(scores, table, data, out)
    for message in messages:
        assert message in str(caught.value)


def test_a_row_without_a_score_is_named(log: pl.DataFrame, tmp_path: Path) -> None:
    gaps = log.with_columns(
        pl.when(pl.int_range(pl.len()) == 4).then(None).otherwise("old_model").alias("gaps")
    )
    refused(gaps.drop("old_model"), "gaps", tmp_path / "column", "row 5", "'gaps'")
    some = log.select("row", "old_model").head(10)
    some.write_csv(tmp_path / "some.csv")
    refused(log.drop("old_model"), str(tmp_path / "some.csv"), tmp_path / "file", "no score for row 11")


def test_files_that_can_not_be_joined_are_refused(log: pl.DataFrame, tmp_path: Path) -> None:
    log.select("row").write_csv(tmp_path / "one.csv")
    refused(log, str(tmp_path / "one.csv"), tmp_path, "1 columns; two are needed")
    pl.concat([log.select("row", "old_model")] * 2).write_csv(tmp_path / "twice.csv")
    refused(log, str(tmp_path / "twice.csv"), tmp_path, "has several scores")


@pytest.mark.slow
def test_a_fit_compares_with_them_and_may_learn_from_them(log: pl.DataFrame, tmp_path: Path) -> None:
    settings = {key: TINY[key] for key in ("model_settings", "teacher_settings", "train", "l2")}
    result = fit(
        log,
        label="click",
        scores="old_model",
        out=tmp_path / "fit",
        settings={**settings, "portfolio": []},
        threads=1,
        device="cpu",
        executor=InThisProcess(),
    )
    assert result.report.reference is not None
    own = result.report.reference[OWN_SCORES]["test"]
    rows = result.data.test.rows
    assert own.auc == pytest.approx(
        metrics.auc(log["click"].to_numpy()[rows], log["old_model"].to_numpy()[rows]), abs=1e-6
    )
    assert OWN_SCORES in [step.member for step in result.report.teaching]


def test_a_column_that_is_not_there_is_named_before_anything_is_done(
    log: pl.DataFrame, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"no column 'old_modell' \(scores\).*old_model"):
        fit(log, label="click", scores="old_modell", out=tmp_path / "fit")
    assert not any(path.is_dir() for path in (tmp_path / "fit").iterdir())


def test_they_do_not_go_with_a_number_of_teachers(log: pl.DataFrame, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="one of many teachers"):
        fit(log, label="click", scores="old_model", out=tmp_path / "fit", settings={"teachers": 2})
