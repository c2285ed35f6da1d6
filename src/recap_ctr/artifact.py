"""The deployable directory: weights, vocabularies, schema and a manifest that vouches for every byte of them."""

import json
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import polars as pl
from pydantic import ConfigDict, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic import Field as Setting
from torch import Tensor, nn

from recap_ctr.axes.routes import Routed
from recap_ctr.calibrate import Calibration, calibration_from_dict
from recap_ctr.config import Frozen, parse
from recap_ctr.data.encode import Encoder, vocabulary_file
from recap_ctr.errors import InputError
from recap_ctr.models import build, count_parameters, parse_model, short_name
from recap_ctr.models.recap import Recap, Route
from recap_ctr.nn.weights import load_tensors, save_tensors
from recap_ctr.plugins import is_dotted
from recap_ctr.schema import Field, read_schema
from recap_ctr.storage import INPUTS, atomic_directory, atomic_file, fingerprint, sha256

FORMAT = 1
MANIFEST, WEIGHTS, SCHEMA, CARD = "manifest.json", "model.safetensors", "schema.toml", "MODEL_CARD.md"
MAX_MANIFEST_BYTES = 64 << 20
TRUSTED = "RECAP_MODELS"  # environment variable: models from outside that artifacts may name, comma-separated
POLARS_ERRORS = (pl.exceptions.PolarsError, pl.exceptions.PanicException)  # the latter is no Exception


@dataclass(frozen=True, eq=False)
class Artifact:
    """A loaded model with all it takes to score raw rows."""

    name: str
    config: Frozen
    model: nn.Module
    """Gives one logit a row: the mean over the artifact's routes, where it has several."""
    encoder: Encoder
    calibration: Calibration
    shift: float
    """Added to the model's logit before calibration: the correction for sampled negatives."""
    manifest: dict[str, Any]

    @property
    def routes(self) -> tuple[Route, ...]:
        return self.model.routes if isinstance(self.model, Routed) else ()

    @property
    def weights(self) -> dict[str, Tensor]:
        """As they are stored: those of the backbone, whatever its routes."""
        backbone = self.model.model if isinstance(self.model, Routed) else self.model
        return dict(backbone.state_dict())

    def dialled(self, routes: int | None = None, depth: int | None = None) -> "Artifact":
        """The same artifact on fewer of its routes, or at another trained depth; the calibration stays."""
        if routes is None and depth is None:
            return self
        if not isinstance(self.model, Routed):
            raise InputError(f"{self.name} has neither routes nor depths to choose from")
        stored = self.model.routes
        if routes is not None and not 1 <= routes <= len(stored):
            raise InputError(f"{routes} routes, where the artifact has {len(stored)}")
        return replace(self, model=Routed(self.model.model, stored[:routes], depth).eval())


def write_artifact(
    path: Path,
    *,
    name: str,
    config: Frozen,
    weights: dict[str, Tensor],
    encoder: Encoder,
    calibration: Calibration,
    shift: float,
    metrics: dict[str, Any],
    data: dict[str, Any],
    training: dict[str, Any],
    routes: tuple[Route, ...] = (),
) -> None:
    """Write the artifact, or replace the one that stands there; at no moment is half of one loadable."""
    with atomic_directory(path) as partial:
        described = encoder.save(partial)
        save_tensors(partial / WEIGHTS, weights)
        with atomic_file(partial / SCHEMA) as file:
            file.write(encoder.schema.to_toml().encode())
        manifest: dict[str, Any] = {
            "kind": "artifact",
            "format": FORMAT,
            "model": {"name": name, "config": config.model_dump(mode="json")},
            "parameters": sum(tensor.numel() for key, tensor in weights.items() if not _is_statistic(key)),
            "fields": described,
            "routes": [route.model_dump(mode="json") for route in routes],
            "calibration": calibration.to_dict(),
            "shift": shift,
            "metrics": metrics,
            "data": data,
            "training": training,
        }
        with atomic_file(partial / CARD) as file:
            file.write(model_card(manifest, encoder).encode())
        files = [WEIGHTS, SCHEMA, CARD, *_vocabularies(encoder.schema.fields)]
        manifest["files"] = {
            file: {"bytes": (partial / file).stat().st_size, "sha256": sha256(partial / file)}
            for file in files
        }
        manifest["checksum"] = fingerprint(manifest)
        with atomic_file(partial / MANIFEST) as out:
            out.write(_canonical(manifest))


class _Strict(Frozen):
    """A part of the manifest, as JSON has it: no text where a number belongs."""

    model_config = ConfigDict(strict=True)


class _File(_Strict):
    bytes: NonNegativeInt
    sha256: str = Setting(pattern="^[0-9a-f]{64}$")


class _Model(_Strict):
    name: str
    config: dict[str, Any]


class _Field(_Strict):
    name: str
    size: PositiveInt
    mean: float = 0.0
    scale: PositiveFloat = 1.0
    edges: tuple[float, ...] = Setting((), strict=False)


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


class _Manifest(_Strict):
    """What a manifest must hold before anything in it is believed."""

    kind: Literal["artifact"]
    format: int = Setting(ge=FORMAT, le=FORMAT)
    model: _Model
    parameters: NonNegativeInt
    fields: list[_Field]
    routes: list[dict[str, list[int]]] = Setting(default_factory=list)
    calibration: dict[str, Any]
    shift: float
    metrics: dict[str, _Metrics]
    data: _Data
    training: dict[str, Any]
    files: dict[str, _File]


def load_artifact(path: Path) -> Artifact:
    """Load after checking every file against the manifest, and the manifest against itself."""
    path = resolve(path)
    manifest = read_artifact_manifest(path)
    for file, entry in manifest["files"].items():
        _check_file(path, file, entry)
    schema = read_schema(path / SCHEMA)
    misfit = f"{path}: the parts of the artifact don't fit together"
    if not set(_vocabularies(schema.fields)) <= manifest["files"].keys():
        raise InputError(f"{misfit}: a vocabulary is not in the manifest")
    name = manifest["model"]["name"]
    _check_trusted(path, name)
    try:
        config = parse_model(name, manifest["model"]["config"])
        calibration = calibration_from_dict(manifest["calibration"])
        encoder = Encoder.load(path, schema, manifest["fields"])
        _check_values(encoder)
        # A false size must cost neither time nor memory: no setting counts more than there are weights, and the
        # weights are counted before they are allocated.
        room = manifest["files"][WEIGHTS]["bytes"] // 4
        sizes = [value for value in dict(config).values() if isinstance(value, int)]
        if max(sizes, default=0) > room or count_parameters(name, config, encoder.layout) > room:
            raise ValueError("the model has more weights than the file")
        model = build(name, config, encoder.layout)
        model.load_state_dict(load_tensors(path / WEIGHTS)[0])
        routes = tuple(parse(Route, route, "route") for route in manifest.get("routes", []))
        if routes and not isinstance(model, Recap):
            raise ValueError(f"{name} has no routes")
        routed = Routed(model, routes) if routes and isinstance(model, Recap) else model
    except (
        KeyError,
        TypeError,
        ValueError,
        RuntimeError,
        OverflowError,
        InputError,
        *POLARS_ERRORS,
    ) as error:
        raise InputError(f"{misfit}: {error}") from None
    for key, tensor in model.state_dict().items():
        if not tensor.isfinite().all():
            raise InputError(f"{path / WEIGHTS}: {key} holds NaN or infinity", fix="train the model anew")
    return Artifact(name, config, routed.eval(), encoder, calibration, float(manifest["shift"]), manifest)


def _check_trusted(path: Path, name: str) -> None:
    """A manifest is data, and may come from anywhere: what it names is not imported for that (docs/decisions/0010)."""
    if not is_dotted(name) or name.partition(":")[0] in sys.modules:
        return
    if name not in [entry.strip() for entry in os.environ.get(TRUSTED, "").split(",")]:
        raise InputError(
            f"{path}: its model, {name}, is code from outside this package, which an artifact alone can't have run",
            fix=f"if you trust that code, set {TRUSTED}={name}, or import its module first",
        )


def resolve(path: Path) -> Path:
    """A run's directory stands for the artifact inside it."""
    inside = path / "artifact"
    return inside if not (path / MANIFEST).is_file() and (inside / MANIFEST).is_file() else path


def read_artifact_manifest(path: Path) -> dict[str, Any]:
    path = resolve(path)
    file = path / MANIFEST
    if not file.is_file() or file.is_symlink():
        if (path / INPUTS).is_file():
            raise InputError(f"{path} is an unfinished run", fix="finish it with the command that began it")
        raise InputError(f"{path} holds no artifact", fix="give a directory that `recap train` wrote")
    damaged = InputError(f"{file} is damaged", fix="copy the artifact again from where it was made")
    if file.stat().st_size > MAX_MANIFEST_BYTES:
        raise damaged
    raw = file.read_bytes()
    try:
        manifest = json.loads(raw)
    except (ValueError, RecursionError):
        raise damaged from None
    if not isinstance(manifest, dict) or manifest.get("kind") != "artifact":
        raise InputError(f"{path} holds no artifact", fix="give a directory that `recap train` wrote")
    if manifest.get("format") != FORMAT:
        raise InputError(
            f"{path} is an artifact of format {manifest.get('format')!r}; this version reads {FORMAT}",
            fix="upgrade recap-ctr, or pack the model anew",
        )
    checksum = manifest.pop("checksum", None)
    try:
        whole = checksum == fingerprint(manifest) and raw == _canonical({**manifest, "checksum": checksum})
    except (ValueError, RecursionError):  # what JSON can hold and we never write: NaN, or nesting without end
        raise damaged from None
    if not whole:
        raise damaged
    parse(_Manifest, manifest, str(file))
    known = {WEIGHTS, SCHEMA, CARD, *(vocabulary_file(i) for i in range(len(manifest["fields"])))}
    if not {WEIGHTS, SCHEMA} <= set(manifest["files"]) <= known:
        raise damaged
    return manifest


def _canonical(manifest: dict[str, Any]) -> bytes:
    return (json.dumps(manifest, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _vocabularies(fields: Iterable[Field]) -> list[str]:
    plain = (not field.is_value and not field.hash_buckets for field in fields)
    return [vocabulary_file(i) for i, kept in enumerate(plain) if kept]


def _check_values(encoder: Encoder) -> None:
    for fitted in encoder.fields:
        if fitted.values.dtype != pl.String or fitted.values.has_nulls():
            raise ValueError(f"the vocabulary of field {fitted.field.name!r} holds no text")
        if list(fitted.edges) != sorted(fitted.edges):
            raise ValueError(f"the edges of field {fitted.field.name!r} are out of order")


def _check_file(path: Path, name: str, entry: dict[str, Any]) -> None:
    file = path / name
    links = file.is_symlink() or (file.parent != path and file.parent.is_symlink())
    if links or not file.is_file():
        raise InputError(f"{file} is missing", fix="copy the artifact again from where it was made")
    if file.stat().st_size != entry["bytes"] or sha256(file) != entry["sha256"]:
        raise InputError(f"{file} is damaged: it differs from its checksum", fix="copy the artifact again")


def _is_statistic(key: str) -> bool:
    return key.rpartition(".")[2].startswith(("running_", "num_batches"))


def model_card(manifest: dict[str, Any], encoder: Encoder) -> str:
    """What the model is, what it was trained on, and how good it was, for whoever finds the directory."""
    lines = [
        f"# {short_name(manifest['model']['name']).upper()} click model",
        "",
        f"{manifest['parameters']:,} parameters over {encoder.layout.num_fields} fields"
        f" and {encoder.layout.num_rows:,} vocabulary entries.",
        f"Trained on {manifest['data']['rows']:,} rows of {manifest['data']['name']}"
        f" (fingerprint {manifest['data']['fingerprint']}), seed {manifest['training']['seed']}.",
        "",
        "| rows | AUC | logloss | calibrated logloss | base rate logloss |",
        "|---|---|---|---|---|",
    ]
    for split, found in manifest["metrics"].items():
        lines.append(
            f"| {split}, {found['rows']:,} | {found['raw']['auc']:.5f} | {found['raw']['logloss']:.5f} |"
            f" {found['calibrated']['logloss']:.5f} | {found['base_rate_logloss']:.5f} |"
        )
    kept = [at.field.name for at in encoder.fields if not at.field.is_value and not at.field.hash_buckets]
    lines += [
        "",
        "`score` is the calibrated probability of a click;"
        " unseen and missing values are scored through a shared vector.",
        f"Raw values are stored for: {', '.join(kept) or 'none'}.",
        "",
        "Not for decisions about people (credit, housing, employment);"
        " scores drift as the traffic does: evaluate often.",
        "",
    ]
    return "\n".join(lines)
