"""The sentences about a diagnosis: findings, warnings, and the notes of forecasts."""

import numpy as np
import pytest

from recap_ctr.diagnose import Cube, Diagnosis, Floats, curve, diagnose, findings
from recap_ctr.evaluation.metrics import sigmoid

ROWS = 2_000


def simulated(shape: tuple[int, int, int], spreads: tuple[float, float, float]) -> tuple[Cube, Floats]:
    rng = np.random.default_rng(0)
    runs, steps, routes = shape
    mean_N = rng.normal(-1.0, 1.0, ROWS)
    logits_NSTR = (
        mean_N[:, None, None, None]
        + rng.normal(0, spreads[0], (ROWS, runs, 1, 1))
        + rng.normal(0, spreads[1], (ROWS, 1, steps, 1))
        + rng.normal(0, spreads[2], (ROWS, 1, 1, routes))
    )
    labels_N = (rng.random(ROWS) < sigmoid(mean_N)).astype(np.float64)
    return Cube.from_array(logits_NSTR), labels_N


def diagnosed(shape: tuple[int, int, int], spreads: tuple[float, float, float]) -> Diagnosis:
    return diagnose(*simulated(shape, spreads))


@pytest.mark.parametrize("spread", [0.1, 0.4])
def test_modest_disagreement_is_predicted_within_five_percent(spread: float) -> None:
    diagnosis = diagnosed((4, 1, 1), (spread, 0, 0))
    family = diagnosis.family("run")
    assert family is not None
    assert family.predicted.value == pytest.approx(family.gain.value, rel=0.05)
    assert not diagnosis.warnings


def test_large_disagreement_is_warned_of() -> None:
    diagnosis = diagnosed((4, 1, 1), (2.0, 0, 0))
    family = diagnosis.family("run")
    assert family is not None
    assert family.predicted.value != pytest.approx(family.gain.value, rel=0.05)
    (warning,) = diagnosis.warnings
    assert "The axis run" in warning
    assert (
        f"a gain of {family.predicted.value:.3g}, but the measured gain is {family.gain.value:.3g}" in warning
    )
    assert warning == family.warning == findings(diagnosis)[-1]
    assert warning in diagnosis.curves[0].notes


def test_few_runs_are_warned_of() -> None:
    assert "Fewer than 3 runs" in diagnosed((2, 2, 1), (0.1, 0.1, 0)).warnings[0]
    assert not diagnosed((3, 2, 1), (0.1, 0.1, 0)).warnings


def test_equal_estimators_have_nothing_to_gain_and_no_warning() -> None:
    diagnosis = diagnosed((3, 2, 1), (0, 0, 0))
    assert not diagnosis.warnings
    family = diagnosis.family("run")
    assert family is not None
    assert family.gain.value == pytest.approx(0, abs=1e-12)
    assert findings(diagnosis)


def test_forecast_goes_on_where_the_curve_ends() -> None:
    cube, labels_N = simulated((3, 1, 1), (0.3, 0, 0))
    measured_curve = curve(cube, labels_N, "run")
    assert [point.count for point in measured_curve.forecast] == list(range(1, 17))
    last = measured_curve.points[-1]
    for measured, expected in zip(measured_curve.points, measured_curve.forecast, strict=False):
        assert expected.gain.value == pytest.approx(measured.predicted.value)
        assert expected.loss.value == pytest.approx(measured.loss.value, abs=0.02 * last.gain.value)
        assert expected.auc is not None
        assert expected.auc.value == pytest.approx(measured.auc.value, abs=0.1 * last.auc_gain.value)
    gains = [point.gain.value for point in measured_curve.forecast]
    assert gains[15] == pytest.approx(gains[1] * 2 * 15 / 16)
    assert measured_curve.forecast[0].loss.value == measured_curve.points[0].loss.value
    assert measured_curve.notes == ()


def test_forecast_says_what_it_cannot_tell() -> None:
    cube, labels_N = simulated((2, 1, 1), (0.002, 0, 0))
    measured_curve = curve(cube, labels_N, "run")
    assert all(point.auc is None for point in measured_curve.forecast)
    assert "no AUC is forecast" in measured_curve.notes[0]
    assert "2 runs can't show" in measured_curve.notes[1]


def test_more_estimators_save_what_the_forecast_says() -> None:
    cube, labels_N = simulated((3, 1, 1), (0.3, 0, 0))
    family = diagnose(cube, labels_N).family("run")
    assert family is not None
    forecast = curve(cube, labels_N, "run").forecast
    more = family.more(7)
    assert more.value == pytest.approx(forecast[6].gain.value - forecast[2].gain.value)
    assert more.runs_high is not None
    assert more.low < more.value < more.runs_high


@pytest.mark.slow
def test_findings_say_where_the_variance_is_and_what_to_do() -> None:
    diagnosis = diagnosed((4, 3, 2), (0.3, 0.1, 0.02))
    sentences = findings(diagnosis)
    text = "\n".join(sentences)

    assert "2,000 rows, 4 runs × 3 checkpoints × 2 routes." in sentences[0]
    assert f"logloss {diagnosis.combinations[-1].loss.value:.5f}" in sentences[0]
    split = diagnosis.decompositions[-1]
    assert split.order == ("route", "trajectory", "run")
    share = split.shares[2].value / split.total.value
    assert share > 0.8
    assert f"{share:.1%} between runs" in sentences[1]
    run = diagnosis.family("run")
    rest = diagnosis.family("run", ("trajectory", "route"))
    assert run is not None
    assert rest is not None
    assert f"The mean of 4 runs saves {run.gain.value:.3g} (other rows {run.gain.low:.3g}" in text
    assert f"One more run would save a further {rest.more(5).value:.3g}" in text
    assert "6 checkpoints instead of 3" in text
    assert "4 routes instead of 2" in text
    assert "Compared with the last checkpoint alone" in text
    assert f"{diagnosis.churn[0].decile_changes.value:.1%} of rows change their decile" in text
    assert sentences[-1].startswith("Average in this order, by the logloss it saves: runs (or distil")
    assert sentences[-1].count(";") == 4  # three steps, two of them with a remark


def test_one_estimator_has_nothing_to_compare_with() -> None:
    assert "nothing to compare" in findings(diagnosed((1, 1, 1), (0, 0, 0)))[0]
