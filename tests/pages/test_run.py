"""The page of a run or a fit."""

from pathlib import Path
from typing import Any

import pytest

from recap_ctr.pages.run import page
from recap_ctr.training.report import RunReport, parse_report, read_report
from tests.support.example_reports import fit_values, run_values
from tests.support.html_outline import Outline

COMMITTED = sorted((Path(__file__).parents[2] / "benchmarks").rglob("report.json"))
TITLES = ["Results", "Frontier", "Reliability", "Theory", "Training", "Fields", "Configuration"]


def test_page_gives_the_answer_first(report: RunReport) -> None:
    fit_page = page(report, "recap fit data --out model")
    html = fit_page.to_html()
    assert Outline(html).headings == TITLES
    assert fit_page.lead == (
        "RECAP ranks a clicked row above an unclicked one 81 times in 100 (AUC 81.00 ± 0.20 on 2,000 test rows): +1.00"
        " points compared with one of its teachers, where the ensemble of all 2 gains +2.00, with 1.10 times the"
        " parameters of one teacher."
    )
    assert "recap fit data --out model" in html
    assert report.data.fingerprint in html
    assert "ensemble of 2" in html and "teacher-1" in html
    assert "<td>lr</td><td></td><td>70.000</td>" in html
    assert "The field ad has the most unknown values: 5.00 %" in html
    assert "docs/glossary.md" in html.partition("<footer>")[2]


def test_unknown_values_are_told_apart_and_repeated_rows_counted() -> None:
    values = fit_values()
    for field in values["fields"]:
        field |= {"unseen": {"test": 0.03}, "rare": {"test": 0.015}, "missing": {"test": 0.005}}
    values["data"]["splits"] = {"test": {"rows": 2_000, "positives": 400}}
    html = page(parse_report(values | {"repeated": {"test": 50}})).to_html()
    assert (
        "5.00 % of its values in test rows are unseen in the training rows (3.00 %), rare there (1.50 %), missing"
        " (0.50 %), and share one embedding vector." in html
    )
    assert "50 of 2,000 test rows (2.5%) have the values and the label of a training row" in html
    for cells in ("unseen in test", "rare in test", "missing in test"):
        assert cells in html
    assert "<td>ad</td><td>30</td><td>3.00%</td><td>1.50%</td><td>0.50%</td>" in html


def test_reasons_that_no_value_has_are_left_out() -> None:
    values = fit_values()
    for field in values["fields"]:
        field |= {"unseen": {"test": 0.05}, "rare": {"test": 0.0}, "missing": {"test": 0.0}}
    html = page(parse_report(values)).to_html()
    assert "are unseen in the training rows (5.00 %), and share one embedding vector." in html


def test_runs_are_named_as_readers_know_them() -> None:
    values = fit_values()
    first, second = values["teacher_runs"].values()
    values["teacher_runs"] = {"fcn-0e1ffef52e": first, "fcn-8c73201544": second}
    values["chosen_because"] = "blend (blend-10-3c0624c704) is better on validation rows"
    results = page(parse_report(values)).sections[0]
    assert [row[0] for row in results.tables[0].rows][2:4] == ["fcn 1", "fcn 2"]
    assert results.text == "Shipped: blend (blend-10) is better on validation rows."


def test_fields_without_unknown_values_are_not_blamed() -> None:
    values = fit_values()
    for field in values["fields"]:
        field["oov"] = dict.fromkeys(field["oov"], 0.0)
    html = page(parse_report(values)).to_html()
    assert "Every value in test rows has an embedding vector of its own." in html
    assert "most unknown values" not in html


def test_a_single_epoch_has_no_curve() -> None:
    values = run_values()
    values["history"] = values["history"][:1]
    section = next(part for part in page(parse_report(values)).sections if part.title == "Training")
    assert section.charts == () and section.text.startswith(
        "There was a single epoch. Its validation AUC is "
    )


@pytest.mark.parametrize(
    ("model", "train", "shown"),
    [
        (
            "lr",
            {"update": "convex"},
            ["training: update", "training: seed", "strength of the regulariser, l2 · rows"],
        ),
        ("boosted", {}, ["training: seed"]),
        ("fcn", {}, ["training: batch_size", "training: learning_rate", "training: seed"]),
    ],
)
def test_the_configuration_holds_what_the_training_looks_at(
    model: str, train: dict[str, Any], shown: list[str]
) -> None:
    values = run_values() | {"model": {"name": model, "config": {}}, "train": train}
    if model == "lr":
        values["strength"] = 0.5
    keys = [row[0] for row in page(parse_report(values)).sections[-1].tables[0].rows]
    assert set(shown) <= set(keys)
    if model != "fcn":
        assert [key for key in keys if key.startswith(("training", "strength"))] == shown


def test_page_of_a_run_without_teachers() -> None:
    run_page = page(parse_report(run_values()))
    titles = [section.title for section in run_page.sections]
    assert titles == ["Results", "Reliability", "Training", "Configuration"]
    assert "calibrated, it lowers logloss by 40.0 %" in run_page.lead


def test_a_model_that_is_worse_than_the_base_rate_raises_the_logloss() -> None:
    values = run_values()
    values["metrics"]["test"]["calibrated"]["logloss"] = 0.51
    assert "calibrated, it RAISES logloss by 2.0 % compared" in page(parse_report(values)).lead


def test_page_quotes_validation_rows_where_there_are_no_test_rows() -> None:
    values = run_values()
    del values["metrics"]["test"]
    assert "on 1,000 valid rows" in page(parse_report(values)).lead


def test_page_shows_auc_within_groups() -> None:
    values = run_values()
    values["metrics"]["test"]["raw"]["group_auc"] = {"auc": 0.75, "num_groups": 1_200, "num_one_class": 3}
    groups = next(section for section in page(parse_report(values)).sections if section.title == "Groups")
    assert [value for _, value in groups.tables[0].rows] == ["75.000", "1,200", "3"]


@pytest.mark.parametrize("path", COMMITTED[::15], ids=lambda path: path.parent.name)
def test_pages_of_older_reports_do_without_what_these_lack(path: Path) -> None:
    report = read_report(path.parent)
    assert report.breakdown is None and report.command is None
    titles = Outline(page(report).to_html()).headings
    assert titles[0] == "Results" and titles[-1] == "Configuration" and "Slices" not in titles
