"""A small grid of estimators and its diagnosis, shared by all tests that only read them."""

import pytest

from recap_ctr.diagnose import (
    Cube,
    Diagnosis,
    Floats,
    diagnose,
)
from tests.support.simulated_logits import simulated


@pytest.fixture(scope="module")
def data() -> tuple[Floats, Floats]:
    return simulated()


@pytest.fixture(scope="module")
def diagnosis(data: tuple[Floats, Floats]) -> Diagnosis:
    return diagnose(Cube.from_array(data[0]), data[1])
