"""The report of a fit with two teachers, and pages whose charts are all drawn."""

from collections.abc import Iterator

import pytest

from recap_ctr.pages import page
from recap_ctr.pages.charts import to_png
from recap_ctr.training.report import FitReport, RunReport, parse_report
from tests.support.example_reports import fit_values


@pytest.fixture(autouse=True, scope="module")
def every_drawing() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "to_png", to_png)
        yield


@pytest.fixture
def report() -> RunReport | FitReport:
    return parse_report(fit_values())
