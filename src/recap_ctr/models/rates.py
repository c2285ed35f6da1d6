"""Rates: small networks on the click rates that values, and pairs of values, had in the training rows.

Shapes: B batch, P crosses (fields or pairs of fields), Q codes of their rates, K heads.
"""

from typing import ClassVar, Literal

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from recap_ctr.config import Frozen
from recap_ctr.data.layout import Layout
from recap_ctr.data.rates import Cross
from recap_ctr.nn.interface import Inputs, Output
from recap_ctr.nn.mlp import DeepHead, DeepHeads
from recap_ctr.nn.rates import RateTable, decode


class RatesConfig(Frozen):
    """The config of Rates."""

    crosses: tuple[Cross, ...] = Field((), max_length=1000)
    """Fields, and pairs of fields, whose rates the network sees; none: training chooses them."""
    buckets: PositiveInt = 1
    """Buckets of the table of rates, which training decides."""
    units: tuple[PositiveInt, ...] = Field((64, 64), min_length=1)
    heads: PositiveInt = 1
    """Networks that read the same table; their mean logit counts. They cost little, as the table is nearly all of the
    model."""
    loss: Literal["bce", "members-bce"] = "bce"
    """With several heads, members-bce trains each by itself."""


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
        self.deep = (
            DeepHead(width, config.units)
            if config.heads == 1
            else DeepHeads(config.heads, width, config.units)
        )

    def forward(self, inputs: Inputs) -> Output:
        """Return one logit per row, of rows with ids or with codes, and those of all heads."""
        codes_BQ = self.codes(inputs.ids_BW) if inputs.ids_BW.shape[1] else inputs.values_BN
        members_KB = self._members(codes_BQ)
        return Output(members_KB.mean(0), {"members_KB": members_KB})

    def codes(self, ids_BW: Tensor) -> Tensor:
        """Return two codes for each cross, as rows that know their codes bring them along."""
        codes_BP2: Tensor = self.table(ids_BW)
        return codes_BP2.flatten(1)

    def logit_of_codes(self, codes_BQ: Tensor) -> Tensor:
        """Return one logit per row that brings its codes along, two for each cross."""
        return self._members(codes_BQ).mean(0)

    def _members(self, codes_BQ: Tensor) -> Tensor:
        """Return one logit per head and row."""
        logits: Tensor = self.deep(decode(codes_BQ.reshape(-1, len(self.config.crosses), 2)))
        return logits.unsqueeze(0) if self.config.heads == 1 else logits

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        """Multiply all logits by a factor."""
        self.deep.head.weight.mul_(factor)
        self.deep.head.bias.mul_(factor)
