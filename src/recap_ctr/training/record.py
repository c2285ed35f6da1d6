"""The loss and the gradient's norm of each step, read from a GPU many steps at a time."""

import math

import torch
from torch import Tensor

from recap_ctr.errors import InputError

DIVERGED = "lower learning_rate or raise l2; the last good state is kept"


def require_finite(what: str, value: float, step: int) -> None:
    """Refuse to go on with a loss or a gradient that is no number."""
    if not math.isfinite(value):
        raise InputError(f"the {what} became {value} at step {step}", fix=DIVERGED)


class StepRecord:
    """What steps leave on the device until somebody reads it."""

    def __init__(self) -> None:
        self._steps: list[tuple[int, Tensor, Tensor]] = []

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: int, loss: Tensor, norm: Tensor) -> None:
        """Keep the loss of a step, and the norm of its gradient."""
        self._steps.append((step, loss.detach(), norm))

    def read(self) -> float:
        """Return the sum of the losses since the last reading; refuse the first step whose numbers are not finite."""
        steps, self._steps = self._steps, []
        if not steps:
            return 0.0
        numbers, losses_N, norms_N = zip(*steps, strict=True)
        losses = torch.stack(losses_N).tolist()
        for step, loss, norm in zip(numbers, losses, torch.stack(norms_N).tolist(), strict=True):
            require_finite("loss", loss, step)
            require_finite("gradient", norm, step)
        return math.fsum(losses)
