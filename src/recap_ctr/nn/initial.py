"""Initial weights. Weights on the meta device are only counted, so no numbers are drawn for them."""

from torch import Tensor, nn


def normal_(weight: Tensor, std: float) -> None:
    """Fill `weight` in place from a normal distribution around zero."""
    if not weight.is_meta:
        nn.init.normal_(weight, std=std)


def xavier_normal_(weight: Tensor, gain: float = 1.0) -> None:
    """Fill `weight` in place with standard deviation gain * sqrt(2 / (fan in + fan out)), as published models do."""
    if not weight.is_meta:
        nn.init.xavier_normal_(weight, gain)


def linear(inputs: int, outputs: int, *, bias: bool = True) -> nn.Linear:
    """Return a linear layer as the published models start it: Xavier normal weights, zero bias."""
    layer = nn.Linear(inputs, outputs, bias=bias)
    xavier_normal_(layer.weight)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer
