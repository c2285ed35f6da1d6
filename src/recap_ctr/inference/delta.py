"""The difference between an artifact and the one that it was updated from: changed rows, dense weights, new values.

A delta names its base by checksum, and holds the manifest of the artifact that it leads to. Applying it gives that
artifact bit for bit, or an error. No torch is needed.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from recap_ctr.data.encode import Encoder, write_vocabulary
from recap_ctr.data.grow import row_map
from recap_ctr.data.profile import PROFILE
from recap_ctr.errors import InputError
from recap_ctr.inference.artifact import Artifact, model_identity, read_artifact
from recap_ctr.inference.manifest import (
    CARD,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    SCHEMA,
    WEIGHTS,
    check_file,
    refuse_countless_values,
    vocabularies,
)
from recap_ctr.storage.arrays import Array, array_names, load_arrays, save_arrays
from recap_ctr.storage.files import (
    atomic_directory,
    copy_file,
    make_directory,
    new_file,
    read_json,
    write_json,
)
from recap_ctr.storage.hashes import sha256

FORMAT = 1
CHANGES, PLACES = "changes.safetensors", "places.safetensors"
AGAIN = "copy the delta again, or ship the whole artifact"


@dataclass(frozen=True)
class DeltaSize:
    """How large a delta is, and how large the artifact that it leads to."""

    bytes: int
    whole: int


def is_delta(path: Path) -> bool:
    """Return whether a directory holds a delta."""
    file = path / MANIFEST
    if not file.is_file() or file.stat().st_size > MAX_MANIFEST_BYTES:
        return False
    try:
        refuse_countless_values(file.read_bytes())
    except ValueError:
        return False
    manifest = read_json(file)
    return isinstance(manifest, dict) and manifest.get("kind") == "delta"


def write_delta(base: Path, new: Path, out: Path) -> DeltaSize:
    """Write the delta that leads from one artifact to another to `out`, after checking that it does."""
    old, target = read_artifact(base), read_artifact(new)
    if target.graphs:
        raise InputError(
            f"{new} has exported graphs, which a delta can't hold", fix="export after applying it"
        )
    sources = _sources(old.encoder, target.encoder)
    before, after = load_arrays(old.path / WEIGHTS), load_arrays(target.path / WEIGHTS)
    names = array_names(target.path / WEIGHTS)
    with atomic_directory(out) as partial:
        places, values = {}, {}
        for name in names:
            start = _moved(before[name], sources) if name in before else None
            changed = None if start is None else _changed(start, after[name])
            if changed is not None:
                places[name] = changed
                values[name] = after[name][changed]
            else:
                values[name] = after[name]
        save_arrays(partial / PLACES, places)
        save_arrays(partial / CHANGES, values)
        make_directory(partial / "vocabulary")
        for name, fields in _vocabulary_changes(old.encoder, target.encoder).items():
            with new_file(partial / name) as file:
                fields.write_parquet(file, statistics=False)
        for name in _copied(target.manifest):
            copy_file(target.path / name, partial / name)
        files = [path for path in sorted(partial.rglob("*")) if path.is_file()]
        manifest = {
            "kind": "delta",
            "format": FORMAT,
            "base": model_identity(old.manifest),
            "tensors": names,
            "target": target.manifest,
            "files": {
                path.relative_to(partial).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256(path)}
                for path in files
            },
        }
        write_json(partial / MANIFEST, manifest)
        with TemporaryDirectory(dir=partial.parent) as trial:
            apply_delta(base, partial, Path(trial) / "artifact")
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    whole = sum(entry["bytes"] for entry in target.manifest["files"].values())
    return DeltaSize(size, whole)


def apply_delta(base: Path, delta: Path, out: Path) -> None:
    """Write the artifact that a delta leads to from its base, and refuse another base. `out` is whole or unchanged."""
    old, manifest = read_artifact(base), _read_manifest(delta)
    if manifest["base"] != model_identity(old.manifest):
        raise InputError(
            f"{delta} does not fit {base}: it was made from another artifact",
            fix="apply the deltas in their order, each to the result of the one before, or ship the whole artifact",
        )
    target = manifest["target"]
    with atomic_directory(out) as partial:
        make_directory(partial / "vocabulary")
        for name in _copied(target):
            copy_file(delta / name, partial / name)
        encoder = _grown(old, delta, target)
        for number, fitted in enumerate(encoder.fields):
            write_vocabulary(fitted, number, partial)
        save_arrays(partial / WEIGHTS, _weights(old, encoder, delta, manifest["tensors"]))
        for name, entry in target["files"].items():
            check_file(partial, name, entry)
        write_json(partial / MANIFEST, target)


def _copied(manifest: dict[str, Any]) -> list[str]:
    """Return the small files of the artifact, which a delta holds unchanged."""
    return [name for name in (SCHEMA, CARD, PROFILE) if name in manifest["files"]]


def _read_manifest(delta: Path) -> dict[str, Any]:
    if not is_delta(delta):
        raise InputError(f"{delta} holds no delta", fix="make one with `recap update --delta`")
    manifest: dict[str, Any] = read_json(delta / MANIFEST)
    if manifest.get("format") != FORMAT:
        raise InputError(
            f"{delta} is a delta of format {manifest.get('format')!r}; this version reads {FORMAT}"
        )
    try:
        for name, entry in manifest["files"].items():
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise InputError(f"{delta} names a file outside of it", fix=AGAIN)
            check_file(delta, name, entry)
        missing = {"base", "tensors", "target"} - manifest.keys() or {"files", "fields"} - manifest[
            "target"
        ].keys()
    except (KeyError, TypeError, AttributeError):
        missing = {"files"}
    if missing:
        raise InputError(f"{delta / MANIFEST} is damaged", fix=AGAIN)
    return manifest


Sources = tuple[int, npt.NDArray[np.int64]]
"""How many rows the base's table has, and where each row of the grown one comes from."""


def _sources(old: Encoder, new: Encoder) -> Sources:
    return old.layout.num_rows, row_map(old, new).source_G


def _moved(before: Array, sources: Sources) -> Array:
    """Return a tensor of the base, with the rows of a table where they are in the grown one."""
    rows, source_G = sources
    return np.asarray(before[source_G]) if before.ndim and before.shape[0] == rows else before


def _changed(start: Array, after: Array) -> npt.NDArray[np.int64] | None:
    """Return the rows that differ in any bit; None if the whole is smaller, or of another shape."""
    if start.shape != after.shape or not after.ndim:
        return None
    rows = after.shape[0]
    bits = [np.ascontiguousarray(array).reshape(rows, -1).view(np.uint8) for array in (start, after)]
    changed = np.flatnonzero((bits[0] != bits[1]).any(axis=1))
    return changed if 8 * len(changed) + after[:1].nbytes * len(changed) < after.nbytes else None


def _weights(old: Artifact, encoder: Encoder, delta: Path, names: list[str]) -> dict[str, Array]:
    """Return the weights of the artifact that a delta leads to."""
    before = load_arrays(old.path / WEIGHTS)
    values, places = load_arrays(delta / CHANGES), load_arrays(delta / PLACES)
    sources, weights = _sources(old.encoder, encoder), {}
    for name in names:
        if name not in places:
            weights[name] = values[name]
            continue
        start = _moved(before[name], sources)
        weights[name] = start.copy()
        weights[name][places[name]] = values[name]
    return weights


def _vocabulary_changes(old: Encoder, new: Encoder) -> dict[str, pl.DataFrame]:
    """Return the places in each vocabulary where the value or the count differs, by the file's name."""
    changes = {}
    for name, number in vocabularies(new.schema.fields).items():
        before, after = old.fields[number], new.fields[number]
        frame = pl.DataFrame({"value": after.values, "count": after.counts}).with_row_index("place")
        same = pl.DataFrame({"value": before.values, "count": before.counts}).with_row_index("place")
        changes[name] = frame.join(same, on=["place", "value", "count"], how="anti", nulls_equal=True).sort(
            "place"
        )
    return changes


def _grown(old: Artifact, delta: Path, target: dict[str, Any]) -> Encoder:
    """Return the encoder of the artifact that a delta leads to."""
    fields = list(old.encoder.fields)
    for name, number in vocabularies(old.encoder.schema.fields).items():
        changes = pl.read_parquet(delta / name, glob=False)
        added = target["fields"][number].get("added", 0)
        size = len(fields[number].values) + added - fields[number].num_added
        values = fields[number].values.to_list() + [None] * (size - len(fields[number].values))
        counts = np.append(fields[number].counts, np.zeros(size - len(fields[number].values), np.int64))
        for place, value in zip(changes["place"].to_list(), changes["value"].to_list(), strict=True):
            values[place] = value
        counts[changes["place"].to_numpy()] = changes["count"].to_numpy()
        fields[number] = replace(
            fields[number], values=pl.Series("value", values, dtype=pl.String), counts=counts, num_added=added
        )
    return Encoder(old.encoder.schema, fields)
