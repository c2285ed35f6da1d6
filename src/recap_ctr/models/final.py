"""FINAL: layers that multiply two linear maps of their input, so that each layer doubles the order.

Shapes: B batch, F fields, d vector size, I inputs, U units of a layer, K blocks.
"""

from typing import ClassVar, Literal, Self

import torch
from pydantic import Field, PositiveInt, model_validator
from torch import Tensor, nn

from recap_ctr.config import Frozen
from recap_ctr.data.layout import Layout
from recap_ctr.nn.dropout import Dropout
from recap_ctr.nn.embedding import Embedding
from recap_ctr.nn.initial import linear
from recap_ctr.nn.interface import Inputs, Output
from recap_ctr.nn.norms import BatchNorm


class FINALConfig(Frozen):
    """The config of FINAL. Two blocks (2B) learn from their mean; without `units2` there is one block (1B).

    One block needs the loss `bce`.
    """

    dim: PositiveInt = 16
    units1: tuple[PositiveInt, ...] = Field((400, 400), min_length=1)
    dropout1: float = Field(0.2, ge=0, lt=1)
    units2: tuple[PositiveInt, ...] = (400,)
    dropout2: float = Field(0.2, ge=0, lt=1)
    gating: bool = True
    """Add a second copy of all vectors, gated by all fields, to the first block's input."""
    residual: Literal["concat", "sum"] = "concat"
    """How a layer combines the first map and the product: each in half of the units, or as a sum."""
    batch_norm: bool = True
    activation: Literal["relu", "none"] = "relu"
    loss: Literal["self-distillation", "bce"] = "self-distillation"

    @model_validator(mode="after")
    def _check(self) -> Self:
        odd = [size for size in self.units1 + self.units2 if size % 2]
        if self.residual == "concat" and odd:
            raise ValueError(f"residual 'concat' halves each layer's units, but {odd[0]} is odd")
        if not self.units2 and self.loss == "self-distillation":
            raise ValueError("one block has nothing to distil from: set loss to 'bce', or set units2")
        return self


class FactorizedInteraction(nn.Module):
    """A layer that multiplies two linear maps of its input, and keeps the first map too."""

    def __init__(self, inputs: int, outputs: int, residual: str) -> None:
        super().__init__()
        self.concat = residual == "concat"
        self.maps = linear(inputs, outputs if self.concat else 2 * outputs)

    def forward(self, x_BI: Tensor) -> Tensor:
        """Return the units of the layer."""
        kept, factor = self.maps(x_BI).chunk(2, dim=-1)
        product = kept * factor
        return torch.cat([kept, product], dim=-1) if self.concat else kept + product


class FieldGates(nn.Module):
    """All vectors, and a copy of them times gates that are linear in the fields, coordinate by coordinate."""

    def __init__(self, num_fields: int) -> None:
        super().__init__()
        self.gate = nn.Linear(num_fields, num_fields)
        nn.init.zeros_(self.gate.weight)
        nn.init.ones_(self.gate.bias)

    def forward(self, e_BFd: Tensor) -> Tensor:
        """Return twice as many vectors: as they are, and gated."""
        gate_BFd = self.gate(e_BFd.transpose(1, 2)).transpose(1, 2)
        return torch.cat([e_BFd, e_BFd * gate_BFd], dim=1)


class Block(nn.Module):
    """A stack of `FactorizedInteraction` layers with a linear head."""

    def __init__(self, config: FINALConfig, width: int, units: tuple[int, ...], dropout: float) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for size in units:
            layers.append(FactorizedInteraction(width, size, config.residual))
            if config.batch_norm:
                layers.append(BatchNorm(size))
            if config.activation == "relu":
                layers.append(nn.ReLU())
            layers.append(Dropout(dropout))
            width = size
        self.layers = nn.Sequential(*layers)
        self.head = linear(width, 1)

    def forward(self, x_BI: Tensor) -> Tensor:
        """Return one logit per row."""
        logit_B1: Tensor = self.head(self.layers(x_BI))
        return logit_B1.squeeze(-1)


class FINAL(nn.Module):
    """For interactions of high order at the cost of an MLP: two blocks that learn from each other."""

    paper: ClassVar[str] = "Zhu et al., FINAL, SIGIR 2023 (doi 10.1145/3539618.3591988)"

    def __init__(self, config: FINALConfig, layout: Layout) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(layout, config.dim)
        width = layout.num_fields * config.dim
        self.gates = FieldGates(layout.num_fields) if config.gating else nn.Identity()
        self.block1 = Block(config, 2 * width if config.gating else width, config.units1, config.dropout1)
        self.block2 = Block(config, width, config.units2, config.dropout2) if config.units2 else None

    def forward(self, inputs: Inputs) -> Output:
        """Return the mean of the blocks' logits, and both of them for the loss."""
        e_BFd = self.embedding(inputs)
        logit1_B = self.block1(self.gates(e_BFd).flatten(1))
        if self.block2 is None:
            return Output(logit1_B, {})
        members_KB = torch.stack([logit1_B, self.block2(e_BFd.flatten(1))])
        return Output(members_KB.mean(dim=0), {"members_KB": members_KB})
