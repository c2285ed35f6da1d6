"""The parts of a model that depend on more than one row, for a worker whose twin has the same rows."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from recap_ctr.errors import InputError
from recap_ctr.jobs.executor import JobError
from recap_ctr.nn.cross import Cross
from recap_ctr.nn.dropout import Dropout, keep_mask
from recap_ctr.nn.group import Group, alone, current_group, joined, refuse_parts_of_torch
from recap_ctr.nn.lora import draw_for_rows
from recap_ctr.nn.losses import bce
from recap_ctr.nn.norms import BatchNorm, ScaleNorm

CPU = torch.device("cpu")


class Twins(Group):
    """The first of two workers with the same rows: every sum is twice its own share."""

    def __init__(self) -> None:
        super().__init__(rank=0, size=2)

    def _reduce(self, tensor: Tensor) -> None:
        tensor.mul_(2)


def results(layer: torch.nn.Module, x: Tensor, call: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Return a layer's output, the gradient of its input, and its statistics."""
    x = x.clone().requires_grad_()
    layer.train()
    out = call(x)
    (out * torch.linspace(-1, 2, out[0].numel(), dtype=out.dtype).view_as(out[0])).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    return [out.detach(), x.grad, *layer.buffers()]


@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (lambda: BatchNorm(5), (6, 5)),
        (lambda: BatchNorm(5), (6, 5, 3)),
        (lambda: ScaleNorm(2), (6, 2, 4)),
        (lambda: Cross(8, num_heads=2), (6, 2, 8)),
    ],
)
def test_norms_take_the_statistics_of_all_rows(
    build: Callable[[], torch.nn.Module], shape: tuple[int, ...]
) -> None:
    """Of a batch that is two times the same rows, a worker gets the first half."""
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64) + 3
    torch.manual_seed(1)
    whole, shared = build().double(), build().double()
    shared.load_state_dict(whole.state_dict())

    def call(layer: torch.nn.Module) -> Callable[[Tensor], Tensor]:
        return (lambda x: layer(x, None)) if isinstance(layer, Cross) else layer

    expected = results(whole, torch.cat([x, x]), call(whole))
    with joined(Twins()) as group:
        group.enter_batch(12)
        got = results(shared, x, call(shared))
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs[: len(ours)] if ours.ndim else theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("weighted", [False, True])
def test_the_loss_is_the_mean_over_all_rows(weighted: bool) -> None:
    logit = torch.tensor([0.3, -2.0, 1.5], requires_grad=True)
    target, weight = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([2.0, 0.5, 1.0]) if weighted else None
    expected = bce(logit, target, weight)
    (gradient,) = torch.autograd.grad(expected, logit)
    with joined(Twins()) as group:
        group.enter_batch(6)
        loss = bce(logit, target, weight)
    (ours,) = torch.autograd.grad(loss, logit)
    assert loss.item() == pytest.approx(expected.item())
    torch.testing.assert_close(2 * ours, gradient)  # The other half is the twin's.


@pytest.mark.parametrize("shape", [(7, 3), (7, 2, 5), (7,)])
def test_workers_draw_their_rows_of_one_mask(shape: tuple[int, ...]) -> None:
    def draw(rows: int) -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(3)
        mask = keep_mask((rows, *shape[1:]), 0.4, CPU)
        return mask, draw_for_rows(9, torch.empty(rows, 2)), keep_mask((rows, *shape[1:]), 0.4, CPU)

    whole = draw(shape[0])
    parts = []
    for rank in range(3):
        with joined(Group(rank, 3)) as group:
            share = group.enter_batch(shape[0])
            parts.append(draw(share.stop - share.start))
    for at, expected in enumerate(whole):
        assert torch.equal(torch.cat([part[at] for part in parts]), expected)


def test_one_is_alone_after_an_error_too() -> None:
    with pytest.raises(KeyError), joined(Group(1, 4)) as group, alone():
        assert current_group().size == 1 and not group.is_first
        raise KeyError
    assert current_group().size == 1


def test_a_message_that_does_not_come_through_says_why() -> None:
    class Broken(Twins):
        def _reduce(self, tensor: Tensor) -> None:
            raise RuntimeError("[/gloo/pair.cc:553] Connection closed by peer. Explanations.\nMore of them.")

    with pytest.raises(
        JobError, match=r"lost contact with another one, which ended \(Connection closed by peer\)"
    ):
        Broken().sum_(torch.zeros(1))


def test_parts_that_do_not_ask_for_the_group_are_refused() -> None:
    refuse_parts_of_torch(torch.nn.Sequential(torch.nn.LayerNorm(2), BatchNorm(2), Dropout(0.1)))
    for part in (torch.nn.BatchNorm1d(2), torch.nn.Dropout(0.1)):
        with pytest.raises(InputError, match=f"{type(part).__name__} \\(0\\) knows nothing of other workers"):
            refuse_parts_of_torch(torch.nn.Sequential(part))
