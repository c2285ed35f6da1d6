"""What a page says of a model that is not ahead of a reference."""

from pathlib import Path

import pytest

from recap_ctr.cli.output import print_report
from recap_ctr.pages.references import lead_text, logloss_gain_text, reference_sentence
from recap_ctr.pages.run import lead, page
from recap_ctr.training.report import Reference, RunReport, read_report

AHEAD = Reference(
    auc=0.7, logloss=0.6, lead=0.02, lead_error=0.005, logloss_gain=0.01, logloss_gain_error=0.002
)
EQUAL = Reference(auc=0.7, logloss=0.6, lead=0.009, lead_error=0.005)
BEHIND = Reference(auc=0.7, logloss=0.6, lead=-0.02, lead_error=0.005)
OLD = Reference(auc=0.7, logloss=0.6)


@pytest.fixture
def report(finished: Path) -> RunReport:
    return read_report(finished)


def against(report: RunReport, **references: Reference) -> RunReport:
    split = report.metrics.split
    return report.model_copy(
        update={"reference": {name: {split: figures} for name, figures in references.items()}}
    )


def test_nothing_is_said_of_references_that_are_behind(report: RunReport) -> None:
    assert reference_sentence(against(report, lr=AHEAD, older=OLD)) == ""


def test_what_the_budget_cut_is_marked(report: RunReport, capsys: pytest.CaptureFixture[str]) -> None:
    cut = BEHIND.model_copy(update={"cut": True})
    compared = against(report, LightGBM=cut, lr=AHEAD)
    assert "NOT ahead of LightGBM (cut by the budget; -2.000 ± 0.980 points of AUC)" in reference_sentence(
        compared
    )
    html = page(compared).to_html()
    assert html.count("LightGBM (cut by the budget)</") == 2 and "lr (cut" not in html
    print_report(compared)
    assert "LightGBM (cut by the budget)  0.7" in capsys.readouterr().out


def test_references_that_are_not_behind_come_first(report: RunReport) -> None:
    compared = against(report, lr=AHEAD, trees=EQUAL, boosted=BEHIND)
    sentence = reference_sentence(compared)
    assert sentence == (
        "The model is NOT ahead of trees (+0.900 ± 0.980 points of AUC) and boosted (-2.000 ± 0.980 points of AUC)"
        " beyond chance on the test rows."
    )
    assert lead(compared).startswith(sentence)


def test_a_lower_logloss_of_a_reference_is_said(report: RunReport) -> None:
    loss = report.metrics.on(report.metrics.split).calibrated.logloss
    surer = AHEAD.model_copy(update={"logloss": loss - 0.01})
    sentence = reference_sentence(against(report, trees=surer, lr=AHEAD.model_copy(update={"logloss": loss})))
    assert sentence.startswith(f"Its calibrated logloss there, {loss:.5f}, is HIGHER than that of trees (")
    assert "lr" not in sentence.partition(":")[0]


def test_calibrated_loglosses_are_compared(report: RunReport, capsys: pytest.CaptureFixture[str]) -> None:
    loss = report.metrics.on(report.metrics.split).calibrated.logloss
    flattered = AHEAD.model_copy(update={"logloss": loss + 0.2, "calibrated_logloss": loss - 0.01})
    sharp = AHEAD.model_copy(update={"logloss": loss - 0.2, "calibrated_logloss": loss + 0.01})
    compared = against(report, trees=flattered, lr=sharp)
    assert f"HIGHER than that of trees ({loss - 0.01:.5f}):" in reference_sentence(compared)
    assert f"<td>{loss - 0.01:.5f}</td>" in page(compared).to_html()
    print_report(compared)
    printed = capsys.readouterr().out
    assert "trees, calibrated" in printed and f"{loss - 0.01:.5f}" in printed


def test_a_run_shows_how_far_it_is_ahead(report: RunReport, capsys: pytest.CaptureFixture[str]) -> None:
    print_report(against(report, lr=AHEAD))
    printed = capsys.readouterr().out
    assert "the model's lead, points" in printed and "+2.000 ± 0.980" in printed


def test_a_shipped_reference_is_not_compared_with_itself(report: RunReport) -> None:
    same = Reference(auc=0.7, logloss=0.6, lead=0.0, lead_error=0.0, logloss_gain=0.0, logloss_gain_error=0.0)
    assert reference_sentence(against(report, regression=same)) == "What is shipped is the regression itself."
    assert lead_text(same) == logloss_gain_text(same) == "the shipped model itself"


def test_differences_have_intervals() -> None:
    assert lead_text(AHEAD) == "+2.000 ± 0.980"
    assert logloss_gain_text(AHEAD) == "+0.01000 ± 0.00392"
    assert lead_text(OLD) == logloss_gain_text(OLD) == ""
