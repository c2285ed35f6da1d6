"""Synthetic clicks with planted interactions: the best possible logloss and AUC are known for every row.

Fields are independent and their values Zipf-distributed. Every value has a latent vector; a term multiplies
the vectors of one, two or three fields elementwise and sums the product:

    logit = intercept + spread * sum over terms S of weight_S * sum_k prod_{f in S} latent_f[value_f, k]

A field's vectors have mean zero under its distribution. A term then has mean zero given any proper subset of
its fields: it is a pure interaction of its order, invisible to lower orders and uncorrelated with every other
term. So the variance of a term, and with it the share of each order, is exact and not a matter of luck.

Shape suffixes: B rows of a block, F fields, V values of a field, R rank, O orders (3), Q quantiles.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from recap_ctr.errors import InputError
from recap_ctr.evaluation.metrics import Floats, logit, sigmoid, softplus

FORMAT = 1  # to be raised when the same config comes to draw other rows
BLOCK_ROWS = 65_536  # part of the format: another size would draw other rows
BAYES_AUC = 0.80
ORDER_SHARES = (0.5, 0.3, 0.2)  # of the logit's variance: first, second, third order
MIN_VALUES = 5


@dataclass(frozen=True)
class SyntheticConfig:
    """What to draw. Everything but `rows` determines the planted model; `rows` only says where to stop."""

    rows: int = 150_000
    num_fields: int = 7
    max_values: int = 1_000  # of the largest field; the others shrink geometrically to MIN_VALUES
    zipf_exponent: float = 1.2
    base_rate: float = 0.2
    rank: int = 4
    seed: int = 1

    def __post_init__(self) -> None:
        for name, holds, needs in (
            ("rows", self.rows >= 2, "at least 2"),
            ("num_fields", self.num_fields >= 3, "at least 3: third-order interactions are planted"),
            ("max_values", self.max_values >= MIN_VALUES, f"at least {MIN_VALUES}"),
            ("zipf_exponent", 0 <= self.zipf_exponent <= 3, "between 0 (uniform) and 3"),
            ("base_rate", 0 < self.base_rate < 1, "between 0 and 1"),
            ("rank", self.rank >= 1, "at least 1"),
            ("seed", 0 <= self.seed < 2**32, "between 0 and 2^32 - 1"),
        ):
            if not holds:
                value = getattr(self, name)
                raise InputError(f"synthetic data: {name} is {value}", fix=f"{name} must be {needs}")

    @property
    def num_values(self) -> tuple[int, ...]:
        """Return the vocabulary size of every field.

        >>> SyntheticConfig().num_values
        (5, 12, 29, 71, 171, 414, 1000)
        """
        sizes_F = np.geomspace(MIN_VALUES, self.max_values, self.num_fields)
        return tuple(int(size) for size in sizes_F.round())


@dataclass(frozen=True)
class Bayes:
    """What no model can beat on the rows drawn: expectations under their Bayes probabilities."""

    logloss: float
    auc: float
    base_rate: float
    base_logloss: float  # of a model that knows the base rate only
    order_shares: tuple[float, float, float]  # of the logit's variance; they sum to 1


@dataclass(frozen=True)
class Term:
    """One planted interaction: the fields whose vectors are multiplied, and the weight of the product."""

    fields: tuple[int, ...]
    weight: float


class SyntheticData:
    """Rows of a planted model, block by block; the same config gives the same rows, whatever their number.

    >>> SyntheticData(SyntheticConfig(rows=2)).frame().columns
    ['row', 'click', 'f1', 'f2', 'f3', 'f4', 'f5', 'f6', 'f7', 'bayes_logit']
    """

    def __init__(self, config: SyntheticConfig) -> None:
        self.config = config
        rng = np.random.default_rng(np.random.SeedSequence(config.seed, spawn_key=(0,)))
        frequencies = [zipf(size, config.zipf_exponent) for size in config.num_values]
        self._cumulative = [np.cumsum(frequency_V)[:-1] for frequency_V in frequencies]
        self._latents = [
            centred(rng.uniform(-1.0, 1.0, (frequency_V.size, config.rank)), frequency_V)
            for frequency_V in frequencies
        ]
        covariances = [
            latent_VR.T @ (frequency_V[:, None] * latent_VR)
            for latent_VR, frequency_V in zip(self._latents, frequencies, strict=True)
        ]
        self._terms = plant(covariances)
        self._intercept, self._spread = self._tune()

    def blocks(self) -> Iterator[pl.DataFrame]:
        """Yield the rows in blocks, so that memory does not grow with their number.

        The columns are row, click (0 or 1), f1 to fF (strings such as f3_17; f3_1 is the commonest), bayes_logit.
        """
        names = [
            pl.Series([f"f{field}_{value}" for value in range(1, size + 1)])
            for field, size in enumerate(self.config.num_values, start=1)
        ]
        for first, values_FB, orders_OB, click_B in self._draws():
            columns: dict[str, pl.Series] = {
                "row": pl.Series(np.arange(first, first + click_B.size, dtype=np.int64)),
                "click": pl.Series(click_B.astype(np.int8)),
            }
            for field, (name, values_B) in enumerate(zip(names, values_FB, strict=True), start=1):
                columns[f"f{field}"] = name.gather(values_B)
            columns["bayes_logit"] = pl.Series(self._logits(orders_OB))
            yield pl.DataFrame(columns)

    def frame(self) -> pl.DataFrame:
        """Return all rows at once."""
        return pl.concat(self.blocks())

    def bayes(self) -> Bayes:
        """Return the expectations over the rows drawn; one number a row is kept in memory."""
        return expected_figures((orders_OB, self._logits(orders_OB)) for _, _, orders_OB, _ in self._draws())

    def _draws(self) -> Iterator[tuple[int, list[NDArray[np.int64]], Floats, NDArray[np.bool_]]]:
        """Yield the first row number, the values, the contribution of each order and the clicks of each block."""
        for block, first in enumerate(range(0, self.config.rows, BLOCK_ROWS)):
            rng = np.random.default_rng(np.random.SeedSequence(self.config.seed, spawn_key=(2, block)))
            values_FB, orders_OB = self._draw(rng)
            click_B = rng.random(BLOCK_ROWS) < sigmoid(self._logits(orders_OB))
            # The last block is drawn in full and then cut: its rows are those of a longer draw.
            cut = slice(self.config.rows - first)
            yield first, [values_B[cut] for values_B in values_FB], orders_OB[:, cut], click_B[cut]

    def _draw(self, rng: np.random.Generator) -> tuple[list[NDArray[np.int64]], Floats]:
        values_FB = [
            np.searchsorted(cumulative_V, rng.random(BLOCK_ROWS), side="right")
            for cumulative_V in self._cumulative
        ]
        return values_FB, term_orders(self._terms, self._latents, values_FB)

    def _logits(self, orders_OB: Floats) -> Floats:
        return np.asarray(self._intercept + self._spread * orders_OB.sum(axis=0))

    def _tune(self) -> tuple[float, float]:
        """Return the intercept and standard deviation of the logit that give the base rate and the Bayes AUC.

        They are fitted to a separate block, which depends on the seed but not on `rows`.
        """
        rng = np.random.default_rng(np.random.SeedSequence(self.config.seed, spawn_key=(1,)))
        return tune_logits(self._draw(rng)[1].sum(axis=0), self.config.base_rate, BAYES_AUC)


def tune_logits(scores_B: Floats, base_rate: float, auc: float) -> tuple[float, float]:
    """Return the intercept and the factor that make logits with this base rate and Bayes AUC of scores.

    There is a multiple of 2,048 scores; as many quantiles of them suffice.
    """
    scores_Q = np.sort(scores_B).reshape(2_048, -1).mean(axis=1)

    def intercept(spread: float) -> float:
        def excess_rate(shift: float) -> float:
            return float(sigmoid(shift + spread * scores_Q).mean()) - base_rate

        return _bisect(excess_rate, -1_000.0, 1_000.0)

    def excess_auc(spread: float) -> float:
        return _expected_auc(intercept(spread) + spread * scores_Q) - auc

    spread = _bisect(excess_auc, 0.0, 16.0)
    return intercept(spread), spread


def expected_figures(blocks: Iterable[tuple[Floats, Floats]]) -> Bayes:
    """Return the expectations over blocks of rows, each with the contribution of every order and the Bayes logits."""
    logits, moments_OO, sums_O = [], np.zeros((3, 3)), np.zeros(3)
    for orders_OB, logits_B in blocks:
        logits.append(logits_B)
        moments_OO += orders_OB @ orders_OB.T
        sums_O += orders_OB.sum(axis=1)
    logits_N = np.sort(np.concatenate(logits))
    covariance_OO = moments_OO - np.outer(sums_O, sums_O) / logits_N.size
    shares_O = covariance_OO.sum(axis=1) / max(float(covariance_OO.sum()), np.finfo(np.float64).tiny)
    base_rate = float(sigmoid(logits_N).mean())
    return Bayes(
        logloss=float(_entropy(logits_N).mean()),
        auc=_expected_auc(logits_N),
        base_rate=base_rate,
        base_logloss=float(_entropy(logit(base_rate))),
        order_shares=(float(shares_O[0]), float(shares_O[1]), float(shares_O[2])),
    )


def zipf(size: int, exponent: float) -> Floats:
    """Return the frequencies of values whose ranks follow Zipf's law."""
    mass_V = np.arange(1.0, size + 1.0) ** -exponent
    return np.asarray(mass_V / mass_V.sum())


def centred(latent_VR: Floats, frequency_V: Floats) -> Floats:
    """Return latent vectors with mean zero under the frequencies of their values."""
    return latent_VR - frequency_V @ latent_VR


def term_orders(
    terms: list[Term], latents: list[Floats], values_FB: list[NDArray[np.int64]]
) -> NDArray[np.float64]:
    """Return what the terms of each order contribute to the logit of rows, before its spread."""
    rows, rank = values_FB[0].size, latents[0].shape[1]
    orders_OB = np.zeros((len(ORDER_SHARES), rows))
    for term in terms:
        product_BR = np.ones((rows, rank))
        for field in term.fields:
            product_BR *= latents[field][values_FB[field]]
        orders_OB[len(term.fields) - 1] += term.weight * product_BR.sum(axis=1)
    return orders_OB


def plant(covariances: list[Floats]) -> list[Term]:
    """Return the terms: every field alone, neighbours in pairs (a ring), disjoint triples of neighbours.

    That makes F + F + F // 3 terms. Terms of one order share its variance evenly. The fields are independent, so the
    variance of a term is the sum over the elementwise product of its fields' covariances.
    """
    num_fields = len(covariances)
    orders: list[list[tuple[int, ...]]] = [
        [(field,) for field in range(num_fields)],
        [(field, (field + 1) % num_fields) for field in range(num_fields)],
        [(field, field + 1, field + 2) for field in range(0, num_fields - 2, 3)],
    ]
    terms = []
    for share, members in zip(ORDER_SHARES, orders, strict=True):
        for fields in members:
            variance = float(np.prod([covariances[field] for field in fields], axis=0).sum())
            terms.append(Term(fields, math.sqrt(share / len(members) / variance)))
    return terms


def _entropy(logits: Floats) -> Floats:
    """Return the expected loss of a Bayes logit on its own row."""
    return sigmoid(logits) * softplus(-logits) + sigmoid(-logits) * softplus(logits)


def _expected_auc(sorted_logits_N: Floats) -> float:
    """Return expected pairs won over expected pairs, when rows click with their Bayes probabilities.

    A pair of different rows (i, j) counts with p_i (1 - p_j). Ties need no special treatment: tied rows have equal p,
    so either order of the two wins one half of their pairs.
    """
    p_N, q_N = sigmoid(sorted_logits_N), sigmoid(-sorted_logits_N)
    wins = p_N @ (np.cumsum(q_N) - q_N)
    return float(wins / (p_N.sum() * q_N.sum() - p_N @ q_N))


def _bisect(increasing: Callable[[float], float], low: float, high: float) -> float:
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if increasing(middle) > 0 else (middle, high)
    return (low + high) / 2
