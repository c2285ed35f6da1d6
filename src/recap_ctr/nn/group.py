"""The workers that train one model together, each on its share of every batch.

A process alone is a group of one, and all that is here then returns its argument. Parts whose result depends on more
than one row (norms, losses, dropout, tables) ask `current_group` for the others (docs/decisions/0022).
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from recap_ctr.errors import InputError
from recap_ctr.jobs.executor import LostWorkerError


class Group:
    """The workers that train one model together, as one of them sees it."""

    def __init__(self, rank: int = 0, size: int = 1, *, local_size: int = 1) -> None:
        self.rank, self.size = rank, size
        self.local_size = local_size
        """How many of the workers share this machine."""
        self._rows, self._place = 0, slice(None)

    @property
    def is_first(self) -> bool:
        """Return whether this worker writes what a run writes once."""
        return self.rank == 0

    def share(self, count: int) -> slice:
        """Return this worker's share of `count` things in a row; shares differ by one at most."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def enter_batch(self, rows: int) -> slice:
        """Begin a batch of `rows` rows over all workers, and return this worker's share of it."""
        self._rows, self._place = rows, self.share(rows)
        return self._place

    def rows_of_all(self, rows: int) -> int:
        """Return how many rows the current batch has over all workers; `rows` are those of this worker."""
        if self.size == 1:
            return rows
        assert rows == self._place.stop - self._place.start, "a batch is entered with `enter_batch`"
        return self._rows

    @property
    def place(self) -> slice:
        """Return this worker's place among the rows of the current batch."""
        return slice(None) if self.size == 1 else self._place

    def sum_(self, tensor: Tensor) -> Tensor:
        """Replace a tensor by its sum over all workers, in place; all get the same bits."""
        if self.size > 1:
            with _contact():
                self._reduce(tensor)
        return tensor

    def sum_all_(self, tensors: Sequence[Tensor]) -> None:
        """Replace several tensors by their sums, in one message."""
        if self.size > 1 and tensors:
            sums = self.sum_(torch.cat([tensor.reshape(-1) for tensor in tensors]))
            parts = torch.split(sums, [tensor.numel() for tensor in tensors])
            for tensor, part in zip(tensors, parts, strict=True):
                tensor.copy_(part.view_as(tensor))

    def total(self, tensor: Tensor) -> Tensor:
        """Return the sum over all workers. What depends on it differs between workers, such as normalised rows."""
        return tensor if self.size == 1 else _apply(tensor, self, sums_gradients=True)

    def common_total(self, tensor: Tensor) -> Tensor:
        """Return the sum over all workers. What depends on it is the same for all of them, such as the loss."""
        return tensor if self.size == 1 else _apply(tensor, self, sums_gradients=False)

    def exchange(self, tensor: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Send `sent[r]` rows of a tensor to each worker r, in order, and return the rows that they send here."""
        out = tensor.new_empty(sum(received), *tensor.shape[1:])
        with _contact():
            self._exchange(out, tensor.contiguous(), received, sent)
        return out

    def decide(self, decision: bool) -> bool:
        """Return what the first worker decided, so that all do the same; clocks and files may differ between them."""
        return decision if self.size == 1 else bool(self.sum_(torch.tensor(int(self.is_first and decision))))

    def wait(self) -> None:
        """Wait until all workers are here."""
        self.decide(True)

    def _reduce(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor)

    def _exchange(self, out: Tensor, tensor: Tensor, received: list[int], sent: list[int]) -> None:
        dist.all_to_all_single(out, tensor, received, sent)


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group, sums_gradients: bool) -> Tensor:
        ctx.group, ctx.sums_gradients = group, sums_gradients
        return group.sum_(tensor.clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return (ctx.group.sum_(gradient.clone()) if ctx.sums_gradients else gradient), None, None


def _apply(tensor: Tensor, group: Group, *, sums_gradients: bool) -> Tensor:
    total = _Total.apply(tensor, group, sums_gradients)  # type: ignore[no-untyped-call]
    assert isinstance(total, Tensor)
    return total


_current = Group()


def current_group() -> Group:
    """Return the group that this process works in."""
    return _current


@contextmanager
def joined(group: Group) -> Iterator[Group]:
    """Work in a group while the context is open."""
    global _current
    before, _current = _current, group
    try:
        yield group
    finally:
        _current = before


def alone() -> Any:
    """Work alone while the context is open, such as on a model that the others don't have."""
    return joined(Group())


def refuse_parts_of_torch(model: nn.Module) -> None:
    """Refuse a model with parts that would make its results depend on the number of workers."""
    kinds = (
        nn.modules.batchnorm._BatchNorm,
        nn.modules.instancenorm._InstanceNorm,
        nn.modules.dropout._DropoutNd,
    )
    for name, module in model.named_modules():
        if isinstance(module, kinds) and not type(module).__module__.startswith("recap_ctr."):
            raise InputError(
                f"{type(module).__name__} ({name}) knows nothing of other workers",
                fix="build the model of recap_ctr.nn.norms and recap_ctr.nn.dropout, or remove --workers",
            )


@contextmanager
def _contact() -> Iterator[None]:
    """Say what it means when a message doesn't come through: another worker is gone."""
    try:
        yield
    except RuntimeError as error:
        reason = re.sub(r"^\[[^]]*\] ", "", str(error)).partition(". ")[0].partition("\n")[0]
        raise LostWorkerError(f"this worker lost contact with another one, which ended ({reason})") from error
