"""Figures 1d and 4: whose AUC and size the table shows, and which of them are on the frontier."""

import json
from itertools import combinations
from pathlib import Path
from statistics import mean

import pytest

from recap_ctr.bench.frontier import Point, frontier, mark_frontier, table_text
from recap_ctr.inference import costs
from recap_ctr.recipe.ablation import finished_runs, student_run
from recap_ctr.recipe.report import measure_ensemble
from recap_ctr.storage.files import read_json
from recap_ctr.training.config import LOGITS
from tests.support.bench_files import check_figure_files
from tests.support.finished_tables import Workshop


def point(name: str, parameters: int, *auc: float) -> Point:
    return Point(name, "other models", len(auc), parameters, auc)


def test_on_the_frontier_is_what_nothing_beats() -> None:
    points = [
        point("small", 10, 0.70),
        point("worse", 20, 0.69, 0.71),
        point("best", 30, 0.79, 0.81),
        point("larger and equal", 40, 0.80),
        point("twin", 30, 0.80),
    ]
    assert [each.name for each in mark_frontier(points) if each.best] == ["small", "best", "twin"]


def test_validation_rows_say_which_ensemble_is_the_best() -> None:
    points = [
        Point("FCN", "single model", 1, 10, (0.70,), valid_auc=(0.70,)),
        Point("2 × FCN", "ensemble", 1, 20, (0.74,), valid_auc=(0.71,)),
        Point("3 × FCN", "ensemble", 1, 30, (0.72,), valid_auc=(0.73,)),
        Point("RECAP", "RECAP", 1, 10, (0.71,), valid_auc=(0.71,)),
    ]
    assert "the best ensemble (3 × FCN) +2.000 at 3.00 times" in table_text(points, "test")


@pytest.mark.slow
def test_table_sets_students_beside_all_else(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "ROWS", 256)
    recipe = workshop.recipe
    other = workshop.reports / "qnn" / "seed-1"
    other.mkdir(parents=True, exist_ok=True)
    values = read_json(workshop.reports / "ablation" / "runs" / "recap-plain" / "seed-1" / "report.json")
    values["metrics"]["test"]["raw"]["auc"], values["parameters"] = 0.1, 7
    (other / "report.json").write_text(json.dumps(values))
    before = workshop.trained()

    text = frontier(recipe, 1, workshop.reports)

    after = workshop.trained()
    assert {path: after[path] for path in before} == before
    assert not any(path.parent.name.startswith("recap-") for path in set(after) - set(before))
    stored = json.loads((workshop.reports / "frontier" / "frontier.json").read_text())
    points = {each["name"]: each for each in stored["points"]}
    assert [each["kind"] for each in stored["points"]] == [
        "single model",
        "ensemble",
        "ensemble",
        *["capacity"] * 3,
        "other models",
        "RECAP",
    ]

    teachers = recipe.train_teachers(recipe.plan())
    size = next(iter(teachers.values())).parameters
    assert points["FCN"]["auc"] == [report.metrics.on("test").raw.auc for report in teachers.values()]
    for count in (2, 3):
        ensembles = [
            measure_ensemble(recipe.config, recipe.data, [run / LOGITS for run in runs])
            for runs in combinations(teachers, count)
        ]
        expected = [ensemble.metrics.on("test").raw.auc for ensemble in ensembles]
        assert points[f"{count} × FCN"]["auc"] == expected, "all choices of its members, not the luckiest"
        assert points[f"{count} × FCN"]["runs"] == len(expected) == {2: 3, 3: 1}[count]
        assert points[f"{count} × FCN"]["parameters"] == count * size
    students = finished_runs(recipe, student_run(recipe, recipe.plan(), "recap", "ema-kd", list(teachers)))
    assert points["RECAP"]["auc"] == [report.metrics.on("test").raw.auc for report in students.values()]
    assert points["RECAP"]["runs"] == 2, "one was asked for, and the ablation had two"
    assert points["QNN"] == {
        "name": "QNN",
        "kind": "other models",
        "runs": 1,
        "parameters": 7,
        "auc": [0.1],
        "cost": None,
        "best": True,
        "valid_auc": [],
    }
    assert points["FCN"]["valid_auc"] == [report.metrics.valid.raw.auc for report in teachers.values()]
    assert points["FCN"]["cost"] == 1 and points["3 × FCN"]["cost"] > 1
    gain = 100 * (mean(points["RECAP"]["auc"]) - mean(points["FCN"]["auc"]))
    assert f"RECAP {gain:+.3f} at {points['RECAP']['parameters'] / size:.2f} times the parameters" in text

    check_figure_files(workshop.reports / "frontier")
    drawn = _figures(workshop.reports)
    assert frontier(recipe, 1, workshop.reports).count("\n") == text.count("\n")
    assert _figures(workshop.reports) == drawn, "costs are measured again, but not drawn"
    assert workshop.trained() == after


def _figures(reports: Path) -> dict[str, bytes]:
    return {suffix: (reports / "frontier" / f"frontier.{suffix}").read_bytes() for suffix in ("png", "svg")}
