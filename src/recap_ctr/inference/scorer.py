"""Raw files and tables to scores and figures, a block at a time."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from recap_ctr.data.encode import Encoded
from recap_ctr.data.roles import drop_unlabelled, read_groups, read_labels, read_weights
from recap_ctr.data.sink import Sink
from recap_ctr.data.source import Block, Source
from recap_ctr.data.table import RawTable
from recap_ctr.errors import InputError
from recap_ctr.evaluation.calibrate import Calibration
from recap_ctr.evaluation.evaluate import SplitFigures, evaluate
from recap_ctr.evaluation.sampling import weigh_negatives
from recap_ctr.inference.check import Finding, Inspection
from recap_ctr.inference.engine import Engine, Floats, Scores, is_installed
from recap_ctr.inference.explain import explanation_columns, explanation_names
from recap_ctr.inference.raw_rows import RawRows
from recap_ctr.inference.setting import Setting
from recap_ctr.jobs.progress import meter

OUTPUT_COLUMNS = ("score", "logit")
ENCODED_IDS = 1 << 25  # This many ids are encoded at a time, such as 131,072 rows of 256 ids.


@dataclass
class Tally:
    """How many rows were scored, and per field how many of their values were missing or unseen."""

    rows: int
    missing: dict[str, int]
    unseen: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        """Return the counts as plain JSON values."""
        return {"rows": self.rows, "missing": self.missing, "unseen": self.unseen}


class RowsEvaluation(SplitFigures):
    """Figures on raw labelled rows, with the counts of missing and unseen values in them."""

    values: Tally
    unlabelled: int = 0
    """Rows without a label, which were left out."""


class Scorer:
    """Scores raw tables with an engine; `columns` maps columns of the schema to those with another name in the rows."""

    def __init__(
        self,
        engine: Engine,
        columns: Mapping[str, str] | None = None,
        setting: Setting | None = None,
    ) -> None:
        self.engine, self.setting = engine, setting
        self.raw_rows = RawRows(engine.encoder.schema, columns)
        self.reset_tally()

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
        """Load the artifact in `path`; fewer `routes` or less `depth` cost accuracy and save time."""
        engine = Engine.load(path, threads=threads)
        setting = engine.setting(routes, depth)
        if setting not in engine.settings and is_installed("torch"):  # Torch needs no graph for the setting.
            engine = Engine.load(path, backend="torch", threads=threads)
        return cls(engine, columns, setting)

    @property
    def calibration(self) -> Calibration:
        """Return the calibration of the setting at which rows are scored."""
        return self.engine.artifact.calibration_of(self.setting or self.engine.settings[0])

    def reset_tally(self) -> None:
        """Count rows and values from zero again."""
        names = [fitted.field.name for fitted in self.engine.encoder.fields]
        self.tally = Tally(0, dict.fromkeys(names, 0), dict.fromkeys(names, 0))
        self.inspection: Inspection | None = None

    @property
    def findings(self) -> list[Finding]:
        """Return what is not usual in the rows that `score` wrote; none of an artifact without a profile."""
        return [] if self.inspection is None else self.inspection.result().findings

    def source(self, rows: RawTable) -> Source:
        """Return files or a data frame as a source of rows to score."""
        return self.raw_rows.open(rows)

    def renamed(self, block: Block) -> Block:
        """Return the block with each mapped field under its own name."""
        return self.raw_rows.renamed(block)

    def scores(self, block: Block) -> Scores:
        """Score a block of rows, and add them to the tally; very wide rows are encoded fewer at a time."""
        num_rows = max(ENCODED_IDS // max(self.engine.encoder.layout.num_columns, 1), 1)
        if block.frame.height <= num_rows:
            return self._scores(block)
        parts = [
            self._scores(Block(block.frame.slice(start, num_rows), block.first_row + start, block.origin))
            for start in range(0, block.frame.height, num_rows)
        ]
        return Scores(
            *(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(Scores))
        )

    def _scores(self, block: Block) -> Scores:
        encoded = self.engine.encode(block)
        self.tally.rows += block.frame.height
        for i, name in enumerate(self.tally.missing):
            self.tally.missing[name] += int(encoded.num_missing[i])
            self.tally.unseen[name] += int(encoded.num_unseen[i])
        if self.inspection is not None:
            self.inspection.add(block, encoded)
        return self.engine.score(encoded, self.setting, origin=block.origin, first_row=block.first_row)

    def raw_logits(self, block: Block) -> Floats:
        """Return the logits before calibration, corrected for sampled negatives."""
        return self.scores(block).raw_logit_B

    def logits(self, block: Block) -> Floats:
        """Return the calibrated logits."""
        return self.scores(block).logit_B

    def encoded_logits(self, encoded: Encoded) -> Floats:
        """Return the calibrated logits of encoded rows."""
        return self.engine.score(encoded, self.setting).logit_B

    def score_frame(self, frame: pl.DataFrame) -> Floats:
        """Return the calibrated probabilities of rows in memory."""
        return self.scores(self.renamed(Block(frame, 1, "the data frame"))).probability_B


def score(
    scorer: Scorer,
    source: Source,
    sink: Sink,
    *,
    explain: int = 0,
    keep: Sequence[str] | None = None,
    quiet: bool = False,
) -> Tally:
    """Write every row to `sink` in order, with its score and logit, a block at a time.

    Of the columns of the rows those in `keep` are written, by default all. With `explain`, columns why_1, why_2, .. say
    which fields contribute most to the logit, and how much. The rows are compared with the training rows, where the
    artifact has a profile of them.
    """
    scorer.reset_tally()
    if scorer.engine.profile is not None:
        scorer.inspection = Inspection(scorer.engine.encoder, scorer.engine.profile)
    for block, renamed in _blocks(scorer, source, "scoring", quiet):
        names = block.frame.columns if keep is None else dict.fromkeys(keep)
        kept = [block.column(name, "to be kept") for name in names]
        for name in (*OUTPUT_COLUMNS, *explanation_names(explain)):
            if name in names:
                raise InputError(
                    f"{block.origin} has a column {name!r} already", fix="rename it before scoring"
                )
        scores = scorer.scores(renamed)
        columns = [pl.Series("score", scores.probability_B), pl.Series("logit", scores.logit_B)]
        if explain:
            columns += explanation_columns(
                scorer.encoded_logits, scorer.engine.encoder, renamed, scores.logit_B, explain
            )
        sink.write(pl.DataFrame([*kept, *columns]))
    return scorer.tally


def evaluate_rows(
    scorer: Scorer,
    source: Source,
    *,
    negative_rate: float = 1.0,
    labelled_only: bool = False,
    quiet: bool = False,
) -> RowsEvaluation:
    """Return all figures on raw labelled rows, of which a share `negative_rate` of the negatives was kept.

    With `labelled_only` rows without a label are left out and counted; otherwise they are an error. Only labels,
    logits, weights and groups are held in memory.
    """
    schema = scorer.engine.encoder.schema
    label_parts, logit_parts = [], []
    weight_parts: list[npt.NDArray[np.float32]] = []
    group_parts: list[pl.Series] = []
    unlabelled = 0
    scorer.reset_tally()
    for _, whole in _blocks(scorer, source, "evaluating", quiet):
        block = drop_unlabelled(whole, schema.label) if labelled_only else whole
        unlabelled += whole.frame.height - block.frame.height
        if not block.frame.height:
            continue
        label_parts.append(read_labels(block, schema.label, schema.positive, schema.negative))
        logit_parts.append(scorer.raw_logits(block))
        # Weights and groups may be absent from all files, but not from some only.
        if schema.weight and (weight_parts or schema.weight in block.frame.columns):
            weight_parts.append(read_weights(block, schema.weight))
        if schema.group and (group_parts or schema.group in block.frame.columns):
            group_parts.append(read_groups(block, schema.group).fill_null(""))
    if not label_parts:
        raise InputError("no row has a label", fix="evaluate on rows whose clicks are known")
    labels = np.concatenate(label_parts)
    if labels.min() == labels.max():
        raise InputError(
            f"all {len(labels):,} rows have label {labels[0]}: one class only", fix="evaluate on more rows"
        )
    weights = np.concatenate(weight_parts) if weight_parts else None
    groups = pl.concat(group_parts).rank("dense").to_numpy().astype(np.int64) if group_parts else None
    figures = evaluate(
        labels,
        np.concatenate(logit_parts),
        scorer.calibration,
        weights=weigh_negatives(labels, weights, negative_rate),
        groups=groups,
        reliability=True,
    )
    return RowsEvaluation(**dict(figures), values=scorer.tally, unlabelled=unlabelled)


def _blocks(scorer: Scorer, source: Source, title: str, quiet: bool) -> Iterator[tuple[Block, Block]]:
    """Yield each block as it is in the source, and with its fields under their own names."""
    with meter(title, source.total_bytes or None, "rows", quiet=quiet) as progress:
        for block, size in source.blocks():
            yield block, scorer.renamed(block)
            progress.advance(block.frame.height, size)
