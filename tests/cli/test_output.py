"""What commands print about figures."""

import pytest

from recap_ctr.cli.output import compare_with_training, print_fit, print_table
from recap_ctr.evaluation.evaluate import Figures, Metrics
from recap_ctr.inference.scorer import RowsEvaluation, Tally
from recap_ctr.training.report import FitReport, parse_report
from tests.support.example_reports import fit_values


def figures(
    auc: float, loss: float, error: float | None = 0.01, rows: int = 1000, rate: float = 0.3
) -> RowsEvaluation:
    return RowsEvaluation(
        rows=rows,
        base_rate=rate,
        base_rate_logloss=0.7,
        raw=Figures(auc=auc, auc_error=error, logloss=loss),
        calibrated=Figures(auc=auc, auc_error=error, logloss=loss),
        values=Tally(rows, {}, {}),
    )


@pytest.mark.parametrize(
    ("now", "logloss", "words"),
    [
        (0.75, 0.5, "within chance"),
        (0.6, 0.5, "train again"),
        (0.9, 0.5, "easier"),
        (0.75, 0.8, "don't serve"),
    ],
)
def test_fresh_rows_are_compared_with_those_of_training(now: float, logloss: float, words: str) -> None:
    trained = Metrics(valid=figures(0.76, 0.5))
    assert words in " ".join(compare_with_training(figures(now, logloss), trained))


@pytest.mark.parametrize(
    ("error", "rows", "rate"), [(0.0, 1000, 0.3), (None, 1000, 0.3), (0.01, 90, 0.1), (0.01, 90, 0.9)]
)
def test_nothing_is_said_of_chance_where_no_error_is_known(
    error: float | None, rows: int, rate: float
) -> None:
    fine = figures(0.76, 0.5)
    doubtful = figures(1.0, 0.5, error, rows, rate)
    for now, before in ((doubtful, fine), (fine, doubtful)):
        sentences = compare_with_training(now, Metrics(valid=fine, test=before))
        assert "chance" not in " ".join(sentences)


def test_a_table_is_plain_text(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["name", "rows"], [["site", "5"], ["a", "1,000"]])
    assert capsys.readouterr().out == "name  rows\n----  -----\nsite  5\na     1,000\n\n"


def test_a_fit_shows_the_auc_per_group_where_its_report_has_it(capsys: pytest.CaptureFixture[str]) -> None:
    values = fit_values()
    report = parse_report(values)
    assert isinstance(report, FitReport)
    print_fit(report)
    header, _, *rows = capsys.readouterr().out.splitlines()
    assert "AUC per group" not in header and rows[-2].split()[-1] == "0.30000"
    teacher, _ = values["teacher_runs"].values()
    for metrics, auc in ((values["metrics"], 0.651), (teacher["metrics"], 0.642)):
        metrics["test"]["raw"] = {
            **metrics["test"]["raw"],
            "group_auc": {"auc": auc, "num_groups": 9, "num_one_class": 1},
        }
    report = parse_report(values)
    assert isinstance(report, FitReport)
    print_fit(report)
    header, _, *rows = capsys.readouterr().out.splitlines()
    place = header.index("AUC per group")
    shown = {row.split("  ")[0]: row[place : place + 13].strip() for row in rows if row}
    assert (shown["shipped: recap"], shown["teacher-1"], shown["teacher-2"]) == ("65.100", "64.200", "")
    assert shown["base rate"] == shown["lr"] == ""
