"""FCN on our trainer, step by step.

python -m benchmarks.speed.ours_train --shape criteo --update exact --data encoded/   # then `run 5`
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

from benchmarks.speed.steps import serve
from recap_ctr.config import TrainConfig
from recap_ctr.data.layout import Layout
from recap_ctr.data.shards import PreparedData, Shard
from recap_ctr.models.fcn import FCNConfig
from recap_ctr.training.loop import Trainer

CONFIGS = {  # The model and l2 of each shape.
    "criteo": (
        FCNConfig(
            num_exponential_layers=3,
            num_linear_layers=4,
            exponential_dropout=0.1,
            linear_dropout=0.2,
            scale_norm=False,
        ),
        1e-5,
    ),
    "avazu": (
        FCNConfig(
            num_exponential_layers=4,
            num_linear_layers=5,
            exponential_dropout=0.0,
            linear_dropout=0.0,
            scale_norm=True,
        ),
        1e-9,
    ),
}


class EncodedRows(PreparedData):
    """Generated ids in place of prepared data, with what the trainer reads: the layout and the training rows."""

    def __init__(self, directory: Path) -> None:
        ids, labels, sizes = (np.load(directory / f"{name}.npy") for name in ("ids", "labels", "sizes"))
        self._layout = Layout.of_sizes(sizes.tolist())
        ids += np.array([field.offset for field in self._layout.fields], dtype=np.int32)
        self.train = Shard(
            ids=ids,
            values=np.empty((len(labels), 0), np.float32),
            labels=labels.astype(np.uint8),
            rows=np.arange(len(labels)),
            weights=None,
            groups=None,
            times=None,
        )

    @property
    def layout(self) -> Layout:
        """Return one categorical field for each column of ids."""
        return self._layout


def build(shape: str, update: str, data: Path, batch: int) -> Trainer:
    """Return a trainer of FCN on the generated rows in `data`."""
    model, l2 = CONFIGS[shape]
    config = TrainConfig.model_validate({"batch_size": batch, "l2": l2, "update": update, "seed": 2024})
    return Trainer("fcn", model, config, EncodedRows(data), torch.device("cpu"))


def main() -> None:
    """Serve training steps on standard input."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", choices=CONFIGS, required=True)
    parser.add_argument("--update", choices=("exact", "fast"), required=True)
    parser.add_argument("--data", type=Path, required=True, help="the directory of generate --encoded")
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    trainer = build(args.shape, args.update, args.data, args.batch)
    serve(trainer.step, parameters=sum(p.numel() for p in trainer.model.parameters()))


if __name__ == "__main__":
    main()
