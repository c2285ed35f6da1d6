"""Drift by period: rows like the training rows are within their limits, others name field, figure and period."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from recap_ctr.config import TrainConfig
from recap_ctr.errors import InputError
from recap_ctr.inference import drift
from recap_ctr.inference.drift import DriftLimits, DriftReport, measure_drift
from recap_ctr.inference.scorer import Scorer
from recap_ctr.inference.window import RARE_ROWS
from recap_ctr.models.catalogue import parse_model
from recap_ctr.pages.drift import drift_page, lead, write_drift
from recap_ctr.training.config import RunConfig
from recap_ctr.training.run import run
from tests.support.daily_log import DAY, START, daily_log, prepared_log


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Scorer:
    directory = tmp_path_factory.mktemp("drift")
    training = TrainConfig(batch_size=2_048, max_epochs=1)
    settings = {"dim": 4, "num_exponential_layers": 1, "num_linear_layers": 1}
    config = RunConfig(
        "fcn", parse_model("fcn", settings), training, train_baseline=False, report_fields=False
    )
    run(config, prepared_log(directory / "data"), directory / "run", quiet=True)
    return Scorer.load(directory / "run", threads=1)


@pytest.fixture(scope="module")
def clean(scorer: Scorer) -> DriftReport:
    return measure_drift(scorer, daily_log(4, first_day=14))


def test_rows_like_the_training_rows_are_within_limits(clean: DriftReport) -> None:
    assert not clean.findings, [finding.sentence for finding in clean.findings]
    assert [period.start for period in clean.periods] == [START + DAY * day for day in range(14, 18)]
    assert [period.rows for period in clean.periods] == pytest.approx([800] * 4, abs=90)
    assert clean.rows == 3_200 and "within its limits" in lead(clean)


def test_figures_are_those_of_the_rows(clean: DriftReport, scorer: Scorer) -> None:
    rows = daily_log(4, first_day=14).filter(pl.col("ts") // DAY == START // DAY + 14)
    first, probability = clean.periods[0], scorer.score_frame(rows)
    assert first.mean_prediction == pytest.approx(float(probability.mean()))
    assert first.click_rate == pytest.approx(float(rows["click"].mean() or 0))  # type: ignore[arg-type]
    ratio = float(probability.sum()) / int(rows["click"].sum())
    assert first.calibration_ratio == pytest.approx(ratio)
    fitted = scorer.engine.encoder.fields[1]
    rare = fitted.values.filter(pl.Series(fitted.counts < RARE_ROWS))
    expected = rows["site"].is_in(rare.implode()).sum() / rows.height
    assert first.fields[1].rare == pytest.approx(expected) and expected > 0
    assert first.fields[5].missing == pytest.approx(rows["price"].null_count() / rows.height)


def test_drift_is_found_in_its_period(scorer: Scorer) -> None:
    log = daily_log(4, first_day=14)
    is_late = pl.col("ts") >= START + 16 * DAY
    fresh = pl.when(is_late & (pl.col("ts") % 3 > 0)).then(pl.lit("new ") + pl.col("site")).otherwise("site")
    report = measure_drift(
        scorer, log.with_columns(fresh.alias("site")).sample(fraction=1, shuffle=True, seed=1)
    )
    assert {finding.period for finding in report.findings} == {2, 3}
    assert {finding.field for finding in report.findings} == {"site"}
    assert {finding.check for finding in report.findings} == {"unseen share", "stability index"}
    assert all(finding.value > finding.limit for finding in report.findings)


def test_probabilities_that_no_longer_hold(scorer: Scorer) -> None:
    log = daily_log(2, first_day=14)
    is_lost = pl.Series(np.random.default_rng(1).random(log.height) < 0.7)
    report = measure_drift(
        scorer, log.with_columns(pl.when(is_lost).then(0).otherwise("click").alias("click"))
    )
    assert {finding.check for finding in report.findings} == {"calibration ratio"}
    lenient = measure_drift(scorer, log, limits=DriftLimits(calibration=20.0, psi=0.0))
    assert {finding.check for finding in lenient.findings} == {"stability index"}


def test_labels_may_be_late_or_absent(scorer: Scorer, clean: DriftReport) -> None:
    log = daily_log(4, first_day=14)
    unlabelled = measure_drift(scorer, log.drop("click"))
    assert [period.calibration_ratio for period in unlabelled.periods] == [None] * 4
    assert [period.fields for period in unlabelled.periods] == [period.fields for period in clean.periods]
    late = log.with_columns(pl.when(pl.col("ts") < START + 14.5 * DAY).then("click").alias("click"))
    first = measure_drift(scorer, late).periods[0]
    assert 0 < first.labelled < first.rows and first.calibration_ratio is not None


def test_too_many_periods_are_refused(scorer: Scorer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert drift.MAX_PERIODS == 400
    monkeypatch.setattr(drift, "MAX_PERIODS", 20)
    with pytest.raises(InputError, match="more than 20 periods"):
        measure_drift(scorer, daily_log(2, 60), every=3_600)


@pytest.mark.slow
def test_the_page(clean: DriftReport, tmp_path: Path) -> None:
    page = drift_page(clean)
    assert [chart.name for chart in page.charts] == [
        "drift-psi",
        "drift-unseen",
        "drift-rare",
        "drift-calibration",
    ]
    assert write_drift(tmp_path, clean).is_file()
    assert DriftReport.model_validate_json((tmp_path / "drift.json").read_bytes()) == clean


def test_the_model_card_says_what_the_rows_were(scorer: Scorer) -> None:
    card = (scorer.engine.artifact.path / "MODEL_CARD.md").read_text()
    assert "The label is click." in card
    assert "The base rate is 0." in card
    assert "Rows were divided by time; train until 2026-03-13" in card
    assert "Training rows are from 2026-03-02 to 2026-03-13 (UTC)." in card
