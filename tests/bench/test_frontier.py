"""Figures 1d and 4: whose AUC and size stand in the table, and which of them are on the frontier."""

import json
from pathlib import Path
from statistics import mean

import pytest

from recap_ctr.bench.frontier import Point, frontier, mark
from recap_ctr.bench.scaling import finished, run_of
from recap_ctr.inference import costs as cost
from tests.bench.conftest import Kitchen
from tests.bench.test_figures import check


def point(name: str, parameters: int, *auc: float) -> Point:
    return Point(name, "other models", len(auc), parameters, auc)


def test_on_the_frontier_is_what_nothing_beats() -> None:
    points = [
        point("small", 10, 0.70), point("worse", 20, 0.69, 0.71), point("best", 30, 0.79, 0.81),
        point("larger and equal", 40, 0.80), point("twin", 30, 0.80),
    ]  # fmt: skip
    assert [one.name for one in mark(points) if one.best] == ["small", "best", "twin"]


def test_table_sets_students_beside_all_else(kitchen: Kitchen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "ROWS", 256)
    own = kitchen.recipe
    other = kitchen.reports / "qnn" / "seed-1"
    other.mkdir(parents=True, exist_ok=True)
    report = json.loads((kitchen.reports / "recipe" / "recap-plain" / "seed-1" / "report.json").read_text())
    report["metrics"]["test"]["raw"]["auc"], report["parameters"] = 0.1, 7
    (other / "report.json").write_text(json.dumps(report))
    before = kitchen.trained()

    text = frontier(own, 1, kitchen.reports)

    after = kitchen.trained()
    assert {path: after[path] for path in before} == before
    assert not any(path.parent.name.startswith("recap-") for path in set(after) - set(before))
    stored = json.loads((kitchen.reports / "frontier" / "frontier.json").read_text())
    points = {one["name"]: one for one in stored["points"]}
    assert [one["kind"] for one in stored["points"]] == [
        "single model", "ensemble", "ensemble", *["capacity"] * 2, "other models", "RECAP",
    ]  # fmt: skip

    teachers = own.teachers(own.plan())
    size = next(iter(teachers.values()))["parameters"]
    assert points["FCN"]["auc"] == [one["metrics"]["test"]["raw"]["auc"] for one in teachers.values()]
    for count, one in enumerate(own.ensembles(list(teachers))[1:], start=2):
        assert points[f"{count} × FCN"]["auc"] == [one["metrics"]["test"]["raw"]["auc"]]
        assert points[f"{count} × FCN"]["parameters"] == count * size
    students = finished(own, run_of(own, own.plan(), "recap", "ema-kd", list(teachers)))
    assert points["RECAP"]["auc"] == [one["metrics"]["test"]["raw"]["auc"] for one in students.values()]
    assert points["RECAP"]["runs"] == 2, "one was asked for, and the ablation had two"
    assert points["QNN"] == {
        "name": "QNN", "kind": "other models", "runs": 1, "parameters": 7, "auc": [0.1], "cost": None, "best": True,
    }  # fmt: skip
    assert points["FCN"]["cost"] == 1 and points["3 × FCN"]["cost"] > 1
    gain = 100 * (mean(points["RECAP"]["auc"]) - mean(points["FCN"]["auc"]))
    assert f"RECAP {gain:+.3f} at {points['RECAP']['parameters'] / size:.2f} times the parameters" in text

    check(kitchen.reports / "frontier")
    drawn = _figures(kitchen.reports)
    assert frontier(own, 1, kitchen.reports).count("\n") == text.count("\n")
    assert _figures(kitchen.reports) == drawn, "costs are measured anew, but not drawn"
    assert kitchen.trained() == after


def _figures(reports: Path) -> dict[str, bytes]:
    return {suffix: (reports / "frontier" / f"frontier.{suffix}").read_bytes() for suffix in ("png", "svg")}
