"""What an update needs beyond the artifact: moments, rows, counts and teachers, in a directory inside it.

The directory is optional: an artifact scores without it, and `recap update` goes on without it, from zero moments and
with no replay. It is bounded: `REPLAY_ROWS` and `PENDING_ROWS` rows, `MAX_RARE` values of each field that are too rare
for a vector, two numbers for each weight, the counts behind the table of click rates, and the teachers' weights.

Shapes: N rows, V rows of the table.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from recap_ctr.axes.logits import table_checksum
from recap_ctr.data.encode import Encoder
from recap_ctr.data.grow import RowMap, row_map
from recap_ctr.data.layout import Layout
from recap_ctr.data.moments import seconds_or_never
from recap_ctr.data.rare import Rare, load_rare, save_rare
from recap_ctr.data.rates import Cross, Entries
from recap_ctr.data.shards import PreparedData, Shard, joined
from recap_ctr.errors import InputError
from recap_ctr.inference.manifest import (
    MANIFEST,
    TRAINING_STATE,
    WEIGHTS,
    artifact_directory,
    read_artifact_manifest,
)
from recap_ctr.models.blend import BlendConfig
from recap_ctr.models.boosted import BoostedConfig
from recap_ctr.models.catalogue import parse_model
from recap_ctr.models.rates import RatesConfig
from recap_ctr.models.recap import RecapConfig
from recap_ctr.nn.weights import load_tensors, to_arrays
from recap_ctr.recipe.refit import whole_log
from recap_ctr.schema import TimeUnit
from recap_ctr.storage.arrays import Array, load_arrays, save_arrays
from recap_ctr.storage.files import atomic_directory, read_json, write_json
from recap_ctr.storage.hashes import sha256
from recap_ctr.training.config import ARTIFACT, LOGITS
from recap_ctr.training.loop import STATE as RUN_STATE
from recap_ctr.training.rates import count_rates
from recap_ctr.training.report import FitReport, read_report

FORMAT = 1
REPLAY_ROWS, PENDING_ROWS = 100_000, 100_000
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class KeptRows:
    """Encoded rows that were seen before. If the model has click rates, each row has those that it may know."""

    shard: Shard
    codes: npt.NDArray[np.uint8] | None = None

    def __len__(self) -> int:
        return len(self.shard)

    def take(self, at: npt.NDArray[np.integer[Any]]) -> "KeptRows":
        """Return the rows at the positions `at`."""
        return KeptRows(self.shard.take(at), None if self.codes is None else self.codes[at])

    def moved(self, rows: RowMap) -> "KeptRows":
        """Return the rows with their ids in the grown vocabularies."""
        return replace(self, shard=replace(self.shard, ids=rows.target_V[self.shard.ids]))

    def plus(self, others: "KeptRows") -> "KeptRows":
        """Return these rows and then the others."""
        codes = None
        if self.codes is not None and others.codes is not None:
            codes = np.concatenate([self.codes, others.codes])
        return KeptRows(joined([self.shard, others.shard]), codes)


@dataclass(frozen=True, eq=False)
class Teacher:
    """A model that taught the shipped one, and how much it counts among the teachers."""

    name: str
    config: dict[str, Any]
    weights: Mapping[str, Array]
    share: float


@dataclass(frozen=True, eq=False)
class TrainingState:
    """Everything that the next update needs besides the model."""

    steps: int = 0
    """How many steps the moments come from."""
    updates: int = 0
    rows_seen: float = 0.0
    """How many rows `replay` is a sample of."""
    moments: Mapping[str, Array] = field(default_factory=dict)
    replay: KeptRows | None = None
    pending: KeptRows | None = None
    """The newest rows: they have been calibrated and judged on, and are trained on at the next update."""
    seen_V: Floats | None = None
    """How many rows each row of the table comes from."""
    last_V: Floats | None = None
    """The moment when each value was last seen, in seconds since 1970; None where rows have no times."""
    unknown: Mapping[str, float] = field(default_factory=dict)
    """The share of values that training rows lacked in the newest rows, by field."""
    rare: Rare = field(default_factory=dict)
    entries: Entries | None = None
    """The counts behind the table of click rates."""
    teachers: tuple[Teacher, ...] = ()


def state_directory(artifact: Path) -> Path:
    """Return where an artifact keeps its training state, if it does."""
    return artifact_directory(artifact) / TRAINING_STATE


def write_state(directory: Path, state: TrainingState, weights: str) -> None:
    """Write the state of the model whose file of weights has the checksum `weights`; its manifest states its size."""
    rows: dict[str, Array] = {}
    for name, kept in (("replay", state.replay), ("pending", state.pending)):
        if kept is not None:
            rows |= {f"{name}.{key}": value for key, value in _columns(kept).items()}
    for name, column in (("seen", state.seen_V), ("last", state.last_V)):
        if column is not None:
            rows[name] = column
    with atomic_directory(directory) as partial:
        save_arrays(partial / "rows.safetensors", rows)
        save_arrays(partial / "moments.safetensors", state.moments)
        if state.entries is not None:
            save_arrays(partial / "rates.safetensors", vars(state.entries))
        for number, teacher in enumerate(state.teachers):
            save_arrays(partial / f"teacher-{number}.safetensors", teacher.weights)
        save_rare(state.rare, partial)
        files = [file for file in sorted(partial.rglob("*")) if file.is_file()]
        entries: dict[str, dict[str, Any]] = {
            file.relative_to(partial).as_posix(): {"bytes": file.stat().st_size, "sha256": sha256(file)}
            for file in files
        }
        manifest = {
            "kind": "training state",
            "format": FORMAT,
            "weights": weights,
            "bytes": sum(entry["bytes"] for entry in entries.values()),
            "steps": state.steps,
            "updates": state.updates,
            "rows_seen": state.rows_seen,
            "unknown": dict(state.unknown),
            "teachers": [
                {"name": teacher.name, "config": teacher.config, "share": teacher.share}
                for teacher in state.teachers
            ],
            "files": entries,
        }
        write_json(partial / MANIFEST, manifest)


def _columns(kept: KeptRows) -> dict[str, Array]:
    columns = {column.name: getattr(kept.shard, column.name) for column in fields(Shard)} | {
        "codes": kept.codes
    }
    return {name: np.asarray(column) for name, column in columns.items() if column is not None}


def read_state(artifact: Path, encoder: Encoder) -> TrainingState | None:
    """Return the training state of an artifact; None if it has none."""
    directory = state_directory(artifact)
    if not (directory / MANIFEST).is_file():
        return None
    manifest = read_json(directory / MANIFEST)
    again = "remove the directory to update without it, or copy the artifact again"
    if manifest.get("kind") != "training state" or manifest.get("format") != FORMAT:
        raise InputError(f"{directory} holds no training state that this version reads", fix=again)
    if manifest["weights"] != read_artifact_manifest(artifact)["files"][WEIGHTS]["sha256"]:
        raise InputError(f"{directory} belongs to another model", fix=again)
    for name, entry in manifest["files"].items():
        file = directory / name
        if not file.is_file() or sha256(file) != entry["sha256"]:
            raise InputError(f"{file} is damaged or missing", fix=again)
    rows = load_arrays(directory / "rows.safetensors")
    has_rates = (directory / "rates.safetensors").is_file()
    return TrainingState(
        steps=manifest["steps"],
        updates=manifest["updates"],
        rows_seen=manifest["rows_seen"],
        moments=load_arrays(directory / "moments.safetensors"),
        replay=_kept("replay.", rows),
        pending=_kept("pending.", rows),
        seen_V=rows.get("seen"),
        last_V=rows.get("last"),
        unknown=manifest["unknown"],
        rare=load_rare(directory, encoder),
        entries=Entries(**load_arrays(directory / "rates.safetensors")) if has_rates else None,
        teachers=tuple(
            Teacher(weights=load_arrays(directory / f"teacher-{number}.safetensors"), **entry)
            for number, entry in enumerate(manifest["teachers"])
        ),
    )


def _kept(prefix: str, rows: Mapping[str, Array]) -> KeptRows | None:
    columns = {name.removeprefix(prefix): rows[name] for name in rows if name.startswith(prefix)}
    if not columns:
        return None
    codes = columns.pop("codes", None)
    return KeptRows(Shard(**{column.name: columns.get(column.name) for column in fields(Shard)}), codes)  # type: ignore[arg-type]


def counted_crosses(config: object) -> tuple[Cross, ...]:
    """Return the fields and pairs of fields whose clicks a model counts; those of trees are among those of rates."""
    if isinstance(config, RatesConfig | BoostedConfig):
        return config.crosses
    parts = (config.rates, config.boosted) if isinstance(config, RecapConfig | BlendConfig) else ()
    return next((part.crosses for part in parts if part is not None), ())


def state_bytes(directory: Path) -> int:
    """Return how large a training state is, as its manifest states."""
    return int(read_json(directory / MANIFEST)["bytes"])


def write_fit_state(fit: Path, report: FitReport, data: PreparedData) -> Path:
    """Keep what an update of a fit's artifact will need, inside it; return the directory.

    `data` are the rows that the model was measured on. Where it has learnt from all of them since, no rows are pending.
    """
    artifact, run = fit / ARTIFACT, fit / report.student
    manifest = read_artifact_manifest(artifact)
    checksum = manifest["files"][WEIGHTS]["sha256"]
    directory = artifact / TRAINING_STATE
    if (directory / MANIFEST).is_file() and read_json(directory / MANIFEST)["weights"] == checksum:
        return directory
    config = parse_model(manifest["model"]["name"], manifest["model"]["config"])
    measured_on, trained, refit = data, run, report.refit
    if refit is not None:
        data, trained = whole_log(fit, refit, data), fit / refit.directory / run.name
    train, crosses = data.train, counted_crosses(config)
    counted = count_rates(data) if crosses else None
    chosen = np.sort(sample(len(train), REPLAY_ROWS, seed=1))
    codes = counted.training_codes(crosses)[chosen] if counted else None
    held_out = joined([data.valid, data.test])
    pending = None if refit else KeptRows(held_out.take(newest(held_out, PENDING_ROWS)))
    moments, steps = optimizer_state(trained / RUN_STATE)
    state = TrainingState(
        steps=steps,
        rows_seen=float(len(train)),
        moments=moments,
        replay=KeptRows(replace(train.take(chosen), groups=None), codes),
        pending=pending,
        seen_V=count_rows(train, data.layout),
        last_V=last_seen([train, held_out], data.layout, data.time_unit),
        unknown=_unknown_before(measured_on),
        rare=load_rare(data.path, data.encoder),
        entries=counted.entries(crosses) if counted else None,
        teachers=_teachers(fit, report, row_map(measured_on.encoder, data.encoder)),
    )
    write_state(directory, state, checksum)
    return directory


def _unknown_before(data: PreparedData) -> dict[str, float]:
    """Return for each field the share of values in the held-out rows that the training rows lack."""
    ids, seen_V = joined([data.valid, data.test]).ids, count_rows(data.train, data.layout)
    return unknown_shares(ids, data.layout) | empty_bucket_shares(ids, data.encoder, seen_V)


def optimizer_state(file: Path) -> tuple[dict[str, Array], int]:
    """Return the moments and counters that a run has saved, and after how many steps; none for a run without steps."""
    if not file.is_file():
        return {}, 0
    tensors, metadata = load_tensors(file)
    arrays = {
        name.removeprefix("update."): value
        for name, value in to_arrays(tensors).items()
        if name.startswith("update.")
    }
    return arrays, int(json.loads(metadata["progress"])["step"])


def _teachers(fit: Path, report: FitReport, rows: RowMap) -> tuple[Teacher, ...]:
    """Return those teachers of a run that are models of this package; trees and scores of another model are left out.

    Their tables get the `rows` of the shipped model's. A teacher that counts twice has twice the share.
    """
    teachers = []
    taught_by = read_report(fit / report.student).teachers
    for name in report.teacher_runs:
        run = fit / name
        weight = taught_by.count(table_checksum(run / LOGITS / "train"))
        if weight:
            manifest = read_artifact_manifest(run / ARTIFACT)
            model, size = manifest["model"], len(rows.target_V)
            weights = {
                name: rows.grow(array) if array.ndim == 2 and len(array) == size else array
                for name, array in load_arrays(run / ARTIFACT / WEIGHTS).items()
            }
            teachers.append(Teacher(model["name"], model["config"], weights, float(weight)))
    return tuple(teachers)


def sample(size: int, most: int, seed: int) -> npt.NDArray[np.int64]:
    """Return all of `size` positions, or `most` of them at random."""
    if size <= most:
        return np.arange(size)
    return np.random.default_rng(seed).choice(size, most, replace=False)


def newest(shard: Shard, most: int) -> npt.NDArray[np.int64]:
    """Return the positions of the newest rows, in the order of their times, or of the shard without times."""
    order = np.arange(len(shard)) if shard.times is None else np.argsort(shard.times, kind="stable")
    return order[-most:]


def count_rows(shard: Shard, layout: Layout) -> Floats:
    """Return how many values in the rows each row of the table stands for; a number counts in part for both its
    edges."""
    ids_BW = np.asarray(shard.ids)
    counts_V = np.bincount(ids_BW.ravel(), minlength=layout.num_rows).astype(np.float64)
    for place in layout.fields:
        if place.is_linear:
            ids_B, shares_B = ids_BW[:, place.start], shard.values[:, place.number_column]
            moved_V = np.bincount(ids_B - place.offset, shares_B, minlength=place.size)
            counts_V[place.offset : place.offset + place.size] -= moved_V
            # Rows at the last edge and those without a number have the share 0.
            counts_V[place.offset + 1 : place.offset + place.size] += moved_V[:-1]
    return np.maximum(counts_V, 0.0)  # Shares are rounded.


def last_seen(shards: list[Shard], layout: Layout, unit: TimeUnit | None) -> Floats | None:
    """Return when each row of the table was last seen, in seconds, minus infinity for never; None without times."""
    if unit is None or any(shard.times is None for shard in shards):
        return None
    last_V = np.full(layout.num_rows, -np.inf)
    for shard in shards:
        ids = np.asarray(shard.ids)
        np.maximum.at(last_V, ids.ravel(), np.repeat(shard.times, ids.shape[1]))  # type: ignore[arg-type]
    is_seen = np.isfinite(last_V)
    moments, place = np.unique(last_V[is_seen], return_inverse=True)
    last_V[is_seen] = seconds_or_never(moments, unit)[place]
    return last_V


def unknown_shares(ids_NW: Array, layout: Layout) -> dict[str, float]:
    """Return for each field the share of its values that have no vector of their own."""
    return {
        place.name: unknown_share(
            np.asarray(ids_NW[:, place.start : place.start + place.width]) - place.offset == place.oov,
            np.asarray(ids_NW[:, place.start : place.start + place.width]) - place.offset == 0,
        )
        for place in layout.fields
    }


def empty_bucket_shares(ids_NW: Array, encoder: Encoder, seen_V: Floats) -> dict[str, float]:
    """Return for each hashed field the share of values in buckets that no training row had.

    It has no other unknown values. Where nearly all buckets are in use, the share says nothing.
    """
    shares = {}
    for fitted, place in zip(encoder.fields, encoder.layout.fields, strict=True):
        if fitted.field.hash_buckets:
            ids = np.asarray(ids_NW[:, place.start : place.start + place.width])
            is_padding = ids == place.offset
            shares[place.name] = unknown_share((seen_V[ids] == 0) & ~is_padding, is_padding)
    return shares


def empty_row_shares(ids_NW: Array, layout: Layout) -> dict[str, float]:
    """Return for each field of several values the share of rows that have none: these hold nothing but padding."""
    return {
        place.name: float(
            np.mean(
                (np.asarray(ids_NW[:, place.start : place.start + place.width]) == place.offset).all(axis=1)
            )
        )
        for place in layout.fields
        if place.pooling is not None
    }


def unknown_share(is_unknown: npt.NDArray[np.bool_], is_padding: npt.NDArray[np.bool_]) -> float:
    """Return the share of unknown values among all that are not padding."""
    return float(is_unknown.sum() / max((~is_padding).sum(), 1))
