"""Dropout whose masks are cheap on a CPU.

torch's `bernoulli_` takes about 10 ns per element there, a fifth of a training step of FCN. A mask needs only a
few random bits per element, so we take 16 from a fast generator that torch's own generator seeds.
"""

import numpy as np
import torch
from torch import Tensor, nn

from recap_ctr.nn.group import current_group

_LEVELS = 1 << 16


def keep_mask(shape: tuple[int, ...], p: float, device: torch.device) -> Tensor:
    """Return a Boolean mask that is False, with probability `p`, where dropout sets an element to zero.

    The first dimension of `shape` counts rows; a worker of a group gets its rows of the mask that one would draw.
    On a CPU, `p` is rounded to a multiple of 1/65536. All randomness comes from torch's global generator, so
    `torch.manual_seed` before a step fixes its masks, whatever was drawn before.

    >>> _ = torch.manual_seed(0)
    >>> keep_mask((2, 8), 0.25, torch.device("cpu")).sum().item()
    12
    """
    if not 0.0 <= p < 1.0:
        raise ValueError(f"dropout p is {p}; it must be at least 0 and below 1")
    group = current_group()
    rows = group.rows_of_all(shape[0]) if shape else 1
    per_row = int(np.prod(shape[1:]))
    if device.type != "cpu":
        return torch.rand((rows, *shape[1:]), device=device)[group.place] >= p
    # One draw per mask, so that later draws don't depend on the size of this mask.
    seed = int(torch.randint(2**63 - 1, ()).item())
    first, last, _ = (bound * per_row for bound in group.place.indices(rows))
    bits = np.random.SFC64(seed)
    bits.random_raw(first // 4, output=False)  # Four words are drawn at a time.
    words = bits.random_raw(-(-last // 4) - first // 4).view(np.int16)[first % 4 :][: last - first]
    threshold = min(round(p * _LEVELS), _LEVELS - 1) - _LEVELS // 2
    return torch.from_numpy(words >= np.int16(threshold)).view(shape)


class Dropout(nn.Module):
    """`nn.Dropout` with masks from `keep_mask`."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        if not 0.0 <= p < 1.0:
            raise ValueError(f"dropout p is {p}; it must be at least 0 and below 1")
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """Set random elements to zero and scale the others; return `x` itself in evaluation mode."""
        if not self.training or self.p == 0.0:
            return x
        # The mask goes through uint8 because torch converts bytes to floats five times faster than booleans.
        keep = keep_mask(tuple(x.shape), self.p, x.device).view(torch.uint8).to(x.dtype)
        return x * keep.mul_(1.0 / (1.0 - self.p))

    def extra_repr(self) -> str:
        """Return the arguments to show in `repr`."""
        return f"p={self.p}"
