"""Wide & Deep: a linear part and an MLP."""

from typing import ClassVar, Literal

from torch import nn

from recap_ctr.data.layout import Layout
from recap_ctr.nn.embedding import Embedding
from recap_ctr.nn.interface import Inputs, Output
from recap_ctr.nn.mlp import DeepConfig, DeepHead, Wide


class WideDeepConfig(DeepConfig):
    """The config of Wide & Deep."""

    loss: Literal["bce"] = "bce"


class WideDeep(nn.Module):
    """For values with strong effects of their own: a linear part learns these, an MLP generalises."""

    paper: ClassVar[str] = (
        "Cheng et al., Wide & Deep Learning for Recommender Systems, DLRS 2016 (arXiv 1606.07792)"
    )

    def __init__(self, config: WideDeepConfig, layout: Layout) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(layout, config.dim)
        self.wide = Wide(layout, bias=False)
        width = layout.num_fields * config.dim
        self.deep = DeepHead(width, config.units, batch_norm=config.batch_norm, dropout=config.dropout)

    def forward(self, inputs: Inputs) -> Output:
        """Return one logit per row."""
        return Output(self.wide(inputs) + self.deep(self.embedding(inputs).flatten(1)), {})
