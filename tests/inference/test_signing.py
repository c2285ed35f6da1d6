"""Signed artifacts: what a signature covers, and everything that makes it void."""

import shutil
import sys
from pathlib import Path

import pytest

from recap_ctr.errors import InputError
from recap_ctr.inference.about import About
from recap_ctr.inference.artifact import set_about
from recap_ctr.inference.calls import load
from recap_ctr.inference.signing import check_signature, refuse_other_than, sign
from recap_ctr.serve.config import ServeConfig
from recap_ctr.serve.versions import load_version
from recap_ctr.storage.files import read_json, write_json
from tests.support.signatures import install_signing, key_pair


@pytest.fixture(autouse=True)
def signing(monkeypatch: pytest.MonkeyPatch) -> None:
    install_signing(monkeypatch)


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    return key_pair(tmp_path, "ours")


@pytest.fixture
def signed(packed: Path, tmp_path: Path, keys: tuple[Path, Path]) -> Path:
    artifact = Path(shutil.copytree(packed, tmp_path / "artifact"))
    assert sign(artifact, keys[0]) == artifact / "model.sig"
    return artifact


def test_a_signed_artifact_is_loaded_and_returned_as_it_is(signed: Path, keys: tuple[Path, Path]) -> None:
    manifest = check_signature(signed, keys[1])
    assert load(signed, verify_key=keys[1]).engine.manifest == manifest
    (signed / "state").mkdir()  # What updates go on from is not part of what is handed on.
    (signed / "state" / "moments").write_bytes(b"new")
    check_signature(signed, keys[1])
    assert sign(signed, keys[0]).is_file()  # Again, over itself.
    check_signature(signed, keys[1])


def test_other_keys_changed_files_and_missing_signatures_are_refused(
    signed: Path, keys: tuple[Path, Path], tmp_path: Path
) -> None:
    _, theirs = key_pair(tmp_path, "theirs")
    with pytest.raises(InputError, match=r"was not signed by .*theirs.pub as it is: Signature mismatch"):
        load(signed, verify_key=theirs)
    manifest = read_json(signed / "manifest.json")
    write_json(signed / "manifest.json", {**manifest, "shift": 1.0})  # With a checksum that fits.
    load(signed)
    with pytest.raises(InputError, match="was not signed"):
        load(signed, verify_key=keys[1])
    (signed / "model.sig").unlink()
    with pytest.raises(InputError, match="artifact is not signed\n  fix: sign it where it was made"):
        check_signature(signed, keys[1])


def test_an_added_file_is_refused(signed: Path, keys: tuple[Path, Path]) -> None:
    (signed / "more.onnx").write_bytes(b"x")
    with pytest.raises(InputError, match="was not signed"):
        check_signature(signed, keys[1])


def test_a_new_card_has_no_signature(signed: Path, keys: tuple[Path, Path]) -> None:
    set_about(signed, About(owner="us"))
    with pytest.raises(InputError, match="is not signed"):
        check_signature(signed, keys[1])


def test_an_artifact_that_is_replaced_meanwhile_is_refused(signed: Path, keys: tuple[Path, Path]) -> None:
    manifest = check_signature(signed, keys[1])
    with pytest.raises(InputError, match="was replaced after its signature was checked"):
        refuse_other_than(manifest, {**manifest, "shift": 1.0}, signed)


def test_a_server_takes_signed_versions_only(signed: Path, keys: tuple[Path, Path], tmp_path: Path) -> None:
    config = ServeConfig(artifact=str(signed), verify_key=str(keys[1]))
    assert load_version(signed, config, tmp_path, 0.01).name
    (signed / "model.sig").write_text("{}")
    with pytest.raises(InputError, match="was not signed"):
        load_version(signed, config, tmp_path, 0.01)


def test_wrong_keys_and_a_missing_package_are_told(
    signed: Path, keys: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match=r"ours.pub: no private key\n  fix: give a private key"):
        sign(signed, keys[1])
    with pytest.raises(InputError, match=r"ours.pem: no public key\n  fix: give a public key"):
        check_signature(signed, keys[0])
    with pytest.raises(InputError, match="nowhere"):
        check_signature(signed, "nowhere")
    monkeypatch.setitem(sys.modules, "model_signing.hashing", None)
    with pytest.raises(InputError, match=r"fix: pip install 'recap-ctr\[sign\]'"):
        check_signature(signed, keys[1])
