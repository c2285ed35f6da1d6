"""The page that compares runs."""

import pytest

from recap_ctr.errors import InputError
from recap_ctr.pages import compare
from recap_ctr.training.report import RunReport, parse_report
from tests.support.example_reports import metrics, run_values


def test_several_runs_on_one_page(report: RunReport) -> None:
    command = "recap train data --model recap --out old"
    worse = parse_report({**run_values(), "metrics": metrics(0.76), "command": command})
    data = report.data.model_copy(update={"split": "by time; test until 2026-01-03"})
    report = report.model_copy(update={"data": data})
    comparison = compare.page({"old": worse, "new": report})
    assert comparison.lead == (
        "new has the highest AUC of 2 runs on the test rows: 81.00 ± 0.20 points, 5.00 more than old."
    )
    titles = [section.title for section in comparison.sections]
    assert titles == ["Results", "Frontier", "Reliability", "Training", "Configuration"]
    html = comparison.to_html()
    assert command in html and "by time; test until 2026-01-03" in html
    near = parse_report({**run_values(), "metrics": metrics(0.809)})
    assert compare.page({"near": near, "new": report}).lead.endswith(
        "0.10 more than near, which may be chance."
    )
    other = report.model_copy(update={"data": report.data.model_copy(update={"fingerprint": "0" * 32})})
    with pytest.raises(InputError, match="2 different data sets"):
        compare.page({"one": report, "two": other})
