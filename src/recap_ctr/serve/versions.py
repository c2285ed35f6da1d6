"""Artifacts as a worker holds them: the serving version, the one before it, and one on offer.

A request keeps the version it was decoded for until it is answered, so that no answer mixes two.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl

from recap_ctr.data.encode import Encoded, Encoder
from recap_ctr.data.few_rows import FEW_ROWS
from recap_ctr.data.moments import write_moments
from recap_ctr.errors import InputError
from recap_ctr.inference.engine import Floats
from recap_ctr.inference.setting import Setting
from recap_ctr.inference.signing import check_signature, refuse_other_than
from recap_ctr.plugins import resolve
from recap_ctr.serve.codec import Codec
from recap_ctr.serve.columns import Table
from recap_ctr.serve.config import ServeConfig
from recap_ctr.serve.interface import RowScorer
from recap_ctr.serve.problem import Problem
from recap_ctr.serve.scheduler import Costs, measure_costs
from recap_ctr.storage.hashes import fingerprint

PROBE_ROWS = 32
SAMPLE_TIME, SAMPLE_STEP = 1_750_000_000, 40_009  # seconds: every hour and weekday comes up
CARD = "MODEL_CARD.md"
MAX_CARD = 1 << 20  # Characters that an answer may hold of it.
MAX_SAMPLED_VALUES = 64  # of a multi field
RECENT_ROWS = 256  # kept in all
RECENT_BYTES = 64 << 10  # the largest body of a request that is kept
Loader = Callable[[Path, int], RowScorer]


@dataclass(frozen=True, eq=False)
class Version:
    """One loaded artifact."""

    name: str
    engine: RowScorer
    codec: Codec
    costs: Costs
    card: str
    seconds: float
    """How long it took to load, check and measure."""

    def setting(self, routes: int | None, depth: int | None) -> int | None:
        """Return the index of the setting that a request demands; None if it leaves the choice to the dial.

        If only one of the two is set, the other one has the engine's default, as in `recap predict`.
        """
        if routes is None and depth is None:
            return None
        settings = list(self.engine.settings)
        listed = "; ".join(f"routes {setting.routes}, depth {setting.depth}" for setting in settings)
        try:
            demanded = self.engine.setting(routes, depth)
        except InputError as error:
            raise Problem(400, error.message, fix=f"settings are {listed}") from None
        if demanded not in settings:
            raise Problem(400, f"{demanded} is not offered here", fix=f"settings are {listed}")
        return settings.index(demanded)

    def encode(self, tables: Sequence[Table]) -> Encoded:
        """Encode the rows of several requests, without making a data frame of them if they are few."""
        height = sum(table.height for table in tables)
        if height <= FEW_ROWS:
            encoded = self.engine.encode_few(self.codec.join_lists(tables), height)
            if encoded is not None:
                return encoded
        return self.engine.encode(self.codec.join(tables))


class RecentRows:
    """The rows of some recent requests, kept in memory only, to compare an offered version by."""

    def __init__(self) -> None:
        self._tables: deque[Table] = deque()
        self._num_rows = 0

    def add(self, table: Table, body_bytes: int) -> None:
        """Keep the rows of a request, unless they are many or their body was large, and forget older ones."""
        if table.height > RECENT_ROWS or body_bytes > RECENT_BYTES:
            return
        self._tables.append(table)
        self._num_rows += table.height
        while self._num_rows > RECENT_ROWS:
            self._num_rows -= self._tables.popleft().height

    def tables(self) -> list[Table]:
        """Return the kept tables, oldest first."""
        return list(self._tables)


def load_version(path: Path, config: ServeConfig, costs_directory: Path, seconds: float) -> Version:
    """Load an artifact, check its scores at every setting on values of its vocabulary, and measure its speed.

    The measurement takes about `seconds`. It is kept in `costs_directory`, so that a restarted worker can reuse it.
    """
    start = time.perf_counter()
    load: Loader = resolve(config.loader)
    signed = None if config.verify_key is None else check_signature(path, config.verify_key)
    engine = load(path, config.threads)
    if signed is not None:
        refuse_other_than(signed, engine.manifest, path)
    name = fingerprint(engine.manifest)[:12]
    encoded = engine.encode(sample_rows(engine.encoder, PROBE_ROWS))
    for setting in engine.settings:
        probability_B = engine.score(encoded, setting).probability_B
        _check_probabilities(probability_B, f"at routes {setting.routes}, depth {setting.depth}")
    costs = _costs(engine, costs_directory / f"costs-{name}.json", seconds)
    codec = Codec(engine.encoder, config.limits)
    return Version(name, engine, codec, costs, _read_card(path / CARD), time.perf_counter() - start)


def _costs(engine: RowScorer, file: Path, seconds: float) -> Costs:
    """Return the costs in `file`; measure them and write the file if there is none."""
    if file.exists():
        return Costs.from_dict(msgspec.json.decode(file.read_bytes()))
    costs = measure_costs(engine, lambda rows: sample_rows(engine.encoder, rows), seconds)
    partial = file.with_suffix(f".{time.monotonic_ns()}")
    partial.write_bytes(msgspec.json.encode(costs.to_dict()))
    partial.replace(file)
    return costs


def _read_card(file: Path) -> str:
    if not file.is_file() or file.is_symlink():
        return ""
    with file.open(encoding="utf-8", errors="replace") as card:
        return card.read(MAX_CARD)


def sample_rows(encoder: Encoder, count: int) -> pl.DataFrame:
    """Return rows with frequent values of each field; the first row has no values at all.

    Multi fields have as many values as the encoder takes, so that the measured cost of a row is that of a full one.
    """
    columns: dict[str, pl.Series] = {}
    places = np.arange(count)
    for number, fitted in enumerate(encoder.fields):
        field = fitted.field
        if field.derive is not None:
            moments = write_moments(SAMPLE_TIME + SAMPLE_STEP * places, field.unit)
            columns.setdefault(field.column, moments.set(pl.Series(places == 0), None))
            continue
        if field.kind == "numeric":
            low, high = (fitted.edges[0], fitted.edges[-1]) if fitted.edges else (0.0, 2.0 * fitted.scale)
            # Of halves, because the difference of two large numbers may be too large.
            numbers = 2 * np.linspace(low / 2, high / 2, count) if count > 1 else np.array([low])
            values = pl.Series(field.name, numbers)
        elif len(fitted.values):
            chosen = (places * (2 * number + 3)) % min(len(fitted.values), 1000)
            values = fitted.values.gather(chosen).alias(field.name)
        else:
            values = pl.Series(field.name, [f"{number}-{place}" for place in places], dtype=pl.String)
        values = values.set(pl.Series(places == 0), None)
        if field.kind == "multi":
            length = min(field.max_len, MAX_SAMPLED_VALUES)
            values = pl.Series(
                field.name, [value and [value] * length for value in values], dtype=pl.List(pl.String)
            )
        columns[field.name] = values
    return pl.DataFrame(columns)


def check_fields(offered: Version, serving: Version) -> None:
    """Refuse an offered version that lacks a field of the serving one, since requests with it would fail."""
    for name, field in serving.codec.columns.items():
        other = offered.codec.columns.get(name)
        if other is None or other.kind != field.kind:
            what = "no such field" if other is None else f"a {other.kind} field of that name"
            raise InputError(
                f"requests may hold the {field.kind} field {name!r}, but the offered artifact has {what}",
                fix="start another server for it, and move the clients there",
            )


def compare(offered: Version, serving: Version, tables: Sequence[Table]) -> dict[str, float]:
    """Score recent rows with both versions, and return how far the probabilities differ."""
    rows = sum(table.height for table in tables)
    if rows == 0:
        return {"rows": 0}
    before_B, after_B = (
        version.engine.score(version.encode(tables)).probability_B for version in (serving, offered)
    )
    _check_probabilities(after_B, "on rows of recent requests")
    difference_B = np.abs(after_B - before_B)
    return {
        "rows": rows,
        "mean_difference": float(difference_B.mean()),
        "largest_difference": float(difference_B.max()),
        "mean_before": float(before_B.mean()),
        "mean_after": float(after_B.mean()),
    }


def describe(version: Version, history: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to `GET /model`; `history` says what became of the last offer."""
    manifest = version.engine.manifest
    return {
        "model": version.name,
        "name": manifest.get("model", {}).get("name"),
        "parameters": manifest.get("parameters"),
        "fields": _describe_columns(version.engine.encoder),
        "settings": [
            _describe_setting(version, index, setting)
            for index, setting in enumerate(version.engine.settings)
        ],
        "calibration": manifest.get("calibration"),
        "metrics": manifest.get("metrics"),
        "data": manifest.get("data"),
        "card": version.card,
        "swap": history,
    }


def _describe_columns(encoder: Encoder) -> list[dict[str, Any]]:
    """Return what a request may hold, in the order of the fields; moments have a unit and no values of their own."""
    entries: dict[str, dict[str, Any]] = {}
    for fitted in encoder.fields:
        field = fitted.field
        if field.derive is not None:
            time = {"kind": "time", "values": 0, "suggestions": False, "separator": None, "unit": field.unit}
            entries.setdefault(field.column, {"name": field.column, **time})
            continue
        entries[field.name] = {
            "name": field.name,
            "kind": field.kind,
            "values": fitted.num_kept,
            "suggestions": len(fitted.values) > 0 and field.kind != "numeric",
            "separator": field.separator if field.kind == "multi" else None,
        }
    return list(entries.values())


def _describe_setting(version: Version, index: int, setting: Setting) -> dict[str, Any]:
    return {
        "routes": setting.routes,
        "depth": setting.depth,
        "milliseconds": {
            str(rows): round(1000 * version.costs.seconds(index, rows), 3) for rows in (1, 100, 500)
        },
        **_quality_and_calibration(version.engine.manifest, setting),
    }


def _quality_and_calibration(manifest: dict[str, Any], setting: Setting) -> dict[str, Any]:
    """Return AUC and logloss of a setting on validation rows, and its own calibration, if the artifact has them."""
    for entry in manifest.get("dial", []):
        if Setting.from_dict(entry) == setting:
            quality = {name: entry[name] for name in ("rows", "auc", "logloss")}
            return {"quality": quality, "calibration": entry.get("calibration")}
    return {"quality": None, "calibration": None}


def _check_probabilities(probability_B: Floats, where: str) -> None:
    if not (np.isfinite(probability_B).all() and (probability_B >= 0).all() and (probability_B <= 1).all()):
        raise InputError(f"the artifact's scores {where} are not probabilities", fix="train the model again")
