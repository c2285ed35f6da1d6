"""Raw rows and an artifact to scores. Needs no torch where the artifact holds exported graphs.

Shapes: B rows.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import polars as pl

from recap_ctr.data.encode import Encoded, Ints, as_text, column
from recap_ctr.data.encode import Floats as Values
from recap_ctr.data.prepare import labels, weights
from recap_ctr.data.sink import Sink
from recap_ctr.data.source import Block, FileSource, Names, Source
from recap_ctr.errors import InputError
from recap_ctr.evaluation.evaluate import evaluate
from recap_ctr.evaluation.metrics import sigmoid
from recap_ctr.evaluation.sampling import weigh_negatives
from recap_ctr.inference.artifact import Artifact, read_artifact
from recap_ctr.inference.artifact import Setting as Setting
from recap_ctr.inference.onnx_backend import Graphs
from recap_ctr.jobs.machine import num_cores
from recap_ctr.jobs.progress import meter

if TYPE_CHECKING:
    from recap_ctr.inference.torch_backend import PackedModel

OUTPUT_COLUMNS = ("score", "logit")
EVAL_ROWS = 512  # at a time: what lies between inputs and logits stays in the processor's cache
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Scores:
    """What is known of each row."""

    probability_B: Floats
    """Calibrated."""
    logit_B: Floats
    """Calibrated."""
    raw_logit_B: Floats
    """The model's own, with the correction for sampled negatives, before calibration."""
    disagreement_B: Floats
    """The standard deviation of the raw logit over routes: how unsure the model is of itself. Zero for one route."""


class Backend(Protocol):
    """What runs a model: encoded rows to raw logits and their disagreement."""

    settings: tuple[Setting, ...]
    threads: int

    def logits(
        self, setting: Setting, ids_BW: Ints, values_BN: Values
    ) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]: ...


class Engine:
    """An artifact ready to score: any number of threads at once, and the same row scores the same in any company."""

    def __init__(self, artifact: Artifact, backend: Backend) -> None:
        self._artifact, self._backend = artifact, backend
        self.manifest, self.encoder = artifact.manifest, artifact.encoder
        self.calibration = artifact.calibration
        self.settings = backend.settings
        """What can be asked for, most accurate and most costly first; the first is the default."""
        self.threads = backend.threads
        """That work on one call."""
        # Vocabularies are sorted at their first use: now, and not at the first request.
        names = [fitted.field.name for fitted in self.encoder.fields]
        self.encode(pl.DataFrame({name: [None] for name in names}, dict.fromkeys(names, pl.String)))

    @classmethod
    def load(
        cls,
        path: Path,
        *,
        backend: Literal["auto", "onnx", "torch"] = "auto",
        threads: int | None = None,
    ) -> "Engine":
        """`auto`: the artifact's graphs if it has any, else torch. Without `threads`, all cores."""
        artifact = read_artifact(path)
        graphs, runtime, torch = bool(artifact.graphs), _installed("onnxruntime"), _installed("torch")
        if backend == "auto":
            backend = "onnx" if graphs and (runtime or not torch) else "torch"
            if backend == "torch" and not torch:
                raise InputError(
                    f"{path} holds no exported graphs, and without them PyTorch is needed",
                    fix="run `recap export` where the model was trained, or pip install 'recap-ctr[train]'",
                )
        if backend == "torch" and not torch:
            raise InputError("this needs PyTorch", fix="pip install 'recap-ctr[train]'")
        if backend == "onnx" and not graphs:
            raise InputError(f"{path} holds no exported graphs", fix=f"recap export {path}")
        if backend == "onnx" and not runtime:
            raise InputError("exported graphs need ONNX Runtime", fix="pip install onnxruntime")
        if backend == "onnx":
            return cls(artifact, Graphs(artifact, threads or num_cores()))
        from recap_ctr.inference.torch_backend import use_threads, with_model

        use_threads(threads)
        return cls.of(with_model(artifact))

    @classmethod
    def of(cls, model: "PackedModel") -> "Engine":
        """An engine of a model in memory, by torch."""
        from recap_ctr.inference.torch_backend import Eager

        return cls(model, Eager(model))

    def setting(self, routes: int | None = None, depth: int | None = None) -> Setting:
        """The setting with so many routes, by default all, at that depth, by default the full one."""
        return self.settings[0] if routes is None and depth is None else self._artifact.setting(routes, depth)

    def encode(self, frame: pl.DataFrame) -> Encoded:
        """Raw rows as the model sees them; unseen and missing values among them."""
        return self.encoder.encode(Block(frame, 1, "the rows"))

    def score(
        self,
        encoded: Encoded,
        setting: Setting | None = None,
        *,
        origin: str = "the rows",
        first_row: int = 1,
    ) -> Scores:
        """All there is to say of some rows; `origin` and `first_row` name a row that can't be scored."""
        setting = setting or self.settings[0]
        raw_B, disagreement_B = np.empty((2, len(encoded.ids_BW)))
        for start in range(0, len(raw_B), EVAL_ROWS):
            part = slice(start, start + EVAL_ROWS)
            raw_B[part], disagreement_B[part] = self._backend.logits(
                setting, encoded.ids_BW[part], encoded.values_BN[part]
            )
        bad = np.flatnonzero(~np.isfinite(raw_B))
        if len(bad):
            raise InputError(
                f"{origin}: row {first_row + bad[0]}: the model's logit is {raw_B[bad[0]]}",
                fix="look for extreme numbers in the row; else train the model anew",
            )
        logit_B = self.calibration.apply(raw_B)
        return Scores(sigmoid(logit_B), logit_B, raw_B, disagreement_B)


def _installed(package: str) -> bool:
    return find_spec(package) is not None


@dataclass
class Tally:
    """What scoring met: rows, and per field how many values were missing or unseen."""

    rows: int
    missing: dict[str, int]
    unseen: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        return {"rows": self.rows, "missing": self.missing, "unseen": self.unseen}


class Scorer:
    """Scores raw tables with an engine; `columns` says under which name a field stands in the rows."""

    def __init__(
        self,
        engine: Engine,
        columns: Mapping[str, str] | None = None,
        setting: Setting | None = None,
    ) -> None:
        self.engine, self.setting = engine, setting
        self._columns = dict(columns or {})
        names = [fitted.field.name for fitted in engine.encoder.fields]
        known = {*names, *engine.encoder.schema.roles.values()}
        for name in self._columns:
            if name not in known:
                raise InputError(
                    f"the artifact has no field {name!r}, which --map names",
                    fix=f"--map FIELD=COLUMN; fields are {', '.join(names)}",
                )
        self.tally = Tally(0, dict.fromkeys(names, 0), dict.fromkeys(names, 0))

    @classmethod
    def load(
        cls,
        path: Path,
        columns: Mapping[str, str] | None = None,
        *,
        routes: int | None = None,
        depth: int | None = None,
        threads: int | None = None,
    ) -> "Scorer":
        """`routes` and `depth` trade accuracy for cost, where the model has them."""
        engine = Engine.load(path, threads=threads)
        setting = engine.setting(routes, depth)
        if setting not in engine.settings and _installed("torch"):  # which needs no graph for it
            engine = Engine.load(path, backend="torch", threads=threads)
        return cls(engine, columns, setting)

    def source(self, rows: Sequence[str | Path]) -> FileSource:
        """Files to score. Those of a schema without header lines may have one, or lack the label."""
        schema = self.engine.encoder.schema
        if schema.columns is None:
            return FileSource(rows)
        fields = frozenset(self._columns.get(field.name, field.name) for field in schema.fields)
        return FileSource(rows, Names(schema.columns, fields, schema.label))

    def renamed(self, block: Block) -> Block:
        """The block with each mapped field under its own name; all at once, so that two fields can be swapped."""
        for given in self._columns.values():
            if given not in block.frame.columns:
                raise InputError(f"{block.origin} has no column {given!r}, which --map names")
        missing = [
            (number, fitted.field.name)
            for number, fitted in enumerate(self.engine.encoder.fields, start=1)
            if fitted.field.name not in (*block.frame.columns, *self._columns)
        ]
        if missing:
            number, name = missing[0]
            schema = self.engine.encoder.schema
            used = {*(field.name for field in schema.fields), *schema.roles.values(), *self._columns.values()}
            unused = [column for column in block.frame.columns if column not in used][:12]
            listed = ", ".join(map(repr, unused)) or "none"
            raise InputError(
                f"{block.origin} has no column {name!r} (field {number} of {len(schema.fields)} in the artifact's"
                f" schema)\n  columns present but unused: {listed}",
                fix=f"rename the column, or pass --map {name}={unused[0] if unused else 'COLUMN'}",
            )
        mapped = [block.frame[given].alias(name) for name, given in self._columns.items()]
        return Block(block.frame.with_columns(mapped), block.first_row, block.origin)

    def scores(self, block: Block) -> Scores:
        encoded = self.engine.encoder.encode(block)
        self.tally.rows += block.frame.height
        for i, name in enumerate(self.tally.missing):
            self.tally.missing[name] += int(encoded.num_missing[i])
            self.tally.unseen[name] += int(encoded.num_unseen[i])
        return self.engine.score(encoded, self.setting, origin=block.origin, first_row=block.first_row)

    def raw_logits(self, block: Block) -> Floats:
        """The model's own logits, before calibration; correction for sampled negatives included."""
        return self.scores(block).raw_logit_B

    def logits(self, block: Block) -> Floats:
        """Calibrated logits."""
        return self.scores(block).logit_B

    def score_frame(self, frame: pl.DataFrame) -> Floats:
        """Calibrated probabilities of rows in memory."""
        return self.scores(self.renamed(Block(frame, 1, "the data frame"))).probability_B


def score(scorer: Scorer, source: Source, sink: Sink, *, quiet: bool = False) -> Tally:
    """Append score and logit to every row, in order, a block at a time."""
    for block, renamed in _blocks(scorer, source, "scoring", quiet):
        for name in OUTPUT_COLUMNS:
            if name in block.frame.columns:
                raise InputError(
                    f"{block.origin} has a column {name!r} already", fix="rename it before scoring"
                )
        found = scorer.scores(renamed)
        scored = pl.Series("score", found.probability_B), pl.Series("logit", found.logit_B)
        sink.write(block.frame.with_columns(scored))
    return scorer.tally


def evaluate_rows(
    scorer: Scorer, source: Source, *, negative_rate: float = 1.0, quiet: bool = False
) -> dict[str, Any]:
    """All figures on raw labelled rows; labels, logits and groups are all that is kept of them."""
    schema = scorer.engine.encoder.schema
    found_labels, found_logits = [], []
    found_weights: list[npt.NDArray[np.float32]] = []
    found_groups: list[pl.Series] = []
    for _, block in _blocks(scorer, source, "evaluating", quiet):
        found_labels.append(labels(block, schema.label))
        found_logits.append(scorer.raw_logits(block))
        # Weights and groups may be absent, but not from some of the files only.
        if schema.weight and (found_weights or schema.weight in block.frame.columns):
            found_weights.append(weights(block, schema.weight))
        if schema.group and (found_groups or schema.group in block.frame.columns):
            found_groups.append(as_text(column(block, schema.group, "group")).alias("").fill_null(""))
    label = np.concatenate(found_labels)
    if label.min() == label.max():
        raise InputError(
            f"all {len(label):,} rows have label {label[0]}: one class only", fix="evaluate on more rows"
        )
    row_weights = np.concatenate(found_weights) if found_weights else None
    groups = pl.concat(found_groups).rank("dense").to_numpy().astype(np.int64) if found_groups else None
    result = evaluate(
        label,
        np.concatenate(found_logits),
        scorer.engine.calibration,
        weights=weigh_negatives(label, row_weights, negative_rate),
        groups=groups,
        reliability=True,
    )
    return result | {"values": scorer.tally.to_dict()}


def _blocks(scorer: Scorer, source: Source, title: str, quiet: bool) -> Iterator[tuple[Block, Block]]:
    with meter(title, source.total_bytes or None, "rows", quiet=quiet) as shown:
        for block, size in source.blocks():
            yield block, scorer.renamed(block)
            shown.advance(block.frame.height, size)
