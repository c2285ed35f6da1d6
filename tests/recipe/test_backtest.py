"""A log, replayed: every strategy is judged on rows that it has not seen, and an interrupted replay goes on."""

from pathlib import Path
from typing import Any

import pytest

from recap_ctr.data.drifting import DriftConfig, DriftingData
from recap_ctr.data.synthetic import SyntheticConfig
from recap_ctr.errors import InputError
from recap_ctr.evaluation.backtest import Backtest, Gap, Period, PeriodFigures
from recap_ctr.jobs.engines import LOCAL
from recap_ctr.jobs.executor import InThisProcess
from recap_ctr.pages.backtest import page, summary
from recap_ctr.recipe import backtest as replays
from recap_ctr.recipe.backtest import backtest, read_period
from tests.conftest import contents
from tests.support.tiny_recipe import TINY


def period(never: float, update: float, refit: float) -> Period:
    figures = {
        name: PeriodFigures(
            auc=0.7 - loss, logloss=loss, calibration_error=0.01, churn=0.1, cpu_seconds=seconds, shipped=True
        )
        for name, loss, seconds in (("never", never, 0.0), ("update", update, 2.0), ("refit", refit, 20.0))
    }
    return Period(start="2026-01-05 00:00", rows=10, figures=figures)


def test_what_is_kept_of_the_gain() -> None:
    report = Backtest(
        every="1d",
        first_rows=100,
        first_cpu_seconds=20.0,
        periods=[period(0.5, 0.45, 0.4), period(0.5, 0.41, 0.4)],
        oldest={"never": 0.3, "update": 0.31, "refit": 0.32},
    )
    assert report.kept(lambda figures: figures.logloss) == pytest.approx(0.7)
    assert report.cpu_share == pytest.approx(0.1)
    assert summary(report).startswith("Updating has 70 % of the gain in AUC and 70 % of the gain in logloss")
    assert "10.0 % of its CPU time" in page(report).to_html()
    assert Backtest.model_validate(report.to_json()) == report
    report = report.model_copy(update={"forgotten": {"never": Gap(mean=0.01, error=0.004)}})
    assert "of the updated model differs by +0.01000 ± 0.00784 from the first fit." in summary(report)


@pytest.mark.parametrize("text", ["1", "d", "0d", "1y", "-1d"])
def test_periods_are_a_number_and_a_unit(text: str) -> None:
    with pytest.raises(InputError, match="not a period"):
        read_period(text)


def test_fits_run_where_those_of_fit_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = DriftingData(DriftConfig(SyntheticConfig(rows=40, num_fields=3), 4)).frame()
    asked: dict[str, Any] = {}

    def stop(*_: object, **options: object) -> None:
        asked.update(options)
        pytest.fail("cut")

    monkeypatch.setattr(replays, "fit", stop)
    with pytest.raises(pytest.fail.Exception):
        backtest(log.drop("row", "bayes_logit"), label="click", time="ts", out=tmp_path / "replay")
    assert asked["executor"] == LOCAL


@pytest.mark.slow
def test_a_log_is_replayed_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = DriftingData(DriftConfig(SyntheticConfig(rows=1_600, num_fields=3, max_values=30), 4, 0.3)).frame()
    options = {
        "out": tmp_path / "replay",
        "label": "click",
        "time": "ts",
        "settings": {**TINY, "teachers": 0},
        "gate": {"confidence": 0.5, "max_calibration_error": 10.0},
        "executor": InThisProcess(),
    }
    rows = log.drop("row", "bayes_logit")
    with monkeypatch.context() as patch:
        patch.setattr(replays, "update", lambda *_, **__: pytest.fail("cut"))
        with pytest.raises(pytest.fail.Exception):
            backtest(rows, **options)  # type: ignore[arg-type]
    made = {
        name: when
        for name, (_, when) in contents(tmp_path / "replay").items()
        if name.endswith("state.safetensors")
    }
    (cut,) = (tmp_path / "replay").glob("updates-*")
    (cut / "update-0003").mkdir()
    (cut / "update-0003" / "half").touch()  # Its CPU time would not be known, so it is made anew.
    result = backtest(rows, **options)  # type: ignore[arg-type]
    assert not (cut / "update-0003" / "half").exists()
    after = {name: when for name, (_, when) in contents(tmp_path / "replay").items()}
    assert made and made.items() <= after.items()  # Nothing is trained twice.
    first, second = result.report.periods
    assert (first.rows, second.rows, result.report.first_rows) == (400, 400, 800)
    assert len({figures.logloss for figures in first.figures.values()}) == 1  # One model so far.
    assert first.figures["update"].churn == 0.0 and second.figures["refit"].cpu_seconds > 0
    assert second.figures["refit"].logloss != second.figures["never"].logloss
    assert result.page.is_file()
    gap = result.report.forgotten["refit"]
    oldest = result.report.oldest
    assert gap.mean == pytest.approx(oldest["update"] - oldest["refit"]) and gap.error > 0
    with monkeypatch.context() as patch:
        patch.setattr(replays, "fit", lambda *_, **__: pytest.fail("the fits are there"))
        other = backtest(rows, **options, update_settings={"passes": 1})  # type: ignore[arg-type]
        assert backtest(rows, **options).report == result.report  # type: ignore[arg-type]
    other_second = other.report.periods[1]
    assert other_second.figures["refit"] == second.figures["refit"]
    assert other_second.figures["update"] != second.figures["update"]
    with pytest.raises(InputError, match="'f1' does not hold moments"):
        backtest(rows, **{**options, "out": tmp_path / "other", "time": "f1"})  # type: ignore[arg-type]
    with pytest.raises(InputError, match="periods; at least 3"):
        backtest(rows, **{**options, "out": tmp_path / "long", "every": "1w"})  # type: ignore[arg-type]
