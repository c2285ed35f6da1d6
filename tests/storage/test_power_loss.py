"""Power that is cut after any change on disk leaves the old output or the new one, whole."""

from pathlib import Path

import pytest

from benchmarks.reliability.power_loss import CASES, replay
from recap_ctr.storage import files


@pytest.mark.slow
@pytest.mark.parametrize("replaces", [False, True], ids=["new", "replaced"])
@pytest.mark.parametrize("name", ["a directory", "training state", "report of a run", "a delta applied"])
def test_every_prefix_of_the_changes(name: str, replaces: bool, tmp_path: Path) -> None:
    result = replay(CASES[name], tmp_path, seeds=2, replaces=replaces)
    assert result["old"] > 0 < result["new"]


@pytest.mark.parametrize("name", ["_sync", "sync_directory"])
def test_a_writer_that_does_not_sync_is_noticed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, name, lambda _: None)
    with pytest.raises(AssertionError, match="not safe"):
        replay(CASES["report of a run"], tmp_path, seeds=0, replaces=True)
