"""The paper's Tables 2 and 3: which runs they are made of, and which figures of them they show."""

import json
from pathlib import Path
from typing import Any

import pytest

from recap_ctr.bench.scaling import BENCHES, bench, render
from recap_ctr.data.shards import PreparedData
from recap_ctr.errors import InputError
from recap_ctr.recipe.stages import Recipe, recipe_config

TINY: dict[str, Any] = {
    "model_settings": {"dim": 4, "depth": 2, "train_depths": [2], "depth_weights": [1.0], "num_adapters": 4},
    "teacher_settings": {"dim": 4, "num_exponential_layers": 1, "num_linear_layers": 1},
    "teachers": 1,
    "routes": 4,
    "l2": 0.01,
    "train": {"batch_size": 256, "max_epochs": 1},
}


def recipe(data: PreparedData, out: Path, **changes: Any) -> Recipe:
    return Recipe(recipe_config("default", {**TINY, **changes}, "test"), data, out, workers=2, quiet=True)


def report(seed: int, one: float, many: float | None) -> dict[str, Any]:
    def figures(auc: float) -> dict[str, Any]:
        return {"test": {name: {"auc": auc, "logloss": 1 - auc} for name in ("raw", "calibrated")}}

    return {
        "data": {"name": "toy"},
        "train": {"seed": seed},
        "parameters": 7,
        "teachers": [],
        "metrics": figures(many or one),
        "metrics_by_routes": {"1": figures(one), "8": figures(many)} if many is not None else {},
    }


def test_one_training_serves_the_lines_with_and_without_routes() -> None:
    found = {
        "plain": [report(1, 0.80, 0.81), report(2, 0.80, 0.82)],
        "ema": [report(1, 0.83, 0.9), report(2, 0.83, 0.9)],
        "kd": [report(1, 0.84, 0.9), report(2, 0.84, 0.9)],
        "ema-kd": [report(1, 0.5, 0.86), report(2, 0.5, 0.87)],
    }
    markdown, latex = render("ablation", found)
    lines = {line.split("|")[1].strip(" *"): line for line in markdown.splitlines() if line.startswith("|")}
    assert "80.000" in lines["Recursive backbone"]
    assert "81.500" in lines["+ route scaling"]
    assert "83.000" in lines["+ trajectory scaling"]
    assert "84.000" in lines["+ cross-run scaling"]
    assert "86.500" in lines["RECAP"]
    assert "\\checkmark" in latex and "86.500" in latex


def test_every_line_of_the_papers_tables_is_there() -> None:
    marks = [(line.ema, line.kd, line.routes) for line in BENCHES["ablation"]]
    assert marks == [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1)]
    assert [(line.ema, line.kd) for line in BENCHES["fcn-scaling"]] == [(0, 0), (1, 0), (0, 1), (1, 1)]


def test_bench_trains_what_is_missing_and_writes_reports_and_table(
    prepared: PreparedData, tmp_path: Path
) -> None:
    out, reports = tmp_path / "bench", tmp_path / "reports"
    text = bench("ablation", recipe(prepared, out), 1, reports)

    assert (reports / "ablation" / "ablation.md").read_text() == text
    assert (reports / "ablation" / "ablation.tex").is_file()
    found = {
        path.parent.parent.name: json.loads(path.read_text())
        for path in sorted(reports.glob("recipe/*/seed-1/report.json"))
    }
    assert set(found) == {"recap-plain", "recap-ema", "recap-kd", "recap-ema-kd"}
    for training, one in found.items():
        assert bool(one["teachers"]) == ("kd" in training)
        assert bool(one["train"]["ema_epochs"]) == ("ema" in training)
        assert one["train"]["schedule"] == ("constant" if "ema" in training else "plateau")
        assert set(one["metrics_by_routes"]) == {"1", "4"}
    written = {path: path.stat().st_mtime_ns for path in out.rglob("best.safetensors")}
    assert bench("ablation", recipe(prepared, out), 1, reports) == text
    assert {path: path.stat().st_mtime_ns for path in out.rglob("best.safetensors")} == written


def test_it_needs_teachers(prepared: PreparedData, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="at least one teacher"):
        bench("fcn-scaling", recipe(prepared, tmp_path, teachers=0), 1, tmp_path / "reports")
