"""Raw rows and an artifact to scores."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import torch

from recap_ctr.artifact import Artifact, load_artifact
from recap_ctr.data.encode import as_text, column
from recap_ctr.data.prepare import labels, weights
from recap_ctr.data.sink import Sink
from recap_ctr.data.source import Block, Source
from recap_ctr.errors import InputError
from recap_ctr.evaluate import evaluate, weigh
from recap_ctr.metrics import sigmoid
from recap_ctr.nn.embedding import Inputs
from recap_ctr.predict import EVAL_ROWS
from recap_ctr.progress import meter

OUTPUT_COLUMNS = ("score", "logit")
Floats = npt.NDArray[np.float64]


@dataclass
class Tally:
    """What scoring met: rows, and per field how many values were missing or unseen."""

    rows: int
    missing: dict[str, int]
    unseen: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        return {"rows": self.rows, "missing": self.missing, "unseen": self.unseen}


class Scorer:
    """Scores raw rows with a loaded artifact; `columns` says under which name a field stands in the rows."""

    def __init__(self, artifact: Artifact, columns: Mapping[str, str] | None = None) -> None:
        self.artifact = artifact
        self._columns = dict(columns or {})
        names = [fitted.field.name for fitted in artifact.encoder.fields]
        known = {*names, *artifact.encoder.schema.roles.values()}
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
    ) -> "Scorer":
        """`routes` and `depth` trade accuracy for cost, where the model has them."""
        return cls(load_artifact(path).dialled(routes, depth), columns)

    def renamed(self, block: Block) -> Block:
        """The block with each mapped field under its own name; all at once, so that two fields can be swapped."""
        for given in self._columns.values():
            if given not in block.frame.columns:
                raise InputError(f"{block.origin} has no column {given!r}, which --map names")
        missing = [
            (number, fitted.field.name)
            for number, fitted in enumerate(self.artifact.encoder.fields, start=1)
            if fitted.field.name not in (*block.frame.columns, *self._columns)
        ]
        if missing:
            number, name = missing[0]
            known = {fitted.field.name for fitted in self.artifact.encoder.fields}
            unused = [column for column in block.frame.columns if column not in known][:12]
            listed = ", ".join(map(repr, unused)) or "none"
            raise InputError(
                f"{block.origin} has no column {name!r} (field {number} of {len(known)} in the artifact's schema)"
                f"\n  columns present but unused: {listed}",
                fix=f"rename the column, or pass --map {name}={unused[0] if unused else 'COLUMN'}",
            )
        mapped = [block.frame[given].alias(name) for name, given in self._columns.items()]
        return Block(block.frame.with_columns(mapped), block.first_row, block.origin)

    def raw_logits(self, block: Block) -> Floats:
        """The model's own logits, before calibration; correction for sampled negatives included."""
        encoded = self.artifact.encoder.encode(block)
        self.tally.rows += block.frame.height
        for i, name in enumerate(self.tally.missing):
            self.tally.missing[name] += int(encoded.num_missing[i])
            self.tally.unseen[name] += int(encoded.num_unseen[i])
        logits = np.empty(block.frame.height, np.float64)
        with torch.inference_mode():
            for start in range(0, len(logits), EVAL_ROWS):
                part = slice(start, start + EVAL_ROWS)
                inputs = Inputs(
                    torch.from_numpy(encoded.ids_BW[part]), torch.from_numpy(encoded.values_BN[part])
                )
                logits[part] = self.artifact.model(inputs).logit_B.numpy()
        bad = np.flatnonzero(~np.isfinite(logits))
        if len(bad):
            raise InputError(
                f"{block.origin}: row {block.first_row + bad[0]}: the model's logit is {logits[bad[0]]}",
                fix="look for extreme numbers in the row; else train the model anew",
            )
        return logits + self.artifact.shift

    def logits(self, block: Block) -> Floats:
        """Calibrated logits."""
        return self.artifact.calibration.apply(self.raw_logits(block))

    def score_frame(self, frame: pl.DataFrame) -> Floats:
        """Calibrated probabilities of rows in memory."""
        return sigmoid(self.logits(self.renamed(Block(frame, 1, "the data frame"))))


def score(scorer: Scorer, source: Source, sink: Sink, *, quiet: bool = False) -> Tally:
    """Append score and logit to every row, in order, a block at a time."""
    for block, renamed in _blocks(scorer, source, "scoring", quiet):
        for name in OUTPUT_COLUMNS:
            if name in block.frame.columns:
                raise InputError(
                    f"{block.origin} has a column {name!r} already", fix="rename it before scoring"
                )
        logits = scorer.logits(renamed)
        scored = pl.Series("score", sigmoid(logits)), pl.Series("logit", logits)
        sink.write(block.frame.with_columns(scored))
    return scorer.tally


def evaluate_rows(
    scorer: Scorer, source: Source, *, negative_rate: float = 1.0, quiet: bool = False
) -> dict[str, Any]:
    """All figures on raw labelled rows; labels, logits and groups are all that is kept of them."""
    schema = scorer.artifact.encoder.schema
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
            found_groups.append(as_text(column(block, schema.group, "group")).fill_null(""))
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
        scorer.artifact.calibration,
        weights=weigh(label, row_weights, negative_rate),
        groups=groups,
        reliability=True,
    )
    return result | {"values": scorer.tally.to_dict()}


def _blocks(scorer: Scorer, source: Source, title: str, quiet: bool) -> Iterator[tuple[Block, Block]]:
    with meter(title, source.total_bytes or None, "rows", quiet=quiet) as shown:
        for block, size in source.blocks():
            yield block, scorer.renamed(block)
            shown.advance(block.frame.height, size)
