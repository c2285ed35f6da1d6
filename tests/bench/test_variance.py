"""Variance beside the tables: figures are the theory's, families those of the runs."""

import json
from pathlib import Path

import numpy as np
import pytest

from recap_ctr.bench.variance import TRAININGS, family, variance
from recap_ctr.evaluation import metrics
from tests.bench.conftest import Kitchen


def test_a_family_has_the_variance_it_was_drawn_with() -> None:
    rng = np.random.default_rng(1)
    shared_N = rng.normal(size=40_000)
    logits_NM = shared_N[:, None] + 0.3 * rng.normal(size=(40_000, 4))
    labels_N = (rng.random(40_000) < metrics.sigmoid(shared_N)).astype(np.int8)

    found = family("four", "run", logits_NM, labels_N)

    assert found.variance == pytest.approx(0.09, rel=0.02)
    assert found.removed == pytest.approx(0.75 * found.variance)
    assert found.predicted == pytest.approx(found.measured, rel=0.15)
    assert found.auc_together > found.auc_alone


def test_table_covers_runs_and_routes(kitchen: Kitchen, tmp_path: Path) -> None:
    reports = tmp_path / "reports"
    text = variance(kitchen.recipe, 2, reports)

    assert (reports / "variance" / "variance.md").read_text() == text
    families = json.loads((reports / "variance" / "variance.json").read_text())["families"]
    by_axis = {axis: [one["name"] for one in families if one["axis"] == axis] for axis in ("run", "route")}
    assert by_axis["route"] == list(TRAININGS.values())
    assert by_axis["run"] == ["FCN, published protocol", "FCN + EMA: the teachers", *TRAININGS.values()]
    counts = {one["name"]: one["count"] for one in families if one["axis"] == "run"}
    assert counts == {name: 3 if name.startswith("FCN") else 2 for name in counts}
    assert all(one["variance"] > 0 for one in families if one["axis"] == "run")
    assert "Routes vary at most" in text
