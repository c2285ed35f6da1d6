"""One optimizer step: Adam over dense weights, and over tables in one of two ways.

- `exact`: the published protocol. Every row of a table moves at every step, by its momentum and by the regulariser.
- `fast`: only the rows of the batch move. A row that returns after k steps gets the regulariser of all k at once,
  as l2 * k * row in its gradient; its moments rest in between. The cost does not grow with the vocabulary.

Where they differ, and by how much: docs/decisions/0003-two-updates.md. Shapes: V table rows, U rows of the batch.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim.adam import adam

from recap_ctr.axes.trajectory import MovingAverage
from recap_ctr.config import TrainConfig
from recap_ctr.errors import InputError
from recap_ctr.nn.device import is_host
from recap_ctr.nn.group import current_group
from recap_ctr.nn.table import RowGradient, Table
from recap_ctr.training.record import require_finite

BETA1, BETA2, EPS = 0.9, 0.999, 1e-8


class Update:
    """Adam with clipped gradients. The tables are regularised by l2/2 · ||table||², other weights in the same way by
    net_l2."""

    def __init__(self, model: nn.Module, config: TrainConfig, averages: Sequence[MovingAverage] = ()) -> None:
        self._config, self._averages, self._group = config, averages, current_group()
        self._fast = config.update == "fast"
        tables = {name: module for name, module in model.named_modules() if isinstance(module, Table)}
        rows = {id(table.weight) for table in tables.values()}
        self._tables = {name: table for name, table in tables.items() if table.weight.requires_grad}
        self._dense = {
            name: weight
            for name, weight in model.named_parameters()
            if id(weight) not in rows and weight.requires_grad
        }
        weights = {**self._dense, **{name: table.weight for name, table in self._tables.items()}}
        self._first = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        self._second = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        self._touched: dict[str, Tensor] = {}
        self._full_grad: dict[str, Tensor] = {}
        for name, table in self._tables.items():
            if self._fast:
                self._touched[name] = torch.zeros(
                    table.weight.shape[0], dtype=torch.int32, device=table.weight.device
                )
            else:
                self._full_grad[name] = torch.zeros_like(table.weight)
        self.step_count = 0
        self.norm = torch.zeros(())
        """That of the last step's gradient, before it was clipped."""

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Update all weights from their gradients, which are then removed, and the averages from the new weights.

        Workers of a group sum their gradients of dense weights; a table's gradient is where its rows are already.
        """
        self.step_count += 1
        gradients = {name: self._take(name, table) for name, table in self._tables.items()}
        trained = {name: weight for name, weight in self._dense.items() if weight.grad is not None}
        dense = [weight.grad for weight in trained.values() if weight.grad is not None]
        self._group.sum_all_(dense)
        if self._config.net_l2 and dense:
            torch._foreach_add_(dense, list(trained.values()), alpha=self._config.net_l2)
        square = torch.stack([grad.square().sum() for grad in dense]).sum() if dense else torch.zeros(())
        squares = [self._square(self._tables[name].weight, gradient) for name, gradient in gradients.items()]
        for table_square in self._group.sum_(torch.stack(squares)) if squares else ():
            square = square + table_square
        self.norm = square.sqrt()
        clip = self._clip()
        is_clipped = isinstance(clip, Tensor) or clip < 1.0
        if is_clipped:
            torch._foreach_mul_(dense, clip)
        self._adam(
            list(trained.values()),
            dense,
            [self._first[name] for name in trained],
            [self._second[name] for name in trained],
            learning_rate,
        )
        for name, gradient in gradients.items():
            if is_clipped:
                gradient.grad_Ud.mul_(clip)
            if self._fast:
                self._step_rows(name, gradient, learning_rate)
            else:
                self._step_table(name, gradient, learning_rate, self._config.l2 * clip)
        for weight in self._dense.values():
            weight.grad = None
        for average in self._averages:
            average.after_step(self.step_count)

    def _clip(self) -> float | Tensor:
        """Return what gradients are multiplied by; on a GPU a tensor, as reading the norm would wait for it."""
        if not is_host(self.norm.device):
            return (self._config.clip / (self.norm + 1e-6)).clamp(max=1.0)
        norm = float(self.norm)
        require_finite("gradient", norm, self.step_count)  # This must come before any weight changes.
        return min(1.0, self._config.clip / (norm + 1e-6))

    def _take(self, name: str, table: Table) -> RowGradient:
        gradient, table.row_gradient = table.row_gradient, None
        if gradient is None and table.weight.grad is not None:
            raise InputError(
                f"the table {name!r} got a gradient of all its rows, as it does under torch.compile",
                fix="train the model as it is, without torch.compile; a trained model may be compiled",
            )
        assert gradient is not None, f"{name} got no gradient"
        if self._fast and self._config.l2 > 0:
            idle_U = self.step_count - self._touched[name][gradient.rows_U]
            if gradient.is_real_U is not None:
                idle_U = idle_U * gradient.is_real_U
            gradient.grad_Ud.add_(table.weight[gradient.rows_U] * idle_U.unsqueeze(1), alpha=self._config.l2)
        return gradient

    def _square(self, weight_Vd: Tensor, gradient: RowGradient) -> Tensor:
        """Return the squared norm of a table's gradient, with the regulariser's share."""
        square = gradient.grad_Ud.square().sum()
        l2 = self._config.l2
        if self._fast or l2 == 0:
            return square
        # |g + l2 w|² over the whole table, where g is zero outside the batch's rows.
        cross = (gradient.grad_Ud * weight_Vd[gradient.rows_U]).sum()
        norm: Tensor = torch.linalg.vector_norm(weight_Vd)
        return square + 2 * l2 * cross + (l2 * norm) ** 2

    def _step_rows(self, name: str, gradient: RowGradient, learning_rate: float) -> None:
        rows_U, weight_Vd = gradient.rows_U, self._tables[name].weight
        for average in self._averages:
            average.before_rows_change(name, rows_U)
        weight_Ud, first_Ud, second_Ud = (
            table_Vd.index_select(0, rows_U)
            for table_Vd in (weight_Vd, self._first[name], self._second[name])
        )
        self._adam([weight_Ud], [gradient.repeated()], [first_Ud], [second_Ud], learning_rate)
        weight_Vd.index_copy_(0, rows_U, weight_Ud)
        self._first[name].index_copy_(0, rows_U, first_Ud)
        self._second[name].index_copy_(0, rows_U, second_Ud)
        self._touched[name].index_fill_(0, rows_U, self.step_count)

    def _step_table(self, name: str, gradient: RowGradient, learning_rate: float, l2: float | Tensor) -> None:
        grad_Vd = self._full_grad[name]
        grad_Vd.index_copy_(0, gradient.rows_U, gradient.repeated())
        weight_Vd = self._tables[name].weight
        moments = [self._first[name]], [self._second[name]]
        if isinstance(l2, Tensor):  # Adam takes only a number.
            self._adam([weight_Vd], [grad_Vd.addcmul_(weight_Vd, l2)], *moments, learning_rate)
            grad_Vd.zero_()
        else:
            self._adam([weight_Vd], [grad_Vd], *moments, learning_rate, l2)
            grad_Vd.index_fill_(0, gradient.rows_U, 0.0)

    def _adam(
        self,
        weights: list[Tensor],
        grads: list[Tensor],
        first: list[Tensor],
        second: list[Tensor],
        learning_rate: float,
        l2: float = 0.0,
    ) -> None:
        if not weights:
            return
        # Adam itself counts the step up by one.
        steps = torch.full((len(weights),), float(self.step_count - 1), device=weights[0].device).unbind()
        adam(
            weights,
            grads,
            first,
            second,
            [],
            list(steps),
            fused=True,
            amsgrad=False,
            beta1=BETA1,
            beta2=BETA2,
            lr=learning_rate,
            weight_decay=l2,
            eps=EPS,
            maximize=False,
        )

    def state(self) -> dict[str, Tensor]:
        """Return the tensors to save for resuming."""
        tensors = {f"first.{name}": value for name, value in self._first.items()}
        tensors |= {f"second.{name}": value for name, value in self._second.items()}
        return tensors | {f"touched.{name}": value for name, value in self._touched.items()}

    def start_from(self, tensors: Mapping[str, Tensor], step_count: int) -> None:
        """Go on with the moments of an earlier run of `step_count` steps; what they lack starts from zero.

        Rows whose last step is not known count as moved by the last one.
        """
        stored = {name: value for name, value in tensors.items() if name in self.state()}
        unknown = {name: torch.full_like(value, step_count) for name, value in self._touched.items()}
        start = {f"touched.{name}": value for name, value in unknown.items()}
        self.load({**self.state(), **start, **stored}, step_count)

    def load(self, tensors: Mapping[str, Tensor], step_count: int) -> None:
        """Go on from saved tensors, after `step_count` steps."""
        for name, value in self.state().items():
            value.copy_(tensors[name])
        self.step_count = step_count
