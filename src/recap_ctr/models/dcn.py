"""DCN, the first version of the Deep & Cross Network.

Shapes: B batch, L cross layers, D = fields * vector size, U units of the MLP's last layer, DU = D + U.
"""

from typing import ClassVar, Literal

import torch
from pydantic import PositiveInt
from torch import Tensor, nn

from recap_ctr.data.layout import Layout
from recap_ctr.nn.embedding import Embedding
from recap_ctr.nn.initial import linear, normal_
from recap_ctr.nn.interface import Inputs, Output
from recap_ctr.nn.mlp import MLP, DeepConfig


class DCNConfig(DeepConfig):
    """The config of DCN."""

    num_layers: PositiveInt = 3
    loss: Literal["bce"] = "bce"


class VectorCross(nn.Module):
    """Cross layers with two vectors of weights each: x' = x + (w · x) x_0 + b."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_layers, width))
        self.bias = nn.Parameter(torch.zeros(num_layers, width))
        normal_(self.weight, (2 / (width + 1)) ** 0.5)  # each w is a linear map to one number

    def forward(self, x0_BD: Tensor) -> Tensor:
        """Return the output of the last cross layer."""
        x_BD = x0_BD
        for w_D, b_D in zip(self.weight, self.bias, strict=True):
            x_BD = x_BD + (x_BD @ w_D).unsqueeze(-1) * x0_BD + b_D
        return x_BD


class DCN(nn.Module):
    """For interactions of low order at almost no cost: each cross layer adds one order and 2 D weights."""

    paper: ClassVar[str] = (
        "Wang et al., Deep & Cross Network for Ad Click Predictions, ADKDD 2017 (arXiv 1708.05123)"
    )

    def __init__(self, config: DCNConfig, layout: Layout) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(layout, config.dim)
        width = layout.num_fields * config.dim
        self.cross = VectorCross(width, config.num_layers)
        self.deep = MLP(width, config.units, batch_norm=config.batch_norm, dropout=config.dropout)
        self.head = linear(width + config.units[-1], 1)

    def forward(self, inputs: Inputs) -> Output:
        """Return one logit per row."""
        x_BD = self.embedding(inputs).flatten(1)
        both_BDU = torch.cat([self.cross(x_BD), self.deep(x_BD)], dim=1)
        return Output(self.head(both_BDU).squeeze(-1), {})
