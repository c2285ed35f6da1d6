"""Artifacts as a worker holds them: the one that serves, the one before it, and one that is offered.

A request keeps the version it was decoded for until it is answered, so that no answer mixes two.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl

from recap_ctr.data.encode import Encoder
from recap_ctr.errors import InputError
from recap_ctr.serve.codec import Codec, Table
from recap_ctr.serve.config import ServeConfig
from recap_ctr.serve.engine import Engine, Setting
from recap_ctr.serve.problem import Problem
from recap_ctr.serve.scheduler import Costs, measure
from recap_ctr.storage.hashes import fingerprint

PROBE_ROWS = 32
CARD = "MODEL_CARD.md"
Loader = Callable[[Path, int], Engine]


@dataclass(frozen=True, eq=False)
class Version:
    """One loaded artifact, with all that is made of it."""

    name: str
    engine: Engine
    codec: Codec
    costs: Costs
    card: str
    seconds: float
    """It took to load, check and measure."""

    def setting(self, routes: int | None, depth: int | None) -> int | None:
        """The place of the setting that a request insists on; None if it leaves the choice to the dial.

        What it leaves open means what it means to the engine, so that a server and `recap predict` agree.
        """
        if routes is None and depth is None:
            return None
        settings = list(self.engine.settings)
        listed = "; ".join(f"routes {known.routes}, depth {known.depth}" for known in settings)
        try:
            wanted = self.engine.setting(routes, depth)
        except InputError as error:
            raise Problem(400, error.message, fix=f"settings are {listed}") from None
        if wanted not in settings:
            raise Problem(400, f"{wanted} is not offered here", fix=f"settings are {listed}")
        return settings.index(wanted)


def loader(name: str) -> Loader:
    """The function that makes an engine of a path, by "module:function"."""
    module, _, function = name.partition(":")
    found: Loader = getattr(import_module(module), function)
    return found


def load(path: Path, config: ServeConfig, costs: Path, seconds: float) -> Version:
    """Load an artifact, have it score rows of its own vocabulary at every setting, and time it for `seconds`.

    The times are kept in the directory `costs`, so that a worker that comes back need not measure again.
    """
    start = time.perf_counter()
    engine = loader(config.loader)(path, config.threads)
    name = fingerprint(engine.manifest)[:12]
    frame = sample_rows(engine.encoder, PROBE_ROWS)
    encoded = engine.encode(frame)
    for setting in engine.settings:
        _check_finite(
            engine.score(encoded, setting).probability_B, f"at routes {setting.routes}, depth {setting.depth}"
        )
    known = costs / f"costs-{name}.json"
    if known.exists():
        found = Costs.from_dict(msgspec.json.decode(known.read_bytes()))
    else:
        found = measure(engine, lambda rows: sample_rows(engine.encoder, rows), seconds)
        partial = known.with_suffix(f".{time.monotonic_ns()}")
        partial.write_bytes(msgspec.json.encode(found.to_dict()))
        partial.replace(known)
    card = path / CARD
    text = (
        card.read_text(encoding="utf-8", errors="replace") if card.is_file() and not card.is_symlink() else ""
    )
    return Version(
        name, engine, Codec(engine.encoder, config.limits), found, text, time.perf_counter() - start
    )


def sample_rows(encoder: Encoder, count: int) -> pl.DataFrame:
    """Rows of frequent values of each field, the first of them without any value at all."""
    columns = []
    places = np.arange(count)
    for number, fitted in enumerate(encoder.fields):
        field = fitted.field
        if field.kind == "numeric":
            low, high = (fitted.edges[0], fitted.edges[-1]) if fitted.edges else (0.0, 2.0 * fitted.scale)
            drawn = pl.Series(field.name, np.linspace(low, high, count) if count > 1 else np.array([low]))
        elif len(fitted.values):
            drawn = fitted.values.gather((places * (2 * number + 3)) % min(len(fitted.values), 1000)).alias(
                field.name
            )
        else:
            drawn = pl.Series(field.name, [f"{number}-{place}" for place in places], dtype=pl.String)
        columns.append(drawn.set(pl.Series(places == 0), None))
    return pl.DataFrame(columns)


def check_fits(new: Version, old: Version) -> None:
    """Whatever the serving version takes, an offered one must take too, else its clients would be turned away."""
    for name, field in old.codec.fields.items():
        other = new.codec.fields.get(name)
        if other is None or other.kind != field.kind:
            what = "no such field" if other is None else f"a {other.kind} field of that name"
            raise InputError(
                f"requests may carry the {field.kind} field {name!r}, and the offered artifact has {what}",
                fix="start another server for it, and move the clients there",
            )


def shadow(new: Version, old: Version, tables: Sequence[Table]) -> dict[str, float]:
    """Score recent requests by both versions; how far their probabilities are apart."""
    rows = sum(table.height for table in tables)
    if rows == 0:
        return {"rows": 0}
    one, other = (
        version.engine.score(version.engine.encode(version.codec.join(tables))).probability_B
        for version in (old, new)
    )
    _check_finite(other, "on rows of recent requests")
    apart = np.abs(other - one)
    return {
        "rows": rows,
        "mean_difference": float(apart.mean()),
        "largest_difference": float(apart.max()),
        "mean_before": float(one.mean()),
        "mean_after": float(other.mean()),
    }


def describe_setting(setting: Setting) -> dict[str, int | None]:
    return {"routes": setting.routes, "depth": setting.depth}


def about(version: Version, history: dict[str, Any]) -> dict[str, Any]:
    """What `GET /model` says."""
    manifest = version.engine.manifest
    return {
        "model": version.name,
        "name": manifest.get("model", {}).get("name"),
        "parameters": manifest.get("parameters"),
        "fields": [
            {
                "name": fitted.field.name,
                "kind": fitted.field.kind,
                "values": fitted.num_kept,
                "suggestions": len(fitted.values) > 0 and fitted.field.kind != "numeric",
                "separator": fitted.field.separator if fitted.field.kind == "multi" else None,
            }
            for fitted in version.engine.encoder.fields
        ],
        "settings": [
            describe_setting(setting)
            | {
                "milliseconds": {
                    str(rows): round(1000 * version.costs.seconds(at, rows), 3) for rows in (1, 100, 500)
                }
            }
            | {"quality": _quality(manifest, setting)}
            for at, setting in enumerate(version.engine.settings)
        ],
        "calibration": manifest.get("calibration"),
        "metrics": manifest.get("metrics"),
        "data": manifest.get("data"),
        "card": version.card,
        "swap": history,
    }


def _quality(manifest: dict[str, Any], setting: Setting) -> dict[str, Any] | None:
    """AUC and logloss on validation rows at a setting, where the artifact has them."""
    for entry in manifest.get("dial", []):
        if entry["routes"] == setting.routes and entry["depth"] == setting.depth:
            return {name: value for name, value in entry.items() if name not in ("routes", "depth")}
    return None


def _check_finite(probability_B: "np.typing.NDArray[np.float64]", where: str) -> None:
    if not (np.isfinite(probability_B).all() and (probability_B >= 0).all() and (probability_B <= 1).all()):
        raise InputError(f"the artifact's scores {where} are no probabilities", fix="train the model anew")
