"""xDeepFM: a compressed interaction network (CIN), a linear part and an MLP.

Shapes: B batch, F fields, d vector size, H vectors of a CIN layer (F of them at first), P = F * H.
"""

from itertools import pairwise
from typing import ClassVar, Literal

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from recap_ctr.data.layout import Layout
from recap_ctr.nn.embedding import Embedding
from recap_ctr.nn.initial import linear
from recap_ctr.nn.interface import Inputs, Output
from recap_ctr.nn.mlp import DeepConfig, DeepHead, Wide


class XDeepFMConfig(DeepConfig):
    """The config of xDeepFM."""

    cin_sizes: tuple[PositiveInt, ...] = Field((16, 16), min_length=1)
    loss: Literal["bce"] = "bce"


class CIN(nn.Module):
    """A compressed interaction network.

    Each layer computes all products of a field's vector and a vector of the previous layer, and mixes them into H new
    vectors. It is linear and without the paper's split, as in the published results. The head reads the sum of the
    coordinates of every layer's vectors.
    """

    def __init__(self, num_fields: int, sizes: tuple[int, ...]) -> None:
        super().__init__()
        *layers, self.last = (
            linear(num_fields * before, size) for before, size in pairwise((num_fields, *sizes))
        )
        self.layers = nn.ModuleList(layers)
        self.head = linear(sum(sizes), 1)

    def forward(self, e_BFd: Tensor) -> Tensor:
        """Return one logit per row."""
        e_BdF = e_BFd.mT.contiguous()
        x_BdH = e_BdF
        pooled: list[Tensor] = []
        for layer in self.layers:
            products_BdP = (e_BdF.unsqueeze(-1) * x_BdH.unsqueeze(-2)).flatten(2)
            x_BdH = layer(products_BdP)
            pooled.append(x_BdH.sum(1))
        # The last layer needs only sums, and a sum of products over d is a matrix product: d times less memory
        # and work than the products themselves.
        sums_BP = (e_BFd @ x_BdH).flatten(1)
        pooled.append(F.linear(sums_BP, self.last.weight, e_BFd.shape[-1] * self.last.bias))
        logit_B1: Tensor = self.head(torch.cat(pooled, dim=1))
        return logit_B1.squeeze(-1)


class XDeepFM(nn.Module):
    """For interactions of whole vectors beyond DeepFM's pairs: each CIN layer raises the order by one."""

    paper: ClassVar[str] = "Lian et al., xDeepFM, KDD 2018 (arXiv 1803.05170)"

    def __init__(self, config: XDeepFMConfig, layout: Layout) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(layout, config.dim)
        self.wide = Wide(layout, bias=False)
        self.cin = CIN(layout.num_fields, config.cin_sizes)
        width = layout.num_fields * config.dim
        self.deep = DeepHead(width, config.units, batch_norm=config.batch_norm, dropout=config.dropout)

    def forward(self, inputs: Inputs) -> Output:
        """Return one logit per row."""
        e_BFd = self.embedding(inputs)
        return Output(self.wide(inputs) + self.cin(e_BFd) + self.deep(e_BFd.flatten(1)), {})
