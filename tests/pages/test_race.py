"""What a fit's page says of the time that was taken, and of what there was no time for."""

from recap_ctr.pages.race import time_sentences
from recap_ctr.training.report import FitReport, parse_report
from tests.support.example_reports import fit_values


def test_what_was_given_up_is_a_list_that_can_be_read() -> None:
    plan = {**fit_values()["plan"], "given_up": ["the race: labels teach", "the student"]}
    report = parse_report(fit_values() | {"plan": plan})
    assert isinstance(report, FitReport)
    assert time_sentences(report)[-1] == "There was no time for the race: labels teach; the student."
