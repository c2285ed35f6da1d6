"""The logits of models over a shard."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from recap_ctr.axes.logits import BLOCK_ROWS, Estimator, LogitWriter
from recap_ctr.axes.routes import route_logits
from recap_ctr.data.shards import Batch, PreparedData, Shard
from recap_ctr.models.recap import Recap, Route
from recap_ctr.nn.interface import Inputs

EVAL_ROWS = 8192


def to_inputs(batch: Batch, device: torch.device) -> Inputs:
    """Return a batch as a model's input on `device`."""
    return Inputs(_tensor(batch.ids_BW, device), _tensor(batch.values_BN, device))


def _tensor(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)


def write_logits(
    path: Path,
    models: Mapping[Estimator, nn.Module],
    data: PreparedData,
    split: str,
    device: torch.device,
    *,
    rows: Shard | None = None,
) -> None:
    """Write the logits over a whole split to a logit table, with one column per estimator.

    `rows` are the split's rows if they are not those of the prepared data.
    """
    shard: Shard = getattr(data, split) if rows is None else rows
    with LogitWriter(path, data, split, list(models)) as writer, torch.inference_mode():
        for model in models.values():
            model.eval()
        for batch in shard.batches(BLOCK_ROWS):
            writer.write(np.stack([_logits(model, batch, device) for model in models.values()], axis=1))


def _logits(model: nn.Module, batch: Batch, device: torch.device) -> npt.NDArray[np.float32]:
    """Return one logit per row, computed in small batches, which stay in cache."""
    ids_BW, values_BN = to_inputs(batch, device)
    parts = [
        model(Inputs(ids, values)).logit_B
        for ids, values in zip(torch.split(ids_BW, EVAL_ROWS), torch.split(values_BN, EVAL_ROWS), strict=True)
    ]
    return np.asarray(torch.cat(parts).cpu().numpy(), np.float32)


def predict_routes(
    model: Recap, shard: Shard, routes: Sequence[Route], device: torch.device, depth: int | None = None
) -> npt.NDArray[np.float64]:
    """Return one logit per row and route, rows × routes; leave the model in evaluation mode."""
    model.eval()
    with torch.inference_mode():
        parts = [
            route_logits(model, to_inputs(batch, device), routes, depth).T.cpu().numpy()
            for batch in shard.batches(EVAL_ROWS)
        ]
    return np.concatenate(parts).astype(np.float64)


def predict(model: nn.Module, shard: Shard, device: torch.device) -> npt.NDArray[np.float32]:
    """Return one logit per row, in the shard's order; leave the model in evaluation mode."""
    model.eval()
    logits = np.empty(len(shard), np.float32)
    start = 0
    with torch.inference_mode():
        for batch in shard.batches(EVAL_ROWS):
            logit_B = model(to_inputs(batch, device)).logit_B
            logits[start : start + len(logit_B)] = logit_B.cpu().numpy()
            start += len(logit_B)
    return logits
