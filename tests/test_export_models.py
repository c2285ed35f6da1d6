"""Every model can be exported."""

import pytest

from recap_ctr.models import MODELS
from tests.checks import check_export


@pytest.mark.parametrize("name", MODELS)
def test_every_model_exports(name: str) -> None:
    check_export(name)
