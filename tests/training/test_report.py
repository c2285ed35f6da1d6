"""The typed report reads every report that was ever committed, and writes it back as it was."""

import json
from pathlib import Path
from typing import Any

import pytest

from recap_ctr.config import TrainConfig
from recap_ctr.errors import InputError
from recap_ctr.storage.files import read_object
from recap_ctr.training.report import (
    FitReport,
    RunReport,
    parse_report,
    read_report,
    record_command,
    write_report,
)

ROOT = Path(__file__).parents[2]
COMMITTED = sorted((ROOT / "benchmarks").rglob("report.json"))


def read(path: Path) -> dict[str, Any]:
    return read_object(path, "a report")


def test_reports_were_committed() -> None:
    assert len(COMMITTED) > 100


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: str(path.parent.relative_to(ROOT)))
def test_a_committed_report_is_read_and_written_back_as_it_was(path: Path, tmp_path: Path) -> None:
    values, report = read(path), read_report(path.parent)
    assert report.metrics.held_out.raw.auc == values["metrics"][report.metrics.split]["raw"]["auc"]
    assert report.train.seed == values["train"]["seed"]
    write_report(tmp_path, report)
    # Training settings are written in full, those that are newer than the report too.
    settings = TrainConfig.model_validate(values["train"]).model_dump(mode="json")
    assert settings == settings | values["train"]
    assert read(tmp_path / "report.json") == {**values, "train": settings}


def test_a_report_that_names_its_recipe_is_that_of_a_fit(finished: Path) -> None:
    values = read(finished / "report.json")
    metrics = values["metrics"]
    fit = {
        "recipe": {"teachers": 1},
        "plan": {"l2": 0.1},
        "student": "student-recap",
        "students": {"student-recap": metrics},
        "teacher_runs": {
            "teachers/teacher-1": {
                "metrics": metrics,
                "seed": 1001,
                "parameters": 7,
                "epochs": 2,
                "seconds": values["seconds"],
            }
        },
        "ensembles": [{"teachers": 1, "metrics": metrics}],
    }
    assert type(parse_report(values)) is RunReport
    report = parse_report({**values, **fit})
    assert isinstance(report, FitReport)
    assert report.teacher_runs["teachers/teacher-1"].seed == 1001
    assert (report.recovered, report.averaging) == (None, None)
    assert report.to_json() == {**values, **fit}


def test_fields_of_newer_versions_are_ignored(finished: Path) -> None:
    values = read(finished / "report.json")
    assert parse_report({**values, "weather": "fine"}) == parse_report(values)


def test_metrics_on_one_route_and_on_every_route(finished: Path) -> None:
    values = read(finished / "report.json")
    report = parse_report(values)
    assert report.on_routes(every=True) is report, "a model without routes has no other metrics"
    better = json.loads(json.dumps(values["metrics"]))
    better["valid"]["raw"]["auc"] = 0.99
    routed = parse_report({**values, "metrics_by_routes": {"1": values["metrics"], "16": better}})
    assert routed.on_routes(every=True).metrics.valid.raw.auc == 0.99
    assert routed.on_routes(every=False).metrics == report.metrics


def test_what_is_no_report_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds no report\.json\n  fix: .*recap fit"):
        read_report(tmp_path)
    (tmp_path / "report.json").write_text('{"kind": "report", "data": {"name": 3}}')
    with pytest.raises(InputError, match=r"report\.json is not a report: data\.name"):
        read_report(tmp_path)
    with pytest.raises(InputError, match="is not a report"):
        parse_report(["a", "list"])


def test_the_first_command_on_record_stays(finished: Path, tmp_path: Path) -> None:
    report = read_report(finished)
    assert record_command(tmp_path, report, "") is report and not (tmp_path / "report.json").exists()
    named = record_command(tmp_path, report, "recap train data --out run")
    assert read_report(tmp_path) == named and named.command == "recap train data --out run"
    assert record_command(tmp_path, named, "recap train data --out run --json") is named


@pytest.mark.parametrize("text", ["[]", "null", "3", "{}"])
def test_what_is_no_report_is_said(text: str, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(InputError, match="is not a report"):
        read_report(tmp_path)
