"""RFM, the Rotative Factorization Machine: fields are angles that rotate one another by attention.

Shapes: B batch, F fields, C width before a layer, W width after it, H heads, K = W / H, U flattened units.
"""

from typing import ClassVar, Literal, Self

import torch
from pydantic import Field, PositiveInt, model_validator
from torch import Tensor, nn

from recap_ctr.config import Frozen
from recap_ctr.data.layout import Layout
from recap_ctr.nn.dropout import Dropout
from recap_ctr.nn.embedding import Embedding
from recap_ctr.nn.initial import normal_, xavier_normal_
from recap_ctr.nn.interface import Inputs, Output

GAIN = 1.414


class RFMConfig(Frozen):
    """The config of RFM. The defaults are from the paper's search space; its choices are unpublished."""

    dim: PositiveInt = 16
    width: int = Field(32, ge=2)
    num_layers: PositiveInt = 2
    num_heads: PositiveInt = 2
    attention_dropout: float = Field(0.1, ge=0, lt=1)
    residual: bool = True
    """Add the fields' unrotated angles to the rotated ones."""
    units: tuple[PositiveInt, ...] = (48,)
    """Layers of the network that amplifies the modulus; may be empty."""
    group: int = Field(8, ge=2)
    """That network's units are normalised in groups of this size."""
    amplification_dropout: float = Field(0.1, ge=0, lt=1)
    embedding_init: Literal["small", "xavier"] = "small"
    """Standard deviation. `small`: 1e-4, as in all models here. `xavier`: sqrt(2 / (values + dim)), the authors'."""
    loss: Literal["bce"] = "bce"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.width % self.num_heads:
            raise ValueError(f"num_heads {self.num_heads} must divide width, which is {self.width}")
        uneven = [size for size in self.units if size % self.group]
        if uneven:
            raise ValueError(
                f"group {self.group} must divide each of units, but {uneven[0]} is not a multiple of it"
            )
        return self


class RotationLayer(nn.Module):
    """A layer in which each field's new angles are a sum of all fields' values, weighted by their agreement."""

    def __init__(self, config: RFMConfig, num_fields: int, inputs: int) -> None:
        super().__init__()
        width, self.num_heads = config.width, config.num_heads
        self.query_FCW = nn.Parameter(torch.empty(num_fields, inputs, width))
        self.key_FCW = nn.Parameter(torch.empty(num_fields, inputs, width))
        self.value_FCW = nn.Parameter(torch.empty(num_fields, inputs, width))
        self.agreement_1K = nn.Parameter(torch.empty(1, width // config.num_heads))
        self.direct = nn.Linear(inputs, width, bias=False)
        matrices = self.query_FCW, self.key_FCW, self.value_FCW
        for weight in (*matrices, self.agreement_1K, self.direct.weight):
            xavier_normal_(weight, GAIN)
        self.dropout = Dropout(config.attention_dropout)
        self.norm = nn.LayerNorm(width)

    def forward(self, angle_BFC: Tensor) -> Tensor:
        """Return the fields' new angles."""
        query_BHFK, key_BHFK = self._heads(angle_BFC, self.query_FCW), self._heads(angle_BFC, self.key_FCW)
        value_BHFK = self.dropout(self._heads(angle_BFC, self.value_FCW))
        # By cos(q - k) = cos q cos k + sin q sin k, two matmuls replace a tensor over pairs and coordinates.
        score_BHFF = (self.agreement_1K * query_BHFK.cos()) @ key_BHFK.cos().mT
        score_BHFF = score_BHFF + (self.agreement_1K * query_BHFK.sin()) @ key_BHFK.sin().mT
        rotated_BFW = (torch.sigmoid(score_BHFF) @ value_BHFK).transpose(1, 2).flatten(2)
        out_BFW: Tensor = self.norm(rotated_BFW + self.direct(self.dropout(angle_BFC)))
        return out_BFW

    def _heads(self, angle_BFC: Tensor, weight_FCW: Tensor) -> Tensor:
        mapped_BFW = torch.einsum("bfc,fcw->bfw", angle_BFC, weight_FCW)
        return mapped_BFW.view(*angle_BFC.shape[:2], self.num_heads, -1).transpose(1, 2)


class Amplification(nn.Module):
    """One linear map for both parts, ReLU, and LayerNorm in groups, separate for each part."""

    def __init__(self, config: RFMConfig, inputs: int, outputs: int) -> None:
        super().__init__()
        self.group = config.group
        self.dropout = Dropout(config.amplification_dropout)
        self.map = nn.Linear(inputs, outputs)
        normal_(self.map.weight, 0.01)
        self.real_norm, self.imaginary_norm = nn.LayerNorm(config.group), nn.LayerNorm(config.group)

    def forward(self, parts: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the real and the imaginary part after the layer."""
        r_BU, q_BU = (torch.relu(self.map(self.dropout(part_BU))) for part_BU in parts)
        return self._grouped(r_BU, self.real_norm), self._grouped(q_BU, self.imaginary_norm)

    def _grouped(self, part_BU: Tensor, norm: nn.LayerNorm) -> Tensor:
        normed: Tensor = norm(part_BU.view(part_BU.shape[0], -1, self.group))
        return normed.flatten(1)


class RFM(nn.Module):
    """For interactions whose order depends on the row: attention decides how far fields rotate each other."""

    paper: ClassVar[str] = "Tian et al., Rotative Factorization Machines, KDD 2024"

    def __init__(self, config: RFMConfig, layout: Layout) -> None:
        super().__init__()
        self.config = config
        small = config.embedding_init == "small"
        std = 1e-4 if small else (2 / (layout.num_rows + config.dim)) ** 0.5
        self.embedding = Embedding(layout, config.dim, std=std)
        widths = [config.dim] + [config.width] * (config.num_layers - 1)
        self.rotations = nn.Sequential(*(RotationLayer(config, layout.num_fields, width) for width in widths))
        # This is unused without `residual`, but the authors' code has it, so totals agree.
        self.project = nn.Linear(config.dim, config.width)
        normal_(self.project.weight, 0.01)
        self.real_norm, self.imaginary_norm = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        amplify: list[nn.Module] = []
        size = layout.num_fields * config.width
        for outputs in config.units:
            amplify.append(Amplification(config, size, outputs))
            size = outputs
        self.amplify = nn.Sequential(*amplify)
        self.head = nn.Linear(size, 1)
        xavier_normal_(self.head.weight)

    def forward(self, inputs: Inputs) -> Output:
        """Return one logit per row."""
        angle_BFC = self.embedding(inputs)
        rotated_BFW = self.rotations(angle_BFC)
        r_BFW, q_BFW = torch.cos(rotated_BFW), torch.sin(rotated_BFW)
        if self.config.residual:
            direct_BFW = self.project(angle_BFC)
            r_BFW = self.real_norm(r_BFW + torch.cos(direct_BFW))
            q_BFW = self.imaginary_norm(q_BFW + torch.sin(direct_BFW))
        r_BU, q_BU = self.amplify((r_BFW.flatten(1), q_BFW.flatten(1)))
        # Both parts share one head, so its bias counts twice, as in the published code.
        logit_B1: Tensor = self.head(r_BU) + self.head(q_BU)
        return Output(logit_B1.squeeze(-1), {})
