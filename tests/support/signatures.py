"""Stand-ins for model-signing and huggingface_hub, with as much of each as we call: the packages are not in `dev`."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.trackers import install


class FakeConfig:
    """Hashing, signing and verifying in one: a signature is the digests of all files, and the name of the key."""

    def __init__(self) -> None:
        self.ignored: set[str] = set()
        self.key = ""

    def set_ignored_paths(self, *, paths: Any, ignore_git_paths: bool) -> "FakeConfig":
        assert not ignore_git_paths  # Everything else is signed.
        self.ignored = set(paths)
        return self

    def set_hashing_config(self, hashing: "FakeConfig") -> "FakeConfig":
        self.ignored = hashing.ignored
        return self

    def use_elliptic_key_signer(self, *, private_key: Path) -> "FakeConfig":
        return self._use(private_key, "private ")

    def use_elliptic_key_verifier(self, *, public_key: Path) -> "FakeConfig":
        return self._use(public_key, "public ")

    def _use(self, key: Path, kind: str) -> "FakeConfig":
        text = key.read_text()
        if not text.startswith(kind):
            raise ValueError(f"no {kind}key")
        self.key = text.removeprefix(kind)
        return self

    def _digest(self, directory: Path) -> dict[str, str]:
        return {
            str(file.relative_to(directory)): hashlib.sha256(file.read_bytes()).hexdigest()
            for file in sorted(directory.rglob("*"))
            if file.is_file() and file.relative_to(directory).parts[0] not in self.ignored
        }

    def sign(self, directory: Path, signature: Path) -> None:
        signature.write_text(json.dumps({"key": self.key, "files": self._digest(directory)}))

    def verify(self, directory: Path, signature: Path) -> None:
        if json.loads(signature.read_text()) != {"key": self.key, "files": self._digest(directory)}:
            raise ValueError("Signature mismatch")


def install_signing(patch: pytest.MonkeyPatch) -> None:
    """Let signatures be made and verified by the stand-in."""
    parts = {
        name: install(patch, f"model_signing.{name}", Config=FakeConfig)
        for name in ("hashing", "signing", "verifying")
    }
    install(patch, "model_signing", **parts)


def key_pair(directory: Path, name: str) -> tuple[Path, Path]:
    """Write a private and a public key of the stand-in."""
    private, public = directory / f"{name}.pem", directory / f"{name}.pub"
    private.write_text(f"private {name}")
    public.write_text(f"public {name}")
    return private, public


class FakeHub:
    """A hub in memory: the files of each branch of each repository, and its commits."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.branches: dict[str, dict[str, bytes]] = {}
        self.commits: list[str] = []
        self.private: bool | None = None
        install(patch, "huggingface_hub.utils", disable_progress_bars=lambda: None)
        install(
            patch,
            "huggingface_hub",
            HfApi=lambda: self,
            snapshot_download=self.snapshot_download,
            CommitOperationAdd=lambda **add: add,
            CommitOperationDelete=lambda **delete: delete,
        )

    def create_repo(self, repository: str, *, private: bool, exist_ok: bool) -> None:
        if not self.branches:
            self.private, self.branches["main"] = private, {".gitattributes": b""}

    def create_branch(self, repository: str, *, branch: str, exist_ok: bool) -> None:
        self.branches.setdefault(branch, dict(self.branches["main"]))

    def list_repo_files(self, repository: str, *, revision: str | None) -> list[str]:
        return list(self.branches[revision or "main"])

    def create_commit(
        self, repository: str, operations: list[dict[str, Any]], *, commit_message: str, revision: str | None
    ) -> Any:
        files = self.branches[revision or "main"]
        for operation in operations:
            name, content = operation["path_in_repo"], operation.get("path_or_fileobj")
            if content is None:
                del files[name]
            else:
                files[name] = content.read_bytes() if isinstance(content, Path) else content
        self.commits.append(commit_message)
        return type("Commit", (), {"commit_url": f"https://hub.example/{repository}/{len(self.commits)}"})

    def snapshot_download(self, repository: str, *, revision: str | None, local_dir: Path) -> None:
        if (revision or "main") not in self.branches:
            raise RuntimeError("404 Client Error.\nRevision Not Found")
        for name, content in {**self.branches[revision or "main"], ".cache/huggingface/x": b""}.items():
            (local_dir / name).parent.mkdir(parents=True, exist_ok=True)
            (local_dir / name).write_bytes(content)
