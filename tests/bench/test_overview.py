"""The overview: its entries come from the runs it names, and its findings from its entries."""

import json
from pathlib import Path

import pytest

from recap_ctr.bench.overview import overview
from recap_ctr.recipe.ablation import PLAIN_FCN
from tests.support.finished_tables import Workshop


@pytest.mark.slow
def test_overview_sets_students_beside_both_ensembles(workshop: Workshop, tmp_path: Path) -> None:
    reports = tmp_path / "reports"
    text = overview(workshop.recipe, 1, reports)

    assert (reports / "overview" / "overview.md").read_text() == text
    record = json.loads((reports / "overview" / "overview.json").read_text())
    entries = {entry["name"]: entry for entry in record["lines"]}
    assert list(entries)[:2] == ["base rate", "logistic regression"]
    assert list(entries)[-5:] == ["recursive backbone", "+ EMA", "+ KD", "+ routes", "RECAP"]
    for name, folder in (
        (PLAIN_FCN, "fcn-plain"),
        ("FCN, averaged weights: the teachers", "teachers"),
    ):
        stored = [
            json.loads(path.read_text())["metrics"]["test"]["raw"]["auc"]
            for path in sorted((reports / "overview" / "runs" / folder).glob("seed-*/report.json"))
        ]
        assert entries[name]["auc"] == stored and len(stored) == 3
        assert f"RECAP minus the ensemble of 3 of {name}" in text
    assert text.count("| ensemble of 3 |") == 2
