"""Copies of the served artifact: whole or not at all, and named by the user's path."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from recap_ctr.errors import InputError
from recap_ctr.serve.snapshots import Snapshots
from tests.support.fake_engine import write


@pytest.fixture
def state(tmp_path: Path) -> Path:
    path = tmp_path / "state"
    path.mkdir()
    return path


def test_a_snapshot_holds_plain_files_of_two_levels(tmp_path: Path, state: Path) -> None:
    model = write(tmp_path / "run" / "artifact", seed=1)
    (model / "graphs").mkdir()
    (model / "graphs" / "full.onnx").write_bytes(b"1")
    (model / "graphs" / "deeper").mkdir()
    (model / "link").symlink_to("/etc/passwd")
    snapshot = Snapshots(str(tmp_path / "run"), state).take()
    copied = sorted(str(path.relative_to(snapshot)) for path in snapshot.rglob("*"))
    assert copied == ["graphs", "graphs/full.onnx", "manifest.json"]


def test_a_copy_that_fails_leaves_nothing(
    tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write(tmp_path / "model")
    (model / "a-first-file").write_bytes(b"1")
    copy = shutil.copyfile

    def copy_until_full(source: Path, target: Path) -> None:
        if source.name == "manifest.json":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
        copy(source, target)

    monkeypatch.setattr(shutil, "copyfile", copy_until_full)
    snapshots = Snapshots(str(model), state)
    with pytest.raises(OSError, match="No space left") as error:
        snapshots.take()
    assert not any(state.iterdir())
    message = snapshots.with_user_path(str(error.value))
    assert f"No space left on device: '{model}/manifest.json'" in message


def test_a_path_without_an_artifact_is_refused(tmp_path: Path, state: Path) -> None:
    with pytest.raises(InputError, match="holds no artifact"):
        Snapshots(str(tmp_path), state).take()
    assert not any(state.iterdir())


def test_the_signature_changes_with_every_file(tmp_path: Path, state: Path) -> None:
    model = write(tmp_path / "model", seed=1)
    snapshots = Snapshots(str(model), state)
    before = snapshots.signature()
    assert snapshots.signature() == before
    write(model, seed=2)
    assert snapshots.signature() != before
