"""The profile of the training rows: what is usual in each field, and how much that varies from period to period.

It travels with the model, so that later rows can be compared with the rows that the model learnt from. A period is a
stretch of training rows in the order of time, or of the file where there is no time. All that is kept are counts:
no values, and about a hundred thousand of them at most, however many rows there are. `profiling` makes it.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, NonNegativeInt, PositiveInt, model_validator

from recap_ctr.config import Frozen, parse
from recap_ctr.data.bins import Bins
from recap_ctr.data.encode import Encoder
from recap_ctr.errors import InputError
from recap_ctr.storage.files import atomic_file, read_json

PROFILE = "profile.json"
MAX_BYTES = 16 << 20


class _Counts(Frozen):
    model_config = ConfigDict(strict=True)


class FieldProfile(_Counts):
    """What the training rows say about one field, period by period."""

    name: str
    edges: list[float]
    """Where the numbers of a field that enters as a number are cut into bins of equal shares."""
    missing: list[NonNegativeInt]
    """Rows without a value."""
    bins: list[list[NonNegativeInt]]
    """Values by bin (see `Bins`); the last counts those rarer than `min_count`."""
    top: list[float]
    """The largest share of the rows that one value has, in a sample of rows."""
    unseen: list[NonNegativeInt]
    """Values of each period of the later half that the earlier half does not have, or that are rarer than `min_count`:
    what a vocabulary that is as old as half of the training rows would lack."""
    exchanged: Annotated[float, Field(ge=0, le=1)] | None = None
    """Of the values that the later half has often, the share that the earlier half lacks, and a standard error more: so
    many values are exchanged for new ones in this time. None without a vocabulary, and in profiles of before."""


class Repeats(_Counts):
    """The largest share of rows that repeat an earlier one, among `rows` neighbouring rows."""

    rows: PositiveInt
    share: float
    """Share of rows whose fields are those of an earlier row."""
    timed_share: float | None
    """Share of rows whose fields and time are those of an earlier row; None without a time."""


class Profile(_Counts):
    """What is usual in the training rows of a model, in counts by period."""

    format: Literal[1] = 1
    starts: list[int] | None
    """When each period begins, in seconds since 1970; None where rows have no time, or one that is no date."""
    seconds: PositiveInt | None
    """How long a period is; None for periods with about as many rows each."""
    rows: list[NonNegativeInt]
    clicks: list[NonNegativeInt]
    fields: list[FieldProfile]
    repeats: list[Repeats]

    @model_validator(mode="after")
    def _check(self) -> "Profile":
        periods = len(self.rows)
        for name, counts in (("clicks", self.clicks), ("starts", self.starts)):
            if counts is not None and len(counts) != periods:
                raise ValueError(f"{name} has not one entry a period")
        for field in self.fields:
            widths = {len(counts) for counts in field.bins}
            lengths = (len(field.missing), len(field.bins), len(field.top), len(field.unseen))
            if lengths != (periods, periods, periods, periods - periods // 2) or len(widths) > 1:
                raise ValueError(f"the counts of field {field.name!r} don't fit the periods")
        return self

    def bins(self, encoder: Encoder) -> Bins:
        """Return the bins in which these rows were counted; refuse an encoder of other fields."""
        names = [fitted.field.name for fitted in encoder.fields]
        bins = Bins(encoder, [field.edges for field in self.fields]) if names == self.names else None
        widths = [len(field.bins[0]) if field.bins else 0 for field in self.fields]
        if bins is None or widths != [place.stop - place.start for place in bins.places]:
            raise InputError("the profile of the training rows is of other fields", fix="fit the model again")
        return bins

    @property
    def names(self) -> list[str]:
        """Return the names of the fields."""
        return [field.name for field in self.fields]

    def write(self, path: Path) -> None:
        """Write the profile as JSON."""
        with atomic_file(path) as file:
            file.write(self.model_dump_json().encode())


def read_profile(path: Path) -> Profile:
    """Return the profile in a file, after checking it."""
    if path.stat().st_size > MAX_BYTES:
        raise InputError(f"{path} is damaged: a profile has at most {MAX_BYTES >> 20} MiB")
    return parse(Profile, read_json(path), str(path))
