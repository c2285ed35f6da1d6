"""AFN, the adaptive factorisation network. With its default settings it has a second MLP: AFN+.

Shapes: B batch, F fields, d vector size, N logarithmic neurons.
"""

from typing import ClassVar, Literal

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from recap_ctr.data.layout import Layout
from recap_ctr.nn.embedding import Embedding
from recap_ctr.nn.initial import linear
from recap_ctr.nn.interface import Inputs, Output
from recap_ctr.nn.mlp import DeepConfig, DeepHead
from recap_ctr.nn.norms import BatchNorm


class AFNConfig(DeepConfig):
    """The config of AFN. `log_*` belong to the MLP on the neurons, `units` and `dropout` to the plain MLP."""

    units: tuple[PositiveInt, ...] = (400, 400, 400)
    """Layers of the plain MLP. Empty: no plain MLP, which makes the model AFN instead of AFN+."""
    num_neurons: PositiveInt = 100
    log_units: tuple[PositiveInt, ...] = Field((400, 400, 400), min_length=1)
    log_dropout: float = Field(0.2, ge=0, lt=1)
    loss: Literal["bce"] = "bce"


class Logarithmic(nn.Module):
    """Neurons that multiply fields with learned exponents: a weighted sum of logarithms, then exp."""

    smallest = 1e-5  # vectors start near zero, where logarithms would be huge

    def __init__(self, num_fields: int, num_neurons: int) -> None:
        super().__init__()
        self.norm_in = BatchNorm(num_fields)
        self.exponents = linear(num_fields, num_neurons, bias=False)
        self.norm_out = BatchNorm(num_neurons)

    def forward(self, e_BFd: Tensor) -> Tensor:
        """Return one vector per neuron."""
        log_BFd = self.norm_in(e_BFd.abs().clamp(min=self.smallest).log())
        product_BNd: Tensor = self.norm_out(torch.exp(self.exponents.weight @ log_BFd))
        return product_BNd


class AFN(nn.Module):
    """For interactions of unknown order: it learns the orders, fractional ones included."""

    paper: ClassVar[str] = "Cheng et al., Adaptive Factorization Network, AAAI 2020 (arXiv 1909.03276)"

    def __init__(self, config: AFNConfig, layout: Layout) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(layout, config.dim)
        self.logarithmic = Logarithmic(layout.num_fields, config.num_neurons)
        self.log_deep = DeepHead(
            config.num_neurons * config.dim,
            config.log_units,
            batch_norm=config.batch_norm,
            dropout=config.log_dropout,
        )
        if config.units:
            # The MLP has separate vectors, unlike in DeepFM: logarithms and an MLP need different scales.
            self.deep_embedding = Embedding(layout, config.dim)
            width = layout.num_fields * config.dim
            self.deep = DeepHead(width, config.units, batch_norm=config.batch_norm, dropout=config.dropout)
            self.head = linear(2, 1)

    def forward(self, inputs: Inputs) -> Output:
        """Return one logit per row."""
        logit_B: Tensor = self.log_deep(self.logarithmic(self.embedding(inputs)).flatten(1))
        if self.config.units:
            deep_B = self.deep(self.deep_embedding(inputs).flatten(1))
            logit_B = self.head(torch.stack([logit_B, deep_B], dim=1)).squeeze(-1)
        return Output(logit_B, {})
