"""Synthetic clicks that drift: values appear and fade from day to day, and what they do to a click moves.

The planted model is that of `synthetic`. Every four days a share `drift` of the values of the large fields is exchanged
for new ones, and the vectors of all values keep a correlation of 1 - `drift` with what they were. The variance of
every term stays the same, so that no day is easier than another. Rows come in time order.

Shape suffixes: B rows of a day, F fields, V values of a field, R rank, O orders (3).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from recap_ctr.data.moments import DAY
from recap_ctr.data.synthetic import (
    BAYES_AUC,
    Bayes,
    SyntheticConfig,
    centred,
    expected_figures,
    plant,
    term_orders,
    tune_logits,
    zipf,
)
from recap_ctr.errors import InputError
from recap_ctr.evaluation.metrics import Floats, sigmoid

FORMAT = 1  # to be raised when the same config comes to draw other rows
FIRST_SECOND = 1_767_571_200  # 2026-01-05, a Monday
SPAN = 4.0  # days in which a share `drift` is exchanged
LARGE = 50  # values from which on a field exchanges them
TUNING_ROWS = 65_536


@dataclass(frozen=True)
class DriftConfig:
    """What to draw: the planted model of `synthetic`, the days, and how much changes."""

    planted: SyntheticConfig = SyntheticConfig()  # noqa: RUF009, it is frozen
    days: int = 14
    drift: float = 0.2

    def __post_init__(self) -> None:
        for name, holds, needs in (
            ("days", 1 <= self.days <= self.planted.rows, "at least 1, and at most one for each row"),
            ("drift", 0 <= self.drift < 1, "at least 0 and below 1"),
        ):
            if not holds:
                raise InputError(
                    f"drifting data: {name} is {getattr(self, name)}", fix=f"{name} must be {needs}"
                )


class DriftingData:
    """Rows of a planted model that moves, a day at a time; the same config gives the same rows.

    >>> DriftingData(DriftConfig(SyntheticConfig(rows=28))).frame().columns[:4]
    ['row', 'ts', 'click', 'f1']
    """

    def __init__(self, config: DriftConfig) -> None:
        self.config = config
        planted, rng = config.planted, self._generator(0)
        self._frequencies = [zipf(size, planted.zipf_exponent) for size in planted.num_values]
        self._latents = [self._vectors(rng, frequency_V) for frequency_V in self._frequencies]
        self._covariances = [
            latent_VR.T @ (frequency_V[:, None] * latent_VR)
            for latent_VR, frequency_V in zip(self._latents, self._frequencies, strict=True)
        ]
        self._terms = plant(self._covariances)
        values = self._draw_values(self._generator(1), TUNING_ROWS)
        scores_B = term_orders(self._terms, self._latents, values).sum(axis=0)
        self._intercept, self._spread = tune_logits(scores_B, planted.base_rate, BAYES_AUC)

    def blocks(self) -> Iterator[pl.DataFrame]:
        """Yield the rows of each day: row, ts (seconds), click, f1 to fF (f3_17.2: the third value in this place)."""
        first = 0
        for day, (values_FB, orders_OB, versions) in enumerate(self._days()):
            rng, count = self._generator(3, day), orders_OB.shape[1]
            logits_B = self._logits(orders_OB)
            seconds_B = FIRST_SECOND + day * DAY + np.sort(rng.integers(0, DAY, count))
            columns: dict[str, pl.Series] = {
                "row": pl.Series(np.arange(first, first + count)),
                "ts": pl.Series(seconds_B),
                "click": pl.Series((rng.random(count) < sigmoid(logits_B)).astype(np.int8)),
            }
            for field, (values_B, versions_V) in enumerate(zip(values_FB, versions, strict=True), start=1):
                names = [
                    f"f{field}_{value}" + (f".{version}" if version else "")
                    for value, version in enumerate(versions_V.tolist(), start=1)
                ]
                columns[f"f{field}"] = pl.Series(names).gather(values_B)
            columns["bayes_logit"] = pl.Series(logits_B)
            yield pl.DataFrame(columns)
            first += count

    def frame(self) -> pl.DataFrame:
        """Return all rows at once."""
        return pl.concat(self.blocks())

    def bayes(self) -> Bayes:
        """Return the expectations over the rows drawn."""
        return expected_figures((orders_OB, self._logits(orders_OB)) for _, orders_OB, _ in self._days())

    def _days(self) -> Iterator[tuple[list[NDArray[np.int64]], Floats, list[NDArray[np.int64]]]]:
        """Yield for each day its rows' values, what each order contributes, and the version of every value."""
        latents = self._latents
        versions = [np.zeros(len(frequency_V), np.int64) for frequency_V in self._frequencies]
        bounds = np.linspace(0, self.config.planted.rows, self.config.days + 1).astype(int)
        for day, count in enumerate(np.diff(bounds).tolist()):
            if day:
                latents, versions = self._move(self._generator(2, day), latents, versions)
            values_FB = self._draw_values(self._generator(4, day), count)
            yield values_FB, term_orders(self._terms, latents, values_FB), versions

    def _move(
        self, rng: np.random.Generator, latents: list[Floats], versions: list[NDArray[np.int64]]
    ) -> tuple[list[Floats], list[NDArray[np.int64]]]:
        """Return the vectors and versions of the next day."""
        kept = (1 - self.config.drift) ** (1 / SPAN)
        moved, counted = [], []
        for latent_VR, versions_V, frequency_V in zip(latents, versions, self._frequencies, strict=True):
            noise_VR = self._vectors(rng, frequency_V)
            is_new_V = (rng.random(len(frequency_V)) > kept) & (len(frequency_V) >= LARGE)
            weight_V1 = np.where(is_new_V, 0.0, kept)[:, None]
            mixed_VR = weight_V1 * latent_VR + np.sqrt(1 - weight_V1**2) * noise_VR
            moved.append(centred(mixed_VR, frequency_V))
            counted.append(versions_V + is_new_V)
        return moved, counted

    def _vectors(self, rng: np.random.Generator, frequency_V: Floats) -> Floats:
        return centred(rng.uniform(-1.0, 1.0, (len(frequency_V), self.config.planted.rank)), frequency_V)

    def _draw_values(self, rng: np.random.Generator, count: int) -> list[NDArray[np.int64]]:
        return [
            np.searchsorted(np.cumsum(frequency_V)[:-1], rng.random(count), side="right")
            for frequency_V in self._frequencies
        ]

    def _logits(self, orders_OB: Floats) -> Floats:
        return np.asarray(self._intercept + self._spread * orders_OB.sum(axis=0))

    def _generator(self, *key: int) -> np.random.Generator:
        return np.random.default_rng(np.random.SeedSequence(self.config.planted.seed, spawn_key=(9, *key)))
