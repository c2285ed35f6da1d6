"""Use an artifact in one call: the Python counterparts of `recap predict`, `evaluate`, `explain` and `check`."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import overload

import polars as pl

from recap_ctr.data.sink import Sink, open_sink
from recap_ctr.data.table import RawTable
from recap_ctr.errors import DataWarning, InputError
from recap_ctr.inference.artifact import Artifact, read_artifact
from recap_ctr.inference.check import RowsCheck, check_rows
from recap_ctr.inference.importance import Importance, explain_rows
from recap_ctr.inference.raw_rows import RawRows
from recap_ctr.inference.scorer import RowsEvaluation, Scorer, evaluate_rows, score
from recap_ctr.inference.signing import check_signature, refuse_other_than

Model = str | Path | Scorer
"""An artifact, the run or fit that holds one, or a scorer that was loaded before."""


def load(
    artifact: str | Path,
    *,
    columns: Mapping[str, str] | None = None,
    routes: int | None = None,
    depth: int | None = None,
    threads: int | None = None,
    verify_key: str | Path | None = None,
) -> Scorer:
    """Load an artifact, or the run or fit that holds one, after checking every file of it.

    `columns` maps fields to the columns that hold them under another name. Fewer `routes` or less `depth` cost
    accuracy and save time; by default the whole model scores. With `verify_key`, an artifact that the owner of this
    public key has not signed is refused before anything else of it is read.
    """
    path = Path(artifact)
    signed = None if verify_key is None else check_signature(path, verify_key)
    scorer = Scorer.load(path, columns, routes=routes, depth=depth, threads=threads)
    if signed is not None:
        refuse_other_than(signed, scorer.engine.manifest, path)
    return scorer


@overload
def predict(
    model: Model,
    rows: RawTable,
    *,
    explain: int = 0,
    keep: Sequence[str] | None = None,
    quiet: bool = True,
) -> pl.DataFrame: ...
@overload
def predict(
    model: Model,
    rows: RawTable,
    *,
    out: str | Path,
    explain: int = 0,
    keep: Sequence[str] | None = None,
    quiet: bool = True,
) -> None: ...
def predict(
    model: Model,
    rows: RawTable,
    *,
    out: str | Path | None = None,
    explain: int = 0,
    keep: Sequence[str] | None = None,
    quiet: bool = True,
) -> pl.DataFrame | None:
    """Score raw rows: add `score` (the calibrated probability) and `logit` to the columns in `keep`, or to all columns.

    `model` is an artifact, the run or fit that holds one, or what `load` returned. `rows` are files (names or
    patterns of CSV, TSV, JSON lines, Parquet or Arrow) or a data frame of polars or pandas.

    With `out`, scores are written to that file (.csv, .tsv, .jsonl, .parquet or .arrow) a block at a time, in bounded
    memory, and nothing is returned; without it, they are returned as a polars frame.

    With `explain`, the columns why_1, why_2, .. name the fields that contribute most to each row's logit: the logit
    minus that of the row without the field's value. Contributions are not causes, and don't sum to the logit.

    Rows that are unlike the training rows are scored all the same, with a `DataWarning` for each finding; see `check`.
    """
    scorer = _scorer(model)
    source = scorer.source(rows)
    if out is not None:
        with open_sink(Path(out)) as sink:
            score(scorer, source, sink, explain=explain, keep=keep, quiet=quiet)
        _warn(scorer)
        return None
    frames = _Frames()
    score(scorer, source, frames, explain=explain, keep=keep, quiet=quiet)
    _warn(scorer)
    return frames.frame


def _warn(scorer: Scorer) -> None:
    """Warn of anything unusual in rows that were scored."""
    for finding in scorer.findings:
        warnings.warn(f"{finding.sentence}\n  fix: {finding.fix}", DataWarning, stacklevel=3)


def evaluate(
    model: Model,
    rows: RawTable,
    *,
    negative_rate: float = 1.0,
    drop_unlabelled: bool = False,
    quiet: bool = True,
) -> RowsEvaluation:
    """Measure a model on raw labelled rows: AUC, logloss, calibration, and counts of missing and unseen values.

    `model` and `rows` are as for `predict`. `negative_rate` is the share of negatives that these rows keep. Rows
    without a label are an error unless `drop_unlabelled` leaves them out.
    """
    scorer = _scorer(model)
    return evaluate_rows(
        scorer,
        scorer.source(rows),
        negative_rate=negative_rate,
        labelled_only=drop_unlabelled,
        quiet=quiet,
    )


def explain(
    model: Model,
    rows: RawTable,
    *,
    max_rows: int = 50_000,
    repeats: int = 5,
    seed: int = 1,
    drop_unlabelled: bool = False,
    quiet: bool = True,
) -> Importance:
    """Measure how much a model relies on each field, by shuffling its values between labelled rows (permutation
    importance).

    `model` and `rows` are as for `predict`; if there are more than `max_rows` rows, that many are drawn at random. Each
    field is shuffled `repeats` times. The 95 % intervals are over rows (DeLong for the AUC) and over repeats.
    Rows without a label are an error unless `drop_unlabelled` leaves them out.
    """
    scorer = _scorer(model)
    return explain_rows(
        scorer,
        scorer.source(rows),
        max_rows=max_rows,
        repeats=repeats,
        seed=seed,
        labelled_only=drop_unlabelled,
        quiet=quiet,
    )


def check(
    rows: RawTable, against: Model | Artifact, *, columns: Mapping[str, str] | None = None, quiet: bool = True
) -> RowsCheck:
    """Look for faults in raw rows: anything unusual in comparison with a model's training rows.

    `rows` are as for `predict`; if they have labels, these are checked, too. `against` is an artifact, the run or fit
    that holds one, or what `load` returned; its weights are not needed. `columns` maps fields to columns of another
    name.
    """
    if isinstance(against, Scorer):
        artifact: Artifact = against.engine.artifact
    else:
        artifact = against if isinstance(against, Artifact) else read_artifact(Path(against))
    return check_rows(artifact, RawRows(artifact.encoder.schema, columns), rows, quiet=quiet)


class _Frames(Sink):
    """A sink that keeps its blocks in memory."""

    def __init__(self) -> None:
        self._blocks: list[pl.DataFrame] = []

    def _append(self, frame: pl.DataFrame, schema: pl.Schema, is_first: bool) -> None:
        self._blocks.append(frame)

    @property
    def frame(self) -> pl.DataFrame:
        if not self._blocks:
            raise InputError("there are no rows to score")
        return pl.concat(self._blocks)


def _scorer(model: Model) -> Scorer:
    return model if isinstance(model, Scorer) else load(model)
