"""Artifacts that are pushed and pulled: whole, in one step, and never over anything else."""

import shutil
import sys
from pathlib import Path

import pytest

from recap_ctr.errors import InputError
from recap_ctr.inference.about import About
from recap_ctr.inference.artifact import set_about
from recap_ctr.inference.hub import pull, push
from recap_ctr.inference.signing import sign
from tests.conftest import contents
from tests.support.object_store import s3_server
from tests.support.signatures import FakeHub, install_signing, key_pair


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    return FakeHub(monkeypatch)


@pytest.fixture
def other(packed: Path, tmp_path: Path) -> Path:
    """Another artifact, with a training state."""
    artifact = Path(shutil.copytree(packed, tmp_path / "other"))
    set_about(artifact, About(owner="another team"))
    (artifact / "state").mkdir()
    (artifact / "state" / "moments").write_bytes(b"secret rows")
    return artifact


def texts(directory: Path) -> dict[str, bytes]:
    return {name: content for name, (content, _) in contents(directory).items()}


class TestHub:
    def test_what_was_pushed_is_pulled(self, packed: Path, other: Path, hub: FakeHub, tmp_path: Path) -> None:
        assert push(packed.parent, "hf://acme/click") == "https://hub.example/acme/click/1"
        assert hub.private
        assert hub.branches["main"]["README.md"].startswith(b"---\nlibrary_name: recap-ctr\n")
        assert b"# FCN click model" in hub.branches["main"]["README.md"]
        assert pull("hf://acme/click", tmp_path / "model").path == tmp_path / "model"
        assert texts(tmp_path / "model") == texts(packed)

        hub.branches["main"]["graphs/old.onnx"] = b"of an earlier version"
        push(other, "hf://acme/click")
        assert len(hub.commits) == 2  # One each: nobody can pull half of an artifact.
        assert not [name for name in hub.branches["main"] if name.startswith(("graphs", "state"))]

    def test_branches_are_apart(self, packed: Path, other: Path, hub: FakeHub, tmp_path: Path) -> None:
        push(packed, "hf://acme/click", private=False)
        push(other, "hf://acme/click@next")
        assert not hub.private
        assert (
            "another team"
            in (pull("hf://acme/click@next", tmp_path / "a").path / "MODEL_CARD.md").read_text()
        )
        assert (
            "another team" not in (pull("hf://acme/click", tmp_path / "b").path / "MODEL_CARD.md").read_text()
        )

    def test_a_damaged_one_replaces_nothing(self, packed: Path, hub: FakeHub, tmp_path: Path) -> None:
        push(packed, "hf://acme/click")
        hub.branches["main"]["model.safetensors"] += b"x"
        with pytest.raises(InputError, match="differs from its checksum"):
            pull("hf://acme/click", tmp_path / "model")
        assert not (tmp_path / "model").exists()
        del hub.branches["main"]["manifest.json"]
        with pytest.raises(InputError, match="hf://acme/click holds no artifact"):
            pull("hf://acme/click", tmp_path / "model")

    def test_failures_name_the_repository_and_the_fix(
        self, packed: Path, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with pytest.raises(InputError, match=r"hf://acme/none: 404 Client Error.\n  fix: check .* HF_TOKEN"):
            pull("hf://acme/none", tmp_path / "model")
        with pytest.raises(InputError, match="hf://acme names no repository"):
            push(packed, "hf://acme")
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
        with pytest.raises(InputError, match=r"fix: pip install 'recap-ctr\[hub\]'"):
            push(packed, "hf://acme/click")


def test_directories_are_replaced_only_by_force_and_only_if_they_hold_artifacts(
    packed: Path, other: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    push(packed, model)
    assert texts(model) == texts(packed)
    push(packed, model)  # Already there.
    with pytest.raises(InputError, match="model holds another artifact\n  fix: add --force"):
        pull(other, model)
    pull(other, model, force=True)
    assert "another team" in (model / "MODEL_CARD.md").read_text()
    assert not (model / "state").exists()

    before = contents(other)
    pull(model, other)  # The same artifact: its training state stays.
    assert contents(other) == before
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    for directory in (tmp_path / "notes", tmp_path / "notes" / "a.txt"):
        with pytest.raises(InputError, match="exists and is no artifact"):
            pull(packed, directory, force=True)


@pytest.mark.slow
def test_an_object_store_is_a_place_too(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RECAP_CACHE", str(tmp_path / "cache"))
    with s3_server(monkeypatch) as bucket:
        push(packed, f"{bucket}/model")
        pull(f"{bucket}/model", tmp_path / "model")
    assert texts(tmp_path / "model") == texts(packed)


def test_signatures_travel_and_are_verified_before_anything_is_replaced(
    packed: Path, other: Path, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_signing(monkeypatch)
    ours, theirs = key_pair(tmp_path, "ours"), key_pair(tmp_path, "theirs")
    sign(other, ours[0])
    push(other, "hf://acme/click")
    model = Path(shutil.copytree(packed, tmp_path / "model"))
    with pytest.raises(InputError, match="hf://acme/click was not signed by"):
        pull("hf://acme/click", model, force=True, verify_key=theirs[1])
    assert contents(model) == contents(packed)
    pull("hf://acme/click", model, force=True, verify_key=ours[1])
    assert (model / "model.sig").read_bytes() == (other / "model.sig").read_bytes()
    push(packed, tmp_path / "unsigned")
    sign(packed_copy := Path(shutil.copytree(packed, tmp_path / "copy")), ours[0])
    push(packed_copy, tmp_path / "unsigned")  # The same artifact gets its signature.
    assert (tmp_path / "unsigned" / "model.sig").is_file()
