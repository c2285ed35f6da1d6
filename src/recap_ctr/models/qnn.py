"""QNN-α: layers that multiply the input by ReLU maps of itself, trained as an ensemble of two dropout masks.

Shapes: B batch, F fields, D = F * dim, H heads, R products per head, C = D / H, K passes.
"""

from typing import ClassVar, Literal, Self

import torch
from pydantic import Field, PositiveInt, model_validator
from torch import Tensor, nn
from torch.nn import functional

from recap_ctr.config import Frozen
from recap_ctr.data.layout import Layout
from recap_ctr.nn.dropout import Dropout
from recap_ctr.nn.embedding import Embedding
from recap_ctr.nn.initial import linear
from recap_ctr.nn.interface import Inputs, Output
from recap_ctr.nn.norms import BatchNorm


class QNNConfig(Frozen):
    """The config of QNN; the defaults are the published ones for ML-1M."""

    dim: PositiveInt = 16
    num_layers: PositiveInt = 1
    num_products: PositiveInt = 4
    """R: products summed in a layer, each with a separate map."""
    num_heads: PositiveInt = 4
    batch_norm: bool = True
    dropout: float = Field(0.1, ge=0, lt=1)
    loss: Literal["self-distillation"] = "self-distillation"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.dim % self.num_heads:
            raise ValueError(f"num_heads {self.num_heads} must divide dim, which is {self.dim}")
        return self


class QuadraticLayer(nn.Module):
    """A layer that adds to its input the products of the input with ReLU maps of itself."""

    def __init__(self, config: QNNConfig, num_fields: int) -> None:
        super().__init__()
        width = num_fields * config.dim
        self.num_fields, self.num_heads = num_fields, config.num_heads
        self.num_products = config.num_products
        self.maps = linear(width, config.num_products * width)
        self.norm = BatchNorm(config.num_products * width) if config.batch_norm else nn.Identity()
        self.dropout = Dropout(config.dropout)

    def forward(self, x_BD: Tensor) -> Tensor:
        """Return the layer's output."""
        B, H = x_BD.shape[0], self.num_heads
        factor_BHRC = self.dropout(torch.relu(self.norm(self.maps(x_BD)))).view(B, H, self.num_products, -1)
        # Each head holds its share of every field, with the fields in order.
        x_BHC = x_BD.view(B, self.num_fields, H, -1).transpose(1, 2).reshape(B, H, -1)
        # The product is ordered by heads and the input by fields, as in the published code and its results.
        out_BD: Tensor = self.dropout((x_BHC * factor_BHRC.sum(dim=2)).flatten(1) + x_BD)
        return out_BD


def logit_of_mean(members_KB: Tensor) -> Tensor:
    """Return the logit of the members' mean probability; no probability is computed, so none rounds to 0 or 1.

    >>> logit_of_mean(torch.tensor([[200.0, 0.0, -1.0], [200.0, 0.0, 1.0]])).tolist()
    [200.0, 0.0, 0.0]
    """
    yes_B, no_B = (functional.logsigmoid(z_KB).logsumexp(dim=0) for z_KB in (members_KB, -members_KB))
    return yes_B - no_B


class QNN(nn.Module):
    """A strong default if one dropout mask is too noisy: in training, two passes predict together."""

    paper: ClassVar[str] = (
        "Li et al., Revisiting Feature Interactions from the Perspective of Quadratic Neural Networks for"
        " Click-through Rate Prediction, 2025 (arXiv 2505.17999)"
    )

    def __init__(self, config: QNNConfig, layout: Layout) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(layout, config.dim)
        self.network = nn.Sequential(
            *(QuadraticLayer(config, layout.num_fields) for _ in range(config.num_layers)),
            linear(layout.num_fields * config.dim, 1),
            nn.Flatten(0),
        )

    def forward(self, inputs: Inputs) -> Output:
        """Return one logit per row; in training, that of two passes and both of theirs for the loss."""
        x_BD = self.embedding(inputs).flatten(1)
        if not self.training:
            return Output(self.network(x_BD), {})
        members_KB = torch.stack([self.network(x_BD), self.network(x_BD)])
        return Output(logit_of_mean(members_KB), {"members_KB": members_KB})
