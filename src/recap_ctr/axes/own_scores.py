"""The scores of a model that the user already has: an estimator to compare with and to learn from."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl

from recap_ctr.axes.logits import Estimator, LogitWriter, is_table
from recap_ctr.config import parse
from recap_ctr.data.encode import as_numbers
from recap_ctr.data.roles import drop_unlabelled
from recap_ctr.data.shards import PreparedData
from recap_ctr.data.source import FileSource, Source
from recap_ctr.data.table import Table
from recap_ctr.data.text import as_text
from recap_ctr.errors import InputError
from recap_ctr.evaluation import metrics
from recap_ctr.schema import Field
from recap_ctr.storage.hashes import fingerprint

OWN_SCORES = "own scores"
SMALLEST = 1e-6  # A probability of 0 or 1 would be an infinite logit.
Floats = npt.NDArray[np.float64]


def write_own_scores(scores: str, table: Table, data: PreparedData, out: Path) -> Path:
    """Write the scores of the table's rows as logit tables to a directory in `out`, and return that directory.

    `scores` is a column of the table, or a file with two columns: a column of the table whose values name its rows, and
    the scores. They are probabilities if all lie between 0 and 1, else logits.
    """
    path = Path(scores)
    values = _from_file(path, table) if path.is_file() else _from_column(scores, table.source, table)
    logits_N = as_logits(values)
    directory = out / f"own-scores-{fingerprint({'data': data.fingerprint, 'sum': _digest(logits_N)})[:10]}"
    for split in ("train", "valid", "test"):
        shard = getattr(data, split)
        if len(shard) and not is_table(directory / split):
            with LogitWriter(directory / split, data, split, [Estimator(OWN_SCORES)]) as writer:
                writer.write(logits_N[shard.rows][:, None])
    return directory


def as_logits(values: Floats) -> Floats:
    """Return probabilities as logits; values beyond 0 and 1 are logits already.

    >>> as_logits(np.array([0.5, 1.0])).round(2).tolist(), as_logits(np.array([0.5, -2.0])).tolist()
    ([0.0, 13.82], [0.5, -2.0])
    """
    if ((values < 0) | (values > 1)).any():
        return values
    return np.asarray(metrics.logit(np.clip(values, SMALLEST, 1 - SMALLEST)))


def _digest(values: Floats) -> str:
    return fingerprint([float(values.sum()), float(values @ np.arange(len(values))), len(values)])


def _from_column(column: str, source: Source, table: Table | None) -> Floats:
    """Return the numbers of a column; a row without one is an error. Rows that the table drops are left out."""
    field = parse(Field, {"name": column, "kind": "numeric", "transform": "value"}, "scores")
    parts = []
    for whole, _ in source.blocks():
        block = drop_unlabelled(whole, table.schema.label) if table and table.drop_unlabelled else whole
        block.column(column, "scores")
        numbers = as_numbers(block, field)
        missing = numbers.is_null().arg_true()
        if len(missing):
            raise InputError(
                f"{block.origin}: row {block.row(missing[0])} has no score in column {column!r}",
                fix="score every row, or leave out --scores",
            )
        parts.append(numbers.to_numpy())
    return np.concatenate(parts).astype(np.float64)


def _from_file(path: Path, table: Table) -> Floats:
    """Return the scores of a file, in the order of the table's rows."""
    source = FileSource([path])
    frames = [block.frame for block, _ in source.blocks()]
    columns = frames[0].columns if frames else []
    if len(columns) != 2:
        raise InputError(
            f"{path} has {len(columns)} columns; two are needed",
            fix="write a column of the log that names its rows, then the score",
        )
    key, score = columns
    keys = pl.concat([as_text(frame[key]).to_frame() for frame in frames])
    score_of = keys.with_columns(pl.Series("score", _from_column(score, source, None)))
    repeated = score_of.filter(pl.col(key).is_duplicated())
    if repeated.height:
        raise InputError(
            f"{path}: {key!r} {repeated[key][0]!r} has several scores", fix="write one for each row"
        )
    parts = []
    for whole, _ in table.source.blocks():
        block = drop_unlabelled(whole, table.schema.label) if table.drop_unlabelled else whole
        named = as_text(block.column(key, "names the rows of the scores")).alias(key).to_frame()
        joined = named.join(score_of, on=key, how="left", maintain_order="left")
        unscored = joined["score"].is_null().arg_true()
        if len(unscored):
            at = unscored[0]
            raise InputError(
                f"{path} has no score for row {block.row(at)} of {block.origin}, {key} {named[key][at]!r}",
                fix="score every row, or leave out --scores",
            )
        parts.append(joined["score"].to_numpy())
    return np.concatenate(parts).astype(np.float64)
