"""Decide whether an output may be written: it may be free, ours to resume, up to date, or somebody else's."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from recap_ctr.errors import InputError
from recap_ctr.storage.files import (
    atomic_file,
    empty_directory,
    is_partial,
    make_directory,
    read_json,
    read_object,
    remove_directory,
    write_json,
)
from recap_ctr.storage.hashes import fingerprint, sha256
from recap_ctr.storage.locks import locked
from recap_ctr.storage.places import is_remote, shown

INPUTS = "inputs.json"


def claim(out: Path, inputs: dict[str, Any], *, finished: str, force: bool) -> bool:
    """Claim the directory `out` for work on `inputs`; return whether it holds that work already, finished.

    Unfinished work on the same inputs stays, to be resumed. Finished work, or work on other inputs, is replaced only
    with `force`, and a directory that isn't ours never is.
    """
    _refuse_stores(out)
    if out.is_dir() and not all(_is_of_a_claim(entry.name) for entry in out.iterdir()):
        if not (out / INPUTS).is_file():
            raise InputError(f"{out} exists and holds something else", fix="choose another --out")
        old = read_object(out / INPUTS, "the record of a run's inputs")
        if old == inputs and not (force and (out / finished).is_file()):
            return (out / finished).is_file()
        if not force:
            changed = sorted(key for key in {*old, *inputs} if old.get(key) != inputs.get(key))
            raise InputError(
                f"{out} belongs to other inputs (changed: {', '.join(changed)})",
                fix="choose another --out, or replace it with --force",
            )
        with locked(out):
            empty_directory(out, last=INPUTS)  # Last, so that the directory is ours to the end.
    elif out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file", fix="choose another --out")
    make_directory(out)
    write_json(out / INPUTS, inputs)
    return False


def is_claimed(out: Path, inputs: dict[str, Any]) -> bool:
    """Return whether the directory `out` was claimed for work on `inputs`."""
    return (out / INPUTS).is_file() and read_json(out / INPUTS) == inputs


def _is_of_a_claim(name: str) -> bool:
    """Return whether an entry was left by a claim that was killed before it was made."""
    return is_partial(name, INPUTS) or name == f".{INPUTS}.lock"


@contextmanager
def unfinished_work(path: Path, inputs: dict[str, Any]) -> Iterator[Path]:
    """Yield a hidden directory beside `path`, which the caller must hold, with what an interrupted call left there.

    It is empty if that was work on other inputs. It is removed when the block ends, or when the input turns out to be
    wrong; whatever else ends the block leaves it for the next call.
    """
    work = path.resolve()
    work = work.with_name(f".{work.name}.work")
    if work.is_symlink():
        work.unlink()
    record = work / INPUTS
    if not record.is_file() or _read_or_none(record) != inputs:
        remove_directory(work)
        make_directory(work)
        write_json(record, inputs)
    try:
        yield work
    except InputError:
        remove_directory(work)
        raise
    remove_directory(work)


def _read_or_none(record: Path) -> Any:
    """Return the inputs in a record; None if it is damaged."""
    try:
        return read_json(record)
    except InputError:
        return None


def take(out: Path, mark: str) -> None:
    """Claim the directory `out` for work whose parts are named after their inputs, so that none replaces another.

    `mark` is the file that says so; a directory that holds something but no mark isn't ours.
    """
    _refuse_stores(out)
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file", fix="choose another --out")
    if out.is_dir() and any(out.iterdir()) and not (out / mark).is_file():
        raise InputError(f"{out} exists and holds something else", fix="choose another --out")
    make_directory(out)
    if not (out / mark).is_file():
        write_json(out / mark, {"kind": mark.removesuffix(".json")})


def is_made(out: Path, inputs: dict[str, Any] | None, *, force: bool) -> bool:
    """Return whether the output `out` was made from these inputs; from others, it is replaced only with `force`.

    What a file was made from is recorded beside it (see `output_file`), and in the manifest of a directory. None, the
    inputs of a pipe, equals nothing.
    """
    _refuse_stores(out)
    if not out.exists() or force:
        return False
    if inputs is not None and _is_made_from(out, fingerprint(inputs)):
        return True
    raise _exists(out)


def is_occupied(path: Path) -> bool:
    """Return whether `path` is a file or a directory that is not empty."""
    return any(path.iterdir()) if path.is_dir() else path.exists()


def _is_made_from(out: Path, inputs: str) -> bool:
    manifest = out / "manifest.json"
    if manifest.is_file() and read_object(manifest, "a manifest").get("inputs") == inputs:
        return True
    record = read_json(_record_of(out)) if _record_of(out).is_file() else None
    if isinstance(record, dict):
        return out.is_file() and record == {"inputs": inputs, "sha256": sha256(out)}
    return bool(record == inputs)  # Earlier versions recorded the inputs alone.


@contextmanager
def output_file(out: Path, inputs: dict[str, Any] | None, *, force: bool) -> Iterator[BinaryIO]:
    """Yield a file that takes the place of `out` when the block ends without an error; others are kept away.

    What it was made from is recorded first, together with the content that it will have, so that the record is right
    whether or not the file gets to its place.
    """

    def record(partial: Path) -> None:
        if inputs is None:
            _record_of(out).unlink(missing_ok=True)
        else:
            write_json(_record_of(out), {"inputs": fingerprint(inputs), "sha256": sha256(partial)})

    with atomic_file(out, wait=False, before_rename=record) as file:
        if out.exists() and not force:
            raise _exists(out)
        yield file


def _exists(out: Path) -> InputError:
    return InputError(f"{out} exists", fix="choose another --out, or replace it with --force")


def _refuse_stores(out: Path) -> None:
    """Refuse a URL, from which a directory of a strange name would be made here."""
    if is_remote(out):
        raise InputError(
            f"{shown(out)}: this command writes to directories of this machine only",
            fix="choose a directory; prepare, fit, train, logits, export and predict write to object stores, too",
        )


def _record_of(out: Path) -> Path:
    return out.with_name(f".{out.name}.{INPUTS}")
