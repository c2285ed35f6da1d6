"""One directory in which the ablation was made once, for all tests of tables that build on it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from recap_ctr import runs
from recap_ctr.bench import scaling
from recap_ctr.data.shards import PreparedData
from recap_ctr.engine import Job
from recap_ctr.recipe import Recipe
from tests.bench.test_scaling import recipe


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
    root, threads = tmp_path_factory.mktemp("bench"), torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        _quickly(patch)
        train = {"batch_size": 1024, "max_epochs": 3}
        own = recipe(prepared, root / "out", teachers=3, l2=1e-4, learning_rate=0.01, train=train)
        scaling.bench("ablation", own, 2, root / "reports")
    torch.set_num_threads(threads)
    return Kitchen(own, root / "reports")


@pytest.fixture
def kitchen(made: Kitchen, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kitchen]:
    threads = torch.get_num_threads()
    _quickly(monkeypatch)
    yield made
    torch.set_num_threads(threads)


def _quickly(patch: pytest.MonkeyPatch) -> None:
    """Few epochs, and jobs in this process: each of their own would cost seconds of imports."""
    patch.setattr(runs, "run_jobs", _in_process)
    patch.setitem(scaling.PLAIN, "max_epochs", 2)


def _in_process(
    jobs: Sequence[Job],
    *,
    workers: int,
    title: str,
    quiet: bool,
    done: Callable[[int, Any], None] | None,
) -> list[Any]:
    assert {job.function for job in jobs} == {"recap_ctr.runs:teach"}
    found = [runs.teach(**job.arguments) for job in jobs]
    for at, report in enumerate(found):
        if done is not None:
            done(at, report)
    return found
