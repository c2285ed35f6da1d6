"""FM, the factorisation machine, and its pairwise term, which DeepFM uses too.

Shapes: B batch, F fields, d vector size.
"""

from typing import ClassVar, Literal

from pydantic import PositiveInt
from torch import Tensor, nn

from recap_ctr.config import Frozen
from recap_ctr.data.layout import Layout
from recap_ctr.nn.embedding import Embedding
from recap_ctr.nn.interface import Inputs, Output
from recap_ctr.nn.mlp import Wide


class FMConfig(Frozen):
    """The config of FM."""

    dim: PositiveInt = 16
    loss: Literal["bce"] = "bce"


def pairs(e_BFd: Tensor) -> Tensor:
    """Return the sum of the inner products of all pairs of different fields."""
    # This is half of (Σe)² − Σe², which costs time linear in the number of fields; all pairs would be quadratic.
    return (e_BFd.sum(1).square() - e_BFd.square().sum(1)).sum(-1) / 2


class FM(nn.Module):
    """The smallest model with interactions, and so the reference for them: LR and all pairs of fields."""

    paper: ClassVar[str] = "Rendle, Factorization Machines, ICDM 2010"

    def __init__(self, config: FMConfig, layout: Layout) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(layout, config.dim)
        self.wide = Wide(layout, bias=True)

    def forward(self, inputs: Inputs) -> Output:
        """Return one logit per row."""
        return Output(self.wide(inputs) + pairs(self.embedding(inputs)), {})
