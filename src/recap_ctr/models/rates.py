"""Rates: a small network on the click rates that values, and pairs of values, had in the training rows.

Shapes: B batch, P crosses (fields or pairs of fields).
"""

from typing import ClassVar, Literal

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from recap_ctr.config import Frozen
from recap_ctr.data.layout import Layout
from recap_ctr.data.rates import Cross
from recap_ctr.nn.interface import Inputs, Output
from recap_ctr.nn.mlp import DeepHead
from recap_ctr.nn.rates import RateTable, decode


class RatesConfig(Frozen):
    """The config of Rates."""

    crosses: tuple[Cross, ...] = Field((), max_length=1000)
    """Fields, and pairs of fields, whose rates the network sees; none: training chooses them."""
    buckets: PositiveInt = 1
    """Buckets of the table of rates, which training decides."""
    units: tuple[PositiveInt, ...] = Field((64, 64), min_length=1)
    loss: Literal["bce"] = "bce"


class Rates(nn.Module):
    """For pairs of values that come again and again, such as a user and an author: what they did before.

    Training rows bring their codes along instead of ids, (B, 2 P) in the place of numbers: a row's own click must not
    be part of the rates that it is explained by (`data/rates.py`).
    """

    paper: ClassVar[str] = (
        "Prokhorenkova et al., CatBoost: unbiased boosting with categorical features, NeurIPS 2018"
    )

    def __init__(self, config: RatesConfig, layout: Layout) -> None:
        super().__init__()
        self.config = config
        self.table = RateTable(config.crosses, config.buckets, layout)
        width = 2 * len(config.crosses)
        self.deep = DeepHead(width, config.units)

    def forward(self, inputs: Inputs) -> Output:
        """Return one logit per row."""
        return Output(self.logit(inputs), {})

    def logit(self, inputs: Inputs) -> Tensor:
        """Return one logit per row, of rows with ids or with codes."""
        if inputs.ids_BW.shape[1]:
            return self._read(self.table(inputs.ids_BW))
        return self.logit_of_codes(inputs.values_BN)

    def logit_of_codes(self, codes_BQ: Tensor) -> Tensor:
        """Return one logit per row that brings its codes along, two for each cross."""
        return self._read(codes_BQ.reshape(-1, len(self.config.crosses), 2))

    def _read(self, codes_BP2: Tensor) -> Tensor:
        logit_B: Tensor = self.deep(decode(codes_BP2))
        return logit_B

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        """Multiply all logits by a factor."""
        self.deep.head.weight.mul_(factor)
        self.deep.head.bias.mul_(factor)
