"""The manifest of an artifact: what it must hold, what it says of the dial, and the checksums of all other files."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic import Field as Checked

from recap_ctr.config import Frozen, parse
from recap_ctr.data.encode import vocabulary_file
from recap_ctr.data.profile import PROFILE
from recap_ctr.errors import InputError
from recap_ctr.inference.setting import Setting, dial_settings, shortfall
from recap_ctr.schema import Field
from recap_ctr.storage.claims import INPUTS
from recap_ctr.storage.files import json_bytes
from recap_ctr.storage.hashes import fingerprint, sha256
from recap_ctr.storage.places import input_directory

FORMAT = 1
MANIFEST, WEIGHTS, SCHEMA, CARD = "manifest.json", "model.safetensors", "schema.toml", "MODEL_CARD.md"
ABOUT = "card"  # The part of a manifest's training that says what people add to the card.
SIGNATURE = "model.sig"  # It signs all files of the artifact but itself and the training state.
TRAINING_STATE = "state"  # The directory inside an artifact that updates go on from; scoring needs none.
MAX_MANIFEST_BYTES = MAX_SCHEMA_BYTES = 16 << 20
MAX_HEADER_BYTES = 4 << 20
"""Most bytes of the names and shapes of all tensors, which take more than ten times as much memory once they are
read."""
MAX_VALUES = 1_000_000
"""Most values in a manifest, a schema or a profile; in memory, each takes up to a hundred times the bytes of its
text."""
COPY_AGAIN = "copy the artifact again from where it was made"


def trained_depths(manifest: dict[str, Any]) -> tuple[int, ...]:
    """Return the depths that were trained; none for a model without routes."""
    return tuple(manifest["model"]["config"]["train_depths"]) if manifest.get("routes") else ()


def whole_dial_of(manifest: dict[str, Any]) -> tuple[Setting, ...]:
    """Return the settings of the dial, most accurate first, good enough to be offered or not."""
    return dial_settings(len(manifest.get("routes", [])), trained_depths(manifest))


def shortfall_of(manifest: dict[str, Any], setting: Setting) -> str | None:
    """Return why a setting is too poor to be offered, in words; None if it is offered."""
    full, qualities = whole_dial_of(manifest)[0], dial_entries(manifest)
    measured = nearest_setting(setting, qualities)
    if setting == full or measured is None or full not in qualities:
        return None
    valid = manifest["metrics"].get("valid", {})
    return shortfall(qualities[measured], qualities[full], valid.get("base_rate_logloss"))


def dial_entries(manifest: dict[str, Any]) -> dict[Setting, dict[str, Any]]:
    """Return the entries of the manifest's dial by their setting."""
    return {Setting.from_dict(entry): entry for entry in manifest.get("dial", [])}


def nearest_setting(setting: Setting, settings: Iterable[Setting]) -> Setting | None:
    """Return the setting itself, or the one with the next smaller number of routes at its depth; None if there is
    neither."""
    candidates = [
        other for other in settings if other.depth == setting.depth and other.routes <= setting.routes
    ]
    return max(candidates, key=lambda other: other.routes, default=None)


class _Strict(Frozen):
    """A part of the manifest; types must be exact, so text is refused where a number belongs."""

    model_config = ConfigDict(strict=True)


class _File(_Strict):
    bytes: NonNegativeInt
    sha256: str = Checked(pattern="^[0-9a-f]{64}$")


class _Model(_Strict):
    name: str
    config: dict[str, Any]


class _Field(_Strict):
    name: str
    size: PositiveInt
    mean: float = 0.0
    scale: PositiveFloat = 1.0
    edges: tuple[float, ...] = Checked((), strict=False)
    added: NonNegativeInt = 0


class _Figures(_Strict):
    model_config = ConfigDict(extra="allow")
    auc: float
    logloss: float
    calibration_error: float
    auc_error: float | None = None
    group_auc: dict[str, float] | None = None


class _Metrics(_Strict):
    model_config = ConfigDict(extra="allow")
    rows: PositiveInt
    base_rate_logloss: float
    raw: _Figures
    calibrated: _Figures


class _Data(_Strict):
    model_config = ConfigDict(extra="allow")
    name: str
    fingerprint: str
    rows: NonNegativeInt


class _Position(_Strict):
    """A setting of the dial. Its numbers become part of a file name, so they are bounded."""

    routes: int = Checked(ge=1, le=1 << 20)
    depth: int | None = Checked(ge=1, le=1 << 20)


class _Graph(_Position):
    precision: Literal["float32", "int8"]
    parity: NonNegativeFloat


class _Quality(_Position):
    rows: PositiveInt
    auc: float
    logloss: float
    calibration: dict[str, Any] | None = None


class _Manifest(_Strict):
    """What a manifest must hold before anything in it is used."""

    kind: Literal["artifact"]
    format: int = Checked(ge=FORMAT, le=FORMAT)
    model: _Model
    parameters: NonNegativeInt
    fields: list[_Field]
    routes: list[dict[str, list[int]]] = Checked(default_factory=list)
    calibration: dict[str, Any]
    shift: float
    metrics: dict[str, _Metrics]
    dial: list[_Quality] = Checked(default_factory=list)
    data: _Data
    training: dict[str, Any]
    graphs: list[_Graph] = Checked(default_factory=list)
    files: dict[str, _File]


def refuse_countless_values(text: bytes) -> None:
    """Raise a ValueError for JSON or TOML whose values would take far more memory than its text."""
    if sum(text.count(mark) for mark in (b"[", b"{", b",", b"=")) > MAX_VALUES:
        raise ValueError(f"it holds more than {MAX_VALUES:,} values")


def refuse_countless_tensors(weights: Path) -> None:
    """Raise a ValueError for a file of weights whose header would take far more memory than the tensors of a model."""
    with weights.open("rb") as file:
        if int.from_bytes(file.read(8), "little") > MAX_HEADER_BYTES:
            raise ValueError(f"the header of {WEIGHTS} is larger than {MAX_HEADER_BYTES >> 20} MiB")


def mismatch(path: Path) -> str:
    """Return the beginning of an error about files that are whole but contradict each other."""
    return f"{path}: the parts of the artifact don't fit together"


def check_routes(manifest: dict[str, Any]) -> None:
    """Refuse graphs and settings of the dial whose routes or depths the model does not have."""
    num_routes = len(manifest.get("routes", []))
    depths = manifest["model"]["config"].get("train_depths") if num_routes else None
    has_depths = isinstance(depths, list) and depths and all(type(depth) is int for depth in depths)
    if num_routes and not has_depths:
        raise ValueError(f"{manifest['model']['name']} has no routes")
    for entry in (*manifest.get("graphs", []), *manifest.get("dial", [])):
        if entry["routes"] > max(num_routes, 1) or entry["depth"] not in (depths or [None]):
            raise ValueError(f"the dial names {Setting.from_dict(entry)}, which the model doesn't have")


def artifact_directory(path: Path) -> Path:
    """Return the directory of the artifact that `path` names: itself, or the one inside a run's directory."""
    path = input_directory(path, "artifact")
    inside = path / "artifact"
    return inside if not (path / MANIFEST).is_file() and (inside / MANIFEST).is_file() else path


def read_artifact_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of an artifact after checking it, but not the other files."""
    path = artifact_directory(path)
    file = path / MANIFEST
    not_an_artifact = InputError(f"{path} holds no artifact", fix="give a directory that `recap train` wrote")
    if not file.is_file() or file.is_symlink():
        if (path / INPUTS).is_file():
            raise InputError(f"{path} is an unfinished run", fix="finish it with the command that began it")
        raise not_an_artifact
    damaged = InputError(f"{file} is damaged", fix=COPY_AGAIN)
    if file.stat().st_size > MAX_MANIFEST_BYTES:
        raise damaged
    raw = file.read_bytes()
    try:
        refuse_countless_values(raw)
        manifest = json.loads(raw)
    except (ValueError, RecursionError):
        raise damaged from None
    if not isinstance(manifest, dict) or manifest.get("kind") != "artifact":
        raise not_an_artifact
    if manifest.get("format") != FORMAT:
        raise InputError(
            f"{path} is an artifact of format {manifest.get('format')!r}; this version reads {FORMAT}",
            fix="upgrade recap-ctr, or write the artifact again with this version",
        )
    checksum = manifest.pop("checksum", None)
    try:
        canonical = json_bytes({**manifest, "checksum": checksum})
        is_whole = checksum == fingerprint(manifest) and raw == canonical
    except (ValueError, RecursionError):  # JSON that we never write: NaN, or nesting without end.
        raise damaged from None
    if not is_whole:
        raise damaged
    parse(_Manifest, manifest, str(file))
    if not _has_the_right_files(manifest):
        raise damaged
    return manifest


def _has_the_right_files(manifest: dict[str, Any]) -> bool:
    """Return whether the manifest lists every file that it must, none that it may not, and no graph twice."""
    graphs = [Setting.from_dict(entry).file for entry in manifest.get("graphs", [])]
    vocabularies = (vocabulary_file(i) for i in range(len(manifest["fields"])))
    required = {WEIGHTS, SCHEMA, *graphs}
    allowed = required | {CARD, PROFILE, *vocabularies}
    return required <= set(manifest["files"]) <= allowed and len(set(graphs)) == len(graphs)


def vocabularies(fields: Iterable[Field]) -> dict[str, int]:
    """Return the files of the vocabularies with the numbers of their fields; numeric and hashed fields have none."""
    return {
        vocabulary_file(i): i
        for i, field in enumerate(fields)
        if not field.is_value and not field.hash_buckets
    }


def check_file(path: Path, name: str, entry: dict[str, Any]) -> None:
    """Refuse a file that is missing, is a link, or doesn't have its checksum."""
    file = path / name
    is_link = file.is_symlink() or (file.parent != path and file.parent.is_symlink())
    if is_link or not file.is_file():
        raise InputError(f"{file} is missing", fix=COPY_AGAIN)
    if file.stat().st_size != entry["bytes"] or sha256(file) != entry["sha256"]:
        raise InputError(f"{file} is damaged: it differs from its checksum", fix=COPY_AGAIN)


def read_checked(path: Path, name: str, entry: dict[str, Any]) -> bytes:
    """Return a file's content after checking these very bytes, because the file may have changed since it was
    verified."""
    check_file(path, name, entry)
    content = (path / name).read_bytes()
    if hashlib.sha256(content).hexdigest() != entry["sha256"]:
        raise InputError(f"{path / name} is damaged: it differs from its checksum", fix=COPY_AGAIN)
    return content
