"""The deployable directory: weights, vocabularies, schema, exported graphs, and a manifest that vouches for every byte.

Reading one needs no torch: `packed` builds the torch model from its weights, `graphs` runs what was exported.
"""

import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import polars as pl
from pydantic import ConfigDict, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic import Field as Checked

from recap_ctr.config import Frozen, parse
from recap_ctr.data.encode import Encoder, vocabulary_file
from recap_ctr.errors import InputError
from recap_ctr.evaluation.calibrate import Calibration, calibration_from_dict
from recap_ctr.evaluation.metrics import auc, logloss
from recap_ctr.models.catalogue import short_name
from recap_ctr.schema import Field, read_schema
from recap_ctr.storage.arrays import Array, save_arrays
from recap_ctr.storage.claims import INPUTS
from recap_ctr.storage.files import atomic_directory, atomic_file
from recap_ctr.storage.hashes import fingerprint, sha256

FORMAT = 1
MANIFEST, WEIGHTS, SCHEMA, CARD = "manifest.json", "model.safetensors", "schema.toml", "MODEL_CARD.md"
GRAPHS = "graphs"
MAX_MANIFEST_BYTES = 64 << 20
POLARS_ERRORS = (pl.exceptions.PolarsError, pl.exceptions.PanicException)  # the latter is no Exception
AGAIN = "copy the artifact again from where it was made"


@dataclass(frozen=True)
class Setting:
    """One position of the dial between accuracy and cost.

    >>> print(Setting(8, 4)), print(Setting(1, 2)), print(Setting(1, None))
    8 routes at depth 4
    1 route at depth 2
    the whole model
    (None, None, None)
    """

    routes: int
    """K of Eq. 15: how many of the artifact's routes are averaged."""
    depth: int | None
    """Steps of the recursion; None for models that have none."""

    def __str__(self) -> str:
        if self.depth is None:
            return "the whole model"
        return f"{self.routes} route{'s' * (self.routes > 1)} at depth {self.depth}"

    @property
    def file(self) -> str:
        """Where its graph stands in an artifact; no such name is ever read from a file."""
        depth = "" if self.depth is None else f"-depth-{self.depth}"
        return f"{GRAPHS}/routes-{self.routes}{depth}.onnx"


def dial_settings(num_routes: int, depths: Sequence[int]) -> tuple[Setting, ...]:
    """The dial, most accurate first: fewer routes by halves, then one route at each smaller trained depth.

    >>> [(s.routes, s.depth) for s in dial_settings(8, [2, 4])]
    [(8, 4), (4, 4), (2, 4), (1, 4), (1, 2)]
    >>> [(s.routes, s.depth) for s in dial_settings(5, [3])]
    [(5, 3), (4, 3), (2, 3), (1, 3)]
    """
    if not num_routes:
        return (Setting(1, None),)
    *smaller, full = sorted(depths)
    powers = {1 << at for at in range(num_routes.bit_length())}
    counts = sorted(powers | {num_routes}, reverse=True)
    return (
        *(Setting(count, full) for count in counts),
        *(Setting(1, depth) for depth in reversed(smaller)),
    )


def setting_quality(
    setting: Setting, labels: Array, calibrated: Array, weights: Array | None
) -> dict[str, Any]:
    """What the manifest says of a setting: how good its calibrated logits are."""
    return {
        "routes": setting.routes,
        "depth": setting.depth,
        "rows": len(labels),
        "auc": auc(labels, calibrated, weights),
        "logloss": logloss(labels, calibrated, weights),
    }


@dataclass(frozen=True)
class Exported:
    """A graph for one setting, and how far it is from torch."""

    setting: Setting
    graph: bytes
    precision: Literal["float32", "int8"]
    parity: float
    """The largest difference of a logit from torch's, relative to it where it exceeds 1."""

    def to_dict(self) -> dict[str, Any]:
        own = {"precision": self.precision, "parity": self.parity}
        return {"routes": self.setting.routes, "depth": self.setting.depth, **own}


@dataclass(frozen=True, eq=False)
class Artifact:
    """All that an artifact says, verified; its weights and graphs are still on disk."""

    path: Path
    encoder: Encoder
    calibration: Calibration
    shift: float
    """Added to the model's logit before calibration: the correction for sampled negatives."""
    manifest: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.manifest["model"]["name"])

    @property
    def graphs(self) -> tuple[Setting, ...]:
        """The settings that have a graph, most accurate first."""
        return tuple(_setting(entry) for entry in self.manifest.get("graphs", []))

    @property
    def dial(self) -> tuple[Setting, ...]:
        """The settings worth offering."""
        config, routes = self.manifest["model"]["config"], self.manifest.get("routes", [])
        return dial_settings(len(routes), config.get("train_depths", []) if routes else [])

    def setting(self, routes: int | None = None, depth: int | None = None) -> Setting:
        """The setting with so many routes, by default all, at that depth, by default the full one."""
        stored, trained = (
            len(self.manifest.get("routes", [])),
            self.manifest["model"]["config"].get("train_depths"),
        )
        if depth is None and (routes is None or (routes == 1 and not stored)):
            return self.dial[0]
        if not stored:
            raise InputError(f"{self.name} has neither routes nor depths to choose from")
        if routes is not None and not 1 <= routes <= stored:
            raise InputError(f"{routes} routes, where the artifact has {stored}")
        if depth is not None and depth not in trained:
            raise InputError(
                f"depth {depth} was not trained", fix=f"trained are {', '.join(map(str, trained))}"
            )
        return Setting(routes or stored, depth or max(trained))

    def check_unchanged(self) -> None:
        """To be called when more of it has been read: another artifact may have taken its place in between."""
        if read_artifact_manifest(self.path) != self.manifest:
            raise InputError(f"{self.path} was replaced while it was read", fix="run the command again")

    def read_graph(self, setting: Setting) -> bytes:
        """The graph of a setting, checked as it was read: what is loaded is what was verified."""
        return _read_checked(self.path, setting.file, self.manifest["files"][setting.file])


def write_artifact(
    path: Path,
    *,
    name: str,
    config: Frozen,
    weights: Mapping[str, Array],
    encoder: Encoder,
    calibration: Calibration,
    shift: float,
    metrics: dict[str, Any],
    data: dict[str, Any],
    training: dict[str, Any],
    routes: Sequence[Frozen] = (),
    dial: Sequence[dict[str, Any]] = (),
) -> None:
    """Write the artifact, or replace the one that stands there; at no moment is half of one loadable."""
    with atomic_directory(path) as partial:
        described = encoder.save(partial)
        save_arrays(partial / WEIGHTS, weights)
        with atomic_file(partial / SCHEMA) as file:
            file.write(encoder.schema.to_toml().encode())
        manifest: dict[str, Any] = {
            "kind": "artifact",
            "format": FORMAT,
            "model": {"name": name, "config": config.model_dump(mode="json")},
            "parameters": sum(array.size for key, array in weights.items() if not _is_statistic(key)),
            "fields": described,
            "routes": [route.model_dump(mode="json") for route in routes],
            "calibration": calibration.to_dict(),
            "shift": shift,
            "metrics": metrics,
            "dial": list(dial),
            "data": data,
            "training": training,
        }
        _vouch(partial, manifest, encoder)


def add_graphs(
    artifact: Artifact, exported: Sequence[Exported], dial: Sequence[dict[str, Any]] | None = None
) -> None:
    """Put graphs into the artifact in place of those it has, and the dial's figures if given; all of it or nothing."""
    manifest = {key: value for key, value in artifact.manifest.items() if key != "graphs"}
    if dial is not None:
        manifest["dial"] = list(dial)
    if exported:
        manifest["graphs"] = [one.to_dict() for one in exported]
    with atomic_directory(artifact.path) as partial:
        (partial / "vocabulary").mkdir()
        for name in (WEIGHTS, SCHEMA, *_vocabularies(artifact.encoder.schema.fields)):
            shutil.copyfile(artifact.path / name, partial / name)
            _check_file(partial, name, artifact.manifest["files"][name])
        if exported:
            (partial / GRAPHS).mkdir()
        for one in exported:
            with atomic_file(partial / one.setting.file) as file:
                file.write(one.graph)
        _vouch(partial, manifest, artifact.encoder)


def is_same_model(path: Path, other: Path) -> bool:
    """Whether two artifacts are whole and differ, if at all, in what `add_graphs` adds."""
    if not all((one / MANIFEST).is_file() for one in (path, other)):
        return False
    try:
        known = [read_artifact(one).manifest for one in (path, other)]
    except InputError:
        return False
    apart = ("graphs", "dial", "checksum", "files")
    one, two = ({key: value for key, value in manifest.items() if key not in apart} for manifest in known)
    files = [
        {
            file: entry
            for file, entry in manifest["files"].items()
            if file != CARD and not file.startswith(GRAPHS)
        }
        for manifest in known
    ]
    return one == two and files[0] == files[1]


def _vouch(directory: Path, manifest: dict[str, Any], encoder: Encoder) -> None:
    """Write the card and the manifest over all other files, which are there."""
    with atomic_file(directory / CARD) as file:
        file.write(model_card(manifest, encoder).encode())
    graphs = [_setting(entry).file for entry in manifest.get("graphs", [])]
    files = [WEIGHTS, SCHEMA, CARD, *_vocabularies(encoder.schema.fields), *graphs]
    manifest = {key: value for key, value in manifest.items() if key not in ("files", "checksum")}
    manifest["files"] = {
        file: {"bytes": (directory / file).stat().st_size, "sha256": sha256(directory / file)}
        for file in files
    }
    manifest["checksum"] = fingerprint(manifest)
    with atomic_file(directory / MANIFEST) as out:
        out.write(_canonical(manifest))


class _Strict(Frozen):
    """A part of the manifest, as JSON has it: no text where a number belongs."""

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
    """Of the dial: what names the file of a graph, so its numbers are kept to what can be."""

    routes: int = Checked(ge=1, le=1 << 20)
    depth: int | None = Checked(ge=1, le=1 << 20)


class _Graph(_Position):
    precision: Literal["float32", "int8"]
    parity: NonNegativeFloat


class _Quality(_Position):
    rows: PositiveInt
    auc: float
    logloss: float


class _Manifest(_Strict):
    """What a manifest must hold before anything in it is believed."""

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


def read_artifact(path: Path) -> Artifact:
    """Read after checking every file against the manifest, and the manifest against itself; without torch."""
    path = resolve(path)
    manifest = read_artifact_manifest(path)
    for file, entry in manifest["files"].items():
        _check_file(path, file, entry)
    schema = read_schema(path / SCHEMA)
    if not set(_vocabularies(schema.fields)) <= manifest["files"].keys():
        raise InputError(f"{misfit(path)}: a vocabulary is not in the manifest")
    try:
        calibration = calibration_from_dict(manifest["calibration"])
        encoder = Encoder.load(path, schema, manifest["fields"])
        _check_values(encoder)
        _check_routes(manifest)
    except (KeyError, TypeError, ValueError, OverflowError, InputError, *POLARS_ERRORS) as error:
        raise InputError(f"{misfit(path)}: {error}") from None
    artifact = Artifact(path, encoder, calibration, float(manifest["shift"]), manifest)
    artifact.check_unchanged()
    return artifact


def misfit(path: Path) -> str:
    """How an error begins that lies between the files, not in one of them."""
    return f"{path}: the parts of the artifact don't fit together"


def _check_routes(manifest: dict[str, Any]) -> None:
    """Graphs and the dial speak of routes and depths that there are."""
    config, routes = manifest["model"]["config"], len(manifest.get("routes", []))
    depths = config.get("train_depths") if routes else None
    if routes and not (isinstance(depths, list) and depths and all(type(depth) is int for depth in depths)):
        raise ValueError(f"{manifest['model']['name']} has no routes")
    for entry in (*manifest.get("graphs", []), *manifest.get("dial", [])):
        if entry["routes"] > max(routes, 1) or entry["depth"] not in (depths or [None]):
            raise ValueError(f"the dial names {_setting(entry)}, which the model doesn't have")


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
    damaged = InputError(f"{file} is damaged", fix=AGAIN)
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
    graphs = [_setting(entry).file for entry in manifest.get("graphs", [])]
    known = {WEIGHTS, SCHEMA, CARD, *graphs, *(vocabulary_file(i) for i in range(len(manifest["fields"])))}
    if not {WEIGHTS, SCHEMA, *graphs} <= set(manifest["files"]) <= known or len(set(graphs)) < len(graphs):
        raise damaged
    return manifest


def _canonical(manifest: dict[str, Any]) -> bytes:
    return (json.dumps(manifest, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _setting(entry: Mapping[str, Any]) -> Setting:
    return Setting(entry["routes"], entry["depth"])


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
        raise InputError(f"{file} is missing", fix=AGAIN)
    if file.stat().st_size != entry["bytes"] or sha256(file) != entry["sha256"]:
        raise InputError(f"{file} is damaged: it differs from its checksum", fix="copy the artifact again")


def _read_checked(path: Path, name: str, entry: dict[str, Any]) -> bytes:
    """A file's content as the manifest has it, although the file may have changed since it was checked."""
    _check_file(path, name, entry)
    content = (path / name).read_bytes()
    if hashlib.sha256(content).hexdigest() != entry["sha256"]:
        raise InputError(f"{path / name} is damaged: it differs from its checksum", fix=AGAIN)
    return content


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
    if len(manifest.get("dial", [])) > 1:
        lines += ["", "| setting | AUC on validation rows | logloss, calibrated |", "|---|---|---|"]
        lines += [
            f"| {_setting(found)} | {found['auc']:.5f} | {found['logloss']:.5f} |"
            for found in manifest["dial"]
        ]
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
