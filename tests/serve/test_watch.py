"""Rows that a worker scores, compared with the training rows."""

from pathlib import Path
from types import SimpleNamespace

import polars as pl
import pytest

from recap_ctr.data.shards import PreparedData
from recap_ctr.data.source import Block
from recap_ctr.serve import watch
from recap_ctr.serve.counters import Counters
from recap_ctr.serve.watch import RowsWatch
from tests.support.daily_log import DAY, START, daily_log, prepared_log
from tests.support.fake_engine import FakeEngine


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    return prepared_log(tmp_path_factory.mktemp("data") / "log")


def engine_of(data: PreparedData) -> FakeEngine:
    engine = FakeEngine({})
    engine.encoder, engine.profile = data.encoder, data.profile
    return engine


def counted(data: PreparedData, engine: FakeEngine, frame: pl.DataFrame, directory: Path) -> dict[str, float]:
    counters = Counters(directory / "counters-000.bin")
    rows_watch = RowsWatch(counters, later=lambda report: report())
    for start in range(0, frame.height, 500):
        rows_watch.add(engine, data.encoder.encode(Block(frame.slice(start, 500), 1, "rows")))
    return counters.totals()


def test_findings_are_counted_window_by_window(
    data: PreparedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "WINDOW_ROWS", 1_500)
    spoilt = daily_log(4, first_day=14).with_columns(pl.lit(None, pl.String).alias("site"))
    totals = counted(data, engine_of(data), spoilt, tmp_path)
    assert totals["recap_windows_total"] == 2  # Of 3,200 rows, 200 wait for the next window.
    found = {name: value for name, value in totals.items() if name.startswith("recap_findings_total")}
    assert found == {'recap_findings_total{check="missing",field="site"}': 2}
    assert totals['recap_psi_total{field="user"}'] / 2 < 0.5


@pytest.mark.parametrize(("day", "is_found"), [(14, True), (80, False)])
def test_the_clock_says_how_old_the_model_is(
    data: PreparedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, day: int, is_found: bool
) -> None:
    monkeypatch.setattr(watch, "WINDOW_ROWS", 1_500)
    monkeypatch.setattr(watch, "time", SimpleNamespace(time=lambda: START + DAY * day))
    engine = engine_of(data)
    assert data.profile is not None
    fast = data.profile.fields[0].model_copy(update={"exchanged": 0.3})
    fields = [fast, *data.profile.fields[1:]]
    engine.profile = data.profile.model_copy(update={"fields": fields})
    user = pl.when(pl.col("ts") % 10 < 7).then(pl.format("new {}", "user")).otherwise("user")
    totals = counted(data, engine, daily_log(2, first_day=14).with_columns(user=user), tmp_path)
    assert ('recap_findings_total{check="unseen",field="user"}' in totals) == is_found


def test_artifacts_without_a_profile_are_not_watched(data: PreparedData, tmp_path: Path) -> None:
    engine = engine_of(data)
    engine.profile = None
    assert "recap_windows_total" not in counted(data, engine, daily_log(2, first_day=14), tmp_path)
