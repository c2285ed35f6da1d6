"""Batches from a thread or from the device: the same as those that are gathered when they are asked for."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from recap_ctr.config import TrainConfig
from recap_ctr.nn.group import Group
from recap_ctr.training import ahead, feed
from recap_ctr.training.ahead import AHEAD, Ahead, Direct, Place, Resident
from recap_ctr.training.feed import Shuffled, feed_of
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
    in_a_thread = Ahead(feed_of(data.train, config, targets, group, window_rows), CPU, noted, 22)
    steps = [*range(5), *range(14, 22), 3]
    for step in steps:  # It goes on, jumps forward, ends with the run, and jumps back.
        one, other = now.take(step), in_a_thread.take(step)
        assert len(one.tensors()) == 4
        for expected, got in zip(one.tensors(), other.tensors(), strict=True):
            assert torch.equal(got, expected)
    assert max(asked) == 21
    assert set(range(3, 3 + AHEAD + 1)) <= set(asked)


@pytest.mark.parametrize("has_extras", [False, True])
def test_batches_of_rows_on_the_device_are_those_that_are_gathered(
    has_extras: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the rows are copied in several blocks, and after a jump."""
    monkeypatch.setattr(feed, "WINDOW_ROWS", 400)
    config = TrainConfig(batch_size=100, max_epochs=3)
    shard, targets, group = plain_rows(1_030).train, None, Group(1, 2)
    if has_extras:
        shard = replace(shard, weights=np.random.default_rng(2).random(1_030, np.float32))
        targets = np.random.default_rng(1).random(1_030, np.float32)

    def place(step: int) -> Place:
        epoch, at = divmod(step, 11)
        return Place(epoch, at, group.share(min(100, 1_030 - 100 * at)))

    rows = Shuffled(shard, config, targets)
    now, resident = Direct(rows, CPU, place), Resident(rows, CPU, place)
    for step in [*range(13), 30, 4]:
        one, other = now.take(step), resident.take(step)
        assert len(one.tensors()) == (5 if has_extras else 3)
        for expected, got in zip(one.tensors(), other.tensors(), strict=True):
            assert torch.equal(got, expected)


def test_rows_are_on_the_gpu_where_a_quarter_of_its_memory_holds_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows, config = plain_rows(100).train, TrainConfig(batch_size=10)
    shuffled, device_ = Shuffled(rows, config, None), torch.device("cuda")
    windowed = feed_of(rows, config, None, Group(), 64)
    for name in ("Resident", "Ahead"):
        monkeypatch.setattr(ahead, name, lambda *_, name=name: name)

    def chosen(batches: Any, free: int) -> Any:
        monkeypatch.setattr(ahead, "free_bytes", lambda _: free)
        return ahead.batches_of(batches, device_, lambda step: Place(0, step, slice(0, 10)), 10)

    assert shuffled.num_bytes == rows.ids.nbytes + rows.values.nbytes + 100 * (4 + 4 + 16)
    assert chosen(shuffled, 4 * shuffled.num_bytes) == "Resident"
    assert chosen(shuffled, 4 * shuffled.num_bytes - 1) == "Ahead"
    assert chosen(windowed, 1 << 40) == "Ahead"
