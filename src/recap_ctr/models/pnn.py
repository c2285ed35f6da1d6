"""PNN, the product-based network, with inner products (IPNN).

Shapes: B batch, F fields, d vector size, D = F * d, P = F * (F - 1) / 2 pairs of fields.
"""

from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from recap_ctr.data.layout import Layout
from recap_ctr.nn.embedding import Embedding
from recap_ctr.nn.interface import Inputs, Output
from recap_ctr.nn.mlp import DeepConfig, DeepHead


class PNNConfig(DeepConfig):
    """The config of PNN."""

    loss: Literal["bce"] = "bce"


class PNN(nn.Module):
    """For pairs of fields with an MLP: it reads the inner products of all pairs as well as the vectors."""

    paper: ClassVar[str] = (
        "Qu et al., Product-based Neural Networks for User Response Prediction, ICDM 2016 (arXiv 1611.00144)"
    )
    pairs_P: Tensor

    def __init__(self, config: PNNConfig, layout: Layout) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(layout, config.dim)
        F = layout.num_fields
        first_P, second_P = torch.triu_indices(F, F, offset=1)
        self.register_buffer("pairs_P", first_P * F + second_P, persistent=False)
        width = F * config.dim + len(self.pairs_P)
        self.deep = DeepHead(width, config.units, batch_norm=config.batch_norm, dropout=config.dropout)

    def forward(self, inputs: Inputs) -> Output:
        """Return one logit per row."""
        e_BFd = self.embedding(inputs)
        products_BFF = e_BFd @ e_BFd.mT
        products_BP = products_BFF.flatten(1).index_select(1, self.pairs_P)
        return Output(self.deep(torch.cat([e_BFd.flatten(1), products_BP], dim=1)), {})
