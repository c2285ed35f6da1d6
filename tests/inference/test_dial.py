"""The dial: costs that rise with rows and quality, a table, a sentence, a page."""

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
from recap_ctr.inference.artifact import Setting, dial_settings, read_artifact
from recap_ctr.inference.dial import (
    BATCHES,
    CostTable,
    Position,
    cells,
    in_words,
    measure_costs,
    page,
    positions,
)
from recap_ctr.inference.scorer import Engine
from recap_ctr.models.catalogue import parse_model
from recap_ctr.training.run import ARTIFACT, RunConfig, run
from tests.conftest import Recap

TOP, BOTTOM = Setting(4, 2), Setting(1, 1)


@pytest.fixture(scope="module")
def routed(prepared: PreparedData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("routed") / "run"
    settings = {"dim": 4, "depth": 2, "train_depths": [1, 2], "num_adapters": 6, "lora_rank": 2}
    train = TrainConfig(batch_size=256, learning_rate=3e-2, l2=1e-4, max_epochs=1)
    run(
        RunConfig("recap", parse_model("recap", settings), train, reference=False, routes=4),
        prepared,
        out,
        quiet=True,
    )
    return out / ARTIFACT


@given(st.integers(0, 40), st.sets(st.integers(1, 9), min_size=1))
def test_settings_fall_in_routes_then_in_depth(routes: int, depths: set[int]) -> None:
    found = dial_settings(routes, sorted(depths))
    if not routes:
        assert found == (Setting(1, None),)
        return
    assert found[0] == Setting(routes, max(depths)), "nothing is lost by asking for nothing"
    assert len(set(found)) == len(found)
    full = [one.routes for one in found if one.depth == max(depths)]
    assert full == sorted(full, reverse=True) and full[-1] == 1
    assert all(above <= 2 * below for above, below in pairwise(full))
    assert [one.depth for one in found if one.routes == 1] == sorted(depths, reverse=True)


class TestCosts:
    @given(st.lists(st.floats(1e-6, 1.0), min_size=3, max_size=3).map(sorted), st.integers(1, 5_000))
    def test_between_and_beyond_what_was_measured(self, measured: list[float], rows: int) -> None:
        table = CostTable(BATCHES, {TOP: tuple(measured)})
        for size, seconds in zip(BATCHES, measured, strict=True):
            assert table.seconds(TOP, size) == pytest.approx(seconds)
        assert table.seconds(TOP, rows + 1) >= table.seconds(TOP, rows) * (1 - 1e-12)
        assert table.seconds(TOP, 5_120) == pytest.approx(10 * measured[2])

    def test_more_never_counts_as_cheaper(self, routed: Path) -> None:
        engine = Engine.load(routed, threads=1)
        table = measure_costs(engine, (64, 1, 8, 8), seconds=0.0)
        assert table.sizes == (1, 8, 64)
        lines = [table.measured[setting] for setting in engine.settings]
        assert len(lines) == 4 and all(one > 0 for line in lines for one in line)
        assert all(list(line) == sorted(line) for line in lines)
        for above, below in pairwise(lines):
            assert all(one >= other for one, other in zip(above, below, strict=True))

    @pytest.mark.parametrize("sizes", [(), (0, 1)])
    def test_batches_of_nothing(self, sizes: tuple[int, ...], packed: Path) -> None:
        with pytest.raises(InputError, match="can't be measured"):
            measure_costs(Engine.load(packed, threads=1), sizes)


def position(setting: Setting, micros: float, auc: float | None = None) -> Position:
    return Position(setting, (20 * micros, 2 * micros, micros), auc, None if auc is None else 1 - auc)


class TestWords:
    def test_what_a_millisecond_buys(self) -> None:
        found = [position(TOP, 100.0, 0.8), position(BOTTOM, 25.0, 0.79)]
        assert in_words(found) == (
            "A millisecond scores 10.0 rows with 4 routes at depth 2, and 40.0 with 1 route at depth 1,"
            " which on validation rows changes AUC by -1.000 points and logloss by +0.01000."
        )
        assert cells(found[1]) == [
            "1 route at depth 1",
            "0.79000",
            "0.21000",
            "500.0",
            "50.0",
            "25.0",
            "40.0",
        ]

    def test_what_is_not_known_is_not_said(self) -> None:
        found = [position(TOP, 100.0), position(BOTTOM, 25.0, 0.79)]
        assert "not in the artifact: recap export ARTIFACT --data PREPARED" in in_words(found)
        assert cells(found[0])[1:3] == ["", ""]
        assert [len(series.x) for series in page("x", found, 1).charts[0].series] == [1]
        assert page("x", found[:1], 1).charts == []

    def test_nothing_to_turn(self) -> None:
        assert in_words([position(Setting(1, None), 50.0, 0.8)]).endswith("; there is nothing to turn.")


def test_quality_comes_from_the_manifest(routed: Path) -> None:
    engine = Engine.load(routed, threads=1)
    costs = CostTable((1,), dict.fromkeys(engine.settings, (0.001,)))
    stored = read_artifact(routed).manifest["dial"]
    found = positions(engine, costs)
    assert [one.setting for one in found] == [Setting(4, 2), Setting(2, 2), Setting(1, 2), Setting(1, 1)]
    assert [(one.auc, one.logloss) for one in found] == [(one["auc"], one["logloss"]) for one in stored]


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
