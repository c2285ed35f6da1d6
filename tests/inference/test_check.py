"""Faults in rows: each kind is caught and named, and rows like the training rows are not."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from recap_ctr.data.encode import Encoder
from recap_ctr.data.shards import PreparedData
from recap_ctr.data.source import Block
from recap_ctr.data.split import Split
from recap_ctr.inference.check import Finding, Inspection, RowsCheck, known_labels
from recap_ctr.inference.raw_rows import RawRows
from recap_ctr.inference.window import Window, stability_index
from tests.support.daily_log import DAY, SCHEMA, START, daily_log, prepared_log
from tests.support.preparing import prepared


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    return prepared_log(tmp_path_factory.mktemp("data") / "log")


@pytest.fixture(scope="module")
def window() -> pl.DataFrame:
    return daily_log(2, first_day=14)


def check(data: PreparedData, *frames: pl.DataFrame) -> RowsCheck:
    assert data.profile is not None
    inspection, raw_rows = Inspection(data.encoder, data.profile), RawRows(data.schema)
    for frame in frames:
        block = Block(frame, 1, "rows")
        inspection.add_absent(raw_rows.absent(block))
        renamed = raw_rows.renamed(block, fill=True)
        inspection.add(renamed, data.encoder.encode(renamed), known_labels(renamed, data.schema))
    return inspection.result()


def only(result: RowsCheck) -> Finding:
    assert len(result.findings) == 1, [finding.sentence for finding in result.findings]
    return result.findings[0]


@pytest.mark.slow
def test_rows_like_the_training_rows_have_no_findings(data: PreparedData) -> None:
    for day in range(14, 24):
        result = check(data, daily_log(1, first_day=day))
        assert result.enough and not result.findings, [finding.sentence for finding in result.findings]


@pytest.mark.parametrize(
    ("column", "change", "kind", "words"),
    [
        ("site", pl.col("site").str.to_uppercase(), "spelling", "case"),
        ("zip", pl.col("zip").str.strip_chars_start("0"), "spelling", "zero padding"),
        ("user", pl.col("user") + " ", "spelling", "blanks"),
        ("tags", pl.col("tags").str.to_uppercase(), "spelling", "case"),
        ("site", pl.lit("None"), "spelling", "stands for no value"),
        ("site", pl.lit("Site2.example"), "constant", "100% of the rows have 'Site2.example'"),
        ("price", pl.lit(0.0), "constant", "have 0"),
        ("referrer", pl.lit("r1"), "constant", "hash bucket"),
        ("user", pl.when(pl.col("ts") % 2 == 0).then(pl.lit("u9")).otherwise("user"), "constant", "'u9'"),
        ("site", pl.lit(None, pl.String), "missing", "a source of the column fails"),
        ("price", pl.col("price").fill_null(0.0), "missing", "filled by a default"),
        ("user", pl.lit("v") + pl.col("user"), "unseen", "such as 'vu"),
        ("price", pl.col("price") * 100, "shifted", "a number from"),
        ("age", pl.col("age") + 20, "shifted", "quantile"),
        ("stay", pl.col("stay") * 3, "shifted", "quantile range"),
        ("stay", pl.lit(60.0), "constant", "have a number of quantile"),
    ],
)
def test_faults_of_a_field(
    data: PreparedData, window: pl.DataFrame, column: str, change: pl.Expr, kind: str, words: str
) -> None:
    finding = only(check(data, window.with_columns(change.alias(column))))
    assert (finding.check, finding.field) == (kind, column)
    assert words in finding.sentence
    assert finding.fix
    assert abs(finding.value - finding.usual) > abs(finding.limit - finding.usual)


def test_the_value_that_prevails_is_named_if_an_update_added_it(
    data: PreparedData, window: pl.DataFrame
) -> None:
    """The ids of added values come after OOV's."""
    fields = list(data.encoder.fields)
    at = [fitted.field.name for fitted in fields].index("site")
    values, counts = fields[at].values, fields[at].counts
    grown = replace(
        fields[at],
        values=pl.concat([values, pl.Series(values.name, ["new.example"])]),
        counts=np.append(counts, 5),
        num_added=1,
    )
    encoder = Encoder(data.schema, [*fields[:at], grown, *fields[at + 1 :]])
    assert data.profile is not None
    inspection = Inspection(encoder, data.profile)
    block = Block(window.with_columns(site=pl.lit("new.example")), 1, "rows")
    inspection.add(block, encoder.encode(block), known_labels(block, data.schema))
    assert "100% of the rows have 'new.example'" in only(inspection.result()).sentence


def test_numbers_where_the_training_rows_had_none(window: pl.DataFrame, tmp_path: Path) -> None:
    log = daily_log(14).with_columns(stay=pl.lit(None, pl.Float64))
    data = prepared(log, tmp_path / "log", SCHEMA, Split(kind="time"))
    finding = only(check(data, window))
    assert (finding.check, finding.field, finding.usual) == ("missing", "stay", 1.0)
    constant = only(check(data, window.with_columns(stay=pl.lit(7.5))))
    assert constant.check == "constant" and "100% of the rows have '7.5'" in constant.sentence


def test_a_column_that_is_absent(data: PreparedData, window: pl.DataFrame) -> None:
    finding = only(check(data, window.drop("zip")))
    assert (finding.field, finding.cause) == ("zip", "there is no such column")


def test_a_label_whose_rate_has_moved(data: PreparedData, window: pl.DataFrame) -> None:
    rng = np.random.default_rng(3)
    is_lost = pl.Series(rng.random(window.height) < 0.6)
    fewer = window.with_columns(pl.when(is_lost).then(0).otherwise("click").alias("click"))
    assert (finding := only(check(data, fewer))).check == "label rate"
    assert finding.field == "click" and finding.value < finding.limit < finding.usual
    assert not check(data, window.drop("click")).findings
    assert not check(data, window.with_columns(pl.lit(None).alias("click"))).findings


def test_repeated_rows(data: PreparedData, window: pl.DataFrame) -> None:
    finding = only(check(data, pl.concat([window, window.head(400)])))
    assert finding.check == "repeated rows" and finding.field is None
    assert finding.value == pytest.approx(0.2)


def test_rows_without_a_readable_time_are_compared_without_it(
    data: PreparedData, window: pl.DataFrame
) -> None:
    repeated = pl.concat([window, window.head(400)]).with_columns(pl.lit(None).alias("ts"))
    # The hour is missing, which explains rows that repeat each other.
    assert (finding := only(check(data, repeated))).check == "missing" and finding.field == "hour"


def test_blocks_add_up(data: PreparedData, window: pl.DataFrame) -> None:
    spoilt = window.with_columns(pl.col("site").str.to_uppercase(), pl.lit(7.0).alias("price"))
    whole, parts = (
        check(data, spoilt),
        check(data, *(spoilt.slice(start, 100) for start in range(0, 1_600, 100))),
    )
    assert whole == parts


def exchanging(days: int, first_day: int = 0) -> pl.DataFrame:
    """Return rows of a log in which ten of 400 users leave every day, and ten others come."""
    log = daily_log(days, first_day=first_day)
    come = 10 * ((pl.col("ts") - START) // DAY)
    number = pl.col("user").str.slice(1).cast(pl.Int64)
    return log.with_columns(
        pl.format("u{}", pl.when(number < come).then(number + 400).otherwise(number)).alias("user")
    )


def test_an_older_model_may_lack_more_values(tmp_path: Path) -> None:
    aged = prepared(exchanging(14), tmp_path / "log", SCHEMA, Split(kind="time"))
    for day in (14, 18, 22):
        later = exchanging(1, first_day=day)
        assert not [finding for finding in check(aged, later).findings if finding.check == "unseen"]
        other = later.with_columns(pl.format("other-{}", "user").alias("user"))
        assert only(check(aged, other)).check == "unseen"
    assert aged.profile is not None
    assert aged.profile.fields[0].exchanged
    fast = aged.profile.fields[0].model_copy(update={"exchanged": 0.3})
    fields = [fast, *aged.profile.fields[1:]]
    profile = aged.profile.model_copy(update={"fields": fields})
    limits, closed = [], []
    for now in (None, 12, 18, 24):
        window = Window(aged.encoder, profile)
        window.add(aged.encoder.encode(Block(exchanging(1, first_day=12), 1, "rows")))
        if now is not None:
            window.add_moments(np.array([START + DAY * now]))
        limits.append(window.unseen(0).high)
        closed.append(window.unseen(2).high)
    assert limits[0] == limits[1] < limits[2] < limits[3] < 1.0
    assert len(set(closed)) == 1, "no new value ever came"


def test_few_rows_are_not_judged(data: PreparedData, window: pl.DataFrame) -> None:
    result = check(data, window.head(50).with_columns(pl.lit(None).alias("site")))
    assert not result.enough and not result.findings
    assert result.fields[1].missing == 1.0


def test_window_counts_are_those_of_the_profile(data: PreparedData) -> None:
    """The training rows as a window have the usual shares, and a stability index of 0."""
    assert data.profile is not None
    window = Window(data.encoder, data.profile)
    train = Block(daily_log(14).head(len(data.train)), 1, "train")
    window.add(data.encoder.encode(train))
    for i in range(len(data.profile.fields)):
        assert window.missing(i).share == pytest.approx(window.missing(i).usual)
        assert window.psi(i) == pytest.approx(0.0, abs=1e-9)
    assert stability_index(np.array([1, 0]), np.array([0, 1])) > 5
