"""Normalisation over a batch: ScaleNorm, which deep stacks of cross layers need, and BatchNorm.

Shapes: B batch, H heads, C features of a head.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


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
        self.running_mean.lerp_(mean_H, self.momentum)
        self.running_var.lerp_(var_H * (count / (count - 1)), self.momentum)

    def extra_repr(self) -> str:
        """Return the arguments to show in `repr`."""
        return f"num_heads={self.weight.numel()}"


class BatchNorm(nn.BatchNorm1d):
    """BatchNorm that uses its running statistics for a training batch of one row, as an epoch's last may be."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise each feature over the batch."""
        if self.training and x.numel() == self.num_features:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        return super().forward(x)


def centre_(c_BHC: Tensor) -> tuple[Tensor, Tensor]:
    """Subtract each head's mean over batch and features in place; return the mean and the biased variance.

    The variance is computed from the centred values: E[c^2] - E[c]^2 loses all digits if the mean is large.
    """
    if c_BHC.shape[0] * c_BHC.shape[2] < 2:
        raise ValueError(
            f"ScaleNorm needs more than 1 value per head to train, but c has shape {tuple(c_BHC.shape)}: "
            "use a larger batch, or eval mode"
        )
    mean_H = c_BHC.mean(-1).mean(0)
    c_BHC -= mean_H[:, None]
    var_H = torch.linalg.vector_norm(c_BHC, dim=-1).square_().mean(0) / c_BHC.shape[2]
    return mean_H, var_H
