"""LR: logistic regression on all fields' values."""

from typing import ClassVar, Literal

from torch import nn

from recap_ctr.config import Frozen
from recap_ctr.data.layout import Layout
from recap_ctr.nn.interface import Inputs, Output
from recap_ctr.nn.mlp import Wide


class LRConfig(Frozen):
    """The config of LR."""

    loss: Literal["bce"] = "bce"


class LR(nn.Module):
    """The reference that every model must beat, and sufficient for fields without interactions."""

    paper: ClassVar[str] = "Richardson et al., Predicting Clicks, WWW 2007"

    def __init__(self, config: LRConfig, layout: Layout) -> None:
        super().__init__()
        self.config = config
        self.wide = Wide(layout, bias=True)

    def forward(self, inputs: Inputs) -> Output:
        """Return one logit per row."""
        return Output(self.wide(inputs), {})
