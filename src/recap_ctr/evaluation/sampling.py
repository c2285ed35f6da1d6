"""Undo the sampling of negatives: shift the logits and weigh the rows as if none had been dropped."""

import math
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from recap_ctr.errors import InputError

Array = npt.NDArray[Any]


class LabelledRows(Protocol):
    """Rows with labels and, perhaps, weights, such as a shard."""

    @property
    def labels(self) -> Array:
        """Return 1 for each row with a click, else 0."""
        ...

    @property
    def weights(self) -> Array | None:
        """Return the rows' weights, or None if all count the same."""
        ...


def negative_rate_shift(rate: float) -> float:
    """Return what to add to the logits of a model whose negatives were kept with probability `rate`: log(rate).

    Keeping fewer negatives multiplies the odds by 1 / rate; the shift undoes that: p = q / (q + (1 - q) / rate).

    >>> negative_rate_shift(1.0)
    0.0
    """
    if not 0 < rate <= 1:
        raise InputError(
            f"negative rate {rate} is not in (0, 1]", fix="give the share of negatives that was kept"
        )
    return math.log(rate)


def undo_sampling(logits: Array, rows: LabelledRows, negative_rate: float) -> tuple[Array, Array | None]:
    """Return logits and weights as for the whole log, of which `rows` has all clicks and a share of the negatives.

    Use both: either one alone corrects for half of the sampling.
    """
    return logits + negative_rate_shift(negative_rate), sampling_weights(rows, negative_rate)


def sampling_weights(rows: LabelledRows, negative_rate: float) -> Array | None:
    """Return the weights that undo the sampling: each negative that was kept stands for 1 / rate of them."""
    return weigh_negatives(rows.labels, rows.weights, negative_rate)


def weigh_negatives(labels: Array, weights: Array | None, negative_rate: float) -> Array | None:
    """Multiply the weights of negatives by 1 / `negative_rate`; None stands for equal weights."""
    if negative_rate == 1.0:
        return weights
    factors = np.where(labels == 1, 1.0, 1.0 / negative_rate)
    return factors if weights is None else factors * weights
