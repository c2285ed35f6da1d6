"""The trajectory axis: an exponential moving average of a run's weights (Eq. 10).

Shapes: V table rows, U distinct rows of a batch, d vector size.
"""

import copy
import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from recap_ctr.config import WARMUP
from recap_ctr.nn.interface import Inputs
from recap_ctr.nn.table import Table


class MovingAverage:
    """The averaged model: ema <- beta * ema + (1 - beta) * weights after each step, starting from a copy.

    Early in training, beta is at most (1 + t) / (1 + warmup + t) at step t, so that the average forgets the random
    start: it then spans a fraction 1 / `warmup` of the steps so far.
    Statistics of normalisation are not averaged, because averaged weights have different ones (`restore_statistics`).

    With `lazy`, the rows of tables are averaged only when a step changes them. The result is exact: between two
    changes a row's weight w is constant, so n steps amount to ema <- P * ema + (1 - P) * w, with P the product of the
    n betas.
    """

    def __init__(self, model: nn.Module, beta: float, *, lazy: bool, warmup: float = WARMUP) -> None:
        self.beta, self.warmup = beta, warmup
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.log_decay = 0.0  # sum of log beta over all steps so far
        # Per lazy table: itself, its average, and the value of `log_decay` up to which each row is averaged.
        self._tables: dict[str, tuple[Table, Table, Tensor]] = {}
        if lazy:
            averaged_modules = dict(self.model.named_modules())
            for name, table in model.named_modules():
                if isinstance(table, Table):
                    average = averaged_modules[name]
                    assert isinstance(average, Table)
                    device = table.weight.device
                    # MPS has no float64.
                    precision = torch.float32 if device.type == "mps" else torch.float64
                    settled_V = torch.zeros(table.weight.shape[0], dtype=precision, device=device)
                    self._tables[name] = table, average, settled_V
        lazy_weights = {id(table.weight) for table, _, _ in self._tables.values()}
        pairs = [
            (averaged, weight)
            for averaged, weight in zip(self.model.parameters(), model.parameters(), strict=True)
            if id(weight) not in lazy_weights
        ]
        self._averages: list[Tensor] = [averaged for averaged, _ in pairs]
        self._weights = [weight for _, weight in pairs]

    @torch.no_grad()
    def before_rows_change(self, name: str, rows_U: Tensor) -> None:
        """Bring the average of some rows of a lazy table up to date, before a step changes their weights."""
        if name in self._tables:
            table, average, settled_V = self._tables[name]
            since_U = settled_V[rows_U]
            keep_U1 = torch.exp(self.log_decay - since_U).to(table.weight.dtype).unsqueeze(1)
            old_Ud = table.weight[rows_U]
            average.weight[rows_U] = old_Ud + keep_U1 * (average.weight[rows_U] - old_Ud)
            settled_V.index_fill_(0, rows_U, self.log_decay)

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """Include the weights after step number `step` (from 1) in the average."""
        beta = min(self.beta, (1 + step) / (1 + self.warmup + step))
        self.log_decay += math.log(beta)
        torch._foreach_lerp_(self._averages, [tensor.detach() for tensor in self._weights], 1 - beta)

    def settle(self) -> nn.Module:
        """Return the averaged model with every row up to date."""
        for name, (_, _, settled_V) in self._tables.items():
            # Rows that are up to date are skipped: settling them twice would round twice.
            self.before_rows_change(name, torch.nonzero(settled_V != self.log_decay).squeeze(1))
        return self.model

    def state(self) -> dict[str, Tensor]:
        """Return all that resuming needs. Rows are saved unsettled: settling them would change later rounding."""
        tensors = dict(self.model.state_dict())
        tensors |= {f"settled.{name}": settled_V for name, (_, _, settled_V) in self._tables.items()}
        tensors["log_decay"] = torch.tensor(self.log_decay, dtype=torch.float64)
        return tensors

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""
        self.model.load_state_dict({name: tensors[name] for name in self.model.state_dict()})
        for name, (_, _, settled_V) in self._tables.items():
            settled_V.copy_(tensors[f"settled.{name}"])
        self.log_decay = float(tensors["log_decay"])


def beta_of(epochs: float, steps_per_epoch: int) -> float:
    """Return the β whose horizon, 1 / (1 - β) steps, is `epochs` epochs; at least two steps.

    >>> beta_of(2.0, 250)
    0.998
    """
    return 1.0 - 1.0 / max(epochs * steps_per_epoch, 2.0)


@torch.no_grad()
def restore_statistics(model: nn.Module, batches: Iterable[Inputs]) -> None:
    """Measure the statistics of all norms again, as means over `batches`.

    After averaging weights, the statistics that training gathered are several per cent off. Only the norms and the
    model itself are in training mode, so that it draws routes, or runs its network twice, as in training. All other
    modules are in evaluation mode, so no dropout acts.
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
