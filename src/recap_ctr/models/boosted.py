"""Boosted: boosted trees on the click rates of single values, on numbers, and on the order of buckets.

Shapes: B batch, P counted fields, Q columns that trees look at.
"""

from typing import ClassVar, Literal

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from recap_ctr.config import Frozen
from recap_ctr.data.layout import Layout
from recap_ctr.data.rates import NEUTRAL, Cross, crossable, fields_of
from recap_ctr.nn.interface import Inputs, Output
from recap_ctr.nn.table import Table
from recap_ctr.nn.trees import Forest

MISSING = -(2.0**20)  # It stands for a missing number, and no real number is as low.


class BoostedConfig(Frozen):
    """The config of Boosted, which training decides."""

    crosses: tuple[Cross, ...] = Field((), max_length=1000)
    """The fields whose click rates trees see; of other fields with one value they see the order of the buckets."""
    trees: PositiveInt = 1
    loss: Literal["bce"] = "bce"


class Boosted(nn.Module):
    """For tables with many numbers, and for short budgets: trees find steps and thresholds that towers learn slowly.

    A table has two figures for each value: of a counted field the two codes of its click rate (`data/rates.py`), of
    another field the number of its bucket. Rows whose own clicks are part of the rates bring codes along, (B, 2 P)
    after their numbers, that the rates without them have.
    """

    paper: ClassVar[str] = (
        "Ke et al., LightGBM: a highly efficient gradient boosting decision tree, NeurIPS 2017"
    )
    counted_P: Tensor
    ordered: Tensor
    numbers: Tensor
    number_offsets: Tensor

    def __init__(self, config: BoostedConfig, layout: Layout) -> None:
        super().__init__()
        self.config = config
        self.figures = Table(layout, 2)
        self.forest = Forest(config.trees)
        self._num_values = layout.num_values
        counted = {cross[0] for cross in config.crosses}
        numeric = [field for field in layout.fields if field.value_column is not None]
        constants = {
            "counted_P": [field.start for field, _ in fields_of(config.crosses, layout)],
            "ordered": [field.start for field in crossable(layout) if field.name not in counted],
            "numbers": [field.start for field in numeric],
            "number_offsets": [field.offset for field in numeric],
        }
        for name, values in constants.items():
            self.register_buffer(name, torch.tensor(values, dtype=torch.int64), persistent=False)

    def forward(self, inputs: Inputs) -> Output:
        """Return one logit per row."""
        values_BN, codes_BQ = inputs.values_BN[:, : self._num_values], None
        if inputs.values_BN.shape[1] > self._num_values:
            codes_BQ = inputs.values_BN[:, self._num_values :]
        return Output(self.logit(Inputs(inputs.ids_BW, values_BN), codes_BQ), {})

    def logit(self, inputs: Inputs, codes_BQ: Tensor | None = None) -> Tensor:
        """Return one logit per row; `codes_BQ` are the codes of rows that bring them along, two for each field."""
        logit_B: Tensor = self.forest(self.columns(inputs, codes_BQ))
        return logit_B

    @torch.no_grad()
    def columns(self, inputs: Inputs, codes_BQ: Tensor | None = None) -> Tensor:
        """Return what trees look at, (B, Q): the counted fields' codes, buckets, and numbers."""
        figures_BW2 = self.figures(inputs.ids_BW)
        if codes_BQ is None:
            codes_BQ = figures_BW2[:, self.counted_P].flatten(1)
        else:
            odds_BP, counts_BP = codes_BQ.reshape(len(codes_BQ), -1, 2).unbind(-1)
            odds_BP = torch.where(counts_BP > 0, odds_BP, NEUTRAL)  # As in the table, for the order of odds.
            codes_BQ = torch.stack([odds_BP, counts_BP], dim=-1).flatten(1)
        is_missing = inputs.ids_BW[:, self.numbers] != self.number_offsets + 1
        numbers = torch.where(is_missing, MISSING, inputs.values_BN)
        return torch.cat([codes_BQ, figures_BW2[:, self.ordered, 0], numbers], dim=1)

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        """Multiply all logits by a factor."""
        self.forest.leaf_TC.mul_(factor)
