"""The training whose first losses are frozen in tests/golden, and the file that holds them."""

from pathlib import Path

import torch

from recap_ctr.bench.synthetic import synthetic_schema
from recap_ctr.config import TrainConfig, parse
from recap_ctr.data.prepare import Preparation, write_prepared_data
from recap_ctr.data.shards import PreparedData
from recap_ctr.data.source import FrameSource
from recap_ctr.data.synthetic import SyntheticConfig, SyntheticData
from recap_ctr.models.catalogue import parse_model
from recap_ctr.training.loop import Trainer

GOLDEN = Path(__file__).parents[1] / "golden" / "fcn-losses.json"
SMALL = {"dim": 4, "num_exponential_layers": 2, "num_linear_layers": 2}


def small_data(out: Path) -> PreparedData:
    frame = SyntheticData(SyntheticConfig(rows=4_000, num_fields=4, max_values=40, seed=3)).frame()
    source = FrameSource(frame.drop("bayes_logit"))
    return write_prepared_data(Preparation(synthetic_schema(4), {"all": source}), out, quiet=True)[0]


def small_trainer(data: PreparedData, **settings: object) -> Trainer:
    config = parse(TrainConfig, {"batch_size": 256, "l2": 1e-3, **settings}, "test")
    return Trainer("fcn", parse_model("fcn", SMALL), config, data, torch.device("cpu"))


def first_losses(data: PreparedData, update: str) -> list[float]:
    """Return the losses of the first 20 steps."""
    trainer = small_trainer(data, update=update)
    losses = []
    for _ in range(20):
        before = trainer.progress.loss_sum
        trainer.step()
        losses.append(trainer.progress.loss_sum - before)
    return losses
