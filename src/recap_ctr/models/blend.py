"""Blend: the models that count, without towers: a regression, a network on click rates, and boosted trees, added up; to
which another network may be added.

Shapes: B batch, N value columns, Q codes of click rates.
"""

from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

from recap_ctr.config import Frozen
from recap_ctr.data.layout import Layout
from recap_ctr.models.boosted import Boosted, BoostedConfig
from recap_ctr.models.catalogue import build, parse_model
from recap_ctr.models.rates import Rates, RatesConfig
from recap_ctr.nn.interface import Inputs, Output
from recap_ctr.nn.mlp import Wide


class HasParts(Protocol):
    """A config that says which parts a model has."""

    @property
    def first_order(self) -> bool:
        """Return whether there is a linear model of all values."""
        ...

    @property
    def rates(self) -> RatesConfig | None:
        """Return the network on click rates, if there is one."""
        ...

    @property
    def boosted(self) -> BoostedConfig | None:
        """Return the boosted trees, if there are any."""
        ...


class Parts(nn.Module):
    """Models that count, whose logits are added up; a fit finds out which of them help."""

    def add_parts(self, config: HasParts, layout: Layout) -> None:
        """Make the parts that the config asks for."""
        self.first_order = Wide(layout, bias=True) if config.first_order else None
        self.rates = Rates(config.rates, layout) if config.rates else None
        # The crosses of trees are among those of rates, whose table both look at.
        self.boosted = (
            Boosted(config.boosted, layout, has_table=self.rates is None) if config.boosted else None
        )
        self._num_values = layout.num_values

    def apart(self, inputs: Inputs) -> tuple[Inputs, Tensor | None]:
        """Return the inputs without the codes of click rates that training rows bring along as numbers, and these."""
        if inputs.values_BN.shape[1] == self._num_values:
            return inputs, None
        values_BN = inputs.values_BN
        return Inputs(inputs.ids_BW, values_BN[:, : self._num_values]), values_BN[:, self._num_values :]

    def beside_logit(self, inputs: Inputs, codes_BQ: Tensor | None = None) -> Tensor | None:
        """Return the sum of the parts' logits; None if there are none."""
        logits: list[Tensor] = []
        if codes_BQ is None and self.rates is not None:
            codes_BQ = self.rates.codes(inputs.ids_BW)
        if self.first_order is not None:
            logits.append(self.first_order(inputs))
        if self.rates is not None and codes_BQ is not None:
            logits.append(self.rates.logit_of_codes(codes_BQ))
        if self.boosted is not None:
            logits.append(self.boosted.logit(inputs, self._codes_of_trees(codes_BQ)))
        return torch.stack(logits).sum(0) if logits else None

    def _codes_of_trees(self, codes_BQ: Tensor | None) -> Tensor | None:
        """Return the codes that the trees look at; a network on rates may look at more."""
        if codes_BQ is None or self.rates is None or self.boosted is None:
            return codes_BQ
        crosses = self.rates.config.crosses
        at = [crosses.index(cross) for cross in self.boosted.config.crosses]
        return codes_BQ.reshape(-1, len(crosses), 2)[:, at].flatten(1)


class NetworkConfig(Frozen):
    """A network that is added to what counts: the name of its model, and its settings."""

    name: str
    settings: dict[str, Any]


class BlendConfig(Frozen):
    """The config of Blend; a fit decides which parts it has."""

    first_order: bool = False
    rates: RatesConfig | None = None
    boosted: BoostedConfig | None = None
    network: NetworkConfig | None = None
    loss: Literal["bce"] = "bce"


class Blend(Parts):
    """For little time: what counting finds out in seconds, maybe with a network beside it, in the best proportions."""

    paper: ClassVar[str] = "Caruana et al., Ensemble selection from libraries of models, ICML 2004"

    def __init__(self, config: BlendConfig, layout: Layout) -> None:
        super().__init__()
        self.config = config
        self.add_parts(config, layout)
        self.network: nn.Module | None = None
        if config.network is not None:
            name, settings = config.network.name, config.network.settings
            self.network = build(name, parse_model(name, settings), layout)
            self.factor = nn.Parameter(torch.ones(1))
        self.constant = nn.Parameter(torch.zeros(1))

    def forward(self, inputs: Inputs) -> Output:
        """Return one logit per row."""
        encoded, codes_BQ = self.apart(inputs)
        logit_B = self.beside_logit(encoded, codes_BQ)
        if logit_B is None:
            logit_B = inputs.values_BN.new_zeros(len(inputs.ids_BW))
        if self.network is not None:
            logit_B = logit_B + self.factor * self.network(encoded).logit_B
        return Output(logit_B + self.constant, {})
