"""FCN on FuxiCTR's own trainer, embedding and loader, step by step (runs in the peer's environment).

    .peer/bin/python -m benchmarks.speed.peer_train --shape criteo --data encoded/     # then `run 5`

The model is written like FuxiCTR's own models: a BaseModel with its FeatureEmbedding (one table per field) and plain
torch modules, trained by BaseModel.train_step. That has its regulariser over whole tables, Adam as its `compile` makes
it, and gradient norms clipped at 10; the loss is read after every step, as its train_epoch does.

There are two loaders. `npz`, the default of its RankDataLoader, keeps the rows in memory and collates them in a
separate process (num_workers 1, its default). `parquet`, which follows its preprocessing, goes through Ray. `parquet`
took about 5 ms less per batch, where a step takes several hundred, but 8 seconds at the start of every epoch, and it
starts Ray's daemons. In whole steps on a busy machine the difference was within the noise, so we measure `npz`;
`--loader` and `--workers` let you check. The start of an epoch counts only if an epoch ends during the measured steps.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from fuxictr.features import FeatureMap
from fuxictr.pytorch.dataloaders import RankDataLoader
from fuxictr.pytorch.layers import FeatureEmbedding
from fuxictr.pytorch.models import BaseModel
from fuxictr.pytorch.torch_utils import seed_everything
from torch import Tensor, nn

from benchmarks.speed.steps import serve

CONFIGS: dict[str, dict[str, Any]] = {
    "criteo": {
        "num_ecn_layers": 3,
        "num_lcn_layers": 4,
        "ecn_dropout": 0.1,
        "lcn_dropout": 0.2,
        "batch_norm": False,
        "embedding_regularizer": 1e-5,
    },
    "avazu": {
        "num_ecn_layers": 4,
        "num_lcn_layers": 5,
        "ecn_dropout": 0.0,
        "lcn_dropout": 0.0,
        "batch_norm": True,
        "embedding_regularizer": 1e-9,
    },
}


class CrossNetwork(nn.Module):
    """ECN, or LCN if `linear`: layers x <- anchor * ([c | c * mask] + b) + x, and a head."""

    def __init__(self, width: int, num_layers: int, dropout: float, batch_norm: bool, linear: bool) -> None:
        super().__init__()
        self.linear = linear
        self.weights = nn.ModuleList(nn.Linear(width, width // 2, bias=False) for _ in range(num_layers))
        self.biases = nn.ParameterList(nn.Parameter(torch.rand(width)) for _ in range(num_layers))
        self.layer_norms = nn.ModuleList(nn.LayerNorm(width // 2) for _ in range(num_layers))
        self.batch_norms = nn.ModuleList(nn.BatchNorm1d(1) for _ in range(num_layers if batch_norm else 0))
        self.dropouts = nn.ModuleList(nn.Dropout(dropout) for _ in range(num_layers if dropout > 0 else 0))
        self.mask = nn.ReLU()
        self.head = nn.Linear(width, 1)

    def forward(self, first: Tensor) -> Tensor:
        """Return one logit per row."""
        x = first
        for i, weight in enumerate(self.weights):
            c = weight(x)
            if len(self.batch_norms) > 0:
                c = self.batch_norms[i](c)
            mask = self.mask(self.layer_norms[i](c))
            cross = torch.cat([c, c * mask], dim=-1)
            x = (first if self.linear else x) * (cross + self.biases[i]) + x
            if len(self.dropouts) > 0:
                x = self.dropouts[i](x)
        logit: Tensor = self.head(x)
        return logit.mean(dim=1)  # The mean over heads; there is one.


class FCN(BaseModel):  # type: ignore[misc]
    """FCN with one head."""

    def __init__(
        self,
        feature_map: FeatureMap,
        embedding_dim: int,
        learning_rate: float,
        num_ecn_layers: int,
        num_lcn_layers: int,
        ecn_dropout: float,
        lcn_dropout: float,
        batch_norm: bool,
        **kwargs: Any,
    ) -> None:
        super().__init__(feature_map, model_id="FCN", **kwargs)
        width = embedding_dim * feature_map.num_fields
        self.embedding_layer = FeatureEmbedding(feature_map, embedding_dim)
        self.ecn = CrossNetwork(width, num_ecn_layers, ecn_dropout, batch_norm, linear=False)
        self.lcn = CrossNetwork(width, num_lcn_layers, lcn_dropout, batch_norm, linear=True)
        self.compile("adam", "binary_crossentropy", learning_rate)
        self.reset_parameters()
        self.model_to_device()

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the probabilities of the model and of both towers."""
        halves = self.embedding_layer(self.get_inputs(inputs)).chunk(2, dim=-1)
        x = torch.cat([half.flatten(start_dim=1) for half in halves], dim=-1).unsqueeze(1)
        deep, shallow = self.ecn(x), self.lcn(x)
        return {
            "y_pred": self.output_activation((deep + shallow) * 0.5),
            "y_deep": self.output_activation(deep),
            "y_shallow": self.output_activation(shallow),
        }

    def add_loss(self, return_dict: dict[str, Tensor], y_true: Tensor) -> Tensor:
        """Return Tri-BCE; gradients flow through its weights too."""
        loss: Tensor = self.loss_fn(return_dict["y_pred"], y_true, reduction="mean")
        deep: Tensor = self.loss_fn(return_dict["y_deep"], y_true, reduction="mean")
        shallow: Tensor = self.loss_fn(return_dict["y_shallow"], y_true, reduction="mean")
        return loss + (deep - loss).clamp(min=0) * deep + (shallow - loss).clamp(min=0) * shallow


def describe(sizes: list[int], directory: str) -> FeatureMap:
    """Return the feature map that fuxictr's preprocessing would have written."""
    feature_map = FeatureMap("encoded", directory)
    feature_map.labels = ["label"]
    for i, size in enumerate(sizes):
        spec = {"source": "", "type": "categorical", "padding_idx": 0, "vocab_size": size}
        feature_map.features[f"f{i}"] = spec
    feature_map.num_fields = feature_map.get_num_fields()
    feature_map.set_column_index()
    return feature_map


def main() -> None:
    """Serve training steps on standard input."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", choices=CONFIGS, required=True)
    parser.add_argument("--data", type=Path, required=True, help="the directory of generate --encoded")
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--loader", choices=("npz", "parquet"), default="npz")
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    seed_everything(2024)
    with tempfile.TemporaryDirectory() as directory:
        ids, labels, sizes = (np.load(args.data / f"{name}.npy") for name in ("ids", "labels", "sizes"))
        feature_map = describe(sizes.tolist(), directory)
        file = Path(directory) / f"train.{args.loader}"
        columns = dict(zip(feature_map.features, ids.T, strict=True))
        if args.loader == "npz":
            np.savez(file, **columns, label=labels)
        else:  # With the types that fuxictr's preprocessing writes.
            pd.DataFrame(columns).astype(np.int64).assign(label=labels.astype(float)).to_parquet(file)
        loader, _ = RankDataLoader(
            feature_map,
            stage="train",
            train_data=str(file),
            batch_size=args.batch,
            data_format=args.loader,
            num_workers=args.workers,
        )
        model = FCN(
            feature_map,
            embedding_dim=16,
            learning_rate=1e-3,
            metrics=["AUC", "logloss"],
            model_root=directory,
            verbose=0,
            **CONFIGS[args.shape],
        )
        model._max_gradient_norm = 10.0  # The default, which only BaseModel.fit sets.
        model.train()

        def endless() -> Iterator[dict[str, Tensor]]:
            while True:
                yield from loader

        batches = endless()
        model.get_labels(next(batches))  # The first batch starts the loader's processes.
        serve(
            lambda: model.train_step(next(batches)).item(),
            parameters=sum(parameter.numel() for parameter in model.parameters()),
        )


if __name__ == "__main__":
    main()
