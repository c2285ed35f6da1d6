"""The trajectory axis: an exponential moving average of a run's weights (Eq. 10).

Shapes: V table rows, U distinct rows of a batch, d vector size.
"""

import copy
import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from recap_ctr.config import WARMUP
from recap_ctr.nn.embedding import Table
from recap_ctr.nn.interface import Inputs


class MovingAverage:
    """Holds the averaged model: ema <- beta * ema + (1 - beta) * weights after each step, started as a copy.

    While training is young beta is smaller, (1 + t) / (1 + warmup + t), so that the average forgets the random start:
    it then spans one part in `warmup` of the steps so far.
    Statistics of normalisation are not averaged: those of averaged weights are others (`restore_statistics`).

    With `lazy`, tables whose rows move only when touched are averaged only then, and exactly: between two touches
    a row's weight w is constant, so n steps amount to ema <- P * ema + (1 - P) * w with P the product of the n betas.
    """

    def __init__(self, model: nn.Module, beta: float, *, lazy: bool, warmup: float = WARMUP) -> None:
        self.beta, self.warmup = beta, warmup
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.log_decay = 0.0  # sum of log beta over all steps so far: S_t
        self._tables: dict[str, tuple[Table, Table, Tensor]] = {}
        if lazy:
            averaged = dict(self.model.named_modules())
            for name, table in model.named_modules():
                if isinstance(table, Table):
                    other = averaged[name]
                    assert isinstance(other, Table)
                    settled_V = torch.zeros(
                        table.weight.shape[0], dtype=torch.float64, device=table.weight.device
                    )
                    self._tables[name] = table, other, settled_V
        lazily = {id(table.weight) for table, _, _ in self._tables.values()}
        pairs = [
            (own, seen)
            for own, seen in zip(self.model.parameters(), model.parameters(), strict=True)
            if id(seen) not in lazily
        ]
        self._averages: list[Tensor] = [own for own, _ in pairs]
        self._weights = [seen for _, seen in pairs]

    @torch.no_grad()
    def before_rows_change(self, name: str, rows_U: Tensor) -> None:
        """Settle the rows of a lazy table up to now, while their old weights are still there."""
        if name in self._tables:
            table, average, settled_V = self._tables[name]
            since_U = settled_V[rows_U]
            keep_U1 = torch.exp(self.log_decay - since_U).to(table.weight.dtype).unsqueeze(1)
            old_Ud = table.weight[rows_U]
            average.weight[rows_U] = old_Ud + keep_U1 * (average.weight[rows_U] - old_Ud)
            settled_V[rows_U] = self.log_decay

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """Count one step; `step` is its number, from 1."""
        beta = min(self.beta, (1 + step) / (1 + self.warmup + step))
        self.log_decay += math.log(beta)
        torch._foreach_lerp_(self._averages, [tensor.detach() for tensor in self._weights], 1 - beta)

    def settle(self) -> nn.Module:
        """The averaged model with every row up to date."""
        for name, (_, _, settled_V) in self._tables.items():
            # Only what is behind: settling twice would round twice.
            self.before_rows_change(name, torch.nonzero(settled_V != self.log_decay).squeeze(1))
        return self.model

    def state(self) -> dict[str, Tensor]:
        """All that resuming needs. Rows are saved as they are: settling them would change later roundings."""
        tensors = dict(self.model.state_dict())
        tensors |= {f"settled.{name}": settled_V for name, (_, _, settled_V) in self._tables.items()}
        tensors["log_decay"] = torch.tensor(self.log_decay, dtype=torch.float64)
        return tensors

    def load(self, tensors: dict[str, Tensor]) -> None:
        self.model.load_state_dict({name: tensors[name] for name in self.model.state_dict()})
        for name, (_, _, settled_V) in self._tables.items():
            settled_V.copy_(tensors[f"settled.{name}"])
        self.log_decay = float(tensors["log_decay"])


def beta_of(epochs: float, steps_per_epoch: int) -> float:
    """β whose horizon, 1 / (1 - β) steps, is this many epochs.

    >>> beta_of(2.0, 250)
    0.998
    """
    return 1.0 - 1.0 / max(epochs * steps_per_epoch, 2.0)


@torch.no_grad()
def restore_statistics(model: nn.Module, batches: Iterable[Inputs]) -> None:
    """Measure the statistics of all normalisations anew, as means over batches; the rest works as in evaluation.

    Only the model itself is told that it trains, so that it draws routes as it does there, or runs its network twice.
    After averaging weights the statistics that training gathered are several per cent off.
    """
    norms = [
        module for module in model.modules() if isinstance(getattr(module, "running_mean", None), Tensor)
    ]
    momenta = [norm.momentum for norm in norms]
    calls = dict.fromkeys(norms, 0)

    def count(norm: nn.Module, _: object) -> None:
        calls[norm] += 1
        norm.momentum = 1.0 / calls[norm]  # type: ignore[assignment]

    hooks = [norm.register_forward_pre_hook(count) for norm in norms]
    model.eval()
    for norm in norms:
        norm.train()
    model.training = True
    for inputs in batches:
        model(inputs)
    for norm, momentum, hook in zip(norms, momenta, hooks, strict=True):
        norm.momentum = momentum
        hook.remove()
    model.eval()
