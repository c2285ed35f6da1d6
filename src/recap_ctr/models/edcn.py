"""EDCN: a cross network and an MLP side by side, which exchange their outputs after every layer.

Shapes: B batch, F fields, D = F * dim.
"""

from typing import ClassVar, Literal

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor, nn

from recap_ctr.config import Frozen
from recap_ctr.data.layout import Layout
from recap_ctr.nn.embedding import Embedding
from recap_ctr.nn.initial import linear
from recap_ctr.nn.interface import Inputs, Output
from recap_ctr.nn.mlp import MLP
from recap_ctr.nn.norms import BatchNorm


class EDCNConfig(Frozen):
    """The config of EDCN."""

    dim: PositiveInt = 16
    num_layers: PositiveInt = 3
    residual: bool = True
    """Cross layers add their input, as in the paper and in FuxiCTR 1.2; FuxiCTR 2 doesn't."""
    regulation: bool = True
    """Weight the fields before every layer, separately for the cross network and for the MLP."""
    temperature: PositiveFloat = 1.0
    """Temperature of the softmax over the fields' weights; a larger one makes them more even."""
    bridge: Literal["hadamard", "sum"] = "hadamard"
    """How a layer's two outputs become the next layer's input: by their product or their sum."""
    batch_norm: bool = True
    dropout: float = Field(0.2, ge=0, lt=1)
    loss: Literal["bce"] = "bce"


class Regulation(nn.Module):
    """The input of one of the two networks: the fields times their weights, and optional BatchNorm."""

    def __init__(self, config: EDCNConfig, num_fields: int) -> None:
        super().__init__()
        self.dim, self.temperature = config.dim, config.temperature
        self.gate_F = nn.Parameter(torch.ones(num_fields)) if config.regulation else None
        self.norm = BatchNorm(num_fields * config.dim) if config.batch_norm else nn.Identity()

    def forward(self, x_BD: Tensor) -> Tensor:
        """Return the weighted and normalised fields."""
        if self.gate_F is not None:
            weight_F = torch.softmax(self.gate_F / self.temperature, dim=0)
            x_BD = x_BD * weight_F.repeat_interleave(self.dim)
        out_BD: Tensor = self.norm(x_BD)
        return out_BD


class EDCNLayer(nn.Module):
    """One cross layer and one layer of the MLP, on the same input regulated in two ways."""

    def __init__(self, config: EDCNConfig, num_fields: int) -> None:
        super().__init__()
        width = num_fields * config.dim
        self.residual = config.residual
        self.to_cross, self.to_deep = Regulation(config, num_fields), Regulation(config, num_fields)
        self.cross = linear(width, 1, bias=False)
        self.bias_D = nn.Parameter(torch.zeros(width))
        self.deep = MLP(width, [width], dropout=config.dropout)

    def forward(self, x_BD: Tensor, anchor_BD: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the cross network's output, the MLP's output, and the anchor: the first cross layer's input."""
        c_BD: Tensor = self.to_cross(x_BD)
        anchor_BD = c_BD if anchor_BD is None else anchor_BD
        crossed_BD = self.cross(c_BD) * anchor_BD + self.bias_D
        return crossed_BD + c_BD if self.residual else crossed_BD, self.deep(self.to_deep(x_BD)), anchor_BD


class EDCN(nn.Module):
    """For interactions of bounded order with an MLP: its two networks exchange outputs after every layer."""

    paper: ClassVar[str] = (
        "Chen et al., Enhancing Explicit and Implicit Feature Interactions via Information Sharing for Parallel"
        " Deep CTR Models, CIKM 2021"
    )

    def __init__(self, config: EDCNConfig, layout: Layout) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(layout, config.dim)
        self.layers = nn.ModuleList(EDCNLayer(config, layout.num_fields) for _ in range(config.num_layers))
        self.head = linear(3 * layout.num_fields * config.dim, 1)

    def forward(self, inputs: Inputs) -> Output:
        """Return one logit per row."""
        bridge_BD: Tensor = self.embedding(inputs).flatten(1)
        cross_BD = deep_BD = anchor_BD = None
        for layer in self.layers:
            cross_BD, deep_BD, anchor_BD = layer(bridge_BD, anchor_BD)
            bridge_BD = cross_BD * deep_BD if self.config.bridge == "hadamard" else cross_BD + deep_BD
        assert cross_BD is not None
        assert deep_BD is not None
        logit_B1: Tensor = self.head(torch.cat([cross_BD, deep_BD, bridge_BD], dim=-1))
        return Output(logit_B1.squeeze(-1), {})
