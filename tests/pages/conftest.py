"""The report of a fit with two teachers."""

import pytest

from recap_ctr.training.report import FitReport, RunReport, parse_report
from tests.support.example_reports import fit_values


@pytest.fixture
def report() -> RunReport | FitReport:
    return parse_report(fit_values())
