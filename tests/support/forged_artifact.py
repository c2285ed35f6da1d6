"""Damaged and forged artifacts, which must be refused."""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from recap_ctr.errors import InputError
from recap_ctr.inference.manifest import MANIFEST
from recap_ctr.inference.torch_backend import load_artifact
from recap_ctr.storage.files import json_bytes
from recap_ctr.storage.hashes import fingerprint, sha256


def forge(path: Path, change: Callable[[dict[str, Any]], object] = lambda _: None) -> None:
    """Change the manifest of an artifact, and make all of its checksums right again, as an attacker could."""
    manifest = json.loads((path / MANIFEST).read_bytes())
    del manifest["checksum"]
    for name in manifest["files"]:
        if (path / name).is_file():
            manifest["files"][name] = {"bytes": (path / name).stat().st_size, "sha256": sha256(path / name)}
    change(manifest)
    write_manifest(path, manifest)


def write_manifest(path: Path, manifest: dict[str, Any]) -> None:
    """Write a manifest without a checksum as the manifest of an artifact, with the right checksum."""
    (path / MANIFEST).write_bytes(json_bytes(manifest | {"checksum": fingerprint(manifest)}))


def swap_directories(first: Path, second: Path) -> None:
    """Exchange two directories."""
    aside = first.with_name("aside")
    first.rename(aside)
    second.rename(first)
    aside.rename(second)


def refused(path: Path, message: str = ".") -> None:
    """Check that loading the artifact raises an InputError that matches `message`."""
    with pytest.raises(InputError, match=message):
        load_artifact(path)


def refused_with_a_flipped_bit(path: Path, name: str, content: bytes, at: int, bit: int) -> None:
    """Check that the artifact is refused with one bit of a file flipped; `content` is the whole file."""
    with (path / name).open("r+b", buffering=0) as file:
        file.seek(at)
        file.write(bytes([content[at] ^ 1 << bit]))
        with suppress(InputError):
            load_artifact(path)
            pytest.fail(f"bit {bit} of byte {at} of {name} was flipped, and the artifact still loads")
        file.seek(at)
        file.write(content[at : at + 1])
