"""EulerNet: vectors as complex numbers, so that interactions of a learned order are products of powers.

Shapes: B batch, F fields, d vector size, I neurons before a layer, N neurons after it.
"""

from itertools import pairwise
from typing import ClassVar, Literal

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor, nn

from recap_ctr.config import Frozen
from recap_ctr.data.layout import Layout
from recap_ctr.nn.dropout import Dropout
from recap_ctr.nn.embedding import Embedding
from recap_ctr.nn.initial import xavier_normal_
from recap_ctr.nn.interface import Inputs, Output


class EulerNetConfig(Frozen):
    """The config of EulerNet."""

    dim: int = Field(16, ge=2)
    neurons: tuple[PositiveInt, ...] = Field((52,), min_length=1)
    """Complex vectors after each layer. If there are as many as fields, they start as a copy of the fields. Otherwise
    each starts as one random field, so with few neurons some fields are lost. The authors use 52 for Frappe and
    MovieLens-tag.
    """
    explicit_dropout: float = Field(0.0, ge=0, lt=1)
    implicit_dropout: float = Field(0.0, ge=0, lt=1)
    layer_norm: bool = True
    implicit_std: PositiveFloat | None = None
    """Initial standard deviation of the implicit maps; None: Xavier's. The port to FuxiCTR advises 0.1 for dim = 128,
    together with shrink = 4."""
    shrink: PositiveFloat = 1.0
    """Divisor of the initial real and imaginary parts."""
    loss: Literal["bce"] = "bce"


def first_orders(inputs: int, outputs: int) -> Tensor:
    """Return the initial orders of the interactions: each output is one input, the same one or a random one."""
    if inputs == outputs:
        return torch.eye(inputs)
    return torch.softmax(torch.randn(inputs, outputs) / 0.01, dim=0)


class EulerLayer(nn.Module):
    """A layer that adds an explicit and an implicit part.

    The explicit part is a product of powers, which is linear in log modulus and phase. The implicit part is one linear
    map, applied to the real and the imaginary part.
    """

    def __init__(self, config: EulerNetConfig, inputs: int, outputs: int) -> None:
        super().__init__()
        d = config.dim
        self.orders_IN = nn.Parameter(first_orders(inputs, outputs))
        self.log_modulus_bias_Nd = nn.Parameter(0.01 * torch.randn(outputs, d))
        self.phase_bias_Nd = nn.Parameter(0.01 * torch.randn(outputs, d))
        self.implicit = nn.Linear(inputs * d, outputs * d)
        if not self.implicit.weight.is_meta:
            if config.implicit_std is None:
                nn.init.xavier_uniform_(self.implicit.weight)
            else:
                nn.init.normal_(self.implicit.weight, std=config.implicit_std)
        self.explicit_dropout = Dropout(config.explicit_dropout)
        self.implicit_dropout = Dropout(config.implicit_dropout)
        self.layer_norm = config.layer_norm
        # These are unused without `layer_norm`, but published totals count them.
        self.real_norm, self.imaginary_norm = nn.LayerNorm(d), nn.LayerNorm(d)

    def forward(self, parts: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the real and the imaginary part after the layer."""
        r_BId, q_BId = parts
        log_BId = self.explicit_dropout(0.5 * torch.log(r_BId.square() + q_BId.square() + 1e-8))
        phase_BId = self.explicit_dropout(torch.atan2(q_BId, r_BId))
        modulus_BNd = torch.exp(self.orders_IN.T @ log_BId + self.log_modulus_bias_Nd)
        phase_BNd = self.orders_IN.T @ phase_BId + self.phase_bias_Nd
        r_BNd = self._implicit(r_BId) + modulus_BNd * torch.cos(phase_BNd)
        q_BNd = self._implicit(q_BId) + modulus_BNd * torch.sin(phase_BNd)
        if self.layer_norm:
            r_BNd, q_BNd = self.real_norm(r_BNd), self.imaginary_norm(q_BNd)
        return r_BNd, q_BNd

    def _implicit(self, part_BId: Tensor) -> Tensor:
        mapped: Tensor = self.implicit(self.implicit_dropout(part_BId).flatten(1))
        return torch.relu(mapped).view(part_BId.shape[0], -1, part_BId.shape[-1])


class EulerNet(nn.Module):
    """For interactions of unknown order: it learns which powers of which fields to multiply."""

    paper: ClassVar[str] = "Tian et al., EulerNet, SIGIR 2023 (arXiv 2304.10711)"

    def __init__(self, config: EulerNetConfig, layout: Layout) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(layout, config.dim)
        self.modulus_F1 = nn.Parameter(torch.ones(layout.num_fields, 1))
        sizes = pairwise((layout.num_fields, *config.neurons))
        self.layers = nn.Sequential(*(EulerLayer(config, inputs, outputs) for inputs, outputs in sizes))
        # The biases of the head and of the implicit maps keep torch's default: upstream initialises its weights
        # before these layers exist.
        self.head = nn.Linear(config.neurons[-1] * config.dim, 1)
        xavier_normal_(self.head.weight)

    def forward(self, inputs: Inputs) -> Output:
        """Return one logit per row."""
        phase_BFd = self.embedding(inputs)
        modulus_F1 = self.modulus_F1 / self.config.shrink
        parts = modulus_F1 * torch.cos(phase_BFd), modulus_F1 * torch.sin(phase_BFd)
        r_BNd, q_BNd = self.layers(parts)
        # Both parts share one head, so its bias counts twice, as in the published code.
        logit_B1: Tensor = self.head(r_BNd.flatten(1)) + self.head(q_BNd.flatten(1))
        return Output(logit_B1.squeeze(-1), {})
