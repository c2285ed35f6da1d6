"""Where a model's held-out scores are good: by the values of some fields, by time, and by score."""

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial

import numpy as np
from numpy.typing import NDArray

from recap_ctr.data.encode import FittedField
from recap_ctr.data.shards import PreparedData, Shard
from recap_ctr.errors import InputError, did_you_mean
from recap_ctr.evaluation.calibrate import Calibration
from recap_ctr.evaluation.sampling import undo_sampling
from recap_ctr.evaluation.slices import Breakdown, FieldValues, ScoredRows, break_down
from recap_ctr.schema import Field, Schema

NUM_FIELDS = 3
EARLIEST, LATEST = 315_532_800, 4_102_444_800  # The years 1980 to 2100, in seconds since 1970.


def held_out_breakdown(
    held_out: Mapping[str, NDArray[np.float32]],
    data: PreparedData,
    calibration: Calibration,
    negative_rate: float,
    fields: Sequence[str] | None = None,
) -> Breakdown:
    """Return the breakdown of a model's calibrated scores on the test rows, or on the validation rows without any.

    `held_out` are its logits for each held-out split, and `fields` the names of the fields to slice by. By default they
    are the three with the fewest values, of those with one named value a row and at least two values in all: their
    slices are large, and few enough to read.
    """
    split = "test" if len(data.test) else "valid"
    shard: Shard = getattr(data, split)
    logits, weights = undo_sampling(held_out[split], shard, negative_rate)
    rows = ScoredRows(np.asarray(shard.labels), calibration.apply(logits), weights)
    values = sliced_fields(data, shard, fields)
    if shard.times is None:
        return break_down(split, rows, values)
    times = np.asarray(shard.times)
    return break_down(split, rows, values, times, time_reader(times))


def check_slices(names: Sequence[str] | None, schema: Schema) -> None:
    """Refuse to slice by a name that is no field, or by a field that doesn't have one named value in each row."""
    choices = [field.name for field in schema.fields if _has_named_values(field)]
    fix = f"choose from {', '.join(choices)}" if choices else "remove the setting: no field can be sliced by"
    for name in names or ():
        field = next((field for field in schema.fields if field.name == name), None)
        if field is None:
            raise InputError(f"slices: no field {name!r}{did_you_mean(name, choices)}", fix=fix)
        if not _has_named_values(field):
            kind = "hashed" if field.hash_buckets else field.kind
            raise InputError(
                f"slices: {name!r} is {kind}, and slices need a field with one named value a row", fix=fix
            )


def _has_named_values(field: Field) -> bool:
    return field.kind == "categorical" and field.hash_buckets is None


def sliced_fields(
    data: PreparedData, shard: Shard, names: Sequence[str] | None = None
) -> dict[str, FieldValues]:
    """Return the values of the fields to slice by, in the order of their `names` if there are any."""
    places = {field.name: place for field, place in zip(data.schema.fields, data.layout.fields, strict=True)}
    if names is None:
        named = [field.name for field in data.schema.fields if _has_named_values(field)]
        several = [name for name in named if places[name].num_values > 1]
        names = sorted(several, key=lambda name: places[name].num_values)[:NUM_FIELDS]
    return {
        name: FieldValues(
            np.asarray(shard.ids[:, places[name].start]) - places[name].offset,
            partial(_value_name, data.stored_fields.field(name)),
        )
        for name in names
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
