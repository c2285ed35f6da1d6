"""Reports as if of finished runs, and what the files of a table must be like."""

import csv
import io
import json
import struct
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from recap_ctr.bench import figures
from recap_ctr.training.report import RunReport, parse_report


def split_figures(auc: float, logloss: float, calibrated: float) -> dict[str, Any]:
    """Return the figures of one split as a report stores them."""
    return {
        "rows": 100,
        "base_rate_logloss": 0.5,
        "raw": {"auc": auc, "logloss": logloss},
        "calibrated": {"auc": auc, "logloss": calibrated},
    }


def report_values(seed: int = 1, **changes: Any) -> dict[str, Any]:
    """Return the JSON values of a whole report of logistic regression, some of them changed."""
    figures_of_splits = {"valid": split_figures(0.5, 1.0, 1.0), "test": split_figures(0.7, 0.5, 0.5)}
    values: dict[str, Any] = {
        "kind": "report",
        "format": 1,
        "data": {"name": "toy", "fingerprint": "of these rows"},
        "model": {"name": "lr", "config": {}},
        "train": {"seed": seed},
        "threads": 1,
        "device": "cpu",
        "calibration": "affine",
        "negative_rate": 1.0,
        "parameters": 7,
        "calibrated_by": {},
        "metrics": figures_of_splits,
        "best_epoch": 1,
        "history": [],
        "seconds": {"train": 1.0, "evaluate": 1.0},
        "versions": {},
        "machine": {},
        "date": "2026-01-01",
    }
    return {**values, **changes}


def report_of(seed: int = 1, **changes: Any) -> RunReport:
    """Return such a report."""
    return parse_report(report_values(seed, **changes))


def check_figure_files(directory: Path) -> None:
    """Check the files of a table with a figure, as all of them must be."""
    name = directory.name
    png = (directory / f"{name}.png").read_bytes()
    assert png.startswith(b"\x89PNG\r\n\x1a\n") and png.endswith(b"IEND\xaeB`\x82")
    assert struct.unpack(">I", png[16:20])[0] == figures.WIDTH * figures.DPI
    svg = (directory / f"{name}.svg").read_text()
    assert ElementTree.fromstring(svg).tag.endswith("svg")
    assert "dc:date" not in svg and "Software" not in svg
    numbers = json.loads((directory / f"{name}.json").read_text())
    assert numbers["kind"] == name
    lines = list(csv.DictReader(io.StringIO((directory / f"{name}.csv").read_text())))
    assert len(lines) == len(numbers["points"])
    assert all(len(line) == len(set(line)) and None not in line for line in lines)
