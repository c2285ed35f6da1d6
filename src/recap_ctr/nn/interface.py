"""What goes into a model and what comes out of it. Shapes: B batch, W id columns, N value columns."""

from typing import NamedTuple

from torch import Tensor


class Inputs(NamedTuple):
    """What a model sees of a batch."""

    ids_BW: Tensor
    values_BN: Tensor


class Output(NamedTuple):
    """What a model returns: the logit, and whatever else its own loss needs."""

    logit_B: Tensor
    aux: dict[str, Tensor]
