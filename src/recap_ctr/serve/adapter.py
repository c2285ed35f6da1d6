"""An engine made of the torch scorer."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import torch

from recap_ctr.artifact import Artifact, load_artifact
from recap_ctr.axes.routes import Routed
from recap_ctr.data.encode import Encoded, Encoder
from recap_ctr.data.source import Block
from recap_ctr.metrics import sigmoid
from recap_ctr.nn.embedding import Inputs
from recap_ctr.serve.engine import Floats


@dataclass(frozen=True)
class TorchSetting:
    routes: int
    depth: int | None


@dataclass(frozen=True, eq=False)
class TorchScores:
    probability_B: Floats
    logit_B: Floats
    raw_logit_B: Floats
    disagreement_B: Floats


class ScorerEngine:
    """The artifact's own model, once for each setting."""

    def __init__(self, artifact: Artifact) -> None:
        self.manifest: dict[str, Any] = artifact.manifest
        self.encoder: Encoder = artifact.encoder
        self._artifact = artifact
        self._models: dict[TorchSetting, torch.nn.Module] = {TorchSetting(1, None): artifact.model}
        if isinstance(artifact.model, Routed):
            config = artifact.model.model.config
            counts = sorted({len(artifact.routes), 4, 2, 1} & set(range(1, len(artifact.routes) + 1)))
            pairs = [(k, d) for d in sorted(config.train_depths, reverse=True) for k in reversed(counts)]
            self._models = {TorchSetting(k, d): artifact.dialled(k, d).model for k, d in pairs}
        self.settings = tuple(self._models)

    @classmethod
    def load(cls, path: Path, threads: int) -> "ScorerEngine":
        torch.set_num_threads(threads)
        return cls(load_artifact(path))

    def encode(self, frame: pl.DataFrame) -> Encoded:
        return self.encoder.encode(Block(frame, 1, "the request"))

    def score(self, encoded: Encoded, setting: TorchSetting | None = None) -> TorchScores:
        with torch.inference_mode():
            inputs = Inputs(torch.from_numpy(encoded.ids_BW), torch.from_numpy(encoded.values_BN))
            output = self._models[setting or self.settings[0]](inputs)
            logit_B = output.logit_B.double()
            spread_B = torch.zeros_like(logit_B)
            if "logits_KB" in output.aux:
                spread_B = output.aux["logits_KB"].double().std(dim=0, correction=0)
        raw_B = logit_B.numpy() + self._artifact.shift
        calibrated_B = self._artifact.calibration.apply(raw_B)
        return TorchScores(sigmoid(calibrated_B), calibrated_B, raw_B, spread_B.numpy())
