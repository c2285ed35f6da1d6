"""Where a model's held-out scores are good: by the values of some fields, by time, and by score."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial

import numpy as np
from numpy.typing import NDArray

from recap_ctr.data.encode import FittedField
from recap_ctr.data.shards import PreparedData, Shard
from recap_ctr.evaluation.calibrate import Calibration
from recap_ctr.evaluation.sampling import undo_sampling
from recap_ctr.evaluation.slices import Breakdown, FieldValues, ScoredRows, break_down

NUM_FIELDS = 3
EARLIEST, LATEST = 315_532_800, 4_102_444_800  # The years 1980 to 2100, in seconds since 1970.


def held_out_breakdown(
    held_out: Mapping[str, NDArray[np.float32]],
    data: PreparedData,
    calibration: Calibration,
    negative_rate: float,
) -> Breakdown:
    """Return the breakdown of a model's calibrated scores on the test rows, or on the validation rows without any.

    `held_out` are its logits for each held-out split.

    Fields are the three with the fewest values, of those with one named value a row and at least two values in all:
    their slices are large, and few enough to read.
    """
    split = "test" if len(data.test) else "valid"
    shard: Shard = getattr(data, split)
    logits, weights = undo_sampling(held_out[split], shard, negative_rate)
    rows = ScoredRows(np.asarray(shard.labels), calibration.apply(logits), weights)
    if shard.times is None:
        return break_down(split, rows, sliced_fields(data, shard))
    times = np.asarray(shard.times)
    return break_down(split, rows, sliced_fields(data, shard), times, time_reader(times))


def sliced_fields(data: PreparedData, shard: Shard) -> dict[str, FieldValues]:
    """Return the values of the fields to slice by."""
    named = [
        (fitted, place)
        for fitted, place in zip(data.encoder.fields, data.layout.fields, strict=True)
        if fitted.field.kind == "categorical" and len(fitted.values) > 1
    ]
    fewest = sorted(named, key=lambda pair: len(pair[0].values))[:NUM_FIELDS]
    return {
        fitted.field.name: FieldValues(
            np.asarray(shard.ids[:, place.start]) - place.offset, partial(_value_name, fitted)
        )
        for fitted, place in fewest
    }


def _value_name(fitted: FittedField, code: int) -> str:
    return fitted.value_of(code) or "rare, unseen or missing"


def time_reader(times: NDArray[np.float64]) -> Callable[[float], str]:
    """Return a function that writes a time as a date, or as a number where the times can't be dates.

    Dates are seconds, or parts of them, since 1970.

    >>> time_reader(np.array([1.7e9, 1.8e9]))(1.7e9), time_reader(np.array([1.0, 2.0]))(1.5)
    ('2023-11-14 22:13', '1.5')
    """
    for unit in (1.0, 1e3, 1e6, 1e9):
        if times.min() / unit >= EARLIEST and times.max() / unit <= LATEST:
            return lambda time: f"{datetime.fromtimestamp(time / unit, UTC):%Y-%m-%d %H:%M}"
    return lambda time: f"{time:.10g}"
