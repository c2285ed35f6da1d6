"""AutoInt: self-attention over fields. With its default settings it has an MLP too: AutoInt+.

Shapes: B batch, F fields, c vector size of a layer's input, a of its output, N heads, s = a / N.
"""

from typing import ClassVar, Literal, Self

import torch
from pydantic import PositiveInt, model_validator
from torch import Tensor, nn

from recap_ctr.data.layout import Layout
from recap_ctr.nn.dropout import Dropout
from recap_ctr.nn.embedding import Embedding
from recap_ctr.nn.initial import linear
from recap_ctr.nn.interface import Inputs, Output
from recap_ctr.nn.mlp import DeepConfig, DeepHead, Wide


class AutoIntConfig(DeepConfig):
    """The config of AutoInt. `dropout` acts on the attention too, as in the published runs."""

    units: tuple[PositiveInt, ...] = (400, 400, 400)
    """Layers of the MLP. Empty: no MLP, which makes the model AutoInt instead of AutoInt+."""
    num_layers: PositiveInt = 2
    num_heads: PositiveInt = 2
    attention_dim: PositiveInt = 32
    """Width of a layer's output, all heads together."""
    residual: bool = True
    layer_norm: bool = True
    scale: bool = True
    wide: bool = False
    loss: Literal["bce"] = "bce"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.attention_dim % self.num_heads:
            raise ValueError(
                f"attention_dim {self.attention_dim} can't be split evenly among num_heads {self.num_heads}"
            )
        return self


class Attention(nn.Module):
    """One layer: each field's new vector is a mean of all fields' values, weighted by query and key."""

    def __init__(
        self,
        dim: int,
        attention_dim: int,
        *,
        num_heads: int,
        dropout: float,
        residual: bool,
        layer_norm: bool,
        scale: bool,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.factor = (attention_dim // num_heads) ** -0.5 if scale else 1.0
        self.query, self.key, self.value = (linear(dim, attention_dim, bias=False) for _ in range(3))
        self.dropout = Dropout(dropout)
        self.residual: nn.Module | None = None
        if residual:
            same_width = dim == attention_dim
            self.residual = nn.Identity() if same_width else linear(dim, attention_dim, bias=False)
        self.norm = nn.LayerNorm(attention_dim) if layer_norm else None

    def forward(self, x_BFc: Tensor) -> Tensor:
        """Return the fields' new vectors."""
        q_BNFs, k_BNFs, v_BNFs = (
            project(x_BFc).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        attention_BNFF = torch.softmax(q_BNFs @ k_BNFs.mT * self.factor, dim=-1)
        out_BFa = (self.dropout(attention_BNFF) @ v_BNFs).transpose(1, 2).flatten(2)
        if self.residual is not None:
            out_BFa = out_BFa + self.residual(x_BFc)
        if self.norm is not None:
            out_BFa = self.norm(out_BFa)
        return torch.relu(out_BFa)


class AutoInt(nn.Module):
    """For data in which related fields differ from row to row: attention finds them for each row."""

    paper: ClassVar[str] = "Song et al., AutoInt, CIKM 2019 (arXiv 1810.11921)"

    def __init__(self, config: AutoIntConfig, layout: Layout) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(layout, config.dim)
        self.layers = nn.Sequential(
            *(
                Attention(
                    config.attention_dim if i else config.dim,
                    config.attention_dim,
                    num_heads=config.num_heads,
                    dropout=config.dropout,
                    residual=config.residual,
                    layer_norm=config.layer_norm,
                    scale=config.scale,
                )
                for i in range(config.num_layers)
            )
        )
        self.head = linear(layout.num_fields * config.attention_dim, 1)
        width = layout.num_fields * config.dim
        self.deep = (
            DeepHead(width, config.units, batch_norm=config.batch_norm, dropout=config.dropout)
            if config.units
            else None
        )
        self.wide = Wide(layout, bias=False) if config.wide else None

    def forward(self, inputs: Inputs) -> Output:
        """Return one logit per row."""
        e_BFd = self.embedding(inputs)
        logit_B = self.head(self.layers(e_BFd).flatten(1)).squeeze(-1)
        if self.deep is not None:
            logit_B = logit_B + self.deep(e_BFd.flatten(1))
        if self.wide is not None:
            logit_B = logit_B + self.wide(inputs)
        return Output(logit_B, {})
