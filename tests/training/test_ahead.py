"""Batches that a thread gathers ahead: the same as those that are gathered when they are asked for."""

import numpy as np
import pytest
import torch

from recap_ctr.config import TrainConfig
from recap_ctr.nn.group import Group
from recap_ctr.training.ahead import AHEAD, Ahead, Direct, Place
from recap_ctr.training.feed import feed_of
from tests.support.plain_rows import plain_rows

CPU = torch.device("cpu")


@pytest.mark.parametrize("window_rows", [0, 256])
def test_batches_ahead_are_those_that_are_gathered_now(window_rows: int) -> None:
    data, config = plain_rows(1_030), TrainConfig(batch_size=100, max_epochs=2, window_rows=window_rows)
    targets, group = np.random.default_rng(1).random(1_030, np.float32), Group(1, 2)

    def place(step: int) -> Place:
        epoch, at = divmod(step, 11)
        return Place(epoch, at, group.share(min(100, 1_030 - 100 * at)))

    asked: list[int] = []

    def noted(step: int) -> Place:
        asked.append(step)
        return place(step)

    now = Direct(feed_of(data.train, config, targets, group, window_rows), CPU, place)
    ahead = Ahead(feed_of(data.train, config, targets, group, window_rows), CPU, noted, 22)
    steps = [*range(5), *range(14, 22), 3]
    for step in steps:  # It goes on, jumps forward, ends with the run, and jumps back.
        one, other = now.take(step), ahead.take(step)
        assert len(one.tensors()) == 4
        for expected, got in zip(one.tensors(), other.tensors(), strict=True):
            assert torch.equal(got, expected)
    assert max(asked) == 21
    assert set(range(3, 3 + AHEAD + 1)) <= set(asked)
