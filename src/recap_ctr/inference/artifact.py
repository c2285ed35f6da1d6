"""The deployable directory: weights, vocabularies, schema, exported graphs, and a manifest with their checksums.

Reading one needs no torch: `torch_backend` builds the model from the weights, `onnx_backend` runs the graphs.
"""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl
from pydantic import ValidationError

from recap_ctr.config import Frozen
from recap_ctr.data.encode import Encoder, FittedField, vocabulary_file
from recap_ctr.data.parquet import unpacked_size
from recap_ctr.data.profile import PROFILE, Profile, read_profile
from recap_ctr.data.stored_fields import StoredFields
from recap_ctr.errors import InputError
from recap_ctr.evaluation.calibrate import Calibration, calibration_from_dict
from recap_ctr.evaluation.evaluate import Metrics
from recap_ctr.inference.about import About
from recap_ctr.inference.card import model_card
from recap_ctr.inference.manifest import (
    ABOUT,
    CARD,
    COPY_AGAIN,
    FORMAT,
    MANIFEST,
    MAX_SCHEMA_BYTES,
    SCHEMA,
    SIGNATURE,
    TRAINING_STATE,
    WEIGHTS,
    artifact_directory,
    check_file,
    check_routes,
    dial_entries,
    mismatch,
    nearest_setting,
    read_artifact_manifest,
    read_checked,
    refuse_countless_tensors,
    refuse_countless_values,
    shortfall_of,
    trained_depths,
    vocabularies,
    whole_dial_of,
)
from recap_ctr.inference.setting import GRAPHS, Setting
from recap_ctr.schema import Field, Schema, read_schema
from recap_ctr.storage.arrays import Array, ArrayInParts, save_arrays
from recap_ctr.storage.files import atomic_directory, atomic_file, copy_file, make_directory, write_json
from recap_ctr.storage.hashes import fingerprint, sha256

# Parts of an artifact that other packages know by this address, whichever file of this package holds them.
__all__ = [
    "Artifact",
    "ExportedGraph",
    "add_graphs",
    "check_num_routes",
    "is_same_model",
    "model_identity",
    "read_artifact",
    "set_about",
    "write_artifact",
]
MAX_UNPACKED_BYTES, MAX_UNPACKED_RATIO = 64 << 20, 32
"""How many bytes any vocabulary may unpack to; a larger vocabulary may unpack to this multiple of its size."""
MAX_VALUES_A_BYTE = 8
"""How many vocabulary entries a byte of their file may hold: several times as many as consecutive numbers, which pack
well."""
MAX_DOTS = 250  # In a line of the schema: a name has at most 200 characters.
POLARS_ERRORS = (pl.exceptions.PolarsError, pl.exceptions.PanicException)  # The latter is not an Exception.


@dataclass(frozen=True)
class ExportedGraph:
    """The graph of one setting, and how far its logits are from torch's."""

    setting: Setting
    graph: bytes
    precision: Literal["float32", "int8"]
    parity: float
    """The largest difference of a logit from torch's, relative to torch's where that exceeds 1."""

    def to_dict(self) -> dict[str, Any]:
        """Return the manifest's entry for the graph."""
        return {
            "routes": self.setting.routes,
            "depth": self.setting.depth,
            "precision": self.precision,
            "parity": self.parity,
        }


@dataclass(frozen=True, eq=False)
class Artifact:
    """What an artifact says about itself, verified; its weights and graphs are still on disk."""

    path: Path
    encoder: Encoder
    calibration: Calibration
    """The calibration of the full setting."""
    calibrations: Mapping[Setting, Calibration]
    """The calibrations of settings that have their own; older artifacts have none."""
    shift: float
    """Added to the model's logit before calibration: the correction for sampled negatives."""
    manifest: dict[str, Any]
    profile: Profile | None = dataclass_field(default=None, kw_only=True)
    """What is usual in the training rows; None in artifacts of older versions."""

    @property
    def name(self) -> str:
        """Return the name of the model, such as recap."""
        return str(self.manifest["model"]["name"])

    @property
    def metrics(self) -> Metrics:
        """Return the figures on held-out rows, as measured when the artifact was written."""
        try:
            return Metrics.model_validate(self.manifest["metrics"])
        except ValidationError as error:
            where = ".".join(str(part) for part in error.errors()[0]["loc"])
            raise InputError(
                f"{self.path / MANIFEST}: metrics.{where}: {error.errors()[0]['msg']}", fix=COPY_AGAIN
            ) from None

    @property
    def graphs(self) -> tuple[Setting, ...]:
        """Return the settings that have a graph, most accurate first."""
        return tuple(Setting.from_dict(entry) for entry in self.manifest.get("graphs", []))

    @property
    def num_routes(self) -> int:
        """Return how many routes the artifact holds; none for a model without routes."""
        return len(self.manifest.get("routes", []))

    @property
    def depths(self) -> tuple[int, ...]:
        """Return the depths that were trained; none for a model without routes."""
        return trained_depths(self.manifest)

    @property
    def full(self) -> Setting:
        """Return the most accurate setting, which is always offered."""
        return self.whole_dial[0]

    @property
    def whole_dial(self) -> tuple[Setting, ...]:
        """Return the settings of the dial, most accurate first, good enough to be offered or not."""
        return whole_dial_of(self.manifest)

    @property
    def dial(self) -> tuple[Setting, ...]:
        """Return the settings on offer, most accurate first."""
        return tuple(setting for setting in self.whole_dial if setting not in self.poor_settings)

    @property
    def poor_settings(self) -> dict[Setting, str]:
        """Return the settings of the dial that are not offered, with the reasons."""
        reasons = {setting: self.shortfall(setting) for setting in self.whole_dial}
        return {setting: reason for setting, reason in reasons.items() if reason is not None}

    def shortfall(self, setting: Setting) -> str | None:
        """Return why a setting is too poor to be offered, in words; None if it is offered.

        The full setting always is, and so is every setting of an artifact that does not say how good it is.
        """
        return shortfall_of(self.manifest, setting)

    def calibration_of(self, setting: Setting) -> Calibration:
        """Return the calibration of a setting: its own, or that of the next smaller number of routes at its depth.

        An older artifact has one calibration for all settings.
        """
        calibrated = None if setting == self.full else nearest_setting(setting, self.calibrations)
        return self.calibration if calibrated is None else self.calibrations[calibrated]

    def setting(self, routes: int | None = None, depth: int | None = None) -> Setting:
        """Return the setting with `routes` (default: all) at `depth` (default: the full one); refuse a poor one."""
        setting = self.named_setting(routes, depth)
        reason = self.shortfall(setting)
        if reason is not None:
            offered = "; ".join(map(str, self.dial))
            raise InputError(
                f"{setting} is not offered: {reason}",
                fix=f"leave out routes and depth for the best scores, or choose one of: {offered}",
            )
        return setting

    def named_setting(self, routes: int | None = None, depth: int | None = None) -> Setting:
        """Return the setting with `routes` (default: all) at `depth` (default: the full one), good or poor."""
        num_routes = self.num_routes
        if depth is None and (routes is None or (routes == 1 and not num_routes)):
            return self.full
        if not num_routes:
            raise InputError(f"{self.name} has neither routes nor depths to choose from")
        check_num_routes(routes, num_routes)
        if depth is not None and depth not in self.depths:
            raise InputError(
                f"depth {depth} was not trained", fix=f"choose from {', '.join(map(str, self.depths))}"
            )
        return Setting(routes or num_routes, depth or max(self.depths))

    @property
    def usual(self) -> Profile:
        """Return the profile of the training rows; refuse an artifact without one."""
        if self.profile is None:
            raise InputError(
                f"{self.path} holds no profile of its training rows: an older version wrote it, or prepared its data",
                fix="fit the model again from the raw rows",
            )
        return self.profile

    def check_unchanged(self) -> None:
        """Refuse an artifact that was replaced since it was read; call this after reading more of its files."""
        if read_artifact_manifest(self.path) != self.manifest:
            raise InputError(f"{self.path} was replaced while it was read", fix="run the command again")

    def read_graph(self, setting: Setting) -> bytes:
        """Return the graph of a setting, after comparing these very bytes with their checksum."""
        return read_checked(self.path, setting.file, self.manifest["files"][setting.file])


def check_num_routes(wanted: int | None, available: int) -> None:
    """Refuse a number of routes that the artifact does not have; None stands for all of them."""
    if wanted is not None and not 1 <= wanted <= available:
        raise InputError(
            f"{wanted} routes are wanted, but the artifact has {available}", fix=f"choose 1 to {available}"
        )


def write_artifact(
    path: Path,
    *,
    name: str,
    config: Frozen,
    weights: Mapping[str, Array | ArrayInParts],
    encoder: Encoder | StoredFields,
    calibration: Calibration,
    shift: float,
    metrics: dict[str, Any],
    data: dict[str, Any],
    training: dict[str, Any],
    routes: Sequence[Frozen] = (),
    dial: Sequence[dict[str, Any]] = (),
    profile: Profile | None = None,
) -> None:
    """Write an artifact, or replace the one in `path`; at no moment can half of one be loaded."""
    with atomic_directory(path) as partial:
        fields = encoder.save(partial)
        if profile is not None:
            profile.write(partial / PROFILE)
        save_arrays(partial / WEIGHTS, weights)
        with atomic_file(partial / SCHEMA) as file:
            file.write(encoder.schema.to_toml().encode())
        manifest: dict[str, Any] = {
            "kind": "artifact",
            "format": FORMAT,
            "model": {"name": name, "config": config.model_dump(mode="json")},
            "parameters": sum(array.size for key, array in weights.items() if not _is_statistic(key)),
            "fields": fields,
            "routes": [route.model_dump(mode="json") for route in routes],
            "calibration": calibration.to_dict(),
            "shift": shift,
            "metrics": metrics,
            "dial": list(dial),
            "data": data,
            "training": training,
        }
        _write_card_and_manifest(partial, manifest, encoder)


def add_graphs(
    artifact: Artifact, graphs: Sequence[ExportedGraph], dial: Sequence[dict[str, Any]] | None = None
) -> None:
    """Replace the graphs of an artifact and, if given, the entries of its dial; after an error, the artifact is
    unchanged."""
    manifest = {key: value for key, value in artifact.manifest.items() if key != "graphs"}
    if dial is not None:
        manifest["dial"] = list(dial)
    if graphs:
        manifest["graphs"] = [graph.to_dict() for graph in graphs]
    with atomic_directory(artifact.path) as partial:
        make_directory(partial / "vocabulary")
        profile = [PROFILE] if artifact.profile is not None else []
        for name in (WEIGHTS, SCHEMA, *profile, *vocabularies(artifact.encoder.schema.fields)):
            copy_file(artifact.path / name, partial / name)
            check_file(partial, name, artifact.manifest["files"][name])
        if graphs:
            make_directory(partial / GRAPHS)
        for graph in graphs:
            with atomic_file(partial / graph.setting.file) as file:
                file.write(graph.graph)
        if (artifact.path / TRAINING_STATE).is_dir():
            shutil.copytree(artifact.path / TRAINING_STATE, partial / TRAINING_STATE, copy_function=copy_file)
        _write_card_and_manifest(partial, manifest, artifact.encoder)


def set_about(path: Path, about: About) -> None:
    """Write owner, use and licence into an artifact's card; the model and its graphs stay."""
    artifact = read_artifact(path)
    training = {key: value for key, value in artifact.manifest["training"].items() if key != ABOUT}
    if entries := about.model_dump(exclude_none=True):
        training[ABOUT] = entries
    if training == artifact.manifest["training"]:
        return
    with atomic_directory(artifact.path) as partial:
        ignored = shutil.ignore_patterns(CARD, MANIFEST, SIGNATURE)
        shutil.copytree(artifact.path, partial, dirs_exist_ok=True, copy_function=copy_file, ignore=ignored)
        for name, entry in artifact.manifest["files"].items():
            if name != CARD:
                check_file(partial, name, entry)
        _write_card_and_manifest(partial, {**artifact.manifest, "training": training}, artifact.encoder)


def model_identity(manifest: dict[str, Any]) -> str:
    """Return a checksum of everything in an artifact but what `add_graphs` or `set_about` may change."""
    return fingerprint(_without_graphs(manifest))


def is_same_model(path: Path, other: Path) -> bool:
    """Return whether two artifacts are whole and differ at most in what `add_graphs` or `set_about` writes."""
    if not all((directory / MANIFEST).is_file() for directory in (path, other)):
        return False
    try:
        first, second = (_without_graphs(read_artifact(directory).manifest) for directory in (path, other))
    except InputError:
        return False
    return first == second


def _without_graphs(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the manifest without anything that `add_graphs` or `set_about` may change."""
    files = {
        name: entry
        for name, entry in manifest["files"].items()
        if name != CARD and not name.startswith(GRAPHS)
    }
    rest = {key: value for key, value in manifest.items() if key not in ("graphs", "dial", "checksum")}
    training = {key: value for key, value in manifest["training"].items() if key != ABOUT}
    return {**rest, "files": files, "training": training}


def _write_card_and_manifest(
    directory: Path, manifest: dict[str, Any], encoder: Encoder | StoredFields
) -> None:
    """Write the card, and the manifest with checksums of all files; the other files must be in place."""
    profile = read_profile(directory / PROFILE) if (directory / PROFILE).is_file() else None
    with atomic_file(directory / CARD) as file:
        file.write(model_card(manifest, encoder.layout, encoder.schema, profile).encode())
    graphs = [Setting.from_dict(entry).file for entry in manifest.get("graphs", [])]
    files = [
        WEIGHTS,
        SCHEMA,
        CARD,
        *([] if profile is None else [PROFILE]),
        *vocabularies(encoder.schema.fields),
        *graphs,
    ]
    manifest = {key: value for key, value in manifest.items() if key not in ("files", "checksum")}
    manifest["files"] = {
        file: {"bytes": (directory / file).stat().st_size, "sha256": sha256(directory / file)}
        for file in files
    }
    write_json(directory / MANIFEST, manifest)


def read_artifact(path: Path) -> Artifact:
    """Read an artifact after checking its manifest and every file's checksum; needs no torch."""
    path = artifact_directory(path)
    manifest = read_artifact_manifest(path)
    for file, entry in manifest["files"].items():
        check_file(path, file, entry)
    schema = _read_schema(path)
    if not set(vocabularies(schema.fields)) <= manifest["files"].keys():
        raise InputError(f"{mismatch(path)}: a vocabulary is not in the manifest")
    try:
        calibration = calibration_from_dict(manifest["calibration"])
        calibrations = {
            setting: calibration_from_dict(entry["calibration"])
            for setting, entry in dial_entries(manifest).items()
            if entry.get("calibration") is not None
        }
        refuse_countless_tensors(path / WEIGHTS)
        _refuse_bombs(path, schema.fields, manifest)
        encoder = Encoder.load(path, schema, manifest["fields"])
        _check_values(encoder)
        profile = _read_profile(path) if PROFILE in manifest["files"] else None
        if profile is not None:
            profile.bins(encoder)
        check_routes(manifest)
    except (KeyError, TypeError, ValueError, OverflowError, InputError, *POLARS_ERRORS) as error:
        raise InputError(f"{mismatch(path)}: {error}") from None
    artifact = Artifact(
        path, encoder, calibration, calibrations, float(manifest["shift"]), manifest, profile=profile
    )
    artifact.check_unchanged()
    return artifact


def _read_schema(path: Path) -> Schema:
    file = path / SCHEMA
    if file.stat().st_size > MAX_SCHEMA_BYTES:
        raise InputError(f"{file} is larger than {MAX_SCHEMA_BYTES >> 20} MiB", fix=COPY_AGAIN)
    text = file.read_bytes()
    try:
        refuse_countless_values(text)
        # The time to read a key with dots grows with the square of their number. We write none.
        if any(line.count(b".") > MAX_DOTS for line in text.splitlines()):
            raise ValueError(f"a line holds more than {MAX_DOTS} dots")
    except ValueError as error:
        raise InputError(f"{file}: {error}", fix=COPY_AGAIN) from None
    return read_schema(file)


def _read_profile(path: Path) -> Profile:
    """Read the profile; raise a ValueError for one that would take far more memory than its text."""
    file = path / PROFILE
    if file.stat().st_size <= MAX_SCHEMA_BYTES:  # A larger one is refused by its size.
        refuse_countless_values(file.read_bytes())
    return read_profile(file)


def _refuse_bombs(path: Path, fields: Sequence[Field], manifest: dict[str, Any]) -> None:
    """Raise a ValueError for vocabularies whose length differs from the manifest, or that unpack to far more than their
    size."""
    for i, (field, entry) in enumerate(zip(fields, manifest["fields"], strict=True)):
        if field.is_value or field.hash_buckets:
            continue
        size, unpacked = (path / vocabulary_file(i)).stat().st_size, unpacked_size(path / vocabulary_file(i))
        num_values = entry["size"] - 2
        if unpacked.values != 2 * num_values or num_values > MAX_VALUES_A_BYTE * size:
            raise ValueError(f"the vocabulary of field {field.name!r} does not hold {num_values:,} values")
        if unpacked.bytes > MAX_UNPACKED_BYTES + MAX_UNPACKED_RATIO * size:
            raise ValueError(f"the vocabulary of field {field.name!r} unpacks to {unpacked.bytes:,} bytes")


def _check_values(encoder: Encoder) -> None:
    """Refuse vocabularies and edges of buckets that the encoder could not have written."""
    for fitted in encoder.fields:
        if fitted.values.dtype != pl.String:
            raise ValueError(f"the vocabulary of field {fitted.field.name!r} holds no text")
        if fitted.num_added > len(fitted.values):
            raise ValueError(f"more values were added to field {fitted.field.name!r} than it has")
        present = fitted.values.drop_nulls()  # A forgotten value leaves a gap.
        if present.n_unique() < len(present):
            raise ValueError(f"the vocabulary of field {fitted.field.name!r} holds a value twice")
        if list(fitted.edges) != sorted(fitted.edges) or not np.isfinite(fitted.edges).all():
            raise ValueError(f"the edges of field {fitted.field.name!r} are out of order")
        if fitted.field.transform == "linear" and not _has_an_id_for_each_edge(fitted):
            raise ValueError(f"the values of field {fitted.field.name!r} are not the numbers of its edges")


def _has_an_id_for_each_edge(fitted: FittedField) -> bool:
    """Return whether a linear field has the number of each edge as a value, and two edges or more, or none."""
    names = [str(number) for number in range(len(fitted.edges))]
    return len(names) != 1 and fitted.num_added == 0 and fitted.values.to_list() == names


def _is_statistic(key: str) -> bool:
    """Return whether a stored array holds a norm's running statistics, which are not parameters."""
    return key.rpartition(".")[2].startswith(("running_", "num_batches"))
