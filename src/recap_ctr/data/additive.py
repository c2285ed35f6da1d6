"""Synthetic clicks of mostly additive effects, with the hour hidden in a timestamp: like many a real log.

    logit = intercept + spread * (user + ad + site + price + hour + user x ad)

Each effect has mean zero, and `SHARES` are their shares of the logit's variance. Users, ads and sites are
Zipf-distributed; the price is log-normal, and its effect is smooth but no straight line; the hour is that of the
timestamp in UTC. Only user x ad is an interaction, a product of latent vectors, and it is small. Rows come in time
order, evenly spread over `DAYS` days.

Shape suffixes: B rows of a block, V values of a field, R rank, O orders (3).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from recap_ctr.data.moments import DAY, hours
from recap_ctr.data.synthetic import (
    BLOCK_ROWS,
    Bayes,
    centred,
    expected_figures,
    tune_logits,
    zipf,
)
from recap_ctr.errors import InputError
from recap_ctr.evaluation.metrics import Floats, sigmoid

FORMAT = 1  # to be raised when the same config comes to draw other rows
BAYES_AUC = 0.795
DAYS = 14
FIRST_SECOND = 1_767_571_200  # 2026-01-05, a Monday
SIZES = {"user": 3_000, "ad": 300, "site": 50}
SHARES = {"user": 0.30, "ad": 0.25, "site": 0.12, "price": 0.14, "hour": 0.14, "user x ad": 0.05}
ZIPF_EXPONENT = 0.9
RANK = 2
PRICE = (3.0, 0.8)  # mean and standard deviation of its logarithm


@dataclass(frozen=True)
class AdditiveConfig:
    """What to draw. `rows` says how densely the same effects are seen."""

    rows: int = 67_500
    base_rate: float = 0.06
    seed: int = 1

    def __post_init__(self) -> None:
        for name, holds, needs in (
            ("rows", self.rows >= 2, "at least 2"),
            ("base_rate", 0 < self.base_rate < 1, "between 0 and 1"),
            ("seed", 0 <= self.seed < 2**32, "between 0 and 2^32 - 1"),
        ):
            if not holds:
                value = getattr(self, name)
                raise InputError(f"additive data: {name} is {value}", fix=f"{name} must be {needs}")


@dataclass(frozen=True, eq=False)
class _Draw:
    """Rows of a block before their clicks."""

    seconds_B: Floats
    values: dict[str, NDArray[np.int64]]
    price_B: Floats
    orders_OB: Floats
    """What the additive effects, and the interaction, contribute to the logit before its spread."""


class AdditiveData:
    """Rows of the additive model, block by block, in time order; the same config gives the same rows.

    >>> AdditiveData(AdditiveConfig(rows=2)).frame().columns
    ['row', 'ts', 'user', 'ad', 'site', 'price', 'click', 'bayes_logit']
    """

    def __init__(self, config: AdditiveConfig) -> None:
        self.config = config
        rng = np.random.default_rng(np.random.SeedSequence(config.seed, spawn_key=(0,)))
        frequencies = {name: zipf(size, ZIPF_EXPONENT) for name, size in SIZES.items()}
        self._cumulative = {name: np.cumsum(frequency_V)[:-1] for name, frequency_V in frequencies.items()}
        self._effects = {
            name: _standardised(rng.normal(size=frequency_V.size), frequency_V)
            for name, frequency_V in frequencies.items()
        }
        self._latents = {
            name: centred(rng.normal(size=(SIZES[name], RANK)), frequencies[name]) for name in ("user", "ad")
        }
        covariances = [
            latent_VR.T @ (frequencies[name][:, None] * latent_VR)
            for name, latent_VR in self._latents.items()
        ]
        self._interaction_scale = 1 / math.sqrt(float((covariances[0] * covariances[1]).sum()))
        scores_B = self._draw(self._generator(1), np.arange(BLOCK_ROWS), BLOCK_ROWS).orders_OB.sum(axis=0)
        self._intercept, self._spread = tune_logits(scores_B, config.base_rate, BAYES_AUC)

    def blocks(self) -> Iterator[pl.DataFrame]:
        """Yield the rows in blocks, so that memory does not grow with their number.

        The columns are row, ts (milliseconds since 1970), user, ad, site (strings such as ad_17; ad_1 is the
        commonest), price, click (0 or 1) and bayes_logit.
        """
        names = {
            name: pl.Series([f"{name}_{value}" for value in range(1, size + 1)])
            for name, size in SIZES.items()
        }
        for first, draw, click_B in self._draws():
            yield pl.DataFrame(
                {
                    "row": np.arange(first, first + click_B.size, dtype=np.int64),
                    "ts": (1_000 * draw.seconds_B).astype(np.int64),
                    **{name: names[name].gather(values_B) for name, values_B in draw.values.items()},
                    "price": draw.price_B,
                    "click": click_B.astype(np.int8),
                    "bayes_logit": self._logits(draw.orders_OB),
                }
            )

    def frame(self) -> pl.DataFrame:
        """Return all rows at once."""
        return pl.concat(self.blocks())

    def bayes(self) -> Bayes:
        """Return the expectations over the rows drawn; one number a row is kept in memory."""
        return expected_figures(
            (draw.orders_OB, self._logits(draw.orders_OB)) for _, draw, _ in self._draws()
        )

    def _draws(self) -> Iterator[tuple[int, _Draw, NDArray[np.bool_]]]:
        """Yield the first row number, the rows and the clicks of each block."""
        for block, first in enumerate(range(0, self.config.rows, BLOCK_ROWS)):
            rng = self._generator(2, block)
            rows = np.arange(first, min(first + BLOCK_ROWS, self.config.rows))
            draw = self._draw(rng, rows, self.config.rows)
            yield first, draw, rng.random(rows.size) < sigmoid(self._logits(draw.orders_OB))

    def _generator(self, *key: int) -> np.random.Generator:
        return np.random.default_rng(np.random.SeedSequence(self.config.seed, spawn_key=key))

    def _draw(self, rng: np.random.Generator, rows: NDArray[np.int64], num_rows: int) -> _Draw:
        """Draw the rows with these numbers out of `num_rows`, of which each has its own stretch of time."""
        seconds_B = FIRST_SECOND + DAYS * DAY * (rows + rng.random(rows.size)) / num_rows
        values = {
            name: np.searchsorted(cumulative_V, rng.random(rows.size), side="right")
            for name, cumulative_V in self._cumulative.items()
        }
        price_B = np.exp(rng.normal(*PRICE, rows.size)).round(2)
        effects = {name: self._effects[name][values_B] for name, values_B in values.items()}
        effects["price"] = _price_effect(price_B)
        effects["hour"] = _HOUR_EFFECT[hours(seconds_B.astype(np.int64))]
        product_BR = np.prod([latent_VR[values[name]] for name, latent_VR in self._latents.items()], axis=0)
        effects["user x ad"] = self._interaction_scale * product_BR.sum(axis=1)
        weighted = {name: math.sqrt(share) * effects[name] for name, share in SHARES.items()}
        interaction_B = weighted.pop("user x ad")
        orders_OB = np.stack([sum(weighted.values()), interaction_B, np.zeros(rows.size)])
        return _Draw(seconds_B, values, price_B, orders_OB)

    def _logits(self, orders_OB: Floats) -> Floats:
        return np.asarray(self._intercept + self._spread * orders_OB.sum(axis=0))


def _standardised(effect_V: Floats, frequency_V: Floats) -> Floats:
    """Return an effect with mean 0 and variance 1 under the frequencies of its values."""
    centred_V = effect_V - frequency_V @ effect_V
    return np.asarray(centred_V / math.sqrt(float(frequency_V @ centred_V**2)))


def _price_curve(deviation: Floats) -> Floats:
    """Return the effect of a log-price by its deviation from the mean, in standard deviations; not yet standardised.

    Expensive items are clicked less, but the most attractive ones cost a little more than usual.
    """
    return -0.25 * deviation + np.exp(-2.0 * (deviation - 0.5) ** 2)


_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(64)  # for means under a normal distribution
_CURVE = _price_curve(_NODES)
_CURVE_MEAN = float(_WEIGHTS @ _CURVE / _WEIGHTS.sum())
_CURVE_SCALE = math.sqrt(float(_WEIGHTS @ (_CURVE - _CURVE_MEAN) ** 2 / _WEIGHTS.sum()))
_ANGLES = 2 * np.pi * np.arange(24) / 24
# Evenings are best, with a second, smaller peak in the morning.
_HOUR_EFFECT = _standardised(
    np.cos(_ANGLES - _ANGLES[20]) + 0.6 * np.cos(2 * _ANGLES - 2 * _ANGLES[9]), np.full(24, 1 / 24)
)


def _price_effect(price_B: Floats) -> Floats:
    mean, deviation = PRICE
    return (_price_curve((np.log(price_B) - mean) / deviation) - _CURVE_MEAN) / _CURVE_SCALE
