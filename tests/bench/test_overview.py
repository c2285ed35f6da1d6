"""The overview: its entries come from the runs it names, and its findings from its entries."""

import json
from pathlib import Path

import pytest

from recap_ctr.bench import scaling
from recap_ctr.bench.overview import cells, overview
from recap_ctr.data.shards import PreparedData
from recap_ctr.recipe.ablation import PLAIN_FCN
from recap_ctr.recipe.stages import Plan
from recap_ctr.training.config import RunConfig
from tests.support.finished_tables import Workshop
from tests.support.tiny_recipe import tiny_recipe


@pytest.mark.slow
def test_overview_sets_students_beside_both_ensembles(workshop: Workshop, tmp_path: Path) -> None:
    reports = tmp_path / "reports"
    text = overview(workshop.recipe, 1, reports)

    assert (reports / "overview" / "overview.md").read_text() == text
    record = json.loads((reports / "overview" / "overview.json").read_text())
    entries = {entry["name"]: entry for entry in record["lines"]}
    assert list(entries)[:2] == ["base rate", "logistic regression"]
    assert list(entries)[-6:] == [
        "recursive backbone, plateau rule",
        "recursive backbone",
        "+ EMA",
        "+ KD",
        "+ routes",
        "RECAP",
    ]
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


def test_lines_have_one_cause_each_and_their_own_l2(
    prepared: PreparedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are the runs of the ablation, so that a difference is that of what they name."""
    recipe = tiny_recipe(prepared, tmp_path)
    plan = recipe.plan()
    teachers = list(recipe.train_teachers(plan))

    def probed(plan: Plan, run: RunConfig) -> float:
        """Stand in for the probe of a training: an l2 that tells which training it was asked for."""
        return (
            0.1 * len(run.teachers)
            + 0.2 * bool(run.train.ema_epochs)
            + 0.4 * (run.train.schedule == "plateau")
        )

    monkeypatch.setattr(recipe, "own_l2", probed)
    of_overview = cells(recipe, plan, teachers, 1)
    of_ablation = scaling.cells("ablation", recipe, plan, teachers, 1)
    base = of_overview["raw"].config
    for training in ("raw", "plain", "ema", "raw-kd", "ema-kd"):
        config = of_overview[training].config
        assert config == of_ablation[training].config
        assert config.train.l2 == pytest.approx(probed(plan, config))
        if training != "plain":
            assert (
                config.train.schedule == base.train.schedule and config.train.patience == base.train.patience
            )
    assert of_overview["published"].config.train.l2 == pytest.approx(0.4)
