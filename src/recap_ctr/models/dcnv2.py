"""DCNv2, the Deep & Cross Network with whole matrices as cross layers, or with mixtures of low-rank ones.

Shapes: B batch, L cross layers, D = fields * vector size, E experts, R rank, U units of the MLP's last layer.
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
    num_layers: PositiveInt = 3
    structure: Literal["parallel", "stacked"] = "parallel"
    """Where the MLP stands: beside the cross layers, or on top of them."""
    rank: PositiveInt | None = None
    """None: whole matrices. Otherwise mixtures of `num_experts` matrices of this rank; published code takes 32."""
    num_experts: PositiveInt = 4
    loss: Literal["bce"] = "bce"


class MatrixCross(nn.Module):
    """Cross layers of one matrix each: x' = x + x_0 * (W x + b)."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(linear(width, width) for _ in range(num_layers))

    def forward(self, x0_BD: Tensor) -> Tensor:
        x_BD = x0_BD
        for layer in self.layers:
            x_BD = x_BD + x0_BD * layer(x_BD)
        return x_BD


class MixtureCross(nn.Module):
    """Cross layers of E experts each, U tanh(C tanh(Vᵀ x)), weighed by gates that all layers share."""

    def __init__(self, width: int, num_layers: int, rank: int, num_experts: int) -> None:
        super().__init__()
        self.v = nn.Parameter(torch.empty(num_layers, num_experts, width, rank))
        self.c = nn.Parameter(torch.empty(num_layers, num_experts, rank, rank))
        self.u = nn.Parameter(torch.empty(num_layers, num_experts, width, rank))
        self.bias = nn.Parameter(torch.zeros(num_layers, width))
        self.gate = nn.Parameter(torch.empty(num_experts, width))
        for weight in (self.v, self.c, self.u):
            # As published: Xavier's rule on a layer's whole stack, which starts smaller than one matrix would.
            normal_(weight, (2 / (rank * (weight.shape[2] + num_experts))) ** 0.5)
        normal_(self.gate, (2 / (width + 1)) ** 0.5)  # an expert's gate is a linear map to one number

    def forward(self, x0_BD: Tensor) -> Tensor:
        x_BD = x0_BD
        for v_EDR, c_ERR, u_EDR, b_D in zip(self.v, self.c, self.u, self.bias, strict=True):
            gate_EB = (self.gate @ x_BD.T).softmax(dim=0)
            low_EBR = torch.tanh(torch.tanh(x_BD @ v_EDR) @ c_ERR.mT)
            # The gates sum to one, so x_0 and b need no gating.
            mixed_BD = torch.einsum("ebr,edr->bd", gate_EB.unsqueeze(-1) * low_EBR, u_EDR)
            x_BD = x_BD + x0_BD * (mixed_BD + b_D)
        return x_BD


class DCNv2(nn.Module):
    """Where D² weights a layer are affordable, DCN with more to say: each pair of coordinates has its own weight."""

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
        x_BD = self.embedding(inputs).flatten(1)
        crossed_BD = self.cross(x_BD)
        if self.parallel:
            logit_B1 = self.head(torch.cat([crossed_BD, self.deep(x_BD)], dim=1))
        else:
            logit_B1 = self.head(self.deep(crossed_BD))
        return Output(logit_B1.squeeze(-1), {})
