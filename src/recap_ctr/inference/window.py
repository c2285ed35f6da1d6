"""A window of later rows, counted as the profile of the training rows counts them, and its limits.

Shape suffixes: F fields, K bins.
"""

import copy
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from recap_ctr.data.bins import Counts
from recap_ctr.data.encode import Encoded, Encoder
from recap_ctr.data.moments import Seconds
from recap_ctr.data.profile import FieldProfile, Profile
from recap_ctr.evaluation.limits import (
    NEARLY_ALL,
    ShareLimits,
    exchanged_limit,
    group_counts,
    normal_quantile,
    share_limits,
    student_quantile,
)

MIN_ROWS = 200  # Fewer rows say too little.
FALSE_ALARM = 0.005  # The chance that a window like the training rows is found at fault, all shares together.
LEAST_MISSING, LEAST_UNSEEN, LEAST_SHIFT, LEAST_RATE = 0.01, 0.02, 0.05, 0.1
"""Smaller changes are ordinary, however many rows show them: of shares, or of a tenth of the label's rate."""
CONSTANT_CHANCE = 1e-4
MAX_TOP_SHARE = 0.995  # A field that one value fills further than this is nearly constant by its nature.
LEAST_PSI = 0.1  # A stability index below this is small by any rule of thumb.
AnyCounts = npt.NDArray[np.int64] | npt.NDArray[np.float64]
PSI_FLOOR = 1e-4  # The share that an empty bin is taken to have.
RARE_ROWS = 10  # Fewer training rows than this leave a value's vector close to its start.


@dataclass(frozen=True)
class Judged:
    """A share in a window beside the usual one and its limits."""

    share: float
    usual: float
    low: float
    high: float
    total: int
    """The rows, or values, that it is a share of."""

    @property
    def is_beyond(self) -> bool:
        """Return whether the share is beyond its limits."""
        return not self.low <= self.share <= self.high

    @property
    def limit(self) -> float:
        """Return the limit on the side where the share is."""
        return self.high if self.share >= self.usual else self.low


class Window:
    """Counts of rows that came after training, and how they compare with the training rows."""

    def __init__(self, encoder: Encoder, profile: Profile) -> None:
        self.encoder, self.profile = encoder, profile
        self.bins = profile.bins(encoder)
        self._rows_P = np.asarray(profile.rows, np.int64)
        self._rare_V = _rare_rows(encoder)
        num_fields = len(profile.fields)
        self.num_shares = 2 * num_fields + self.bins.size + 1
        self._empty()

    def fresh(self) -> "Window":
        """Return an empty window of the same model."""
        window = copy.copy(self)
        window._empty()
        return window

    def _empty(self) -> None:
        self.rows = self.labelled = self.clicks = 0
        self._num_moments, self._sum_of_moments = 0, 0.0
        self.counts_K = np.zeros(self.bins.size, np.int64)
        self.missing_F, self.unseen_F, self.rare_F = np.zeros((3, len(self.profile.fields)), np.int64)

    def add(self, encoded: Encoded) -> None:
        """Count further rows."""
        self.rows += len(encoded.ids_BW)
        self.counts_K += self.bins.count(encoded.ids_BW, encoded.values_BN)
        self.missing_F += encoded.num_missing
        self.unseen_F += encoded.num_unseen
        rare_W = self._rare_V[encoded.ids_BW].sum(axis=0)
        self.rare_F += np.add.reduceat(rare_W, [place.start for place in self.encoder.layout.fields])

    def add_moments(self, moments: Seconds) -> None:
        """Take note of when rows were, in seconds since 1970: not all rows need one."""
        self._num_moments += len(moments)
        self._sum_of_moments += float(moments.sum())

    def add_labels(self, labels: npt.NDArray[np.uint8]) -> None:
        """Count the labels of rows that have one."""
        self.labelled += len(labels)
        self.clicks += int(labels.sum())

    @property
    def is_enough(self) -> bool:
        """Return whether the rows, and the training rows, are enough to be judged."""
        return self.rows >= MIN_ROWS and len(self._rows_P) > 1

    def field_bins(self, index: int) -> Counts:
        """Return the counts of a field's bins; the last is of unseen values."""
        counts = self.counts_K[self.bins.places[index]].copy()
        counts[-1] = self.unseen_F[index]
        return counts

    def _limits(
        self, counts: Counts, totals: Counts, total: int, least: float, *, alike: bool = False
    ) -> ShareLimits:
        chance = FALSE_ALARM / self.num_shares
        return share_limits(counts, totals, max(total, 1), chance=chance, least=least, alike=alike)

    def missing(self, index: int) -> Judged:
        """Return the share of rows without a value of a field."""
        counts = np.asarray(self.profile.fields[index].missing, np.int64)[:, None]
        limits = self._limits(counts, self._rows_P, self.rows, LEAST_MISSING)
        return _judged(int(self.missing_F[index]), self.rows, limits)

    def unseen(self, index: int) -> Judged:
        """Return the share of a field's values that the vocabulary lacks; fewer than usual are no fault.

        If it is known when the rows were, the limit grows with the time that has gone by since the training rows.
        """
        field, total = self.profile.fields[index], int(self.field_bins(index).sum())
        later = len(self._rows_P) // 2
        totals = bins_matrix(field).sum(axis=1)[later:]
        limits = self._limits(np.asarray(field.unseen, np.int64)[:, None], totals, total, LEAST_UNSEEN)
        judged = _judged(int(self.unseen_F[index]), total, limits)
        high = max(judged.high, min(judged.usual + self._growth(index), NEARLY_ALL))
        return Judged(judged.share, judged.usual, 0.0, high, total)

    def _growth(self, index: int) -> float:
        """Return by how much the share of unseen values may ordinarily have grown since the training rows."""
        counts, field = self.encoder.fields[index].counts, self.profile.fields[index]
        if not field.exchanged or (halves := self._age()) is None:
            return 0.0
        shares = counts / max(int(bins_matrix(field).sum()), 1)
        chance = FALSE_ALARM / self.num_shares
        return LEAST_UNSEEN + exchanged_limit(shares, min(field.exchanged * halves, 1.0), chance)

    def _age(self) -> float | None:
        """Return how long after the training rows these are, as a multiple of their later half; None if not known."""
        starts, num_periods = self.profile.starts, len(self._rows_P)
        if starts is None or not self._num_moments:
            return None
        end = starts[-1] + (self.profile.seconds or (starts[-1] - starts[0]) / num_periods)
        later_half = max(end - starts[num_periods // 2], 1)
        return max(self._sum_of_moments / self._num_moments - end, 0.0) / later_half

    def rare(self, index: int) -> float:
        """Return the share of a field's values that fewer than `RARE_ROWS` training rows have."""
        return int(self.rare_F[index]) / max(int(self.field_bins(index).sum()), 1)

    def largest_shift(self, index: int) -> tuple[int, Judged] | None:
        """Return the bin of a field whose share is furthest beyond its limits; None if all are within them.

        Shares are those among values of the vocabulary; unseen values, which training rows can't have, are judged
        separately. Values leave a log every day, so in a vocabulary only a common value whose share has grown counts.
        """
        fitted = self.encoder.fields[index]
        counts, bins = self.field_bins(index)[:-1], bins_matrix(self.profile.fields[index])[:, :-1]
        total = int(counts.sum())
        if total < MIN_ROWS:
            return None
        limits = self._limits(bins, bins.sum(axis=1), total, LEAST_SHIFT, alike=True)
        share = counts / total
        excess = share - limits.high_K
        if fitted.field.is_value or fitted.edges or fitted.field.hash_buckets:
            excess = np.maximum(excess, limits.low_K - share)
        elif len(fitted.values) > len(excess):
            excess[-1] = -1.0  # It joins all rarer values.
        worst = int(excess.argmax())
        return (worst, _judged(int(counts[worst]), total, limits, worst)) if excess[worst] > 0 else None

    def label_rate(self) -> Judged | None:
        """Return the share of clicks among labelled rows; None if too few have a label."""
        if self.labelled < MIN_ROWS:
            return None
        counts = np.asarray(self.profile.clicks, np.int64)[:, None]
        usual = float(counts.sum() / max(self._rows_P.sum(), 1))
        limits = self._limits(counts, self._rows_P, self.labelled, LEAST_RATE * usual)
        return _judged(self.clicks, self.labelled, limits)

    def psi(self, index: int) -> float:
        """Return the population stability index of a field: 0 if all bins have their usual shares."""
        usual = bins_matrix(self.profile.fields[index]).sum(axis=0)
        return stability_index(self.field_bins(index), usual)

    def psi_limit(self, index: int) -> float:
        """Return the largest ordinary stability index of a field, from groups of training rows of the window's size."""
        counts = bins_matrix(self.profile.fields[index])
        totals = counts.sum(axis=1)
        groups_GK, _ = group_counts(counts, totals, max(int(self.field_bins(index).sum()), 1))
        half = max(len(groups_GK) // 2, 1)
        indices = np.array(
            [stability_index(group_K, counts.sum(axis=0)) for group_K in groups_GK]
            + [stability_index(group_K, groups_GK[:half].sum(axis=0)) for group_K in groups_GK[half:]]
        )
        quantile = student_quantile(FALSE_ALARM / len(self.profile.fields), max(len(indices) - 1, 1))
        varied = float(indices.mean() + quantile * indices.std())
        return max(LEAST_PSI, varied, 1.25 * float(indices.max()))

    def top_share(self, index: int, share: float) -> Judged:
        """Judge the `share` of rows that the commonest value of a field has; less than usual is no fault."""
        top_P = np.asarray(self.profile.fields[index].top)
        most, chance = float(top_P.max()), FALSE_ALARM / self.num_shares
        z = normal_quantile(chance)
        varied = float(top_P.mean()) + student_quantile(chance, len(top_P) - 1) * float(top_P.std())
        noise = z * math.sqrt(2 * most * (1 - most) / self.rows) + z * z / (3 * self.rows)
        limit = max(most + LEAST_SHIFT, varied) + noise
        if most <= MAX_TOP_SHARE and most**self.rows < CONSTANT_CHANCE:
            limit = min(limit, MAX_TOP_SHARE)
        return Judged(share, most, 0.0, min(limit, 1.0), self.rows)


def _rare_rows(encoder: Encoder) -> npt.NDArray[np.bool_]:
    """Return which rows of the table come from few training rows; rows of hashed and numeric fields never count."""
    rare_V = np.zeros(encoder.layout.num_rows, np.bool_)
    for fitted, place in zip(encoder.fields, encoder.layout.fields, strict=True):
        codes = np.flatnonzero(fitted.counts < RARE_ROWS).astype(np.int32)
        rare_V[place.offset + fitted.ids(codes)] = True
    return rare_V


def bins_matrix(field: FieldProfile) -> Counts:
    """Return the counts of a field's bins in the training rows, periods × bins."""
    return np.asarray(field.bins, np.int64)


def _judged(count: int, total: int, limits: ShareLimits, at: int = 0) -> Judged:
    usual, low, high = (float(bounds[at]) for bounds in (limits.usual_K, limits.low_K, limits.high_K))
    return Judged(count / max(total, 1), usual, low, high, total)


def stability_index(counts_K: AnyCounts, usual_K: AnyCounts) -> float:
    """Return the population stability index of counts against the usual ones: Σ (p - q) ln(p / q).

    >>> round(stability_index(np.array([50, 50]), np.array([500, 500])), 3)
    0.0
    >>> round(stability_index(np.array([80, 20]), np.array([500, 500])), 3)
    0.416
    """
    p_K, q_K = (np.maximum(counts / max(counts.sum(), 1), PSI_FLOOR) for counts in (counts_K, usual_K))
    return float(((p_K - q_K) * np.log(p_K / q_K)).sum())
