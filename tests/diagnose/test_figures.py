"""Families of estimators on the grid, and subsets of them."""

from math import comb

import numpy as np

from recap_ctr.diagnose.figures import Grid


def test_many_subsets_are_drawn_from_a_seed_and_few_are_all_taken() -> None:
    families = Grid((9, 1, 2)).families(("run",))
    for size in (2, 5, 8, 9):
        drawn, again, other = (
            families.subsets(size, np.random.default_rng(seed)).members for seed in (1, 1, 2)
        )
        every = 2 * comb(9, size)
        assert len(set(drawn)) == len(drawn) == min(every, 64)
        assert all(len(set(subset)) == size for subset in drawn)
        assert drawn == again
        assert (set(drawn) == set(other)) == (every <= 64)
        # Both families give as many.
        assert sum(subset[0][0] % 2 for subset in drawn) == len(drawn) / 2
