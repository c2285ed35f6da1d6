"""How weights start. Weights on the meta device, which are only counted, are left alone: drawing there is slow."""

from torch import Tensor, nn


def normal_(weight: Tensor, std: float) -> None:
    if not weight.is_meta:
        nn.init.normal_(weight, std=std)


def xavier_normal_(weight: Tensor, gain: float = 1.0) -> None:
    """Standard deviation gain * sqrt(2 / (fan in + fan out)): every linear map of the published models."""
    if not weight.is_meta:
        nn.init.xavier_normal_(weight, gain)


def linear(inputs: int, outputs: int, *, bias: bool = True) -> nn.Linear:
    """A linear map as the published models start it: Xavier normal, zero bias."""
    layer = nn.Linear(inputs, outputs, bias=bias)
    xavier_normal_(layer.weight)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer
