"""The logits of models over a shard."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from recap_ctr.axes.logits import BLOCK_ROWS, Estimator, LogitWriter
from recap_ctr.axes.routes import route_logits
from recap_ctr.data.shards import Batch, PreparedData, Shard
from recap_ctr.models.recap import Recap, Route
from recap_ctr.nn.group import current_group
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
    inputs: str | None = None,
) -> None:
    """Write the logits over a whole split to a logit table, with one column per estimator.

    `rows` are the rows to score if they are not those of a split of the prepared data; `inputs` are those of
    `LogitWriter`. Workers of a group compute their shares, and the first of them writes.
    """
    shard: Shard = getattr(data, split) if rows is None else rows
    group = current_group()
    table = LogitWriter(path, data, split, list(models), inputs, shard) if group.is_first else nullcontext()
    with table as writer, torch.inference_mode():
        for model in models.values():
            model.eval()
        for start in range(0, len(shard), BLOCK_ROWS):
            logits_NM = np.zeros((min(BLOCK_ROWS, len(shard) - start), len(models)), np.float32)
            for share in _shares(len(logits_NM)):
                batch = shard.batch(slice(start + share.start, start + share.stop))
                on_device = to_inputs(batch, device)
                for column, model in enumerate(models.values()):
                    logits_NM[share, column] = model(on_device).logit_B.cpu().numpy()
            group.sum_(torch.from_numpy(logits_NM))
            if writer is not None:
                writer.write(logits_NM)


def _shares(rows: int) -> Iterator[slice]:
    """Yield the places of this worker's rows in small batches, which stay in cache; all workers have as many batches.

    What a worker leaves at zero, the others fill: the sum over all of them is the whole.
    """
    group = current_group()
    size = EVAL_ROWS * group.size
    for start in range(0, rows, size):
        share = group.share(min(size, rows - start))
        yield slice(start + share.start, start + share.stop)


def predict_routes(
    model: Recap, shard: Shard, routes: Sequence[Route], device: torch.device, depth: int | None = None
) -> npt.NDArray[np.float64]:
    """Return one logit per row and route, rows × routes; leave the model in evaluation mode."""
    model.eval()
    logits_NK = np.zeros((len(shard), len(routes)), np.float32)
    with torch.inference_mode():
        for share in _shares(len(shard)):
            inputs = to_inputs(shard.batch(share), device)
            logits_NK[share] = route_logits(model, inputs, routes, depth).T.cpu().numpy()
        current_group().sum_(torch.from_numpy(logits_NK))
    return logits_NK.astype(np.float64)


def predict(model: nn.Module, shard: Shard, device: torch.device) -> npt.NDArray[np.float32]:
    """Return one logit per row, in the shard's order; leave the model in evaluation mode.

    Workers of a group compute their shares, and all get the whole.
    """
    model.eval()
    logits_N = np.zeros(len(shard), np.float32)
    with torch.inference_mode():
        for share in _shares(len(shard)):
            logits_N[share] = model(to_inputs(shard.batch(share), device)).logit_B.cpu().numpy()
        current_group().sum_(torch.from_numpy(logits_N))
    return logits_N
