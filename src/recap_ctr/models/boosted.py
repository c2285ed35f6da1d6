"""Boosted: boosted trees on the click rates of values and of pairs, on numbers, and on the order of values and buckets.

Shapes: B batch, P counted fields, Q columns that trees look at, f figures of a value.
"""

from typing import ClassVar, Literal

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from recap_ctr.config import Frozen
from recap_ctr.data.layout import Layout
from recap_ctr.data.rates import NEUTRAL, Cross, crossable, fields_of
from recap_ctr.nn.interface import Inputs, Output
from recap_ctr.nn.rates import RateTable
from recap_ctr.nn.table import Table
from recap_ctr.nn.trees import Forest

MISSING = -(2.0**20)  # It stands for a missing number, and no real number is as low.


class BoostedConfig(Frozen):
    """The config of Boosted, which training decides."""

    crosses: tuple[Cross, ...] = Field((), max_length=1000)
    """The fields whose click rates trees see, then the pairs of fields; of other fields with one value they see the
    order of the buckets, of linear ones the place among the edges."""
    buckets: PositiveInt = 1
    """Buckets of the table of the pairs' rates, which training decides."""
    orders: tuple[str, ...] = Field((), max_length=1000)
    """Those of the counted fields whose values are numbers, so that trees see their order, too."""
    trees: PositiveInt = 1
    loss: Literal["bce"] = "bce"

    @property
    def pairs(self) -> tuple[Cross, ...]:
        """Return the pairs of fields whose click rates trees see."""
        return tuple(cross for cross in self.crosses if len(cross) > 1)


class Boosted(nn.Module):
    """For tables with many numbers, and for short budgets: trees find steps and thresholds that towers learn slowly.

    A table has two figures for each value: of a counted field the two codes of its click rate (`data/rates.py`), of
    another field the number of its bucket. If there are `orders`, a third one is the rank of a value in its field. The
    rates of pairs are in a packed table, or come from a network on click rates that has one (`has_table`). Rows whose
    own clicks are part of the rates bring codes along, (B, 2 P) after their numbers, that the rates without them have.
    """

    paper: ClassVar[str] = (
        "Ke et al., LightGBM: a highly efficient gradient boosting decision tree, NeurIPS 2017"
    )
    counted_P: Tensor
    ordered: Tensor
    ranked: Tensor
    numbers: Tensor
    number_offsets: Tensor
    number_oov: Tensor
    is_linear: Tensor

    def __init__(self, config: BoostedConfig, layout: Layout, *, has_table: bool = True) -> None:
        super().__init__()
        self.config = config
        self.table = RateTable(config.pairs, config.buckets, layout) if config.pairs and has_table else None
        self.figures = Table(layout, 3 if config.orders else 2)
        self.forest = Forest(config.trees)
        self._num_values = layout.num_values
        singles = [cross for cross in config.crosses if len(cross) == 1]
        counted = {cross[0] for cross in singles}
        numeric = [field for field in layout.fields if field.value_column is not None]
        constants = {
            "counted_P": [field.start for field, _ in fields_of(singles, layout)],
            "ordered": [
                field.start
                for field in crossable(layout)
                if field.name not in counted and not field.is_linear
            ],
            "ranked": [field.start for field in layout.fields if field.name in config.orders],
            "numbers": [field.start for field in numeric],
            "number_offsets": [field.offset + 1 for field in numeric],
            "number_oov": [field.offset + field.oov for field in numeric],
            "is_linear": [int(field.is_linear) for field in numeric],
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
        """Return one logit per row; `codes_BQ` are the codes of rows that bring them along, two for each cross."""
        logit_B: Tensor = self.forest(self.columns(inputs, codes_BQ))
        return logit_B

    @torch.no_grad()
    def columns(self, inputs: Inputs, codes_BQ: Tensor | None = None) -> Tensor:
        """Return what trees look at, (B, Q): the counted fields' codes, buckets, ranks, and numbers."""
        figures_BWf = self.figures(inputs.ids_BW)
        if codes_BQ is None:
            codes_BQ = self.codes(inputs.ids_BW)
        if self.config.crosses:
            codes_BP2 = codes_BQ.to(figures_BWf.dtype).reshape(-1, len(self.config.crosses), 2)
            odds_BP, counts_BP = codes_BP2.unbind(-1)
            odds_BP = torch.where(
                counts_BP > 0, odds_BP, NEUTRAL
            )  # As in the figures, for the order of odds.
            codes_BQ = torch.stack([odds_BP, counts_BP], dim=-1).flatten(1)
        ids = inputs.ids_BW[:, self.numbers]
        places = ((ids - self.number_offsets) * self.is_linear).to(inputs.values_BN.dtype)
        numbers = torch.where(ids == self.number_oov, MISSING, inputs.values_BN + places)
        buckets, ranks = figures_BWf[:, self.ordered, 0], figures_BWf[:, self.ranked, -1]
        return torch.cat([codes_BQ, buckets, ranks, numbers], dim=1)

    def codes(self, ids_BW: Tensor) -> Tensor:
        """Return two codes for each cross, as rows that know their codes bring them along."""
        codes_BQ: Tensor = self.figures(ids_BW)[:, self.counted_P, :2].flatten(1)
        if self.table is None:
            return codes_BQ
        return torch.cat([codes_BQ, self.table(ids_BW).flatten(1)], dim=1)

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        """Multiply all logits by a factor."""
        self.forest.leaf_TC.mul_(factor)
