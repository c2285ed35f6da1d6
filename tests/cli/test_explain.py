"""The command that says which fields a model relies on, and predictions with reasons."""

from pathlib import Path

import polars as pl
import pytest

from tests.conftest import Recap
from tests.support.command_line import assert_refused, only_json


@pytest.mark.slow
def test_table_and_json_hold_the_same_figures(raw: Path, packed: Path, recap: Recap) -> None:
    arguments = ("explain", packed, raw / "clicks.csv", "--repeats", "2", "--rows", "300")
    done = recap(*arguments)
    assert done.code == 0
    header, _, *lines = done.out.splitlines()
    assert header.split("  ")[0] == "field" and "AUC drop, points" in header and "95 % interval" in header
    result = only_json(recap(*arguments, "--json").out)
    assert (result["rows"], result["repeats"], result["seed"]) == (300, 2, 1)
    fields = result["fields"]
    assert [line.split()[0] for line in lines if line] == [field["field"] for field in fields]
    assert {field["field"] for field in fields} == {"site", "ad", "user", "price", "tags"}
    drops = [field["auc_drop"]["value"] for field in fields]
    assert drops == sorted(drops, reverse=True)
    assert lines[0].split()[1] == f"{100 * drops[0]:.3f}"
    assert all(
        field["auc_drop"]["low"] <= field["auc_drop"]["value"] <= field["auc_drop"]["high"]
        for field in fields
    )
    assert f"Shuffling {fields[0]['field']} costs most" in done.err and "not what causes clicks" in done.err


def test_rows_without_labels_are_refused(raw: Path, packed: Path, recap: Recap) -> None:
    pl.read_csv(raw / "clicks.csv").drop("click").write_csv(raw / "fresh.csv")
    assert_refused(recap("explain", packed, raw / "fresh.csv"), "no column 'click' (label)")


@pytest.mark.slow
def test_predictions_with_reasons(raw: Path, packed: Path, recap: Recap) -> None:
    done = recap("predict", packed, raw / "clicks.csv", "--out", raw / "scores.csv", "--explain", "2")
    assert done.code == 0 and "why_1 is the field" in done.err
    scored = pl.read_csv(raw / "scores.csv")
    assert scored.columns[-2:] == ["why_1", "why_2"]
    assert scored["why_1"].str.contains(r"^(site|ad|user|price|tags)=.* \([+-]\d+\.\d\d\)$").all()
    assert (
        "is up to date"
        in recap("predict", packed, raw / "clicks.csv", "--out", raw / "scores.csv", "--explain", "2").err
    )
    # Without reasons, or with more of them, it is another output.
    assert_refused(
        recap("predict", packed, raw / "clicks.csv", "--out", raw / "scores.csv"), "scores.csv exists"
    )
