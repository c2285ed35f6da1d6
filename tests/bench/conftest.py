"""One directory in which the ablation was made once, for all tests of tables that build on it."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from recap_ctr.bench import scaling
from recap_ctr.data.shards import PreparedData
from recap_ctr.recipe.stages import Recipe
from tests.bench.test_scaling import recipe
from tests.conftest import in_process


@dataclass(frozen=True)
class Kitchen:
    """Where tables are made: the recipe's runs, and what is kept of them."""

    recipe: Recipe
    reports: Path

    def trained(self) -> dict[Path, int]:
        """All runs, and when their weights were last written."""
        return {
            path.parent: path.stat().st_mtime_ns for path in self.recipe.out.rglob("seed-*/best.safetensors")
        }


@pytest.fixture(scope="session")
def made(prepared: PreparedData, tmp_path_factory: pytest.TempPathFactory) -> Kitchen:
    """After the ablation with two seeds."""
    root = tmp_path_factory.mktemp("bench")
    with in_process() as patch:
        patch.setitem(scaling.PLAIN, "max_epochs", 2)
        train = {"batch_size": 1024, "max_epochs": 3}
        own = recipe(prepared, root / "out", teachers=3, l2=1e-4, learning_rate=0.01, train=train)
        scaling.bench("ablation", own, 2, root / "reports")
    return Kitchen(own, root / "reports")


@pytest.fixture
def kitchen(made: Kitchen) -> Iterator[Kitchen]:
    with in_process() as patch:
        patch.setitem(scaling.PLAIN, "max_epochs", 2)
        yield made
