"""The page of a run or a fit."""

from recap_ctr.pages.run import page
from recap_ctr.training.report import RunReport, parse_report
from tests.support.example_reports import run_values
from tests.support.html_outline import Outline

TITLES = ["Results", "Frontier", "Reliability", "Theory", "Training", "Fields", "Configuration"]


def test_page_gives_the_answer_first(report: RunReport) -> None:
    fit_page = page(report, "recap fit data --out model")
    html = fit_page.to_html()
    assert Outline(html).headings == TITLES
    assert fit_page.lead == (
        "RECAP puts the click first in 81.00 % of pairs of a click and a non-click (AUC 81.00 ± 0.20) on 2,000 test"
        " rows: +1.00 points compared with one of its teachers, where the ensemble of all 2 gains +2.00, with 1.10"
        " times the parameters of one teacher."
    )
    assert "recap fit data --out model" in html
    assert report.data.fingerprint in html
    assert "ensemble of 2" in html and "teacher-1" in html
    assert "<td>lr</td><td></td><td>70.000</td>" in html
    assert "The field ad has the most unknown values: 5.00 %" in html
    assert "docs/glossary.md" in html.partition("<footer>")[2]


def test_page_of_a_run_without_teachers() -> None:
    run_page = page(parse_report(run_values()))
    titles = [section.title for section in run_page.sections]
    assert titles == ["Results", "Reliability", "Training", "Configuration"]
    assert "calibrated, it lowers logloss by 40.0 %" in run_page.lead


def test_page_quotes_validation_rows_where_there_are_no_test_rows() -> None:
    values = run_values()
    del values["metrics"]["test"]
    assert "on 1,000 valid rows" in page(parse_report(values)).lead


def test_page_shows_auc_within_groups() -> None:
    values = run_values()
    values["metrics"]["test"]["raw"]["group_auc"] = {"auc": 0.75, "num_groups": 1_200, "num_one_class": 3}
    groups = next(section for section in page(parse_report(values)).sections if section.title == "Groups")
    assert [value for _, value in groups.tables[0].rows] == ["75.000", "1,200", "3"]
