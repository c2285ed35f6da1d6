"""Normalisation over a batch: ScaleNorm, which deep stacks of cross layers need, and BatchNorm.

Shapes: B batch, H heads, C features of a head.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recap_ctr.nn.group import current_group


class ScaleNorm(nn.Module):
    """BatchNorm with one channel per head: a single mean and variance over the batch and all features.

    It restores the scale of `W h`, which strong regularisation of the embeddings makes tiny compared with the
    bias of a cross layer, and keeps the ratios between features. It equals `nn.BatchNorm1d(num_heads)` on
    (B, H, C). Code that normalises by itself gets the statistics from `centre_` and passes them to `track`.
    """

    eps = 1e-5
    momentum = 0.1
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_heads))
        self.bias = nn.Parameter(torch.zeros(num_heads))
        self.register_buffer("running_mean", torch.zeros(num_heads))
        self.register_buffer("running_var", torch.ones(num_heads))

    def forward(self, c_BHC: Tensor) -> Tensor:
        """Normalise each head, by the batch's statistics in training and the running ones in evaluation."""
        if self.training and current_group().size > 1:
            return _normalise_over_workers(self, c_BHC)
        return F.batch_norm(
            c_BHC,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            training=self.training,
            momentum=self.momentum,
            eps=self.eps,
        )

    @torch.no_grad()
    def track(self, mean_H: Tensor, var_H: Tensor, count: int) -> None:
        """Move the running statistics towards those of a batch with `count` values per head.

        `var_H` is the biased variance that normalises the batch; the running one is unbiased, as in torch.
        """
        _track(self, mean_H, var_H, count)

    def extra_repr(self) -> str:
        """Return the arguments to show in `repr`."""
        return f"num_heads={self.weight.numel()}"


class BatchNorm(nn.BatchNorm1d):
    """BatchNorm that uses its running statistics for a training batch of one row, as an epoch's last may be."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise each feature over the batch."""
        values = current_group().rows_of_all(len(x)) * x.shape[2:].numel() if self.training else 0
        if values == 1:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        if self.training and current_group().size > 1:
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            return _normalise_over_workers(self, x)
        return super().forward(x)


def centre_(c_BHC: Tensor) -> tuple[Tensor, Tensor]:
    """Subtract each head's mean over batch and features in place; return the mean and the biased variance.

    The variance is computed from the centred values: E[c^2] - E[c]^2 loses all digits if the mean is large.
    """
    group = current_group()
    count = group.rows_of_all(c_BHC.shape[0]) * c_BHC.shape[2]
    if count < 2:
        raise ValueError(
            f"ScaleNorm needs more than 1 value per head to train, but c has shape {tuple(c_BHC.shape)}: "
            "use a larger batch, or eval mode"
        )
    if group.size > 1:
        mean_H = group.sum_(c_BHC.sum(-1).sum(0)) / count
        c_BHC -= mean_H[:, None]
        squares_H = torch.linalg.vector_norm(c_BHC, dim=-1).square_().sum(0)
        return mean_H, group.sum_(squares_H) / count
    mean_H = c_BHC.mean(-1).mean(0)
    c_BHC -= mean_H[:, None]
    var_H = torch.linalg.vector_norm(c_BHC, dim=-1).square_().mean(0) / c_BHC.shape[2]
    return mean_H, var_H


def _normalise_over_workers(norm: ScaleNorm | BatchNorm, x: Tensor) -> Tensor:
    """Normalise each channel (dimension 1) by the statistics of all workers' rows, as F.batch_norm does for one."""
    group = current_group()
    others = [at for at in range(x.ndim) if at != 1]
    shape = [1 if at in others else -1 for at in range(x.ndim)]
    count = group.rows_of_all(len(x)) * x.shape[2:].numel()
    mean = group.total(x.sum(others)) / count
    centred = x - mean.view(shape)
    var = group.total(centred.square().sum(others)) / count
    _track(norm, mean.detach(), var.detach(), count)
    scale = torch.rsqrt(var + norm.eps) * norm.weight
    return centred * scale.view(shape) + norm.bias.view(shape)


@torch.no_grad()
def _track(norm: ScaleNorm | BatchNorm, mean: Tensor, var: Tensor, count: int) -> None:
    """Move the running statistics towards those of a batch with `count` values per channel."""
    assert norm.running_mean is not None and norm.running_var is not None and norm.momentum is not None
    norm.running_mean.lerp_(mean, norm.momentum)
    norm.running_var.lerp_(var * (count / (count - 1)), norm.momentum)
