"""Figures of predictions: raw and calibrated, by split, and what an old report may lack."""

import numpy as np
import pytest

from recap_ctr.errors import InputError
from recap_ctr.evaluation import metrics
from recap_ctr.evaluation.calibrate import AffineCalibration
from recap_ctr.evaluation.evaluate import Metrics, SplitFigures, evaluate, measure

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(-1.0, 1.0, 2_000)
LABELS = (RNG.random(2_000) < metrics.sigmoid(LOGITS)).astype(np.float64)
GROUPS = np.arange(2_000) // 10
IDENTITY = AffineCalibration(1.0, 0.0)


def split_figures() -> SplitFigures:
    return evaluate(LABELS, LOGITS, IDENTITY, reliability=True)


def test_figures_are_the_metrics_of_raw_and_calibrated_logits() -> None:
    calibration = AffineCalibration(0.5, 1.0)
    figures = evaluate(LABELS, LOGITS, calibration, groups=GROUPS)

    assert figures.rows == 2_000
    assert figures.base_rate == pytest.approx(LABELS.mean())
    for measured, logits in ((figures.raw, LOGITS), (figures.calibrated, 0.5 * LOGITS + 1.0)):
        assert measured.auc == pytest.approx(metrics.auc(LABELS, logits))
        assert measured.logloss == pytest.approx(metrics.logloss(LABELS, logits))
        assert measured.mean_prediction == pytest.approx(metrics.sigmoid(logits).mean())
        assert measured.group_auc == metrics.group_auc(LABELS, logits, GROUPS)
    rate = LABELS.mean()
    assert figures.base_rate_logloss == pytest.approx(-rate * np.log(rate) - (1 - rate) * np.log(1 - rate))
    assert figures.explained == pytest.approx(1 - figures.calibrated.logloss / figures.base_rate_logloss)


def test_weights_count_rows() -> None:
    weights = RNG.integers(1, 4, 2_000)
    copies = np.repeat(np.arange(2_000), weights)

    weighted = evaluate(LABELS, LOGITS, IDENTITY, weights=weights.astype(np.float64))
    copied = evaluate(LABELS[copies], LOGITS[copies], IDENTITY)

    assert weighted.raw.logloss == pytest.approx(copied.raw.logloss)
    assert weighted.base_rate == pytest.approx(copied.base_rate)


def test_groups_of_one_class_lose_only_their_own_figure() -> None:
    figures = measure(LABELS, LOGITS, groups=np.arange(2_000))
    assert figures.group_auc is None and figures.auc > 0.5
    assert "group_auc" in figures.model_fields_set
    assert "group_auc" not in measure(LABELS, LOGITS).model_fields_set


def test_rows_of_one_class_are_refused() -> None:
    with pytest.raises(InputError, match="both classes"):
        evaluate(np.ones(3), np.zeros(3), IDENTITY)


def test_test_rows_are_quoted_where_there_are_any() -> None:
    valid, test = split_figures(), evaluate(LABELS[:500], LOGITS[:500], IDENTITY)
    both, only_valid = Metrics(valid=valid, test=test), Metrics(valid=valid)

    assert (both.split, both.held_out) == ("test", test)
    assert (only_valid.split, only_valid.held_out) == ("valid", valid)
    assert dict(both.items()) == {"valid": valid, "test": test}
    assert both.on("valid") == valid and both.on("test") == test
    for split in ("test", "train"):
        with pytest.raises(InputError, match=f"no figures on {split} rows"):
            only_valid.on(split)


def test_reliability_can_be_left_out() -> None:
    assert split_figures().reliability
    short = Metrics(valid=split_figures()).without_reliability()
    assert short.valid.reliability is None and "reliability" not in short.to_json()["valid"]
    assert short.valid.raw == split_figures().raw


def test_a_report_without_newer_figures_is_read_and_written_back_as_it_was() -> None:
    figures = {"auc": 0.7, "logloss": 0.4}
    old = {"valid": {"rows": 10, "base_rate_logloss": 0.5, "raw": figures, "calibrated": figures}}
    assert Metrics.model_validate(old).to_json() == old
