"""A disk that loses power: what a program did to the files below a directory, and what of it a crash may leave.

A file's bytes are safe once the file was synced, a name once its directory was. A crash keeps or loses everything else,
directory by directory, in any combination. Nothing but system calls of this process is recorded: creating, renaming,
exchanging, removing and syncing.
"""

import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from recap_ctr.storage import files

Change = Callable[["Disk"], None]


@dataclass(eq=False)
class File:
    """A file, and the bytes that are safe."""

    safe: bytes = b""


@dataclass(eq=False)
class Directory:
    """A directory: its names, and those that are safe."""

    names: dict[str, "File | Directory"] = field(default_factory=dict)
    safe: dict[str, "File | Directory"] = field(default_factory=dict)


class Disk:
    """The files below a directory, in memory; all that is there at first is safe."""

    def __init__(self, root: Path) -> None:
        self.root, self.top = root, _read(root)

    def entry(self, path: Path) -> "File | Directory | None":
        found: File | Directory | None = self.top
        for part in path.relative_to(self.root).parts:
            found = found.names.get(part) if isinstance(found, Directory) else None
        return found

    def directory(self, path: Path) -> Directory:
        directory = self.entry(path)
        assert isinstance(directory, Directory), path
        return directory

    def crash(self, out: Path, keep: Callable[[], bool]) -> None:
        """Write to `out` what is left; `keep` says for each directory whether names that are not safe are there."""
        _write(self.top, out, keep)


def _read(path: Path) -> Directory:
    directory = Directory()
    for entry in path.iterdir():
        directory.names[entry.name] = _read(entry) if entry.is_dir() else File(entry.read_bytes())
    directory.safe = dict(directory.names)
    return directory


def _write(directory: Directory, out: Path, keep: Callable[[], bool]) -> None:
    out.mkdir()
    for name, entry in (directory.names if keep() else directory.safe).items():
        if isinstance(entry, Directory):
            _write(entry, out / name, keep)
        else:
            (out / name).write_bytes(entry.safe)


@contextmanager
def recorded(root: Path) -> Iterator[list[Change]]:
    """Yield the changes that the block makes below `root`, one by one."""
    root = root.resolve()
    log: list[Change] = []

    def watched(path: Any) -> Path | None:
        path = Path(path).absolute()
        return path if path.is_relative_to(root) else None

    def note(path: Path | None, change: Callable[[Disk, Path], None]) -> None:
        if path is not None:
            log.append(lambda disk: change(disk, path))

    real_open, real_fsync, real_exchange = os.open, os.fsync, files._exchange
    real_replace, real_rename, real_mkdir = Path.replace, Path.rename, Path.mkdir
    real_unlink, real_rmtree = Path.unlink, shutil.rmtree

    def opened(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        is_new = flags & os.O_CREAT and not os.path.lexists(path)
        descriptor = real_open(path, flags, *rest, **named)
        if is_new:
            note(watched(path), lambda disk, at: disk.directory(at.parent).names.update({at.name: File()}))
        return descriptor

    def fsync(descriptor: int) -> None:
        real_fsync(descriptor)
        path = watched(Path(f"/proc/self/fd/{descriptor}").readlink())
        if path is None:
            return
        content = None if path.is_dir() else path.read_bytes()

        def change(disk: Disk, at: Path) -> None:
            entry = disk.entry(at)
            if isinstance(entry, Directory):
                entry.safe = dict(entry.names)
            elif isinstance(entry, File) and content is not None:
                entry.safe = content

        note(path, change)

    def move(path: Path, target: Path) -> None:
        def change(disk: Disk, at: Path) -> None:
            entry = disk.directory(at.parent).names.pop(at.name)
            disk.directory(to.parent).names[to.name] = entry

        at, to = watched(path), Path(target).absolute()
        note(at, change)

    def replace(path: Path, target: Path) -> Path:
        moved = real_replace(path, target)
        move(path, target)
        return moved

    def rename(path: Path, target: Path) -> Path:
        moved = real_rename(path, target)
        move(path, target)
        return moved

    def exchange(new: Path, old: Path) -> None:
        real_exchange(new, old)

        def change(disk: Disk, at: Path) -> None:
            names = disk.directory(at.parent).names
            names[new.name], names[old.name] = names[old.name], names[new.name]

        note(watched(new), change)

    def mkdir(path: Path, *rest: Any, **named: Any) -> None:
        is_new = not path.exists()
        real_mkdir(path, *rest, **named)
        if is_new:
            note(
                watched(path), lambda disk, at: disk.directory(at.parent).names.update({at.name: Directory()})
            )

    def forget(disk: Disk, at: Path) -> None:
        disk.directory(at.parent).names.pop(at.name, None)

    def unlink(path: Path, missing_ok: bool = False) -> None:
        real_unlink(path, missing_ok)
        note(watched(path), forget)

    def rmtree(path: Path, *rest: Any, **named: Any) -> None:
        real_rmtree(path, *rest, **named)
        note(watched(path), forget)

    with (
        patch.multiple(os, open=opened, fsync=fsync),
        patch.multiple(Path, replace=replace, rename=rename, mkdir=mkdir, unlink=unlink),
        patch.object(shutil, "rmtree", rmtree),
        patch.object(files, "_exchange", exchange),
    ):
        yield log


def crashes(before: Disk, log: list[Change], out: Path, seeds: int) -> Iterator[tuple[int, Path]]:
    """Yield the number of changes before each crash, and the directory that it leaves, in several ways each."""
    disk = before
    for done in range(len(log) + 1):
        ways: list[Callable[[], bool]] = [lambda: False, lambda: True]
        for seed in range(seeds):
            generator = random.Random(1000 * seed + done)
            ways.append(lambda generator=generator: generator.random() < 0.5)  # type: ignore[misc]
        for way in ways:
            disk.crash(out, way)
            yield done, out
            shutil.rmtree(out)
        if done < len(log):
            log[done](disk)
