"""The table of promises: every row has a command that exists, and says what it measured."""

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.reliability import kills
from benchmarks.reliability.checks import TESTS
from benchmarks.reliability.flips import damage
from benchmarks.reliability.promises import ROWS
from benchmarks.reliability.small_artifact import write_small
from benchmarks.summary import promise
from recap_ctr.inference import torch_backend
from tests.support.command_line import all_commands

HERE = Path(__file__).parent
MEASUREMENTS = [measurement for row in ROWS for measurement in row.measurements]


def test_all_rows_have_a_command_that_exists() -> None:
    assert [row.number for row in ROWS] == list(range(1, 20))
    for measurement in MEASUREMENTS:
        module = importlib.import_module(f"benchmarks.reliability.{measurement.command[0]}")
        assert f"python -m benchmarks.reliability.{measurement.command[0]}" in (module.__doc__ or "")
    assert len({measurement.name for measurement in MEASUREMENTS}) == len(MEASUREMENTS)


def test_the_tests_of_rows_exist() -> None:
    for names in TESTS.values():
        for name in names:
            file, *parts = name.split("::")
            text = (HERE / file).read_text()
            for part in parts:
                assert re.search(rf"(class|def) {part}\b", text), name


def test_results_are_told_with_their_date_and_what_is_not_as_promised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.summary.HERE", tmp_path)
    (flips,) = [measurement for measurement in MEASUREMENTS if measurement.name == "flips"]
    assert promise(flips) == ("not measured yet", "`flips`")
    result: dict[str, Any] = {
        "over": True,
        "refused": {"flipped bits": 1_000},
        "accepted": ["one"],
        "command": "python -m benchmarks.reliability.flips --every 97",
        "date": "2026-01-31",
        "quick": True,
        "as_promised": False,
    }
    (tmp_path / "reliability" / "results").mkdir(parents=True)
    (tmp_path / "reliability" / "results" / "flips.json").write_text(json.dumps(result))
    said, by = promise(flips)
    assert said == "**not as promised:** refused: 1,000 flipped bits; accepted: 1"
    assert by == "`flips --every 97`, 2026-01-31, a short run"


def test_flips_go_on_and_what_is_accepted_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_small(tmp_path / "artifact", num_values=4)
    state: dict[str, Any] = {"done": 0, "refused": {}, "accepted": [], "over": False}
    list(damage(tmp_path / "artifact", state, 6_007, 0.0))
    assert not state["over"]
    list(damage(tmp_path / "artifact", state, 6_007, 60.0))
    assert state["over"] and not state["accepted"]
    assert set(state["refused"]) == {"flipped bits", "cut files", "swapped files"}
    assert state["done"] == sum(state["refused"].values())
    # A reader that checks nothing.
    monkeypatch.setattr("benchmarks.reliability.flips.load_artifact", lambda path: None)
    again: dict[str, Any] = {"done": 0, "refused": {}, "accepted": [], "over": False}
    list(damage(tmp_path / "artifact", again, 6_007, 60.0))
    assert len(again["accepted"]) == state["done"]
    torch_backend.load_artifact(tmp_path / "artifact")


def test_commands_that_are_killed_exist_and_differences_are_seen(tmp_path: Path) -> None:
    commands = all_commands()
    for name in kills.CASES:
        assert name in commands
    out = tmp_path / "output" / "run"
    out.mkdir(parents=True)
    (out / "report.json").write_text('{"auc": 0.5, "seconds": 3}')
    (out / "weights").write_bytes(b"1")
    whole = kills.Whole(
        {key: value for key, value in kills.contents(out).items() if "seconds" not in key}, 1.0
    )
    (out / "report.json").write_text('{"auc": 0.5, "seconds": 4}')
    assert not kills.differences(whole, kills.contents(out))
    (out / "report.json").write_text('{"auc": 0.6, "seconds": 4}')
    (out / ".weights.01234567.partial").touch()
    (out / "weights").unlink()
    assert kills.differences(whole, kills.contents(out)) == [
        *("run/report.json:/auc", "run/weights", "run/weights:bytes"),
        "run/.weights.01234567.partial",
    ]
