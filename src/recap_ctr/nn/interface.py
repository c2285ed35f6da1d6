"""The input and output of every model. Shapes: B batch, W id columns, N value columns."""

from typing import NamedTuple

from torch import Tensor


class Inputs(NamedTuple):
    """A batch as a model sees it; `Layout` says which columns belong to which field."""

    ids_BW: Tensor
    """Row numbers in the table of vectors."""
    values_BN: Tensor
    """The numbers of numeric fields."""


class Output(NamedTuple):
    """The result of a model: one logit per row, and the tensors that its loss needs besides."""

    logit_B: Tensor
    aux: dict[str, Tensor]
