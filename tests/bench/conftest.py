"""One directory in which the ablation was made once, for all tests of tables that build on it."""

from collections.abc import Iterator

import pytest

from recap_ctr.bench.scaling import scaling
from recap_ctr.data.shards import PreparedData
from recap_ctr.recipe import ablation
from tests.conftest import in_process
from tests.support.finished_tables import Workshop
from tests.support.tiny_recipe import tiny_recipe


@pytest.fixture(scope="session")
def made(prepared: PreparedData, tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """The directory after the ablation with two seeds."""
    root = tmp_path_factory.mktemp("bench")
    train = {"batch_size": 1024, "max_epochs": 3}
    with in_process() as patch:
        patch.setitem(ablation.PLAIN, "max_epochs", 2)
        recipe = tiny_recipe(prepared, root / "out", teachers=3, l2=1e-4, learning_rate=0.01, train=train)
        scaling("ablation", recipe, 2, root / "reports")
    return Workshop(recipe, root / "reports")


@pytest.fixture
def workshop(made: Workshop, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    """The same directory; every test that trains more leaves it there."""
    monkeypatch.setitem(ablation.PLAIN, "max_epochs", 2)
    return made


@pytest.fixture(autouse=True)
def jobs_here() -> Iterator[None]:
    """Run jobs in this process, whatever starts them."""
    with in_process():
        yield
