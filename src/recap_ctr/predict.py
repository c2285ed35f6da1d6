"""A model's logits over a shard."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from recap_ctr.data.shards import Batch, PreparedData, Shard
from recap_ctr.logits import BLOCK_ROWS, Estimator, LogitWriter
from recap_ctr.nn.embedding import Inputs

EVAL_ROWS = 8192


def to_inputs(batch: Batch, device: torch.device) -> Inputs:
    return Inputs(_tensor(batch.ids_BW, device), _tensor(batch.values_BN, device))


def _tensor(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)


def write_logits(
    path: Path, model: nn.Module, data: PreparedData, split: str, estimator: Estimator, device: torch.device
) -> None:
    """The model's logits over a whole split as a logit table of one column."""
    logits = predict(model, getattr(data, split), device)
    with LogitWriter(path, data, split, [estimator]) as writer:
        for start in range(0, len(logits), BLOCK_ROWS):
            writer.write(logits[start : start + BLOCK_ROWS, None])


def predict(model: nn.Module, shard: Shard, device: torch.device) -> npt.NDArray[np.float32]:
    """One logit per row, in the shard's order; the model is left in evaluation mode."""
    model.eval()
    logits = np.empty(len(shard), np.float32)
    start = 0
    with torch.inference_mode():
        for batch in shard.batches(EVAL_ROWS):
            logit_B = model(to_inputs(batch, device)).logit_B
            logits[start : start + len(logit_B)] = logit_B.cpu().numpy()
            start += len(logit_B)
    return logits
