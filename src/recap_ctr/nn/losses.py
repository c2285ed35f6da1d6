"""Training losses, by their name in a model's config. Each is a mean over the batch, weighted by row weights."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from recap_ctr.nn.group import current_group
from recap_ctr.nn.interface import Output


def bce(logit_B: Tensor, target_B: Tensor, weight_B: Tensor | None) -> Tensor:
    """Return the mean binary cross-entropy of logits against targets in [0, 1] (Eq. 1)."""
    group = current_group()
    if weight_B is None and group.size == 1:
        return F.binary_cross_entropy_with_logits(logit_B, target_B)
    losses_B = F.binary_cross_entropy_with_logits(logit_B, target_B, reduction="none")
    if weight_B is None:
        return group.common_total(losses_B.sum() / group.rows_of_all(len(losses_B)))
    return group.common_total((losses_B * weight_B).sum() / group.sum_(weight_B.sum()).clamp(min=1e-12))


def plain(output: Output, target_B: Tensor, weight_B: Tensor | None) -> Tensor:
    """Return the cross-entropy of the model's logit."""
    return bce(output.logit_B, target_B, weight_B)


def tri_bce(output: Output, target_B: Tensor, weight_B: Tensor | None) -> Tensor:
    """Return FCN's loss as in its code: each tower's loss is weighted by its lag, which passes gradients too."""
    return _tri_bce(output, target_B, weight_B, detach=False)


def tri_bce_detached(output: Output, target_B: Tensor, weight_B: Tensor | None) -> Tensor:
    """Return FCN's loss as in its paper: the weights of the towers' losses are constants."""
    return _tri_bce(output, target_B, weight_B, detach=True)


def _tri_bce(output: Output, target_B: Tensor, weight_B: Tensor | None, *, detach: bool) -> Tensor:
    fused = bce(output.logit_B, target_B, weight_B)
    total = fused
    for tower in ("exponential", "linear"):
        loss = bce(output.aux[tower], target_B, weight_B)
        lag = torch.clamp(loss - fused, min=0.0)
        total = total + (lag.detach() if detach else lag) * loss
    return total


def depth_bce(output: Output, target_B: Tensor, weight_B: Tensor | None) -> Tensor:
    """Return the sum of alpha_d · BCE over the trained depths (Eq. 16)."""
    losses = [bce(logit_B, target_B, weight_B) for logit_B in output.aux["logits_KB"]]
    return torch.stack(losses) @ output.aux["alphas_K"]


def self_distillation(output: Output, target_B: Tensor, weight_B: Tensor | None) -> Tensor:
    """Return the BCE of the logit, plus that of each row of `members_KB` against the model's own probability.

    The probability is held constant. QNN's members are two passes with separate dropout masks, FINAL's are its
    two blocks.
    """
    probability_B = torch.sigmoid(output.logit_B).detach()
    members = [bce(logit_B, probability_B, weight_B) for logit_B in output.aux.get("members_KB", ())]
    return sum(members, start=bce(output.logit_B, target_B, weight_B))


def members_bce(output: Output, target_B: Tensor, weight_B: Tensor | None) -> Tensor:
    """Return the mean of the members' own losses: trained each by itself they differ, so that their mean gains."""
    losses = [bce(logit_B, target_B, weight_B) for logit_B in output.aux["members_KB"]]
    return torch.stack(losses).mean()


def distillation(name: str) -> "Loss":
    """Return the distillation loss (Eq. 14) for a model whose loss is `name`.

    It applies to every trained depth if the model has several, otherwise to the logit.
    """
    return depth_bce if name == "depth-bce" else plain


Loss = Callable[[Output, Tensor, Tensor | None], Tensor]
LOSSES: dict[str, Loss] = {
    "bce": plain,
    "tri-bce": tri_bce,
    "tri-bce-detached": tri_bce_detached,
    "depth-bce": depth_bce,
    "self-distillation": self_distillation,
    "members-bce": members_bce,
}
