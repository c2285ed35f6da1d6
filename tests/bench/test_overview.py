"""The overview: its lines come from the runs it says, and its findings from its lines."""

import json
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import ttest_1samp

from recap_ctr.bench.overview import against, overview
from tests.bench.conftest import Kitchen


def test_against_is_scipys_one_sample_test() -> None:
    values = (0.91, 0.912, 0.915)
    found, expected = against(values, 0.909), ttest_1samp(values, 0.909)
    interval = expected.confidence_interval(0.95)
    assert found["p"] == pytest.approx(expected.pvalue)
    assert found["mean"] == pytest.approx(np.mean(values) - 0.909)
    assert (found["low"], found["high"]) == pytest.approx((interval.low - 0.909, interval.high - 0.909))
    assert against((0.91,), 0.909)["p"] is None


def test_overview_sets_students_beside_both_ensembles(kitchen: Kitchen, tmp_path: Path) -> None:
    reports = tmp_path / "reports"
    text = overview(kitchen.recipe, 1, reports)

    assert (reports / "overview" / "overview.md").read_text() == text
    lines = {
        line["name"]: line
        for line in json.loads((reports / "overview" / "overview.json").read_text())["lines"]
    }
    assert list(lines)[:2] == ["base rate", "logistic regression"]
    assert list(lines)[-5:] == ["recursive backbone", "+ EMA", "+ KD", "+ routes", "RECAP"]
    for name, folder in (
        ("FCN, published protocol", "fcn-plain"),
        ("FCN, averaged weights: the teachers", "teachers"),
    ):
        stored = [
            json.loads(path.read_text())["metrics"]["test"]["raw"]["auc"]
            for path in sorted((reports / "recipe" / folder).glob("seed-*/report.json"))
        ]
        assert lines[name]["auc"] == stored and len(stored) == 3
        assert f"RECAP minus the ensemble of 3 of {name}" in text
    assert text.count("| ensemble of 3 |") == 2
