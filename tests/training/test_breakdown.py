"""The breakdown in a run's report: which fields it slices by, and how it names values and times."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from recap_ctr.data.prepare import Preparation, write_prepared_data
from recap_ctr.data.shards import PreparedData
from recap_ctr.data.source import FrameSource
from recap_ctr.data.split import Split
from recap_ctr.errors import InputError
from recap_ctr.schema import Field, Schema
from recap_ctr.training.breakdown import sliced_fields, time_reader
from recap_ctr.training.config import RunConfig
from recap_ctr.training.report import read_report
from recap_ctr.training.run import run


def test_report_slices_test_rows_by_the_fields_with_the_fewest_values(finished: Path) -> None:
    report = read_report(finished)
    breakdown, figures = report.breakdown, report.metrics.held_out
    assert breakdown is not None and breakdown.split == "test" and breakdown.rows == figures.rows
    assert {entry.field for entry in breakdown.fields} == {"site", "ad", "user"}
    for entry in breakdown.fields:
        assert sum(part.rows for part in entry.slices) == figures.rows
        total = sum(part.rows * part.logloss for part in entry.slices)
        assert total / figures.rows == pytest.approx(figures.calibrated.logloss)
        mean = sum(part.rows * part.mean_prediction for part in entry.slices) / figures.rows
        assert mean == pytest.approx(figures.calibrated.mean_prediction)
    assert not breakdown.periods and len(breakdown.gains) == 10


@pytest.mark.slow
def test_values_and_periods_have_names(run_config: RunConfig, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    frame = pl.DataFrame(
        {
            "click": rng.integers(0, 2, 600),
            "constant": ["same"] * 600,
            "hashed": rng.integers(0, 3, 600),
            "tags": ["a b"] * 600,
            "device": rng.choice(["phone", "desktop"], 600),
            "site": rng.choice(list("abcdefghijklmnop"), 600),
            "day": [f"2026-01-{1 + row // 30:02d}" for row in range(600)],
        }
    )
    schema = Schema(
        label="click",
        time="day",
        fields=(
            Field(name="constant", kind="categorical"),
            Field(name="hashed", kind="categorical", hash_buckets=8),
            Field(name="tags", kind="multi"),
            Field(name="site", kind="categorical", min_count=2),
            Field(name="device", kind="categorical"),
        ),
    )
    preparation = Preparation(schema, {"all": FrameSource(frame)}, Split(kind="time"))
    data = write_prepared_data(preparation, tmp_path / "data", quiet=True)[0]
    assert list(sliced_fields(data, data.test)) == ["device", "site"]
    breakdown = run(run_config, data, tmp_path / "run", quiet=True).breakdown
    assert breakdown is not None
    device, site = breakdown.fields
    assert {part.name for part in device.slices} == {"phone", "desktop"}
    assert len(site.slices) == 9 and site.slices[-1].name.endswith("other values")
    assert breakdown.periods[0].name == "from 2026-01-19 00:00"


def test_fields_to_slice_by_can_be_chosen(
    run_config: RunConfig, prepared: PreparedData, finished: Path, tmp_path: Path
) -> None:
    assert list(sliced_fields(prepared, prepared.test, ["user", "site"])) == ["user", "site"]
    out = Path(shutil.copytree(finished, tmp_path / "run"))
    state = (out / "state.safetensors").stat().st_mtime_ns
    for chosen in (("user", "site"), (), None):
        report = run(replace(run_config, slices=chosen), prepared, out, quiet=True)
        assert report.slices == (None if chosen is None else list(chosen)) and report.breakdown is not None
        fields = [entry.field for entry in report.breakdown.fields]
        assert sorted(fields) == ["ad", "site", "user"] if chosen is None else fields == list(chosen)
    assert (out / "state.safetensors").stat().st_mtime_ns == state, "nothing is trained again"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sit", "slices: no field 'sit'; did you mean 'site'?"),
        ("click", "slices: no field 'click'"),
        ("price", "slices: 'price' is numeric, and slices need a field with one named value a row"),
        ("tags", "slices: 'tags' is multi"),
    ],
)
def test_other_fields_are_refused(
    name: str, message: str, run_config: RunConfig, prepared: PreparedData, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=re.escape(message) + ".*\n  fix: choose from site, ad, user"):
        run(replace(run_config, slices=("site", name)), prepared, tmp_path / "run", quiet=True)


@pytest.mark.parametrize("unit", [1.0, 1e3, 1e6, 1e9])
def test_times_read_as_dates_in_every_unit(unit: float) -> None:
    times = unit * np.array([1_767_225_600.0, 1_767_312_000.0])
    assert time_reader(times)(times[0]) == "2026-01-01 00:00"


def test_other_times_are_numbers() -> None:
    assert time_reader(np.array([20260101.0, 20260201.0]))(20260101.0) == "20260101"
