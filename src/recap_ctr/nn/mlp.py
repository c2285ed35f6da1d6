"""Parts that most published models share: a multi-layer perceptron (MLP) and a wide (linear) part.

Shapes: B batch, I inputs, U units of the last layer, K heads.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from recap_ctr.config import Frozen
from recap_ctr.data.layout import Layout
from recap_ctr.nn.dropout import Dropout
from recap_ctr.nn.embedding import Embedding
from recap_ctr.nn.initial import linear, xavier_normal_
from recap_ctr.nn.interface import Inputs
from recap_ctr.nn.norms import BatchNorm


class DeepConfig(Frozen):
    """The config that all models with one MLP share. The defaults are a good start for ML-1M."""

    dim: PositiveInt = 16
    units: tuple[PositiveInt, ...] = Field((400, 400, 400), min_length=1)
    batch_norm: bool = True
    dropout: float = Field(0.2, ge=0, lt=1)


class MLP(nn.Module):
    """A stack of hidden layers, each a linear map, optional BatchNorm, ReLU and dropout."""

    def __init__(
        self, width: int, units: Sequence[int], *, batch_norm: bool = False, dropout: float = 0.0
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for size in units:
            layers.append(linear(width, size))
            if batch_norm:
                layers.append(BatchNorm(size))
            layers += [nn.ReLU(), Dropout(dropout)]
            width = size
        self.layers = nn.Sequential(*layers)

    def forward(self, x_BI: Tensor) -> Tensor:
        """Return the units of the last hidden layer."""
        x_BU: Tensor = self.layers(x_BI)
        return x_BU


class DeepHead(nn.Module):
    """An MLP followed by a linear map to one logit."""

    def __init__(
        self, width: int, units: Sequence[int], *, batch_norm: bool = False, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.hidden = MLP(width, units, batch_norm=batch_norm, dropout=dropout)
        self.head = linear(units[-1], 1)

    def forward(self, x_BI: Tensor) -> Tensor:
        """Return one logit per row."""
        logit_B1: Tensor = self.head(self.hidden(x_BI))
        return logit_B1.squeeze(-1)


class DeepHeads(nn.Module):
    """Several MLPs side by side, each with a logit of its own; they share their input and nothing else."""

    def __init__(self, count: int, width: int, units: Sequence[int]) -> None:
        super().__init__()
        widths = [width, *units]
        self.hidden = nn.ModuleList(
            _ParallelLinear(count, inputs, outputs) for inputs, outputs in pairwise(widths)
        )
        self.head = _ParallelLinear(count, widths[-1], 1)

    def forward(self, x_BI: Tensor) -> Tensor:
        """Return one logit per head and row, (K, B)."""
        x_KBU = x_BI
        for layer in self.hidden:
            x_KBU = layer(x_KBU).relu()
        logit_KB1: Tensor = self.head(x_KBU)
        return logit_KB1.squeeze(-1)


class _ParallelLinear(nn.Module):
    """A linear map for each head."""

    def __init__(self, count: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(count, 1, outputs))
        for weight_IU in self.weight:
            xavier_normal_(weight_IU)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of each head, for inputs of its own or for those of all."""
        return x @ self.weight + self.bias


class Wide(nn.Module):
    """A linear model: the sum of a row's weights, one per value; a numeric field's weight times its number."""

    def __init__(self, layout: Layout, *, bias: bool) -> None:
        super().__init__()
        self.embedding = Embedding(layout, 1, sum_pooling=True)
        self.bias = nn.Parameter(torch.zeros(())) if bias else None

    def forward(self, inputs: Inputs) -> Tensor:
        """Return one logit per row."""
        logit_B: Tensor = self.embedding(inputs).sum(dim=(1, 2))
        return logit_B if self.bias is None else logit_B + self.bias
