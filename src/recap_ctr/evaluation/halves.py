"""Two halves of the held-out rows: one to choose with, and one to confirm the choice."""

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.intp]
MIN_OF_A_CLASS = 200  # Rows of each label that a half needs; with fewer, all rows choose and none confirms.
SEED = 1


def halves(labels: npt.NDArray[np.generic]) -> tuple[Rows, Rows]:
    """Return the rows of two random halves, one to choose and one to confirm; all rows twice if they are few."""
    values = np.asarray(labels)
    order = np.random.default_rng(SEED).permutation(len(values))
    parts = order[::2], order[1::2]
    clicks = [int(values[part].sum()) for part in parts]
    if any(min(count, len(part) - count) < MIN_OF_A_CLASS for count, part in zip(clicks, parts, strict=True)):
        return order, order
    return parts
