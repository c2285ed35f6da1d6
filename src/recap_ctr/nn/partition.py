"""Which worker has which rows of a table.

Row i stands at place i * K mod V, K without a common factor with V, and each worker has a block of places. A vocabulary
is in order of frequency, so blocks of rows would give one worker nearly all the work; blocks of places balance.
"""

import math
from itertools import pairwise

import torch
from torch import Tensor

GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


class Partition:
    """The places of a table's rows, and the blocks of them; one worker keeps the rows in their own order."""

    def __init__(self, num_rows: int, size: int) -> None:
        self.num_rows, self.size = num_rows, size
        self._factor = 1 if size == 1 else _factor(num_rows)
        self._inverse = pow(self._factor, -1, num_rows)
        self._block = -(-num_rows // size)

    def block(self, rank: int) -> range:
        """Return the places of a worker; the last workers may have fewer, or none."""
        start, stop = (min(self._block * at, self.num_rows) for at in (rank, rank + 1))
        return range(start, stop)

    def cuts(self, sorted_places: Tensor) -> list[int]:
        """Return how many of these places, in ascending order, belong to each worker."""
        ends = [self.block(rank).stop for rank in range(self.size)]
        bounds = torch.tensor(ends, device=sorted_places.device, dtype=sorted_places.dtype)
        at = [0, *torch.searchsorted(sorted_places, bounds).tolist()]
        return [stop - start for start, stop in pairwise(at)]

    def places(self, rows: Tensor) -> Tensor:
        """Return where rows stand."""
        return rows.long() * self._factor % self.num_rows

    def rows_at(self, places: Tensor) -> Tensor:
        """Return which rows stand at these places."""
        return places.long() * self._inverse % self.num_rows

    def has_order_of(self, other: "Partition") -> bool:
        """Return whether another partition has the rows at the same places."""
        return (self.num_rows, self._factor) == (other.num_rows, other._factor)


def _factor(num_rows: int) -> int:
    """Return K: near V times the golden ratio, which spreads neighbours far apart.

    >>> _factor(10), _factor(2_000_000)
    (7, 1236069)
    """
    factor = max(round(num_rows * GOLDEN_RATIO), 1)
    while math.gcd(factor, num_rows) > 1:
        factor += 1
    return factor
