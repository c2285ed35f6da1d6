"""A tiny click log, prepared and trained once for all tests that only read it; and the command, in this process.

Fixtures import what they need, because the process that hands tests out to others reads this file, too, and runs none.
"""

import functools
import gc
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from tests.support.ray_cluster import VARIABLES

if TYPE_CHECKING:
    import polars as pl

    from recap_ctr.data.shards import PreparedData
    from recap_ctr.schema import Schema
    from recap_ctr.training.config import RunConfig

ROWS = 3_000
# Ray reads these when it is imported, which collecting the documentation's examples does already.
os.environ |= {**VARIABLES, "RAY_AUTH_TOKEN": secrets.token_hex(16)}
gc.set_threshold(100_000, 20, 100)
# A busy machine is no reason to fail an example that hypothesis tries.
settings.register_profile("without deadlines", deadline=None)
settings.load_profile("without deadlines")


def pytest_collection_finish() -> None:
    """Let the garbage collector leave out the millions of objects of all modules, which live as long as the tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def no_fsync() -> Iterator[None]:
    """Skip waiting for the disk: no file here has to survive a power cut, and it is most of a small test's time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def one_drawing_of_a_kind() -> Iterator[None]:
    """Draw only the first chart of each name: a page takes longer than most fits here. `tests/pages` draws all."""
    from recap_ctr.pages import page
    from recap_ctr.pages.charts import Chart, to_png

    drawn: dict[str, bytes] = {}

    def draw(chart: Chart) -> bytes:
        if chart.name not in drawn:
            drawn[chart.name] = to_png(chart)
        return drawn[chart.name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "to_png", draw)
        yield


@pytest.fixture(scope="session")
def click_log() -> "pl.DataFrame":
    """Two text fields with planted interactions, ids beyond 2^53, numbers with gaps, and several tags a row."""
    import numpy as np
    import polars as pl

    from recap_ctr.data.synthetic import SyntheticConfig, SyntheticData

    drawn = SyntheticData(SyntheticConfig(rows=ROWS, num_fields=3, max_values=40)).frame()
    rng = np.random.default_rng(0)
    price = pl.Series(rng.lognormal(size=ROWS).round(3)).set(pl.Series(rng.random(ROWS) < 0.1), None)
    tags = [" ".join(f"t{tag}" for tag in rng.integers(0, 9, rng.integers(0, 4))) for _ in range(ROWS)]
    return drawn.select(
        "row",
        "click",
        pl.col("f1").alias("site"),
        pl.col("f2").alias("ad"),
        (pl.col("f3").str.slice(3).cast(pl.Int64) + 10**17).alias("user"),
        price.alias("price"),
        pl.Series("tags", tags, dtype=pl.String),
    )


@pytest.fixture(scope="session")
def click_schema() -> "Schema":
    from recap_ctr.schema import Field, Schema

    return Schema(
        label="click",
        row_id="row",
        fields=(
            Field(name="site", kind="categorical"),
            Field(name="ad", kind="categorical", min_count=2),
            Field(name="user", kind="categorical"),
            Field(name="price", kind="numeric"),
            Field(name="tags", kind="multi", max_len=3),
        ),
    )


@pytest.fixture(scope="session")
def prepared(
    click_log: "pl.DataFrame", click_schema: "Schema", tmp_path_factory: pytest.TempPathFactory
) -> "PreparedData":
    from recap_ctr.data.prepare import Preparation, write_prepared_data
    from recap_ctr.data.source import FrameSource

    out = tmp_path_factory.mktemp("prepared") / "data"
    return write_prepared_data(Preparation(click_schema, {"all": FrameSource(click_log)}), out, quiet=True)[0]


@pytest.fixture(scope="session")
def run_config() -> "RunConfig":
    from recap_ctr.config import TrainConfig
    from recap_ctr.models.catalogue import parse_model
    from recap_ctr.training.config import RunConfig

    return RunConfig(
        model="fcn",
        model_config=parse_model("fcn", {"dim": 4, "num_exponential_layers": 1, "num_linear_layers": 1}),
        train=TrainConfig(batch_size=256, learning_rate=1e-2, l2=1e-4, max_epochs=2),
    )


@pytest.fixture(scope="session")
def finished(
    prepared: "PreparedData", run_config: "RunConfig", tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The directory of a finished run. Copy it before changing anything."""
    from recap_ctr.training.run import run

    out = tmp_path_factory.mktemp("finished") / "run"
    run(run_config, prepared, out, quiet=True)
    return out


@pytest.fixture(scope="session")
def packed(finished: Path) -> Path:
    """The artifact of that run."""
    from recap_ctr.training.config import ARTIFACT

    return finished / ARTIFACT


@dataclass(frozen=True)
class Done:
    """What a command left behind."""

    code: int
    out: str
    err: str


Recap = Callable[..., Done]


@pytest.fixture
def recap(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Recap]:
    """The command line without the two seconds that a process of its own costs."""
    import torch

    from recap_ctr.cli import main as cli

    # The command sets these, and torch's threads: all are as before after the test.
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.setenv("POLARS_MAX_THREADS", "1")
    threads = torch.get_num_threads()

    def call(*arguments: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["recap", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert isinstance(end.value.code, int)
        return Done(end.value.code, *capsys.readouterr())

    yield call
    torch.set_num_threads(threads)


@contextmanager
def in_process() -> Iterator[pytest.MonkeyPatch]:
    """Run the jobs of the default executor in this process: processes of their own would cost seconds of imports."""
    import torch

    from recap_ctr.jobs.executor import InThisProcess
    from recap_ctr.jobs.local import LocalProcesses

    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalProcesses, "run", InThisProcess.run)
        yield patch
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def one_process() -> Iterator[None]:
    """Run the jobs of all tests of a module in this process."""
    with in_process():
        yield


@pytest.fixture(scope="session")
def one_registry() -> Iterator[None]:
    """Let torch's exporter list its hundreds of operators once, instead of for every graph."""
    from torch.onnx._internal.exporter import _registration

    registry: Any = _registration.ONNXRegistry
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "from_torchlib", staticmethod(functools.cache(registry.from_torchlib)))
        yield


def contents(directory: Path) -> dict[str, tuple[bytes, int]]:
    """Every file below a directory, with the time of its last change."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {
        path.relative_to(directory).as_posix(): (path.read_bytes(), path.stat().st_mtime_ns) for path in files
    }
