"""Heads of the network on click rates: they share the table, and learn each by itself."""

import torch
from torch.nn import functional as F

from recap_ctr.data.layout import Layout
from recap_ctr.data.shards import PreparedData
from recap_ctr.models.rates import Rates, RatesConfig
from recap_ctr.nn.interface import Inputs, Output
from recap_ctr.nn.losses import LOSSES

ROWS = 16


def rates(layout: Layout, heads: int) -> Rates:
    torch.manual_seed(1)
    field = next(field.name for field in layout.fields if field.pooling is None)
    crosses = ((field,), (field, field))
    return Rates(RatesConfig(crosses=crosses, units=(8, 4), heads=heads, loss="members-bce"), layout)


def coded() -> Inputs:
    codes = torch.randint(0, 255, (ROWS, 4), generator=torch.Generator().manual_seed(2))
    return Inputs(torch.empty(ROWS, 0, dtype=torch.int32), codes)


def test_the_logit_is_the_mean_of_heads_that_differ(prepared: PreparedData) -> None:
    output: Output = rates(prepared.layout, 3)(coded())
    members_KB = output.aux["members_KB"]
    assert members_KB.shape == (3, ROWS) and members_KB.std(0).min() > 0
    torch.testing.assert_close(output.logit_B, members_KB.mean(0))


def test_a_head_is_a_small_mlp(prepared: PreparedData) -> None:
    model, inputs = rates(prepared.layout, 3), coded()
    weights = dict(model.deep.named_parameters())
    x = single_input(model, inputs)
    for layer in range(2):
        x = (x @ weights[f"hidden.{layer}.weight"][1] + weights[f"hidden.{layer}.bias"][1]).relu()
    expected = (x @ weights["head.weight"][1] + weights["head.bias"][1]).squeeze(-1)
    torch.testing.assert_close(model(inputs).aux["members_KB"][1], expected)


def single_input(model: Rates, inputs: Inputs) -> torch.Tensor:
    """Return what all heads read."""
    seen: list[torch.Tensor] = []
    with torch.no_grad():
        handle = model.deep.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
        model(inputs)
        handle.remove()
    return seen[0]


def test_each_head_learns_by_itself(prepared: PreparedData) -> None:
    """The gradient of one head is a third of what it would be alone, whatever the others say."""
    model, inputs, labels = rates(prepared.layout, 3), coded(), (torch.arange(ROWS) % 2).float()
    output = model(inputs)
    loss = LOSSES[model.config.loss](output, labels, None)
    losses = [F.binary_cross_entropy_with_logits(row, labels) for row in output.aux["members_KB"]]
    torch.testing.assert_close(loss, sum(losses) / 3)
    head = model.deep.head.weight
    (whole,) = torch.autograd.grad(loss, head, retain_graph=True)
    (alone,) = torch.autograd.grad(losses[1], head)
    torch.testing.assert_close(whole[1], alone[1] / 3)
    assert not alone[0].any()


def test_scaled_heads_have_scaled_logits(prepared: PreparedData) -> None:
    model, inputs = rates(prepared.layout, 3), coded()
    before = model(inputs).logit_B
    model.scale(0.5)
    torch.testing.assert_close(model(inputs).logit_B, 0.5 * before)
