"""Commands that hand a model on."""

import shutil
from pathlib import Path

import pytest

from tests.conftest import Recap
from tests.support.command_line import assert_refused, only_json
from tests.support.signatures import FakeHub, install_signing, key_pair


@pytest.mark.slow
def test_signed_pushed_pulled_and_verified(
    packed: Path, raw: Path, recap: Recap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = FakeHub(monkeypatch)
    install_signing(monkeypatch)
    artifact = Path(shutil.copytree(packed, tmp_path / "artifact"))
    private, public = key_pair(tmp_path, "ours")
    _, other = key_pair(tmp_path, "theirs")
    signed = recap("sign", artifact, "--key", private)
    assert "Next: recap serve" in signed.err
    pushed = recap("push", artifact, "hf://acme/click", "--public", "--json")
    assert only_json(pushed.out)["place"] == "https://hub.example/acme/click/1"
    assert hub.private is False
    assert_refused(
        recap("pull", "hf://acme/click", tmp_path / "model", "--verify-key", other), "was not signed"
    )
    pulled = recap("pull", "hf://acme/click", tmp_path / "model", "--verify-key", public, "--json")
    assert only_json(pulled.out) == {"artifact": str(tmp_path / "model"), "model": "fcn"}
    rows = raw / "rows.csv"
    rows.write_text("site,ad,user,price,tags\na,b,1,2.5,t1\n")
    scored = recap("predict", tmp_path / "model", rows, "--verify-key", public)
    assert (scored.code, scored.out) == (0, recap("predict", packed, rows).out)
    assert_refused(recap("predict", tmp_path / "model", rows, "--verify-key", other), "was not signed")
    assert_refused(recap("serve", tmp_path / "model", "--port", 0, "--verify-key", other), "sign")
