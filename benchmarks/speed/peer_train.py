"""FCN on FuxiCTR's own trainer, embedding and loader, step by step (runs in the peer's environment).

    .peer/bin/python peer_train.py --shape criteo --data encoded/     # then `run 5` on standard input
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from fuxictr.features import FeatureMap
from fuxictr.pytorch.dataloaders import RankDataLoader
from fuxictr.pytorch.layers import FeatureEmbedding
from fuxictr.pytorch.models import BaseModel
from fuxictr.pytorch.torch_utils import seed_everything
from steps import serve
from torch import Tensor, nn

SETTINGS = {
    "criteo": {"num_ecn_layers": 3, "num_lcn_layers": 4, "ecn_dropout": 0.1, "lcn_dropout": 0.2,
               "batch_norm": False, "embedding_regularizer": 1e-5},
    "avazu": {"num_ecn_layers": 4, "num_lcn_layers": 5, "ecn_dropout": 0.0, "lcn_dropout": 0.0,
              "batch_norm": True, "embedding_regularizer": 1e-9},
}


class CrossNetwork(nn.Module):
    """ECN, or LCN where `linear`: layers x <- anchor * ([c | c * mask] + b) + x, and a head."""

    def __init__(self, width: int, num_layers: int, dropout: float, batch_norm: bool, linear: bool) -> None:
        super().__init__()
        self.linear = linear
        self.weights = nn.ModuleList(nn.Linear(width, width // 2, bias=False) for _ in range(num_layers))
        self.biases = nn.ParameterList(nn.Parameter(torch.rand(width)) for _ in range(num_layers))
        self.layer_norms = nn.ModuleList(nn.LayerNorm(width // 2) for _ in range(num_layers))
        self.batch_norms = nn.ModuleList(nn.BatchNorm1d(1) for _ in range(num_layers * batch_norm))
        self.dropouts = nn.ModuleList(nn.Dropout(dropout) for _ in range(num_layers * (dropout > 0)))
        self.mask = nn.ReLU()
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = x
        for i, weight in enumerate(self.weights):
            c = weight(x)
            if len(self.batch_norms) > 0:
                c = self.batch_norms[i](c)
            mask = self.mask(self.layer_norms[i](c))
            c = torch.cat([c, c * mask], dim=-1)
            x = (first if self.linear else x) * (c + self.biases[i]) + x
            if len(self.dropouts) > 0:
                x = self.dropouts[i](x)
        return self.head(x)


class FCN(BaseModel):
    """FCN with one head, in the form of FuxiCTR's model zoo."""

    def __init__(self, feature_map: FeatureMap, model_id: str = "FCN", gpu: int = -1,
                 learning_rate: float = 1e-3, embedding_dim: int = 16, num_ecn_layers: int = 3,
                 num_lcn_layers: int = 3, ecn_dropout: float = 0.0, lcn_dropout: float = 0.0,
                 batch_norm: bool = False, embedding_regularizer: float | None = None, **kwargs: object) -> None:
        super().__init__(feature_map, model_id=model_id, gpu=gpu, embedding_regularizer=embedding_regularizer, **kwargs)
        width = embedding_dim * feature_map.num_fields
        self.embedding_layer = FeatureEmbedding(feature_map, embedding_dim)
        self.ecn = CrossNetwork(width, num_ecn_layers, ecn_dropout, batch_norm, linear=False)
        self.lcn = CrossNetwork(width, num_lcn_layers, lcn_dropout, batch_norm, linear=True)
        self.compile(kwargs["optimizer"], kwargs["loss"], learning_rate)
        self.reset_parameters()
        self.model_to_device()

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        embeddings = self.embedding_layer(self.get_inputs(inputs))
        halves = torch.chunk(embeddings, 2, dim=-1)
        x = torch.cat([half.flatten(start_dim=1) for half in halves], dim=-1).unsqueeze(1)
        deep = self.ecn(x).mean(dim=1)
        shallow = self.lcn(x).mean(dim=1)
        return {
            "y_pred": self.output_activation((deep + shallow) * 0.5),
            "y_deep": self.output_activation(deep),
            "y_shallow": self.output_activation(shallow),
        }

    def add_loss(self, return_dict: dict[str, Tensor], y_true: Tensor) -> Tensor:
        loss = self.loss_fn(return_dict["y_pred"], y_true, reduction="mean")
        deep = self.loss_fn(return_dict["y_deep"], y_true, reduction="mean")
        shallow = self.loss_fn(return_dict["y_shallow"], y_true, reduction="mean")
        return loss + torch.relu(deep - loss) * deep + torch.relu(shallow - loss) * shallow


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", choices=SETTINGS, required=True)
    parser.add_argument("--data", type=Path, required=True, help="the directory of generate.py --encoded")
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--loader", choices=("npz", "parquet"), default="npz")
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    seed_everything(2024)

    ids, labels, sizes = (np.load(args.data / f"{name}.npy") for name in ("ids", "labels", "sizes"))
    with tempfile.TemporaryDirectory() as directory:
        feature_map = FeatureMap("encoded", directory)
        feature_map.labels = ["label"]
        feature_map.default_emb_dim = 16
        for i, size in enumerate(sizes.tolist()):
            spec = {"source": "", "type": "categorical", "padding_idx": 0, "vocab_size": size}
            feature_map.features[f"f{i}"] = spec
        feature_map.num_fields = feature_map.get_num_fields()
        feature_map.set_column_index()
        columns = {f"f{i}": ids[:, i] for i in range(len(sizes))}
        if args.loader == "npz":
            path = Path(directory) / "train.npz"
            np.savez(path, **columns, label=labels)
        else:
            import polars as pl
            path = Path(directory) / "train.parquet"
            pl.DataFrame({**{k:v.astype(np.int64) for k,v in columns.items()}, "label": labels.astype(np.float64)}).write_parquet(path)
        loader, _ = RankDataLoader(feature_map, stage="train", train_data=str(path), batch_size=args.batch,
                                   shuffle=True, data_format=args.loader, num_workers=args.workers)
        model = FCN(feature_map, optimizer="adam", loss="binary_crossentropy", task="binary_classification",
                    metrics=["AUC", "logloss"], model_root=directory, verbose=0, embedding_dim=16, **SETTINGS[args.shape])
        model._max_gradient_norm = 10.0  # set by BaseModel.fit
        model.train()
        def endless() -> Iterator[dict[str, Tensor]]:
            while True:
                yield from loader

        batches = endless()
        next(batches)
        serve(lambda: model.train_step(next(batches)).item(),
              parameters=sum(p.numel() for p in model.parameters()))


if __name__ == "__main__":
    main()
