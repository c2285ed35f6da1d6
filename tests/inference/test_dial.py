"""The dial: its settings, and costs that rise with rows and quality."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recap_ctr.config import TrainConfig
from recap_ctr.data.shards import PreparedData
from recap_ctr.errors import InputError
from recap_ctr.inference.artifact import read_artifact
from recap_ctr.inference.dial import BATCH_SIZES, CostTable, measure_costs, positions
from recap_ctr.inference.engine import Engine
from recap_ctr.inference.setting import Setting, dial_settings
from recap_ctr.models.catalogue import parse_model
from recap_ctr.training.config import ARTIFACT, RunConfig
from recap_ctr.training.run import run
from tests.conftest import Recap

TOP = Setting(4, 2)


@pytest.fixture(scope="module")
def routed(prepared: PreparedData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the artifact of a run on four routes, without graphs."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("routed") / "run"
    settings = {"dim": 4, "depth": 2, "train_depths": [1, 2], "num_adapters": 6, "lora_rank": 2}
    train = TrainConfig(batch_size=256, learning_rate=3e-2, l2=1e-4, max_epochs=1)
    config = RunConfig(
        "recap",
        parse_model("recap", settings),
        train,
        train_baseline=False,
        report_fields=False,
        routes=4,
    )
    run(config, prepared, out, quiet=True)
    return out / ARTIFACT


@pytest.mark.slow
@given(st.integers(0, 40), st.sets(st.integers(1, 9), min_size=1))
def test_settings_fall_in_routes_then_in_depth(routes: int, depths: set[int]) -> None:
    dial = dial_settings(routes, sorted(depths))
    if not routes:
        assert dial == (Setting(1, None),)
        return
    assert dial[0] == Setting(routes, max(depths)), "the default is the most accurate setting"
    assert len(set(dial)) == len(dial)
    at_full_depth = [setting.routes for setting in dial if setting.depth == max(depths)]
    assert at_full_depth == sorted(at_full_depth, reverse=True) and at_full_depth[-1] == 1
    assert all(more <= 2 * fewer for more, fewer in pairwise(at_full_depth))
    assert [setting.depth for setting in dial if setting.routes == 1] == sorted(depths, reverse=True)


class TestCosts:
    @given(st.lists(st.floats(1e-6, 1.0), min_size=3, max_size=3).map(sorted), st.integers(1, 5_000))
    def test_between_and_beyond_what_was_measured(self, measured: list[float], rows: int) -> None:
        table = CostTable(BATCH_SIZES, {TOP: tuple(measured)})
        for size, seconds in zip(BATCH_SIZES, measured, strict=True):
            assert table.seconds(TOP, size) == pytest.approx(seconds)
        assert table.seconds(TOP, rows + 1) >= table.seconds(TOP, rows) * (1 - 1e-12)
        assert table.seconds(TOP, 5_120) == pytest.approx(10 * measured[2])

    @pytest.mark.slow
    def test_more_never_counts_as_cheaper(self, routed: Path) -> None:
        engine = Engine.load(routed, threads=1)
        table = measure_costs(engine, (64, 1, 8, 8), seconds=0.0)
        assert table.sizes == (1, 8, 64)
        costs = [table.seconds_by_setting[setting] for setting in engine.settings]
        assert len(costs) == 4 and all(seconds > 0 for row in costs for seconds in row)
        assert all(list(row) == sorted(row) for row in costs)
        for better, cheaper in pairwise(costs):
            assert all(more >= less for more, less in zip(better, cheaper, strict=True))

    @pytest.mark.parametrize("sizes", [(), (0, 1)])
    def test_batches_without_rows(self, sizes: tuple[int, ...], packed: Path) -> None:
        with pytest.raises(InputError, match="can't be measured"):
            measure_costs(Engine.load(packed, threads=1), sizes)


def test_quality_comes_from_the_manifest(routed: Path) -> None:
    engine = Engine.load(routed, threads=1)
    costs = CostTable((1,), dict.fromkeys(engine.settings, (0.001,)))
    stored = {Setting.from_dict(entry): entry for entry in read_artifact(routed).manifest["dial"]}
    dial = positions(engine, costs)
    assert [entry.setting for entry in dial] == [Setting(4, 2), Setting(2, 2), Setting(1, 2), Setting(1, 1)]
    assert [(entry.auc, entry.logloss) for entry in dial] == [
        (stored[entry.setting]["auc"], stored[entry.setting]["logloss"]) for entry in dial
    ]
    assert len(stored) == 6, "every number of routes of the dial is measured at every depth"


@pytest.mark.slow
def test_the_command(routed: Path, packed: Path, tmp_path: Path, recap: Recap) -> None:
    done = recap("dial", routed, "--seconds", 0, "--threads", 1, "--out", tmp_path / "dial")
    assert done.code == 0, done.err
    assert "4 routes at depth 2" in done.out and "A millisecond scores" in done.out.splitlines()[-1]
    written: dict[str, Any] = json.loads((tmp_path / "dial" / "dial.json").read_text())
    assert written["threads"] == 1 and len(written["settings"]) == 4
    assert written["settings"][0]["microseconds_per_row"].keys() == {"1", "64", "512"}
    figures = {path.name for path in (tmp_path / "dial" / "figures").iterdir()}
    assert figures == {f"dial-{name}.{kind}" for name in ("auc", "logloss") for kind in ("csv", "png")}
    assert "<svg" in (tmp_path / "dial" / "report.html").read_text()
    done = recap("dial", packed, "--seconds", 0, "--threads", 1, "--json")
    assert json.loads(done.out)["settings"][0]["depth"] is None
