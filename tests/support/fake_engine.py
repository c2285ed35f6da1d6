"""An engine without a model, for tests: it loads at once, and scores by arithmetic in a time that the test sets.

Its artifact is a manifest with these keys: `seed` decides the scores, `row_us` and `start_us` are the microseconds per
row and per batch at the best setting, `extra` is the name of one more field, `time` that of a column of milliseconds
from which two fields are derived, and `broken` says how it is damaged: `checksum`, `nan`, `endless` or `large`.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from recap_ctr.data.encode import Encoded, Encoder, FittedField
from recap_ctr.data.few_rows import Columns, FewRows
from recap_ctr.data.profile import Profile
from recap_ctr.data.source import Block
from recap_ctr.errors import InputError
from recap_ctr.inference.engine import Scores
from recap_ctr.inference.setting import Setting
from recap_ctr.schema import Field, Schema

FIELDS = (
    Field(name="site", kind="categorical"),
    Field(name="user id", kind="categorical", missing=("-1",)),
    Field(name="price", kind="numeric"),
    Field(name="age", kind="numeric", transform="quantiles", num_buckets=4),
    Field(name="tags", kind="multi", max_len=3, separator="|"),
    Field(name="device", kind="categorical", hash_buckets=50),
)
ROW = {"site": "a", "user id": 10**17 + 3, "price": 6.5, "tags": ["x", "new"]}
"""A row of `FIELDS`, with known, new and missing values."""


def fake_encoder(extra: str | None = None, time_column: str | None = None) -> Encoder:
    """Return an encoder of `FIELDS`, of the field `extra`, and of the hour and weekday of a column of milliseconds.

    Their vocabularies are small.
    """
    fields = FIELDS + ((Field(name=extra, kind="categorical"),) if extra else ())
    if time_column:
        derived = {"kind": "categorical", "source": time_column, "unit": "ms"}
        fields += tuple(
            Field.model_validate({"name": part, "derive": part, **derived}) for part in ("hour", "weekday")
        )

    def fit(field: Field) -> FittedField:
        kept = {
            "site": ["a", "b", "c.com", "7", "true"],
            "user id": [str(10**17 + k) for k in range(40)] + ["3", "0.5"],
            "age": ["0", "1", "2", "3"],
            "tags": ["x", "y", "z", "1"],
            "hour": [str(hour) for hour in range(24)],
            "weekday": [str(day) for day in range(7)],
        }.get(field.name, ["q"] if field.name == extra else [])
        edges = (10.0, 20.0, 30.0) if field.name == "age" else ()
        values = pl.Series(kept, dtype=pl.String)
        return FittedField(field, values, np.arange(len(kept), 0, -1), 5.0, 2.0, edges)

    return Encoder(Schema(label="click", fields=fields), [fit(field) for field in fields])


class FakeEngine:
    """A RowScorer with four settings, whose relative costs are `costs`."""

    settings = (Setting(8, 4), Setting(4, 4), Setting(1, 4), Setting(1, 2))
    costs = (1.0, 0.5, 0.2, 0.1)

    def __init__(self, manifest: dict[str, Any], sleep: Callable[[float], None] = time.sleep) -> None:
        self.manifest = {"calibration": {"kind": "affine", "scale": 2.0, "shift": -0.5}, **manifest}
        self.encoder = fake_encoder(manifest.get("extra"), manifest.get("time"))
        self.profile: Profile | None = None
        self._sleep = sleep
        self._few_rows, self._sleep = FewRows(self.encoder), sleep
        rng = np.random.default_rng(manifest.get("seed", 0))
        self._weights = rng.normal(size=(len(self.settings), self.encoder.layout.num_rows))

    def setting(self, routes: int | None = None, depth: int | None = None) -> Setting:
        """Return a setting, on offer or not."""
        return Setting(routes or 8, depth or 4)

    def encode(self, frame: pl.DataFrame) -> Encoded:
        """Encode raw rows."""
        return self.encoder.encode(Block(frame, 1, "the request"))

    def encode_few(self, columns: Columns, height: int) -> Encoded | None:
        """Encode few rows."""
        return self._few_rows.encode(columns, height)

    def score(self, encoded: Encoded, setting: Setting | None = None) -> Scores:
        """Sleep as long as the manifest says, and return scores that depend on every value of the row."""
        at = self.settings.index(setting or self.settings[0])
        rows = len(encoded.ids_BW)
        seconds = 1e-6 * (self.manifest.get("start_us", 0) + rows * self.manifest.get("row_us", 0))
        if seconds:
            self._sleep(seconds * self.costs[at])
        raw_B = self._weights[at][encoded.ids_BW].mean(axis=1) + encoded.values_BN.mean(axis=1) / 100
        if self.manifest.get("broken") == "nan":
            raw_B = raw_B * np.nan
        logit_B = 2.0 * raw_B - 0.5
        return Scores(1 / (1 + np.exp(-logit_B)), logit_B, raw_B, np.abs(raw_B) / (at + 1))


def load(path: Path, threads: int) -> FakeEngine:
    """Load a fake artifact; tests name this function as the loader of their servers."""
    manifest = json.loads((path / "manifest.json").read_bytes())
    if manifest.get("broken") == "checksum":
        raise InputError(
            f"{path}/model is damaged: it differs from its checksum", fix="copy the artifact again"
        )
    while manifest.get("broken") == "endless":
        pass
    if manifest.get("broken") == "large":
        np.ones(1 << 33)
    return FakeEngine(manifest)


def write(path: Path, **manifest: Any) -> Path:
    """Write a fake artifact in one step, as a real one would be, and return `path`."""
    path.mkdir(parents=True, exist_ok=True)
    partial = path / ".partial"
    partial.write_text(json.dumps(manifest))
    partial.replace(path / "manifest.json")
    return path
