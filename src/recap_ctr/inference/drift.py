"""How far rows drift from the training rows of a model, period by period, and whether its probabilities still hold."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import polars as pl

from recap_ctr.config import Record
from recap_ctr.data.moments import DAY
from recap_ctr.data.roles import drop_unlabelled, read_moments
from recap_ctr.data.source import Block
from recap_ctr.data.table import RawTable
from recap_ctr.errors import InputError
from recap_ctr.inference.check import known_labels
from recap_ctr.inference.scorer import Scorer
from recap_ctr.inference.window import MIN_ROWS, Window
from recap_ctr.jobs.progress import meter
from recap_ctr.schema import Schema

CHUNK_ROWS = 10_000  # of a period where rows have no time
MAX_PERIODS = 400
MAX_CALIBRATION = 0.1
CALIBRATION_ERRORS = 4.0  # Standard errors within which a calibration ratio is chance.
Ints = npt.NDArray[np.int64]


class DriftLimits(Record):
    """Limits to replace those that the training rows give."""

    psi: float | None = None
    unseen: float | None = None
    calibration: float = MAX_CALIBRATION
    """How far the calibration ratio may be from 1."""


class FieldDrift(Record):
    """One field in one period."""

    name: str
    missing: float
    unseen: float
    """Share of values outside the vocabulary: unseen in training, or rarer there than min_count."""
    unseen_limit: float
    rare: float
    """Share of values that fewer than `RARE_ROWS` training rows have."""
    psi: float
    psi_limit: float


class DriftPeriod(Record):
    """The rows of one period."""

    start: int | None
    """Seconds since 1970; None where rows have no time."""
    rows: int
    fields: list[FieldDrift]
    mean_prediction: float
    labelled: int
    click_rate: float | None = None
    calibration_ratio: float | None = None
    """Mean prediction over click rate of the labelled rows: 1 if probabilities hold."""
    calibration_error: float | None = None
    """Its standard error."""


class DriftFinding(Record):
    """Something that is beyond its limit in a period."""

    check: str
    field: str | None
    period: int
    """The place of the period in the report, from 0."""
    start: int | None
    value: float
    limit: float

    @property
    def sentence(self) -> str:
        """Return the finding in one line."""
        where = f"{self.field}: " if self.field else ""
        return f"{where}{self.check} {self.value:.4g} is beyond its limit of {self.limit:.4g}"


class DriftReport(Record):
    """Drift by period, in the order of time."""

    rows: int
    periods: list[DriftPeriod]
    findings: list[DriftFinding]


class _Period:
    """Counts of the rows of one period."""

    def __init__(self, window: Window) -> None:
        self.window = window
        self.predictions = self.labelled_predictions = self.variance = 0.0


@dataclass(frozen=True)
class _Cut:
    """How rows are cut into periods: by time, or by their number."""

    schema: Schema
    every: int

    def periods(self, block: Block, first: int) -> tuple[Ints, bool]:
        """Return the period of each row (rows are numbered from `first`), and whether periods are times."""
        time = self.schema.time
        if time is None or time not in block.frame.columns:
            return (first + np.arange(block.frame.height)) // CHUNK_ROWS, False
        seconds = read_moments(block, self.schema)
        if seconds is None:
            raise InputError(
                f"{block.origin}: the time {time!r} holds no moments",
                fix="drop the column, to cut the rows by their number instead",
            )
        return seconds // self.every, True


def measure_drift(
    scorer: Scorer,
    rows: RawTable,
    *,
    every: int = DAY,
    limits: DriftLimits | None = None,
    quiet: bool = True,
) -> DriftReport:
    """Compare rows with the training rows, in periods of `every` seconds, or of 10,000 rows where they have no time."""
    encoder, schema = scorer.engine.encoder, scorer.engine.encoder.schema
    empty = Window(encoder, scorer.engine.artifact.usual)
    periods: dict[int, _Period] = {}
    cut, first, is_timed = _Cut(schema, every), 0, False
    source = scorer.source(rows)
    with meter("measuring drift", source.total_bytes or None, "rows", quiet=quiet) as progress:
        for block, size in source.blocks():
            renamed = scorer.renamed(block)
            numbers, is_timed = cut.periods(renamed, first)
            for number in np.unique(numbers).tolist():
                if number not in periods:
                    periods[number] = _Period(empty.fresh())
                _refuse_many(periods)
                part = renamed.frame.filter(pl.Series(numbers == number))
                _add(scorer, periods[number], replace(renamed, frame=part, numbers=None))
            first += block.frame.height
            progress.advance(block.frame.height, size)
    return _report(periods, every if is_timed else None, limits or DriftLimits())


def _refuse_many(periods: dict[int, _Period]) -> None:
    if len(periods) > MAX_PERIODS:
        raise InputError(f"the rows span more than {MAX_PERIODS} periods", fix="choose a longer --every")


def _add(scorer: Scorer, period: _Period, block: Block) -> None:
    """Count and score further rows of a period."""
    encoder = scorer.engine.encoder
    encoded = encoder.encode(block)
    period.window.add(encoded)
    probability = scorer.engine.score(encoded, scorer.setting).probability_B
    period.predictions += float(probability.sum())
    labels = known_labels(block, encoder.schema)
    if labels is None:
        return
    if len(labels) < len(probability):  # Some rows wait for their label.
        labelled = encoder.encode(drop_unlabelled(block, encoder.schema.label))
        probability = scorer.engine.score(labelled, scorer.setting).probability_B
    period.window.add_labels(labels)
    period.labelled_predictions += float(probability.sum())
    period.variance += float((probability * (1 - probability)).sum())


def _report(periods: dict[int, _Period], every: int | None, limits: DriftLimits) -> DriftReport:
    entries, findings = [], []
    for place, number in enumerate(sorted(periods)):
        period = periods[number]
        start = None if every is None else number * every
        entry = _entry(period, start, limits)
        entries.append(entry)
        if period.window.is_enough:
            findings += [
                DriftFinding(check=check, field=field, period=place, start=start, value=value, limit=limit)
                for check, field, value, limit in _beyond(entry, limits)
            ]
    return DriftReport(rows=sum(entry.rows for entry in entries), periods=entries, findings=findings)


def _entry(period: _Period, start: int | None, limits: DriftLimits) -> DriftPeriod:
    window, fields = period.window, []
    for i, name in enumerate(window.profile.names):
        unseen = window.unseen(i)
        fields.append(
            FieldDrift(
                name=name,
                missing=window.missing(i).share,
                unseen=unseen.share,
                unseen_limit=unseen.high if limits.unseen is None else limits.unseen,
                rare=window.rare(i),
                psi=window.psi(i),
                psi_limit=window.psi_limit(i) if limits.psi is None else limits.psi,
            )
        )
    labelled = {}
    if window.clicks:
        labelled = {
            "click_rate": window.clicks / window.labelled,
            "calibration_ratio": period.labelled_predictions / window.clicks,
            "calibration_error": math.sqrt(period.variance) / window.clicks,
        }
    return DriftPeriod(
        start=start,
        rows=window.rows,
        fields=fields,
        mean_prediction=period.predictions / max(window.rows, 1),
        labelled=window.labelled,
        **labelled,
    )


def _beyond(entry: DriftPeriod, limits: DriftLimits) -> Iterator[tuple[str, str | None, float, float]]:
    """Yield each figure that is beyond its limit in a period: the check, the field, the value and the limit."""
    for field in entry.fields:
        if field.unseen > field.unseen_limit:
            yield "unseen share", field.name, field.unseen, field.unseen_limit
        if field.psi > field.psi_limit:
            yield "stability index", field.name, field.psi, field.psi_limit
    if entry.calibration_ratio is not None and entry.labelled >= MIN_ROWS:
        chance = CALIBRATION_ERRORS * (entry.calibration_error or 0.0)
        limit = max(limits.calibration, chance)
        if abs(entry.calibration_ratio - 1) > limit:
            side = math.copysign(limit, entry.calibration_ratio - 1)
            yield "calibration ratio", None, entry.calibration_ratio, 1 + side
