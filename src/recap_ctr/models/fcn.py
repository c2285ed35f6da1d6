"""FCN, the Fusing Cross Network (formerly DCNv3), and each of its towers alone: ECN and LCN.

Shapes: B batch, F fields, H heads, d vector size per head, D = F * d.
"""

from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, PositiveInt, SerializerFunctionWrapHandler, model_serializer
from torch import Tensor, nn

from recap_ctr.config import Frozen
from recap_ctr.data.layout import Layout
from recap_ctr.nn.cross import Cross
from recap_ctr.nn.embedding import Embedding
from recap_ctr.nn.initial import linear
from recap_ctr.nn.interface import Inputs, Output


class TowerConfig(Frozen):
    """The config of one cross tower alone."""

    dim: int = Field(16, ge=2, multiple_of=2)
    num_layers: PositiveInt = 2
    num_heads: PositiveInt = 1
    dropout: float = Field(0.1, ge=0, lt=1)
    layer_norm: bool = True
    scale_norm: bool = True
    loss: Literal["bce"] = "bce"


class FCNConfig(Frozen):
    """The config of FCN; the defaults are the published ones for ML-1M."""

    dim: int = Field(16, ge=2, multiple_of=2)
    num_exponential_layers: PositiveInt = 3
    num_linear_layers: PositiveInt = 4
    num_heads: PositiveInt = 1
    num_branches: PositiveInt = 1
    """Towers of each kind, side by side on the same vectors; their logits are averaged."""
    exponential_dropout: float = Field(0.1, ge=0, lt=1)
    linear_dropout: float = Field(0.1, ge=0, lt=1)
    layer_norm: bool = True
    scale_norm: bool = True
    loss: Literal["tri-bce", "tri-bce-detached", "bce"] = "tri-bce"

    @model_serializer(mode="wrap")
    def _without_later_defaults(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Drop the number of branches where it is 1: the first runs' directories are not named after it."""
        return {key: value for key, value in dump(self).items() if key != "num_branches" or value > 1}


def halved(e_BFd: Tensor, num_heads: int) -> Tensor:
    """Return, per head, the first halves of all fields' vectors, then the second halves: (B, H, D)."""
    B, F, _ = e_BFd.shape
    parts = e_BFd.view(B, F, num_heads, 2, -1)
    return parts.permute(0, 2, 3, 1, 4).reshape(B, num_heads, -1)


class Tower(nn.Module):
    """A stack of cross layers and a linear head, averaged over heads: z_d (exponential) or z_s (linear)."""

    def __init__(
        self,
        width: int,
        num_layers: int,
        num_heads: int,
        dropout: float,
        layer_norm: bool,
        scale_norm: bool,
        *,
        exponential: bool,
    ) -> None:
        super().__init__()
        self.exponential = exponential
        self.layers = nn.ModuleList(
            Cross(width, num_heads=num_heads, layer_norm=layer_norm, scale_norm=scale_norm, dropout=dropout)
            for _ in range(num_layers)
        )
        self.head = linear(width, 1)

    def forward(self, x0_BHD: Tensor) -> Tensor:
        """Return one logit per row."""
        x_BHD = x0_BHD
        for layer in self.layers:
            x_BHD = layer(x_BHD, None if self.exponential else x0_BHD)
        logit: Tensor = self.head(x_BHD)
        return logit.squeeze(-1).mean(dim=1)


class FCN(nn.Module):
    """The strongest baseline here: two towers on one embedding model low and high orders at once."""

    paper: ClassVar[str] = "Li et al., FCN: Fusing Exponential and Linear Cross Network (arXiv 2407.13349)"

    def __init__(self, config: FCNConfig, layout: Layout) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(layout, config.dim * config.num_heads)
        width, heads = layout.num_fields * config.dim, config.num_heads
        norms = config.layer_norm, config.scale_norm
        deep = config.num_exponential_layers, heads, config.exponential_dropout
        flat = config.num_linear_layers, heads, config.linear_dropout
        self.exponential = Tower(width, *deep, *norms, exponential=True)
        self.linear = Tower(width, *flat, *norms, exponential=False)
        further = range(1, config.num_branches)
        self.further_exponential = nn.ModuleList(
            Tower(width, *deep, *norms, exponential=True) for _ in further
        )
        self.further_linear = nn.ModuleList(Tower(width, *flat, *norms, exponential=False) for _ in further)

    def forward(self, inputs: Inputs) -> Output:
        """Return the mean of the two towers' logits, and both of them for the loss; branches are averaged first."""
        x0_BHD = halved(self.embedding(inputs), self.config.num_heads)
        exponential_B, linear_B = self.exponential(x0_BHD), self.linear(x0_BHD)
        if self.config.num_branches > 1:
            further = [tower(x0_BHD) for tower in self.further_exponential]
            exponential_B = torch.stack([exponential_B, *further]).mean(0)
            further = [tower(x0_BHD) for tower in self.further_linear]
            linear_B = torch.stack([linear_B, *further]).mean(0)
        return Output(
            torch.add(exponential_B, linear_B) / 2, {"exponential": exponential_B, "linear": linear_B}
        )


class _OneTower(nn.Module):
    """One cross tower on its own embedding."""

    paper: ClassVar[str] = "Li et al., FCN: Fusing Exponential and Linear Cross Network (arXiv 2407.13349)"
    exponential: bool

    def __init__(self, config: TowerConfig, layout: Layout) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(layout, config.dim * config.num_heads)
        self.tower = Tower(
            layout.num_fields * config.dim,
            config.num_layers,
            config.num_heads,
            config.dropout,
            config.layer_norm,
            config.scale_norm,
            exponential=self.exponential,
        )

    def forward(self, inputs: Inputs) -> Output:
        """Return one logit per row."""
        return Output(self.tower(halved(self.embedding(inputs), self.config.num_heads)), {})


class ECN(_OneTower):
    """For interactions of high order: FCN's exponential tower alone, each layer doubles the order."""

    exponential = True


class LCN(_OneTower):
    """For interactions of low order: FCN's linear tower alone, each layer raises the order by one."""

    exponential = False
