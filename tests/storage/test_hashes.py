"""Checksums of files."""

from pathlib import Path

import pytest

from recap_ctr.storage import hashes
from recap_ctr.storage.hashes import sha256


def test_sha256_reads_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashes, "CHUNK_BYTES", 2)
    (tmp_path / "f").write_bytes(b"abc")
    assert sha256(tmp_path / "f") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
