"""Decide whether an output may be written: it may be free, ours to resume, up to date, or somebody else's."""

from pathlib import Path
from typing import Any

from recap_ctr.errors import InputError
from recap_ctr.storage.files import empty_directory, read_json, write_json
from recap_ctr.storage.hashes import fingerprint
from recap_ctr.storage.locks import locked

INPUTS = "inputs.json"


def claim(out: Path, inputs: dict[str, Any], *, finished: str, force: bool) -> bool:
    """Claim the directory `out` for work on `inputs`; return whether it holds that work already, finished.

    Unfinished work on the same inputs stays, to be resumed. Finished work, or work on other inputs, is replaced only
    with `force`, and a directory that isn't ours never is.
    """
    if out.is_dir() and any(entry.name != f".{INPUTS}.partial" for entry in out.iterdir()):
        if not (out / INPUTS).is_file():
            raise InputError(f"{out} exists and holds something else", fix="choose another --out")
        old = read_json(out / INPUTS)
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
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / INPUTS, inputs)
    return False


def take(out: Path, mark: str) -> None:
    """Claim the directory `out` for work whose parts are named after their inputs, so that none replaces another.

    `mark` is the file that says so; a directory that holds something but no mark isn't ours.
    """
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file", fix="choose another --out")
    if out.is_dir() and any(out.iterdir()) and not (out / mark).is_file():
        raise InputError(f"{out} exists and holds something else", fix="choose another --out")
    out.mkdir(parents=True, exist_ok=True)
    if not (out / mark).is_file():
        write_json(out / mark, {"kind": mark.removesuffix(".json")})


def is_made(out: Path, inputs: dict[str, Any] | None, *, force: bool) -> bool:
    """Return whether the output `out` was made from these inputs; from others, it is replaced only with `force`.

    The fingerprint of a file's inputs is kept beside it (see `record`). None, the inputs of a pipe, equals nothing.
    """
    if not out.exists() or force:
        _record_of(out).unlink(missing_ok=True)
        return False
    if inputs is not None and _record_of(out).is_file() and read_json(_record_of(out)) == fingerprint(inputs):
        return True
    raise InputError(f"{out} exists", fix="choose another --out, or replace it with --force")


def record(out: Path, inputs: dict[str, Any] | None) -> None:
    """Record beside a finished output what it was made from."""
    if inputs is not None:
        write_json(_record_of(out), fingerprint(inputs))


def _record_of(out: Path) -> Path:
    return out.with_name(f".{out.name}.{INPUTS}")
