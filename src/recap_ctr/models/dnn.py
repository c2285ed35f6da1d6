"""DNN: an MLP on the concatenated vectors, without explicit interactions."""

from typing import ClassVar, Literal

from torch import nn

from recap_ctr.data.layout import Layout
from recap_ctr.nn.embedding import Embedding
from recap_ctr.nn.interface import Inputs, Output
from recap_ctr.nn.mlp import DeepConfig, DeepHead


class DNNConfig(DeepConfig):
    """The config of DNN."""

    loss: Literal["bce"] = "bce"


class DNN(nn.Module):
    """The simplest deep model, which models of interactions have to beat: an MLP on all vectors."""

    paper: ClassVar[str] = "Covington et al., Deep Neural Networks for YouTube Recommendations, RecSys 2016"

    def __init__(self, config: DNNConfig, layout: Layout) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(layout, config.dim)
        self.deep = DeepHead(
            layout.num_fields * config.dim,
            config.units,
            batch_norm=config.batch_norm,
            dropout=config.dropout,
        )

    def forward(self, inputs: Inputs) -> Output:
        """Return one logit per row."""
        return Output(self.deep(self.embedding(inputs).flatten(1)), {})
