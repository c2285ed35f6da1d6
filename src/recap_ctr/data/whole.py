"""All rows of a log as training rows: what a chosen model learns from in the end.

A fit holds rows back to choose and to measure. Once that is done they are the newest rows there are, and a model that
has learnt from them too is better on the rows to come.
"""

from dataclasses import replace
from functools import cached_property

import numpy as np

from recap_ctr.data.encode import Encoder
from recap_ctr.data.grow import Base
from recap_ctr.data.shards import PreparedData, Shard, held_out_shards, joined
from recap_ctr.storage.hashes import fingerprint

MAX_ROWS = 20_000_000  # All rows are held in memory.


class WholeLog(PreparedData):
    """Prepared data of which all rows train, in the order train, valid, test; the held-out rows are still apart, too.

    Nothing may be chosen on these any more.
    """

    @property
    def fingerprint(self) -> str:
        """Return a hash that differs from that of the same data with rows held out."""
        return fingerprint({"data": super().fingerprint, "train": "all rows"})

    @cached_property
    def train(self) -> Shard:
        """Return all rows."""
        return joined([self._open("train"), *held_out_shards(self).values()])

    @cached_property
    def is_in_time_order(self) -> bool:
        """Return whether the rows that were held out are later than nearly all others."""
        return PreparedData(self.path, verify=False).is_in_time_order


def base_of(data: PreparedData) -> Base:
    """Return the vocabularies of prepared data as those that grow with the held-out rows: old ids stay.

    Values are counted from zero, over all rows; quantiles, which do not grow, keep their counts.
    """
    encoder = data.encoder
    uncounted = [
        replace(fitted, counts=np.zeros_like(fitted.counts)) if fitted.grows else fitted
        for fitted in encoder.fields
    ]
    return Base(data.fingerprint, Encoder(encoder.schema, uncounted))


def holds_the_same_rows(first: PreparedData, second: PreparedData) -> bool:
    """Return whether both have the same rows in every split, in the same order."""
    return all(
        np.array_equal(getattr(first, split).rows, getattr(second, split).rows)
        for split in ("train", "valid", "test")
    )
