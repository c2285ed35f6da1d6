"""The normalisation that keeps a deep stack of cross layers alive.

Shapes: B batch, H heads, C features of a head.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class ScaleNorm(nn.Module):
    """BatchNorm with one channel per head: a single mean and variance over the batch and all features.

    It restores the scale of `W h`, which strong regularisation of the embeddings makes tiny beside the bias
    of a cross layer, and leaves the ratio between features alone. Equals `nn.BatchNorm1d(num_heads)` on
    (B, H, C). `nn/cross.py` computes the statistics itself while it multiplies, and hands them to `track`.
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
        return f"num_heads={self.weight.numel()}"
