"""What a model is compared with: the figures, and the paired differences."""

from pathlib import Path

import numpy as np
import pytest

from recap_ctr.data.shards import PreparedData
from recap_ctr.evaluation import metrics
from recap_ctr.evaluation.calibrate import fit_affine
from recap_ctr.models.catalogue import parse_model
from recap_ctr.training.config import RunConfig
from recap_ctr.training.references import (
    CONVERGED,
    compare_with_reference,
    held_out_logits,
    was_cut,
    write_tree_logits,
)
from recap_ctr.training.run import run


def test_differences_are_paired(prepared: PreparedData) -> None:
    rng = np.random.default_rng(0)
    labels = prepared.valid.labels
    noise = rng.normal(size=len(labels))
    good, bad = labels + 0.5 * noise, 0.2 * labels + noise
    ahead = compare_with_reference({"valid": good}, {"valid": bad}, prepared, 1.0)["valid"]
    behind = compare_with_reference({"valid": bad}, {"valid": good}, prepared, 1.0)["valid"]
    assert ahead.auc == metrics.auc(labels, bad)
    assert ahead.lead == pytest.approx(metrics.auc(labels, good) - metrics.auc(labels, bad))
    assert ahead.logloss_gain == pytest.approx(metrics.logloss(labels, bad) - metrics.logloss(labels, good))
    assert ahead.lead is not None and behind.lead == pytest.approx(-ahead.lead)
    assert ahead.lead_error == pytest.approx(behind.lead_error)
    assert ahead.logloss_gain_error == pytest.approx(behind.logloss_gain_error)


def test_a_model_is_not_ahead_of_itself(prepared: PreparedData) -> None:
    logits = np.random.default_rng(0).normal(size=len(prepared.valid))
    same = compare_with_reference({"valid": logits}, {"valid": logits}, prepared, 0.5)["valid"]
    assert (same.lead, same.lead_error, same.logloss_gain, same.logloss_gain_error) == (0, 0, 0, 0)


def test_trees_beat_chance_and_are_fitted_once(prepared: PreparedData, tmp_path: Path) -> None:
    write_tree_logits(str(prepared.path), str(tmp_path / "trees"), threads=1)
    logits = held_out_logits(tmp_path / "trees", prepared)
    assert list(logits) == ["valid", "test"]
    assert metrics.auc(prepared.test.labels, logits["test"]) > 0.55
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "trees").rglob("*.npy")}
    write_tree_logits(str(prepared.path), str(tmp_path / "trees"), threads=1)
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "trees").rglob("*.npy")}


def test_what_a_deadline_cut_is_on_record(prepared: PreparedData, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    write_tree_logits(str(prepared.path), str(whole), threads=1)
    write_tree_logits(str(prepared.path), str(cut), threads=1, deadline=1.0)
    assert was_cut(cut) and not was_cut(whole)
    (cut / "ended.json").unlink()
    assert not was_cut(cut), "tables of older versions say nothing"

    config = RunConfig("lr", parse_model("lr", {}), CONVERGED, train_baseline=False)
    report = run(config, prepared, tmp_path / "lr", quiet=True, deadline=1.0)
    assert report.to_json()["cut"] is True and was_cut(tmp_path / "lr" / "logits")
    assert "cut" not in run(config, prepared, tmp_path / "whole-lr", quiet=True).to_json()
    logits = np.random.default_rng(0).normal(size=len(prepared.valid))
    marked = compare_with_reference({"valid": logits}, {"valid": logits}, prepared, 1.0, is_cut=True)
    assert marked["valid"].to_json()["cut"] is True


def test_the_standard_error_of_a_logloss_difference_is_that_of_repeated_draws() -> None:
    rng = np.random.default_rng(0)

    def draw(rows: int) -> metrics.Difference:
        logits = rng.normal(size=rows)
        labels = (rng.random(rows) < metrics.sigmoid(logits)).astype(int)
        return metrics.logloss_difference(labels, 0.5 * logits, logits)

    draws = [draw(500) for _ in range(400)]
    spread = np.std([drawn.difference for drawn in draws])
    assert np.mean([drawn.standard_error for drawn in draws]) == pytest.approx(spread, rel=0.1)


def test_a_reference_is_calibrated_like_the_model(prepared: PreparedData) -> None:
    rng = np.random.default_rng(0)
    held_out = {"valid": prepared.valid, "test": prepared.test}
    truth = {split: 2.0 * rows.labels - 1.0 + rng.normal(size=len(rows)) for split, rows in held_out.items()}
    unsure = {split: 0.1 * logits + 3.0 for split, logits in truth.items()}
    compared = compare_with_reference(truth, unsure, prepared, 1.0)
    for split, rows in held_out.items():
        expected = fit_affine(prepared.valid.labels, unsure["valid"]).apply(unsure[split])
        assert compared[split].calibrated_logloss == metrics.logloss(rows.labels, expected)
        assert compared[split].logloss == metrics.logloss(rows.labels, unsure[split])
    stepwise = compare_with_reference(truth, unsure, prepared, 1.0, calibration="isotonic")
    assert stepwise["test"].calibrated_logloss != compared["test"].calibrated_logloss
