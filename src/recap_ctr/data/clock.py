"""Fields that a column of moments offers: hour of day and day of week, where a log is long and fine enough for them."""

from collections.abc import Collection, Iterator, Sequence

import numpy as np
import polars as pl

from recap_ctr.data.moments import DAY, HOUR, derived_categories, find_unit, hours, read_seconds
from recap_ctr.data.summary import ColumnSummary
from recap_ctr.data.text import as_text
from recap_ctr.schema import MAX_NAME, Field

MIN_DAYS = 7  # in fewer, a weekday is a date in disguise
MIN_ROWS = 100  # in fewer, columns may agree by chance


def clock_fields(
    columns: Sequence[ColumnSummary],
    samples: Sequence[pl.DataFrame],
    fields: Sequence[Field],
    taken: Collection[str],
) -> Iterator[tuple[Field, str]]:
    """Yield the hour and the weekday that the columns of moments offer as fields, each with its reason.

    `columns` come in order of preference, and each of the two is taken from the first that offers it. It is left out if
    a categorical field says the same in all rows of `samples`. A new name differs from those in `taken`.
    """
    for derive in ("hour", "weekday"):
        for column in columns:
            unit = find_unit(column.counts["value"])
            if unit is None or (reason := _offer(column, derive, unit)) is None:
                continue
            values = {"source": column.name, "derive": derive, "unit": unit}
            field = Field.model_validate(
                {"name": _free_name(column.name, derive, taken), "kind": "categorical", **values}
            )
            if not any(_agree(field, other, samples) for other in fields):
                yield field, f"{reason}; in UTC, from moments as {unit!r}"
            break


def _offer(column: ColumnSummary, derive: str, unit: str) -> str | None:
    """Return why hour or weekday can be learnt from the moments in a column; None if it can't."""
    seconds = read_seconds(column.counts["value"], unit).drop_nulls().to_numpy()  # type: ignore[arg-type]
    days = (seconds.max() - seconds.min()) / DAY
    if derive == "weekday":
        return (
            f"day of the week of {column.name!r}: the rows span {days:.0f} days" if days >= MIN_DAYS else None
        )
    num_hours = len(np.unique(hours(seconds)))
    # Dates without a time of day have one hour each, even where an offset makes it differ from day to day.
    is_fine = len(np.unique(seconds // HOUR)) > len(np.unique(seconds // DAY))
    return f"hour of the day of {column.name!r}: {num_hours} occur" if is_fine and num_hours > 1 else None


def _free_name(column: str, derive: str, taken: Collection[str]) -> str:
    name = f"{column[: MAX_NAME - 20]}_{derive}"
    while name in taken:
        name += "_"
    return name


def _agree(derived: Field, other: Field, samples: Sequence[pl.DataFrame]) -> bool:
    """Return whether a derived field and another divide the sampled rows in the same way, under whatever names."""
    if other.kind != "categorical":
        return False
    pairs = [
        pl.DataFrame(
            {
                "derived": derived_categories(sample[derived.column], derived),
                "other": as_text(sample[other.column].alias(""), other.missing),
            }
        )
        for sample in samples
    ]
    table = pl.concat(pairs)
    num_pairs = table.n_unique()
    return table.height >= MIN_ROWS and num_pairs == table["derived"].n_unique() == table["other"].n_unique()
