"""The page of a diagnosis."""

import numpy as np
import pytest

from recap_ctr.diagnose import Cube, diagnose
from recap_ctr.pages.diagnosis import page


@pytest.mark.slow
def test_page_shows_every_part_of_a_diagnosis() -> None:
    rng = np.random.default_rng(0)
    diagnosis = diagnose(Cube.from_array(rng.normal(size=(400, 3, 2, 2))), rng.integers(0, 2, 400))
    data = {"name": "toy", "fingerprint": "1" * 32}
    diagnosis_page = page(diagnosis, ["First finding.", "Second finding."], data, "recap diagnose data")
    titles = [section.title for section in diagnosis_page.sections]
    parts = ["Gains", "Theory", "Residual variance", "Decomposition", "Churn"]
    assert titles == ["Findings", *parts, "Configuration"]
    assert diagnosis_page.lead == "First finding."
    names = ["gain-auc", "gain-loss", "theory", "residual", "decomposition"]
    assert [chart.name for chart in diagnosis_page.charts] == names
    html = diagnosis_page.to_html()
    assert "<li>Second finding.</li>" in html and "<pre>recap diagnose data</pre>" in html
