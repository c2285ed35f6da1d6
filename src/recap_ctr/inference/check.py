"""Look for faults in rows before a model scores them: anything unusual in comparison with the training rows."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import numpy as np
import numpy.typing as npt
import polars as pl

from recap_ctr.config import Record
from recap_ctr.data.bins import field_entries
from recap_ctr.data.encode import (
    MISSING_CODE,
    Encoded,
    Encoder,
    FittedField,
    Floats,
    Ints,
    as_numbers,
    categories,
    pieces,
)
from recap_ctr.data.moments import Seconds
from recap_ctr.data.profile import Profile
from recap_ctr.data.roles import drop_unlabelled, read_labels, read_moments, read_times
from recap_ctr.data.source import Block
from recap_ctr.data.spelling import MISSING_WORD, ambiguous_share, find_respelling
from recap_ctr.data.table import RawTable
from recap_ctr.errors import InputError
from recap_ctr.inference.artifact import Artifact
from recap_ctr.inference.raw_rows import RawRows
from recap_ctr.inference.window import MAX_TOP_SHARE, MIN_ROWS, Judged, Window
from recap_ctr.jobs.progress import meter
from recap_ctr.schema import Schema

MAX_UNSEEN_VALUES = 10_000  # of a field, whose spelling is looked at
MAX_HASHED_ROWS = 10_000_000  # of a window, with 8 bytes each, to look for repeated rows
LEAST_RESPELT = 0.005  # of a field's values: fewer in another spelling are ordinary
LEAST_REPEATED = 0.01
MAX_SAMPLED_ROWS = 1 << 16  # of a window, to find the commonest value
MAX_SAMPLED_TIMES = 1_000  # of a block, to know how old the model was
FEWEST = 7.0  # Rows that are no accident, whatever their share.
Check = Literal["spelling", "constant", "missing", "unseen", "shifted", "label rate", "repeated rows"]
Hashes = npt.NDArray[np.uint64]


class Finding(Record):
    """One thing that is not usual in the rows."""

    check: Check
    field: str | None
    """The field, or the label; None for whole rows."""
    value: float
    """The share in question, between 0 and 1."""
    usual: float
    """The same share in the training rows."""
    limit: float
    """The share beyond which it is a finding: from the variation between the periods of the training rows."""
    what: str
    """What was noticed, in words."""
    cause: str
    fix: str

    @property
    def sentence(self) -> str:
        """Return the finding in one line, with its numbers and its likely cause."""
        return f"{self.what} ({self.value:.2%}; usual {self.usual:.2%}, limit {self.limit:.2%}): {self.cause}"


class FieldShares(Record):
    """The shares of a field in the rows beside the usual ones."""

    name: str
    missing: float
    usual_missing: float
    unseen: float
    usual_unseen: float
    psi: float
    """Population stability index against the training rows."""


class RowsCheck(Record):
    """The result of comparing rows with the training rows of a model."""

    rows: int
    enough: bool
    """Whether there were enough rows to judge."""
    findings: list[Finding]
    fields: list[FieldShares]


class Inspection:
    """Collects, block by block and in bounded memory, what a check needs to know of rows."""

    def __init__(self, encoder: Encoder, profile: Profile) -> None:
        self.window = Window(encoder, profile)
        self._encoder, self._profile = encoder, profile
        num_fields = len(encoder.fields)
        self._unseen: dict[int, pl.DataFrame] = {}
        self._sample = _Sample()
        self._hashes: list[Hashes] = []
        self._is_timed = encoder.schema.time is not None
        self._absent: set[str] = set()
        self._num_fields = num_fields

    def add(self, block: Block, encoded: Encoded, labels: npt.NDArray[np.uint8] | None = None) -> None:
        """Look at further rows; `labels` are theirs, if they are known."""
        if not block.frame.height:
            return
        self.window.add(encoded)
        if (moments := _sampled_moments(block, self._encoder.schema)) is not None:
            self.window.add_moments(moments)
        if labels is not None:
            self.window.add_labels(labels)
        self._sample.add(encoded)
        for i in np.flatnonzero(encoded.num_unseen):
            self._add_unseen(int(i), block, encoded)
        if self.window.rows <= MAX_HASHED_ROWS:
            self._add_hashes(block)

    def _add_hashes(self, block: Block) -> None:
        times = _readable_times(block, self._encoder.schema) if self._is_timed else None
        if self._is_timed and times is None:
            self._is_timed, self._hashes = False, []  # Rows with a time can't be compared with rows without.
        self._hashes.append(_row_hashes(block, self._encoder, times))

    def add_absent(self, columns: list[str]) -> None:
        """Note which columns the rows don't have; their values count as missing."""
        self._absent.update(columns)

    def _add_unseen(self, index: int, block: Block, encoded: Encoded) -> None:
        """Count the values of a field that the vocabulary lacks; of very many, the commonest are kept."""
        fitted, place = self._encoder.fields[index], self._encoder.layout.fields[index]
        if fitted.field.kind == "multi":
            values = pieces(block, fitted.field).values
            values = values.filter(pl.Series(fitted.codes(values) == MISSING_CODE))
        else:
            is_oov = encoded.ids_BW[:, place.start] == place.offset + fitted.oov
            if fitted.field.has_number:
                values = as_numbers(block, fitted.field).cast(pl.String)
            else:
                values = categories(block, fitted.field, fitted.edges)
            values = values.filter(pl.Series(is_oov))
        table = values.alias("value").drop_nulls().value_counts(name="count")
        table = table.with_columns(pl.col("count").cast(pl.Int64))
        if index in self._unseen:
            joined = pl.concat([self._unseen[index], table])
            table = joined.group_by("value").agg(pl.col("count").sum())
        self._unseen[index] = table.sort("count", "value", descending=[True, False]).head(MAX_UNSEEN_VALUES)

    def result(self) -> RowsCheck:
        """Return what is unusual in the rows so far."""
        window = self.window
        findings = list(self._findings()) if window.is_enough else []
        fields = []
        for i, profile in enumerate(self._profile.fields):
            missing, unseen = window.missing(i), window.unseen(i)
            fields.append(
                FieldShares(
                    name=profile.name,
                    missing=missing.share,
                    usual_missing=missing.usual,
                    unseen=unseen.share,
                    usual_unseen=unseen.usual,
                    psi=window.psi(i),
                )
            )
        return RowsCheck(rows=window.rows, enough=window.is_enough, findings=findings, fields=fields)

    def _findings(self) -> Iterator[Finding]:
        is_explained = False
        for i in range(self._num_fields):
            tests = (self._spelling, self._constant, self._missing, self._unseen_values, self._shifted)
            # The first explains the others: respelt values are unseen, too.
            if (finding := next(filter(None, (test(i) for test in tests)), None)) is not None:
                yield finding
                is_explained |= finding.check in ("constant", "missing")
        if (rate := self.window.label_rate()) is not None and rate.is_beyond:
            yield _label_finding(self._encoder.schema.label, rate)
        # Rows that lost the values of a field repeat each other by that alone.
        if not is_explained and (finding := self._repeated()) is not None:
            yield finding

    def _spelling(self, index: int) -> Finding | None:
        fitted, total = self._encoder.fields[index], int(self.window.field_bins(index).sum())
        unseen = int(self.window.unseen_F[index])
        if index not in self._unseen or unseen < max(LEAST_RESPELT * total, FEWEST):
            return None
        table = self._unseen[index]
        respelling = find_respelling(table["value"], table["count"], fitted.values)
        if respelling is None:
            return None
        share = respelling.count / total
        usual = 0.0
        if respelling.kind != MISSING_WORD:
            usual = ambiguous_share(fitted.values, pl.Series(fitted.counts))
        limit = max(2 * usual, LEAST_RESPELT) + FEWEST / total
        if share <= limit:
            return None
        spelt = respelling.vocabulary_value
        cause = (
            f"such as {respelling.value!r}, which stands for no value"
            if spelt is None
            else f"such as {respelling.value!r} for {spelt!r} ({respelling.kind})"
        )
        return _finding(
            "spelling", fitted, share, usual, limit, "values are spelled otherwise", cause, respelling.fix
        )

    def _constant(self, index: int) -> Finding | None:
        fitted = self._encoder.fields[index]
        if fitted.field.derive is not None:  # Rows of one hour have one hour.
            return None
        value, share = self._top_value(index)
        judged = self.window.top_share(index, share)
        is_one_value = not fitted.edges or share > MAX_TOP_SHARE  # A quantile may hold many numbers.
        if not judged.is_beyond or not is_one_value:
            return None
        cause = f"{share:.0%} of the rows have {value}; a default may have taken the place of the values"
        fix = "look where the column is filled; if it is right, update the model or fit it again"
        what = "has one value only" if share > MAX_TOP_SHARE else "one value prevails"
        return _finding("constant", fitted, share, judged.usual, judged.limit, what, cause, fix)

    def _top_value(self, index: int) -> tuple[str, float]:
        """Return the commonest value of a field in words, and its share of the rows."""
        fitted, place = self._encoder.fields[index], self._encoder.layout.fields[index]
        ids, numbers = self._sample.rows
        entries = field_entries(place, fitted, ids, numbers)
        value, share = "", 0.0
        if len(entries.codes):
            counts = np.bincount(entries.codes)
            top = entries.values[counts.argmax()]
            value, share = _spell_value(fitted, float(top)), float(counts.max() / len(ids))
        unseen = self._unseen.get(index)
        if unseen is not None and unseen["count"][0] > share * self.window.rows:
            return repr(unseen["value"][0]), unseen["count"][0] / self.window.rows
        return value, share

    def _missing(self, index: int) -> Finding | None:
        fitted, judged = self._encoder.fields[index], self.window.missing(index)
        if not judged.is_beyond:
            return None
        if fitted.field.column in self._absent:
            cause, fix = "there is no such column", "add it, or name it with --map"
        elif judged.share > judged.usual:
            cause, fix = (
                "a source of the column fails, or a join lost rows",
                "look where the column is filled",
            )
        else:
            cause = "missing values may be filled by a default now"
            fix = "leave cells without a value empty, as in the training rows"
        return _finding(
            "missing", fitted, judged.share, judged.usual, judged.limit, "missing values", cause, fix
        )

    def _unseen_values(self, index: int) -> Finding | None:
        fitted, judged = self._encoder.fields[index], self.window.unseen(index)
        if not judged.is_beyond:
            return None
        table = self._unseen.get(index)
        example = "" if table is None or not table.height else f", such as {table['value'][0]!r}"
        cause = f"values that the vocabulary lacks{example}: new ones since training, another column, or other ids"
        fix = "compare the values with the training rows; if they are right, update the model or fit it again"
        return _finding(
            "unseen", fitted, judged.share, judged.usual, judged.limit, "values are unseen", cause, fix
        )

    def _shifted(self, index: int) -> Finding | None:
        fitted = self._encoder.fields[index]
        if fitted.field.derive is not None:  # Rows of a few hours have those hours.
            return None
        if (shift := self.window.largest_shift(index)) is None:
            return None
        place, judged = shift
        which = _describe_bin(fitted, self._profile.fields[index].edges, place)
        direction = "more" if judged.share > judged.usual else "less"
        cause = f"{which} is {direction} common than usual: other traffic, another unit, or a default"
        fix = "compare the column with the training rows; if it is right, update the model or fit it again"
        return _finding(
            "shifted", fitted, judged.share, judged.usual, judged.limit, "values have shifted", cause, fix
        )

    def _repeated(self) -> Finding | None:
        repeats = self._profile.repeats
        if not self._hashes or not repeats:
            return None
        hashes = np.concatenate(self._hashes)
        if len(hashes) < MIN_ROWS:
            return None
        share = 1.0 - len(np.unique(hashes)) / len(hashes)
        nearest = next((entry for entry in repeats if entry.rows >= len(hashes)), repeats[-1])
        usual = nearest.timed_share if self._is_timed else nearest.share
        usual = min((usual or 0.0) * max(1.0, len(hashes) / nearest.rows), 1.0)
        limit = min(max(2 * usual, usual + LEAST_REPEATED) + FEWEST / len(hashes), 1.0)
        if share <= limit:
            return None
        return Finding(
            check="repeated rows",
            field=None,
            value=share,
            usual=usual,
            limit=limit,
            what="rows repeat an earlier one",
            cause="a file may have been read or sent twice, or a join multiplied rows",
            fix="drop the copies; if rows have an id, by that id",
        )


def check_rows(artifact: Artifact, raw_rows: RawRows, rows: RawTable, *, quiet: bool = True) -> RowsCheck:
    """Return what is unusual in rows, in comparison with an artifact's training rows; columns of fields may be
    absent."""
    encoder, schema = artifact.encoder, artifact.encoder.schema
    inspection = Inspection(encoder, artifact.usual)
    source = raw_rows.open(rows)
    with meter("checking", source.total_bytes or None, "rows", quiet=quiet) as progress:
        for block, size in source.blocks():
            inspection.add_absent(raw_rows.absent(block))
            renamed = raw_rows.renamed(block, fill=True)
            inspection.add(renamed, encoder.encode(renamed), known_labels(renamed, schema))
            progress.advance(block.frame.height, size)
    return inspection.result()


def known_labels(block: Block, schema: Schema) -> npt.NDArray[np.uint8] | None:
    """Return the labels of the rows that have one; None without the column, or if it is empty."""
    if schema.label not in block.frame.columns:
        return None
    labelled = drop_unlabelled(block, schema.label)
    if not labelled.frame.height:
        return None
    return read_labels(labelled, schema.label, schema.positive, schema.negative)


def _finding(
    check: Check,
    fitted: FittedField,
    value: float,
    usual: float,
    limit: float,
    what: str,
    cause: str,
    fix: str,
) -> Finding:
    name = fitted.field.name
    return Finding(
        check=check,
        field=name,
        value=value,
        usual=usual,
        limit=limit,
        what=f"{name}: {what}",
        cause=cause,
        fix=fix,
    )


def _label_finding(label: str, rate: Judged) -> Finding:
    cause = "labels may be late, joined wrongly, or of another kind"
    if rate.share > rate.usual:
        cause = "negatives may have been sampled or lost, or labels are of another kind"
    return Finding(
        check="label rate",
        field=label,
        value=rate.share,
        usual=rate.usual,
        limit=rate.limit,
        what=f"{label}: the share of clicks has moved",
        cause=cause,
        fix="wait until all clicks are in, and look where labels are joined",
    )


def _spell_value(fitted: FittedField, entry: float) -> str:
    """Return the value that an id, or a standardised number, stands for."""
    if fitted.field.is_value:
        number = fitted.mean + fitted.scale * entry
        return f"{0.0 if abs(number) < 1e-6 * fitted.scale else number:.6g}"  # It was rounded to 32 bits.
    place = int(entry) - int(fitted.ids(np.zeros(1, np.int32))[0])
    if fitted.field.hash_buckets:
        return f"a value of hash bucket {place}"
    if fitted.edges:
        return f"a number of quantile {fitted.values[place]}"
    return repr(fitted.value_of(int(entry)))


def _describe_bin(fitted: FittedField, edges: list[float], place: int) -> str:
    """Return in words which values a bin counts."""
    if fitted.field.is_value:
        bounds = [*(f"{edge:.6g}" for edge in edges)]
        if place == 0:
            return f"a number below {bounds[0]}" if bounds else "a number"
        return f"a number from {bounds[place - 1]}" + (f" to {bounds[place]}" if place < len(bounds) else "")
    if fitted.field.hash_buckets:
        return f"hash range {place + 1}"
    if fitted.edges:
        return f"quantile range {place + 1}"
    return repr(fitted.values[place]) if place < len(fitted.values) else "a rarer value"


class _Sample:
    """Rows at even distances, at most `MAX_SAMPLED_ROWS` of them, however many there are."""

    def __init__(self) -> None:
        self._step, self._offset, self._num_rows = 1, 0, 0
        self._parts: list[tuple[Ints, Floats]] = []

    def add(self, encoded: Encoded) -> None:
        """Keep some of the next rows."""
        at = slice(self._offset, None, self._step)
        self._parts.append((encoded.ids_BW[at], encoded.values_BN[at]))
        self._offset = (self._offset - len(encoded.ids_BW)) % self._step
        self._num_rows += len(self._parts[-1][0])
        while self._num_rows > MAX_SAMPLED_ROWS:
            ids, numbers = self.rows
            self._parts = [(ids[::2], numbers[::2])]
            self._step, self._num_rows = 2 * self._step, len(ids[::2])

    @property
    def rows(self) -> tuple[Ints, Floats]:
        """Return the ids and numbers of the rows."""
        return np.concatenate([ids for ids, _ in self._parts]), np.concatenate(
            [part for _, part in self._parts]
        )


def _readable_times(block: Block, schema: Schema) -> pl.Series | None:
    """Return the times of rows; None if some are absent or can't be read, which is no error when scoring."""
    if schema.time is None or schema.time not in block.frame.columns:
        return None
    try:
        return pl.Series(read_times(block, schema.time))
    except InputError:
        return None


def _sampled_moments(block: Block, schema: Schema) -> Seconds | None:
    """Return when some of the rows were; None where that is not known."""
    if schema.time is None or schema.time not in block.frame.columns:
        return None
    step = -(-block.frame.height // MAX_SAMPLED_TIMES)
    sample = replace(block, frame=block.frame.select(schema.time).gather_every(step), numbers=None)
    try:
        return read_moments(sample, schema)
    except InputError:
        return None


def _row_hashes(block: Block, encoder: Encoder, times: pl.Series | None) -> Hashes:
    """Return a hash of each row, over all fields and, if there is one, the time."""
    columns = []
    for fitted in encoder.fields:
        field = fitted.field
        if field.kind == "numeric":
            columns.append(as_numbers(block, field))
        elif field.kind == "multi":
            columns += _hashed_pieces(block, fitted)
        else:
            columns.append(categories(block, field))
    if times is not None:
        columns.append(times)
    return pl.DataFrame([column.alias(str(i)) for i, column in enumerate(columns)]).hash_rows(0).to_numpy()


def _hashed_pieces(block: Block, fitted: FittedField) -> list[pl.Series]:
    """Return a hash of each value of a multi field, a column for each position; 0 where there is none."""
    flat = pieces(block, fitted.field)
    hashes = np.zeros((flat.height, fitted.field.width), np.uint64)
    hashes[flat.rows, flat.positions] = flat.values.hash(0).to_numpy()
    return [pl.Series(np.ascontiguousarray(column)) for column in hashes.T]
