"""Bring batches to the device that trains: gathered when they are asked for, by a thread, or on the device itself.

A GPU must not wait for rows. Where its memory has room for all of them, they are copied there once. Otherwise a thread
gathers two batches ahead and copies them through pinned memory, in its own stream, while the steps before are computed.
A CPU has its cores for the steps, and gathers between them.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recap_ctr.data.shards import Batch
from recap_ctr.nn.device import send
from recap_ctr.nn.interface import Inputs
from recap_ctr.training.feed import Feed, Shuffled

AHEAD = 2
FREE_SHARE = 0.25
"""Rows may take this share of a GPU's free memory; the steps need the rest."""


class Rows(NamedTuple):
    """This worker's rows of a batch, on the device."""

    inputs: Inputs
    labels_B: Tensor
    weights_B: Tensor | None
    targets_B: Tensor | None

    def tensors(self) -> list[Tensor]:
        """Return all that is on the device."""
        columns = (*self.inputs, self.labels_B, self.weights_B, self.targets_B)
        return [column for column in columns if isinstance(column, Tensor)]


def _sent(batch: Batch, targets: npt.NDArray[np.float32] | None, device: torch.device) -> Rows:
    """Copy rows and their targets to a device."""

    def copied(column: npt.NDArray[Any]) -> Tensor:
        return send(torch.from_numpy(column), device)

    return Rows(
        Inputs(copied(batch.ids_BW), copied(batch.values_BN)),
        copied(batch.labels_B),
        None if batch.weights_B is None else copied(batch.weights_B),
        None if targets is None else copied(targets),
    )


def _mapped(change: Callable[[Tensor], Tensor], rows: Rows) -> Rows:
    """Return the rows with every column changed."""
    inputs, labels_B, weights_B, targets_B = rows
    return Rows(
        Inputs(change(inputs.ids_BW), change(inputs.values_BN)),
        change(labels_B),
        None if weights_B is None else change(weights_B),
        None if targets_B is None else change(targets_B),
    )


def _joined(blocks: list[Rows]) -> Rows:
    """Return the rows of several blocks as one."""
    columns = zip(*(block.tensors() for block in blocks), strict=True)
    joined = (torch.cat(column) for column in columns)
    return _mapped(lambda _: next(joined), blocks[0])


class Place(NamedTuple):
    """Where a step's rows are: the step of an epoch, and this worker's part of its batch."""

    epoch: int
    step: int
    part: slice


class Batches(Protocol):
    """The batches of a run, by number of step."""

    def take(self, step: int) -> Rows:
        """Return this worker's rows of a step."""
        ...


def batches_of(feed: Feed, device: torch.device, place_of: Callable[[int], Place], num_steps: int) -> Batches:
    """Return the way to get batches that suits the device."""
    if device.type != "cuda":
        return Direct(feed, device, place_of)
    if isinstance(feed, Shuffled) and feed.num_bytes <= FREE_SHARE * free_bytes(device):
        return Resident(feed, device, place_of)
    return Ahead(feed, device, place_of, num_steps)


def free_bytes(device: torch.device) -> int:
    """Return how much memory of a GPU is free."""
    return int(torch.cuda.mem_get_info(device)[0])


class Direct:
    """Batches that are gathered when they are asked for."""

    def __init__(self, feed: Feed, device: torch.device, place_of: Callable[[int], Place]) -> None:
        self._feed, self._device, self._place_of = feed, device, place_of

    def take(self, step: int) -> Rows:
        """Gather this worker's rows of a step and copy them."""
        return _sent(*self._feed.take(*self._place_of(step)), self._device)


class Resident:
    """Batches that the device takes from its own copy of all rows.

    A thread draws the order of the next epoch meanwhile, as it can take longer than many steps.
    """

    def __init__(self, feed: Shuffled, device: torch.device, place_of: Callable[[int], Place]) -> None:
        self._feed, self._device, self._place_of = feed, device, place_of
        self._thread = ThreadPoolExecutor(1, "recap-order")
        self._epoch = -1
        self._order, self._ahead = torch.empty(0), (-1, Future[Tensor]())
        self._rows = _joined([_sent(*block, device) for block in feed.blocks()])

    def take(self, step: int) -> Rows:
        """Return this worker's rows of a step."""
        epoch, at, part = self._place_of(step)
        if epoch != self._epoch:
            waiting = self._ahead[1] if self._ahead[0] == epoch else self._thread.submit(self._draw, epoch)
            self._epoch, self._order = epoch, waiting.result()
            self._ahead = epoch + 1, self._thread.submit(self._draw, epoch + 1)
        order = self._order[self._feed.places(at, part)]
        return _mapped(lambda column: column.index_select(0, order), self._rows)

    def _draw(self, epoch: int) -> Tensor:
        return send(torch.from_numpy(self._feed.order(epoch)), self._device)


class Ahead:
    """Batches that a thread gathers and copies, two ahead of the one that is asked for, up to the run's last one."""

    def __init__(
        self, feed: Feed, device: torch.device, place_of: Callable[[int], Place], num_steps: int
    ) -> None:
        self._direct, self._device, self._num_steps = Direct(feed, device, place_of), device, num_steps
        self._stream = None if device.type != "cuda" else torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._thread = ThreadPoolExecutor(1, "recap-batches")
        self._queue: deque[tuple[int, Future[tuple[Rows, torch.cuda.Event | None]]]] = deque()

    def take(self, step: int) -> Rows:
        """Return this worker's rows of a step; wait only for the first step, and after a jump."""
        if not self._queue or self._queue[0][0] != step:
            self._queue.clear()
        first = self._queue[-1][0] + 1 if self._queue else step
        for following in range(first, max(min(step + AHEAD + 1, self._num_steps), step + 1)):
            self._queue.append((following, self._thread.submit(self._gather, following)))
        rows, copied = self._queue.popleft()[1].result()
        if copied is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(copied)
            for tensor in rows.tensors():
                tensor.record_stream(
                    stream
                )  # Their memory is not given to later copies before this stream is done.
        return rows

    def _gather(self, step: int) -> tuple[Rows, "torch.cuda.Event | None"]:
        if self._stream is None:
            return self._direct.take(step), None
        with torch.cuda.stream(self._stream):
            return self._direct.take(step), self._stream.record_event()
