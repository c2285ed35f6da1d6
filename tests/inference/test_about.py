"""The card's owner, use, licence and weak slices: what they say, and that they change no model."""

import shutil
from pathlib import Path

import pytest

from recap_ctr.evaluation.slices import Breakdown, FieldSlices, Slice
from recap_ctr.inference.about import About, about_lines, slice_lines, weak_slices
from recap_ctr.inference.artifact import is_same_model, model_identity, read_artifact, set_about
from tests.conftest import contents


def part(name: str, auc: float | None, rows: int = 200) -> Slice:
    return Slice(
        name=name, rows=rows, base_rate=0.1, mean_prediction=0.12, logloss=0.3, auc=auc, auc_error=0.01
    )


@pytest.fixture
def artifact(packed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(packed, tmp_path / "artifact"))


def test_weak_slices_are_the_lowest_of_those_with_enough_rows() -> None:
    fields = [
        FieldSlices(field="site", slices=[part("a", 0.8), part("b", 0.6), part("few", 0.1, rows=99)]),
        FieldSlices(field="hour", slices=[part("1", 0.7), part("one class", None), part("2|3", 0.5)]),
    ]
    breakdown = Breakdown(
        split="test", rows=1000, fields=fields, periods=[], gains=[], thresholds=[], histogram=[]
    )
    found = weak_slices(breakdown)
    assert [entry["name"] for entry in found["slices"]] == ["2|3", "b", "1"]
    assert found["num_slices"] == 4
    lines = slice_lines({"valid": {}, "test": found})
    assert lines[1] == "The weakest of 4 slices of the test rows, by AUC; some are weak by chance."
    assert lines[5] == "| hour 2\\|3 | 200 | 10.00% | 0.5000 ± 0.0196 | 1.200 |"
    assert slice_lines({"test": {"rows": 5}}) == []  # An artifact of an older version.


def test_what_was_not_said_is_left_out() -> None:
    assert about_lines({}) == []
    assert about_lines({"intended_use": "rank\nads", "owner": None}) == ["", "- Intended use: rank ads"]


def test_a_run_has_its_weak_slices_in_its_card(packed: Path) -> None:
    card, artifact = (packed / "MODEL_CARD.md").read_text(), read_artifact(packed)
    slices = artifact.manifest["metrics"]["test"]["slices"]
    assert slices == sorted(slices, key=lambda entry: entry["auc"])
    for entry in slices:
        assert f"| {entry['field']} {entry['name']} | {entry['rows']:,} |" in card
    assert artifact.metrics.on("test").rows  # The figures are still read as such.


def test_an_owner_changes_the_card_and_nothing_else(artifact: Path, packed: Path) -> None:
    set_about(artifact, About(owner="the ads team", data_licence="internal"))
    card = (artifact / "MODEL_CARD.md").read_text()
    assert "- Owner: the ads team\n- Licence of the training rows: internal\n" in card
    assert "Intended use" not in card
    assert is_same_model(artifact, packed)
    before, after = read_artifact(packed).manifest, read_artifact(artifact).manifest
    assert model_identity(before) == model_identity(after)
    changed = {name for name, entry in after["files"].items() if entry != before["files"][name]}
    assert changed == {"MODEL_CARD.md"}

    written = contents(artifact)
    set_about(artifact, About(owner="the ads team", data_licence="internal"))
    assert contents(artifact) == written  # It is not written again.
    set_about(artifact, About())
    assert (artifact / "MODEL_CARD.md").read_bytes() == (packed / "MODEL_CARD.md").read_bytes()
    assert (artifact / "manifest.json").read_bytes() == (packed / "manifest.json").read_bytes()
