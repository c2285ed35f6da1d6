"""DCNv2, the Deep & Cross Network whose cross layers are full matrices or mixtures of low-rank ones.

Shapes: B batch, D = fields * vector size, E matrices of a mixture, R their rank.
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


class DCNv2Config(DeepConfig):
    """The config of DCNv2."""

    num_layers: PositiveInt = 3
    structure: Literal["parallel", "stacked"] = "parallel"
    """Whether the MLP reads the vectors, like the cross layers, or the output of the cross layers."""
    rank: PositiveInt | None = None
    """None: full matrices. Otherwise mixtures of `num_experts` matrices of this rank; published code uses 32."""
    num_experts: PositiveInt = 4
    """Low-rank matrices per cross layer."""
    loss: Literal["bce"] = "bce"


class MatrixCross(nn.Module):
    """Cross layers with one matrix each: x' = x + x_0 * (W x + b)."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(linear(width, width) for _ in range(num_layers))

    def forward(self, x0_BD: Tensor) -> Tensor:
        """Return the output of the last cross layer."""
        x_BD = x0_BD
        for layer in self.layers:
            x_BD = x_BD + x0_BD * layer(x_BD)
        return x_BD


class MixtureCross(nn.Module):
    """Cross layers that mix E low-rank maps each, U tanh(C tanh(Vᵀ x)), by gates that all layers share."""

    def __init__(self, width: int, num_layers: int, rank: int, num_experts: int) -> None:
        super().__init__()
        self.v = nn.Parameter(torch.empty(num_layers, num_experts, width, rank))
        self.c = nn.Parameter(torch.empty(num_layers, num_experts, rank, rank))
        self.u = nn.Parameter(torch.empty(num_layers, num_experts, width, rank))
        self.bias = nn.Parameter(torch.zeros(num_layers, width))
        self.gate = nn.Parameter(torch.empty(num_experts, width))
        for weight in (self.v, self.c, self.u):
            # Published code applies Xavier's rule to a layer's whole stack of matrices, so they start smaller.
            normal_(weight, (2 / (rank * (weight.shape[2] + num_experts))) ** 0.5)
        normal_(self.gate, (2 / (width + 1)) ** 0.5)  # each gate is a linear map to one number

    def forward(self, x0_BD: Tensor) -> Tensor:
        """Return the output of the last cross layer."""
        x_BD = x0_BD
        for v_EDR, c_ERR, u_EDR, b_D in zip(self.v, self.c, self.u, self.bias, strict=True):
            gate_EB = (self.gate @ x_BD.T).softmax(dim=0)
            low_EBR = torch.tanh(torch.tanh(x_BD @ v_EDR) @ c_ERR.mT)
            # The gates sum to one, so x_0 and b need no gating.
            mixed_BD = torch.einsum("ebr,edr->bd", gate_EB.unsqueeze(-1) * low_EBR, u_EDR)
            x_BD = x_BD + x0_BD * (mixed_BD + b_D)
        return x_BD


class DCNv2(nn.Module):
    """A richer DCN if D² weights per layer are affordable: each pair of coordinates has its own weight."""

    paper: ClassVar[str] = "Wang et al., DCN V2, WWW 2021 (arXiv 2008.13535)"

    def __init__(self, config: DCNv2Config, layout: Layout) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(layout, config.dim)
        width = layout.num_fields * config.dim
        self.cross = (
            MatrixCross(width, config.num_layers)
            if config.rank is None
            else MixtureCross(width, config.num_layers, config.rank, config.num_experts)
        )
        self.deep = MLP(width, config.units, batch_norm=config.batch_norm, dropout=config.dropout)
        self.parallel = config.structure == "parallel"
        self.head = linear(config.units[-1] + (width if self.parallel else 0), 1)

    def forward(self, inputs: Inputs) -> Output:
        """Return one logit per row."""
        x_BD = self.embedding(inputs).flatten(1)
        crossed_BD = self.cross(x_BD)
        if self.parallel:
            logit_B1 = self.head(torch.cat([crossed_BD, self.deep(x_BD)], dim=1))
        else:
            logit_B1 = self.head(self.deep(crossed_BD))
        return Output(logit_B1.squeeze(-1), {})
