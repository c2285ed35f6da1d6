"""Variance beside the tables: figures are the theory's, families those of the runs."""

import json
from pathlib import Path

import numpy as np
import pytest

from recap_ctr.bench.variance import TRAININGS, family, variance
from recap_ctr.evaluation import metrics
from recap_ctr.recipe.ablation import PLAIN_FCN
from tests.support.finished_tables import Workshop


def test_a_family_has_the_variance_it_was_drawn_with() -> None:
    rng = np.random.default_rng(1)
    shared_N = rng.normal(size=40_000)
    logits_NM = shared_N[:, None] + 0.3 * rng.normal(size=(40_000, 4))
    labels_N = (rng.random(40_000) < metrics.sigmoid(shared_N)).astype(np.int8)

    drawn = family("four", "run", logits_NM, labels_N)

    assert drawn.variance == pytest.approx(0.09, rel=0.02)
    assert drawn.removed == pytest.approx(0.75 * drawn.variance)
    assert drawn.predicted == pytest.approx(drawn.measured, rel=0.15)
    assert drawn.auc_together > drawn.auc_alone


@pytest.mark.slow
def test_table_covers_runs_and_routes(workshop: Workshop, tmp_path: Path) -> None:
    reports = tmp_path / "reports"
    text = variance(workshop.recipe, 2, reports)

    assert (reports / "variance" / "variance.md").read_text() == text
    families = json.loads((reports / "variance" / "variance.json").read_text())["families"]
    by_axis = {axis: [each["name"] for each in families if each["axis"] == axis] for axis in ("run", "route")}
    assert by_axis["route"] == list(TRAININGS.values())
    assert by_axis["run"] == [PLAIN_FCN, "FCN + EMA: the teachers", *TRAININGS.values()]
    counts = {each["name"]: each["count"] for each in families if each["axis"] == "run"}
    assert counts == {name: 3 if name.startswith("FCN") else 2 for name in counts}
    assert all(each["variance"] > 0 for each in families if each["axis"] == "run")
    assert "Routes vary at most" in text
