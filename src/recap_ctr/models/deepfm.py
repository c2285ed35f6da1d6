"""DeepFM: a factorisation machine and an MLP on the same vectors.

Shapes: B batch, F fields, d vector size.
"""

from typing import ClassVar, Literal

from torch import nn

from recap_ctr.data.layout import Layout
from recap_ctr.models.fm import pairs
from recap_ctr.nn.embedding import Embedding
from recap_ctr.nn.interface import Inputs, Output
from recap_ctr.nn.mlp import DeepConfig, DeepHead, Wide


class DeepFMConfig(DeepConfig):
    """The config of DeepFM."""

    loss: Literal["bce"] = "bce"


class DeepFM(nn.Module):
    """A sound first choice if pairs of fields matter: it models pairs explicitly, the rest with an MLP."""

    paper: ClassVar[str] = "Guo et al., DeepFM, IJCAI 2017 (arXiv 1703.04247)"

    def __init__(self, config: DeepFMConfig, layout: Layout) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(layout, config.dim)
        self.wide = Wide(layout, bias=True)
        width = layout.num_fields * config.dim
        self.deep = DeepHead(width, config.units, batch_norm=config.batch_norm, dropout=config.dropout)

    def forward(self, inputs: Inputs) -> Output:
        """Return one logit per row."""
        e_BFd = self.embedding(inputs)
        return Output(self.wide(inputs) + pairs(e_BFd) + self.deep(e_BFd.flatten(1)), {})
