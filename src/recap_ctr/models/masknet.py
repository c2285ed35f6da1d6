"""MaskNet: layers whose input is multiplied by a mask that a small MLP computes from the whole row.

Shapes: B batch, F fields, d vector size, D = F * d, I inputs of a block, O its outputs.
"""

from typing import ClassVar, Literal

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn import functional

from recap_ctr.config import Frozen
from recap_ctr.data.layout import Layout
from recap_ctr.nn.dropout import Dropout
from recap_ctr.nn.embedding import Embedding
from recap_ctr.nn.initial import linear
from recap_ctr.nn.interface import Inputs, Output
from recap_ctr.nn.mlp import DeepHead


class MaskNetConfig(Frozen):
    """The config of MaskNet."""

    dim: PositiveInt = 16
    form: Literal["parallel", "serial"] = "parallel"
    """`parallel`: blocks side by side on the vectors, then an MLP. `serial`: one block after the other, no MLP."""
    units: tuple[PositiveInt, ...] = Field((400, 400, 400), min_length=1)
    """Sizes of the MLP's layers, or of the blocks if they are serial."""
    num_blocks: PositiveInt = 3
    """Number of parallel blocks; there are as many serial blocks as `units`."""
    block_dim: PositiveInt = 64
    """Outputs of a parallel block."""
    ratio: PositiveFloat = 1.0
    """Hidden units of a mask's MLP, relative to the length of the mask."""
    embedding_norm: bool = True
    """Normalise the vectors that are masked; masks are always computed from the vectors as they are."""
    block_norm: bool = True
    dropout: float = Field(0.2, ge=0, lt=1)
    loss: Literal["bce"] = "bce"


class FieldNorm(nn.Module):
    """LayerNorm of each field's vector, with a gain and a shift per field."""

    def __init__(self, num_fields: int, dim: int) -> None:
        super().__init__()
        self.gain_Fd = nn.Parameter(torch.ones(num_fields, dim))
        self.shift_Fd = nn.Parameter(torch.zeros(num_fields, dim))

    def forward(self, e_BFd: Tensor) -> Tensor:
        """Return the normalised vectors."""
        return functional.layer_norm(e_BFd, e_BFd.shape[-1:]) * self.gain_Fd + self.shift_Fd


class MaskBlock(nn.Module):
    """A masked linear map, LayerNorm, ReLU and dropout."""

    def __init__(self, width: int, inputs: int, outputs: int, config: MaskNetConfig) -> None:
        super().__init__()
        hidden = max(1, int(inputs * config.ratio))
        self.mask = nn.Sequential(linear(width, hidden), nn.ReLU(), linear(hidden, inputs))
        self.mix = linear(inputs, outputs, bias=False)
        self.norm = nn.LayerNorm(outputs) if config.block_norm else nn.Identity()
        self.dropout = Dropout(config.dropout)

    def forward(self, v_BI: Tensor, e_BD: Tensor) -> Tensor:
        """Return the block's output for the input `v`, with a mask computed from the vectors `e`."""
        v_BO: Tensor = self.mix(self.mask(e_BD) * v_BI)
        out_BO: Tensor = self.dropout(torch.relu(self.norm(v_BO)))
        return out_BO


class MaskNet(nn.Module):
    """For data in which the weight of a field depends on the rest of the row: each row gets its mask."""

    paper: ClassVar[str] = "Wang et al., MaskNet, DLP-KDD 2021 (arXiv 2102.07619)"

    def __init__(self, config: MaskNetConfig, layout: Layout) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(layout, config.dim)
        self.norm = FieldNorm(layout.num_fields, config.dim) if config.embedding_norm else nn.Identity()
        width = layout.num_fields * config.dim
        self.head: nn.Linear | DeepHead
        if config.form == "parallel":
            sizes = [(width, config.block_dim)] * config.num_blocks
            self.head = DeepHead(config.num_blocks * config.block_dim, config.units, dropout=config.dropout)
        else:
            sizes = list(zip((width, *config.units), config.units, strict=False))
            self.head = linear(config.units[-1], 1)
        self.blocks = nn.ModuleList(MaskBlock(width, inputs, outputs, config) for inputs, outputs in sizes)

    def forward(self, inputs: Inputs) -> Output:
        """Return one logit per row."""
        e_BFd = self.embedding(inputs)
        e_BD, v_BI = e_BFd.flatten(1), self.norm(e_BFd).flatten(1)
        if self.config.form == "parallel":
            v_BI = torch.cat([block(v_BI, e_BD) for block in self.blocks], dim=-1)
        else:
            for block in self.blocks:
                v_BI = block(v_BI, e_BD)
        return Output(self.head(v_BI).view(-1), {})
