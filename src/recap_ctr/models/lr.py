"""LR: logistic regression on all fields' values, the reference that every model must beat."""

from typing import Literal

import torch
from torch import nn

from recap_ctr.config import Frozen
from recap_ctr.data.encode import Layout
from recap_ctr.losses import Output
from recap_ctr.nn.embedding import Embedding, Inputs


class LRConfig(Frozen):
    loss: Literal["bce"] = "bce"


class LR(nn.Module):
    def __init__(self, config: LRConfig, layout: Layout) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(layout, 1, sum_pooling=True)
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, inputs: Inputs) -> Output:
        return Output(self.embedding(inputs).sum(dim=(1, 2)) + self.bias, {})
