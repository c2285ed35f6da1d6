"""The paper's Tables 2 and 3: which runs they are made of, and which figures of them they show."""

from pathlib import Path

import pytest

from recap_ctr.bench.scaling import TABLES, render, scaling
from recap_ctr.data.shards import PreparedData
from recap_ctr.errors import InputError
from recap_ctr.training.report import RunReport, read_report
from tests.support.bench_files import report_of, split_figures
from tests.support.tiny_recipe import tiny_recipe


def report(seed: int, on_one_route: float, on_every_route: float) -> RunReport:
    """Return a report of a model whose AUC on one route differs from that on all eight."""
    single, every = (
        {split: split_figures(auc, 1 - auc, 1 - auc) for split in ("valid", "test")}
        for auc in (on_one_route, on_every_route)
    )
    return report_of(seed, metrics=every, metrics_by_routes={"1": single, "8": every})


def test_one_training_serves_the_entries_with_and_without_routes() -> None:
    reports = {
        "plain": [report(1, 0.80, 0.81), report(2, 0.80, 0.82)],
        "ema": [report(1, 0.83, 0.9), report(2, 0.83, 0.9)],
        "kd": [report(1, 0.84, 0.9), report(2, 0.84, 0.9)],
        "ema-kd": [report(1, 0.5, 0.86), report(2, 0.5, 0.87)],
    }
    markdown, latex = render("ablation", reports)
    lines = {line.split("|")[1].strip(" *"): line for line in markdown.splitlines() if line.startswith("|")}
    assert "80.000" in lines["Recursive backbone"]
    assert "81.500" in lines["+ route scaling"]
    assert "83.000" in lines["+ trajectory scaling"]
    assert "84.000" in lines["+ cross-run scaling"]
    assert "86.500" in lines["RECAP"]
    assert "\\checkmark" in latex and "86.500" in latex


def test_every_entry_of_the_papers_tables_is_there() -> None:
    marks = [(entry.ema, entry.kd, entry.routes) for entry in TABLES["ablation"].entries]
    assert marks == [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1)]
    assert [(entry.ema, entry.kd) for entry in TABLES["fcn-scaling"].entries] == [
        (0, 0),
        (1, 0),
        (0, 1),
        (1, 1),
    ]


@pytest.mark.slow
def test_it_trains_what_is_missing_and_writes_reports_and_table(
    prepared: PreparedData, tmp_path: Path
) -> None:
    out, reports = tmp_path / "bench", tmp_path / "reports"
    text = scaling("ablation", tiny_recipe(prepared, out), 1, reports)

    assert (reports / "ablation" / "ablation.md").read_text() == text
    assert (reports / "ablation" / "ablation.tex").is_file()
    copies = {
        path.parent.parent.name: read_report(path.parent)
        for path in sorted(reports.glob("recipe/*/seed-1/report.json"))
    }
    assert set(copies) == {"recap-plain", "recap-ema", "recap-kd", "recap-ema-kd"}
    for training, copy in copies.items():
        assert bool(copy.teachers) == ("kd" in training)
        assert bool(copy.train.ema_epochs) == ("ema" in training)
        assert copy.train.schedule == ("constant" if "ema" in training else "plateau")
        assert set(copy.metrics_by_routes) == {"1", "4"}
    written = {path: path.stat().st_mtime_ns for path in out.rglob("best.safetensors")}
    assert scaling("ablation", tiny_recipe(prepared, out), 1, reports) == text
    assert {path: path.stat().st_mtime_ns for path in out.rglob("best.safetensors")} == written


def test_it_needs_teachers(prepared: PreparedData, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="at least one teacher"):
        scaling("fcn-scaling", tiny_recipe(prepared, tmp_path, teachers=0), 1, tmp_path / "reports")
