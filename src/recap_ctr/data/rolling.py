"""A profile that goes on with its model: an update's rows add periods, and the oldest ones leave.

Both are counted in the bins of the grown vocabularies. A value that was too rare for a vector stays among the unseen
values of the periods before it got one.

Shapes: P periods of before, L later ones, J of both, K bins of a field.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from recap_ctr.data.bins import NUM_BINS, Counts
from recap_ctr.data.encode import Encoder, FittedField
from recap_ctr.data.profile import FieldProfile, Profile, Repeats


def go_on(
    before: Profile, old: Encoder, later: Profile, unseen_FL: Sequence[Counts], new: Encoder, most: int
) -> Profile:
    """Return the newest `most` periods of the profile `before` and of that of later rows.

    `old` is the encoder of before, `new` the one that grew out of it. `unseen_FL` counts for each field the values of
    the later periods that the vocabulary of before lacks.
    """
    places_J, starts = _join(before, later)
    num_periods = int(places_J.max()) + 1
    kept = slice(max(num_periods - most, 0), num_periods)
    num_kept = kept.stop - kept.start

    def added(first: npt.ArrayLike, second: npt.ArrayLike) -> npt.NDArray[Any]:
        """Return the sums by period of numbers of both."""
        numbers = np.concatenate([np.asarray(first), np.asarray(second)])
        sums = np.zeros((num_periods, *numbers.shape[1:]), numbers.dtype)
        np.add.at(sums, places_J, numbers)
        return sums[kept]

    rows = added(before.rows, later.rows)
    fields = []
    for i, (first, second) in enumerate(zip(before.fields, later.fields, strict=True)):
        # What was unseen in the earlier half of before is not known, and is in no later half either.
        unknown = np.zeros(len(before.rows) - len(first.unseen), np.int64)
        unseen = added(np.concatenate([unknown, np.asarray(first.unseen, np.int64)]), unseen_FL[i])
        num_bins = np.shape(second.bins)[1]
        bins = _regrouped(np.asarray(first.bins, np.int64), old.fields[i], new.fields[i], num_bins)
        # In a period that both have, a value's share is at most the mean of the largest ones.
        top = added(
            np.multiply(first.top, before.rows, dtype=np.float64),
            np.multiply(second.top, later.rows, dtype=np.float64),
        )
        fields.append(
            FieldProfile(
                name=first.name,
                edges=first.edges,
                missing=added(first.missing, second.missing).tolist(),
                bins=added(bins, second.bins).tolist(),
                top=np.minimum(top / np.maximum(rows, 1), 1.0).tolist(),
                unseen=unseen[num_kept // 2 :].tolist(),
                exchanged=first.exchanged,
            )
        )
    return Profile(
        starts=None if starts is None else starts[kept],
        seconds=None if starts is None else before.seconds,
        rows=rows.tolist(),
        clicks=added(before.clicks, later.clicks).tolist(),
        fields=fields,
        repeats=_repeats(before.repeats, later.repeats),
    )


def _join(before: Profile, later: Profile) -> tuple[npt.NDArray[np.int64], list[int] | None]:
    """Return the place of each period among those of both, and when each begins; None where that is not known.

    A stretch of time that both have rows of is one period.
    """
    total = len(before.rows) + len(later.rows)
    if before.starts is None or later.starts is None:
        return np.arange(total), None
    starts = [*before.starts, *later.starts]
    if before.seconds is None:
        return np.arange(total), starts
    places = {start: place for place, start in enumerate(dict.fromkeys(starts))}
    return np.array([places[start] for start in starts]), list(places)


def _regrouped(bins_PK: Counts, before: FittedField, after: FittedField, num_bins: int) -> Counts:
    """Return counts of before in the bins of the grown field: a forgotten value is among the unseen ones."""
    grouped = np.zeros((len(bins_PK), num_bins), np.int64)
    grouped[:, : bins_PK.shape[1] - 1], grouped[:, -1] = bins_PK[:, :-1], bins_PK[:, -1]
    if after.grows:
        for place, (old, new) in enumerate(zip(before.values[: NUM_BINS - 1], after.values, strict=False)):
            if old != new:
                grouped[:, -1] += grouped[:, place]
                grouped[:, place] = 0
    return grouped


def _repeats(before: list[Repeats], later: list[Repeats]) -> list[Repeats]:
    """Return the entries of before, with the larger shares of the later ones of the same size."""
    sizes = {entry.rows: entry for entry in later}
    joined = []
    for entry in before:
        other = sizes.get(entry.rows, entry)
        timed = [share for share in (entry.timed_share, other.timed_share) if share is not None]
        joined.append(
            Repeats(
                rows=entry.rows, share=max(entry.share, other.share), timed_share=max(timed, default=None)
            )
        )
    return joined
