"""Copies of the artifact at the served path, so that workers don't depend on what happens there later."""

import math
import re
import shutil
import stat
import time
from pathlib import Path
from typing import Any

from recap_ctr.errors import InputError
from recap_ctr.inference.delta import apply_delta, is_delta
from recap_ctr.inference.manifest import TRAINING_STATE
from recap_ctr.storage.places import input_directory, is_remote, signature

Signature = tuple[Any, ...]
STORE_SECONDS = 10.0  # Between two looks at an artifact in an object store.


class Snapshots:
    """Numbered copies, in `directory`, of the artifact at one path.

    `artifact` is the path as the user gave it: an artifact, a run that holds one, or a link to either.
    """

    def __init__(self, artifact: str, directory: Path) -> None:
        self._artifact, self._directory = artifact, directory
        self._path = Path(artifact).absolute()
        self._looked = -math.inf
        self._signature: Signature = ()
        self.number = 0
        """The number of the last snapshot."""

    def take(self, serving: Path | None = None) -> Path:
        """Copy the artifact and return the copy; leave nothing behind if that fails.

        A delta is copied to a place beside that, for `complete` to apply it to the snapshot that is `serving`.
        """
        self.number += 1
        snapshot = self._directory / f"artifact-{self.number}"
        try:
            source = self._source()
            if not is_delta(source):
                _copy(source, snapshot)
            elif serving is not None:
                _copy(source, _delta_of(snapshot))
            else:
                raise InputError(
                    f"{source} holds a delta, and there is nothing yet to apply it to",
                    fix="start the server with a whole artifact",
                )
        except BaseException:
            remove(snapshot)
            raise
        return snapshot

    def signature(self) -> Signature:
        """Return a value that changes when somebody writes to the artifact or replaces it."""
        if is_remote(self._artifact):
            return self._signature_in_store()
        real = self._source().resolve()
        files = sorted(
            file
            for pattern in ("*", "*/*")
            for file in real.glob(pattern)
            if TRAINING_STATE not in file.relative_to(real).parts
        )
        statuses = [(str(file), file.lstat()) for file in files]
        return tuple((name, status.st_ino, status.st_size, status.st_mtime_ns) for name, status in statuses)

    def _signature_in_store(self) -> Signature:
        """Ask the store, but not at every look."""
        if time.monotonic() - self._looked > STORE_SECONDS:
            self._signature = (signature(self._artifact),)
            self._looked = time.monotonic()
        return self._signature

    def with_user_path(self, message: str) -> str:
        """Replace the path of a snapshot in `message`, which means nothing to the user, by the path they gave."""
        prefix = re.escape(str(self._directory / "artifact-"))
        return re.sub(prefix + r"\d+(-delta)?", lambda _: self._artifact, message)

    def _source(self) -> Path:
        """Return the directory of the artifact, which may be inside that of a run, or a copy of one in a store."""
        if is_remote(self._artifact):
            return input_directory(self._artifact, "artifact")
        inner = self._path / "artifact"
        is_run = not (self._path / "manifest.json").is_file() and (inner / "manifest.json").is_file()
        return inner if is_run else self._path


def complete(snapshot: Path, serving: Path) -> None:
    """Make a snapshot from the one that is `serving`, if only a delta was offered; refuse one with another base.

    What the delta holds decides how much time and memory this takes, so the supervisor must not do it itself.
    """
    delta = _delta_of(snapshot)
    if delta.is_dir():
        apply_delta(serving, delta, snapshot)
        shutil.rmtree(delta)


def remove(snapshot: Path) -> None:
    """Remove a snapshot, and whatever was left on the way to it."""
    for path in (snapshot, _delta_of(snapshot), *snapshot.parent.glob(f".{snapshot.name}.*")):
        shutil.rmtree(path, ignore_errors=True)


def _delta_of(snapshot: Path) -> Path:
    return snapshot.with_name(f"{snapshot.name}-delta")


def _copy(source: Path, target: Path) -> None:
    """Copy the plain files of a directory and of its subdirectories; ignore links and deeper levels."""
    if not (source / "manifest.json").is_file():
        raise InputError(
            f"{source} holds no artifact", fix="give a directory that `recap train` or `recap fit` wrote"
        )
    target.mkdir()
    for entry in sorted(source.resolve().iterdir()):
        mode = entry.lstat().st_mode
        if stat.S_ISREG(mode):
            shutil.copyfile(entry, target / entry.name)
        elif stat.S_ISDIR(mode) and entry.name != TRAINING_STATE:
            (target / entry.name).mkdir()
            for file in sorted(entry.iterdir()):
                if stat.S_ISREG(file.lstat().st_mode):
                    shutil.copyfile(file, target / entry.name / file.name)
