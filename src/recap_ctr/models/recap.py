"""RECAP's recursive backbone: FCN's two towers, each with one weight for all depths and a bank of adapters.

Shapes: B batch, F fields, D = F * dim, C = D / 2, K trained depths. A route has one adapter per step and tower.
"""

from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)
from torch import Tensor, nn

from recap_ctr.config import Frozen
from recap_ctr.data.layout import Layout
from recap_ctr.models.blend import Parts
from recap_ctr.models.boosted import BoostedConfig
from recap_ctr.models.fcn import halved
from recap_ctr.models.rates import RatesConfig
from recap_ctr.nn.cross import Cross
from recap_ctr.nn.embedding import Embedding
from recap_ctr.nn.initial import linear
from recap_ctr.nn.interface import Inputs, Output
from recap_ctr.nn.lora import AdapterBank, SignBank, draw_for_rows
from recap_ctr.nn.norms import ScaleNorm

TowerRoute = tuple[int, ...]
LATER = ("first_order", "rates", "boosted", "max_rank", "tower_limit")
"""Settings that the first runs' directories are not named after."""
PRIME = 2**31 - 1
SIZE_LIMIT = 1.05  # largest size, relative to FCN with its published 3 + 4 layers


class Route(Frozen):
    """The adapters of one forward pass: one per step, for each tower."""

    exponential: TowerRoute
    linear: TowerRoute


class RecapConfig(Frozen):
    """The config of the backbone. The paper doesn't state the trained depths and their weights."""

    dim: int = Field(16, ge=2, multiple_of=2)
    depth: PositiveInt = 4
    """Steps of the recursion, T in the paper."""
    num_adapters: PositiveInt = 8
    """Adapters per tower, M_route in the paper."""
    lora_rank: PositiveInt | None = None
    """r_LoRA in the paper; None: the largest multiple of 4 that keeps the model within 1.05 times FCN's size."""
    max_rank: PositiveInt | None = None
    """Where the rank follows from FCN's size: the largest to take, however large FCN is."""
    form: Literal["additive", "multiplicative", "signs"] = "additive"
    """The weight with an adapter: W + AB^T, as in the paper; W ∘ (1 + AB^T); or, for columns, W ∘ ab^T with vectors
    that start at random signs."""
    binding: Literal["free", "tied", "columns"] = "tied"
    """`free`: any adapter at any step. `tied`: each adapter belongs to one step, and a step has several. `columns`: a
    route takes the same adapter at all steps of both towers, so that there are as many routes as adapters."""
    sampling: Literal["batch", "row", "fixed", "all"] = "batch"
    """In training, draw one route for the whole batch, or one for each row. For columns: with `fixed` a row always
    takes the same one, by a hash of its values, so that each column learns from rows of its own; with `all` every row
    takes every column, and the loss is the mean of theirs."""
    sample_from: NonNegativeInt = 0
    """The epoch from which routes are sampled. Before it, all rows take the home route, and each epoch starts by
    copying the home adapter of every step to the step's other adapters."""
    exponential_dropout: float = Field(0.1, ge=0, lt=1)
    linear_dropout: float = Field(0.1, ge=0, lt=1)
    layer_norm: bool = True
    scale_norm: bool = True
    fuse: Literal["mean", "gate"] = "mean"
    first_order: bool = False
    """A linear model of all values beside the towers, whose logit is added to theirs at every depth."""
    rates: RatesConfig | None = None
    """A network on click rates beside the towers, whose logit is added too; a fit puts it there."""
    boosted: BoostedConfig | None = None
    """Boosted trees beside the towers, whose logit is added too; a fit puts them there."""
    tower_limit: NonNegativeFloat | None = None
    """The largest distance of each tower's logit from its bias, in evaluation; a fit finds it. A recursion multiplies
    what it gets: of a few rare values, training can make logits of thousands, which no batch of training shows."""
    train_depths: tuple[PositiveInt, ...] = (2, 4)
    depth_weights: tuple[float, ...] = (0.1, 0.9)
    """α_d of Eq. 16, one per trained depth; most weight is on the last depth, which is the one that is served."""
    loss: Literal["depth-bce"] = "depth-bce"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.depth not in self.train_depths or max(self.train_depths) > self.depth:
            raise ValueError(f"train_depths must end at depth {self.depth}")
        if tuple(sorted(set(self.train_depths))) != self.train_depths:
            raise ValueError("train_depths must be in ascending order, without duplicates")
        if len(self.depth_weights) != len(self.train_depths):
            raise ValueError("depth_weights needs one weight for each of train_depths")
        if min(self.depth_weights) < 0 or abs(sum(self.depth_weights) - 1) > 1e-6:
            raise ValueError("depth_weights must not be negative and must sum to 1")
        if self.binding == "tied" and self.num_adapters % self.depth:
            raise ValueError(
                f"tied adapters are split evenly among the steps: num_adapters {self.num_adapters} must be a "
                f"multiple of depth {self.depth}"
            )
        if self.form != "additive" and self.sampling not in ("batch", "all"):
            raise ValueError(
                f"adapters of form {self.form!r} change W itself, so all rows of a batch need the same: set sampling"
                " to 'batch'"
            )
        if self.binding != "tied" and self.sample_from:
            raise ValueError(
                f"adapters of binding {self.binding!r} have no home adapter to copy: sample_from needs binding 'tied'"
            )
        if self.sampling in ("fixed", "all") and self.binding != "columns":
            raise ValueError(f"sampling {self.sampling!r} is one of columns: it needs binding 'columns'")
        if self.form == "signs" and self.binding != "columns":
            raise ValueError("signs make columns that differ: form 'signs' needs binding 'columns'")
        return self

    @model_serializer(mode="wrap")
    def _without_later_defaults(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Drop a setting that is newer than the runs named after these values, if it is at its default."""
        return {key: value for key, value in dump(self).items() if key not in LATER or value}

    def choices(self, step: int) -> range:
        """Return the adapters that step `step` (from 0) may use."""
        if self.binding != "tied":
            return range(self.num_adapters)
        return range(step, self.num_adapters, self.depth)

    @property
    def home(self) -> Route:
        """Return the default route: the first choice of each step; free adapters in turn; the first column."""
        if self.binding == "columns":
            return self.column(0)
        steps = range(self.depth)
        adapters = tuple(step % self.num_adapters if self.binding == "free" else step for step in steps)
        return Route(exponential=adapters, linear=adapters)

    def column(self, adapter: int) -> Route:
        """Return the route that takes one adapter at all steps of both towers."""
        adapters = (adapter,) * self.depth
        return Route(exponential=adapters, linear=adapters)


def parameters_of_rank(config: RecapConfig, layout: Layout, rank: int) -> int:
    """Return the number of parameters of a model with adapters of rank `rank`, by formula."""
    D = layout.num_fields * config.dim
    C = D // 2
    tower = C * D + D + config.num_adapters * rank * (C + D)
    tower += (2 * C if config.layer_norm else 0) + (2 * config.depth if config.scale_norm else 0)
    gate = 2 * D + 1 if config.fuse == "gate" else 0
    first_order = layout.num_rows + 1 if config.first_order else 0
    return layout.num_rows * config.dim + 2 * (tower + D + 1) + gate + first_order


def parameters_of_fcn(config: RecapConfig, layout: Layout) -> int:
    """Return the number of parameters of FCN with its published layers, and the backbone's vectors and norms."""
    D = layout.num_fields * config.dim
    layer = D * D // 2 + D + (D if config.layer_norm else 0) + (2 if config.scale_norm else 0)
    return layout.num_rows * config.dim + 7 * layer + 2 * (D + 1)


def default_rank(config: RecapConfig, layout: Layout) -> int:
    """Return the largest multiple of 4 as rank that keeps the model within `SIZE_LIMIT`; at least 4.

    It does not exceed `max_rank` either.
    """
    half, limit = layout.num_fields * config.dim // 2, SIZE_LIMIT * parameters_of_fcn(config, layout)
    if config.form == "signs":
        return 1
    rank, largest = 4, min(half, config.max_rank or half)
    while rank + 4 <= largest and parameters_of_rank(config, layout, rank + 4) <= limit:
        rank += 4
    return rank


def assign_columns(ids_BW: Tensor, count: int) -> Tensor:
    """Return one of `count` columns for each row, by a hash of its ids: the same for the same values."""
    mixers_W = torch.arange(1, ids_BW.shape[1] + 1, device=ids_BW.device) * 1_640_531_513 % 2**20
    mixed_B = (ids_BW.long() * mixers_W).sum(1) % PRIME
    return mixed_B * 48_271 % PRIME % count


class RecursiveTower(nn.Module):
    """One cross layer, applied recursively; all depths share it, except for a ScaleNorm per depth."""

    def __init__(
        self, config: RecapConfig, width: int, rank: int, dropout: float, *, exponential: bool
    ) -> None:
        super().__init__()
        self.exponential, self.form = exponential, config.form
        self.cross = Cross(width, layer_norm=config.layer_norm, scale_norm=False, dropout=dropout)
        self.bank: AdapterBank | SignBank = (
            SignBank(config.num_adapters, width // 2, width)
            if config.form == "signs"
            else AdapterBank(config.num_adapters, width // 2, width, rank)
        )
        self.norms = nn.ModuleList(ScaleNorm(1) for _ in range(config.depth if config.scale_norm else 0))
        self.head = linear(width, 1)
        self.limit = config.tower_limit

    def norm(self, step: int) -> ScaleNorm | None:
        """Return the ScaleNorm of a step (from 0), None if the tower has none."""
        norm = self.norms[step] if len(self.norms) else None
        assert norm is None or isinstance(norm, ScaleNorm)
        return norm

    def step(self, h_BHD: Tensor, h0_BHD: Tensor, at: int, adapter: int | Tensor) -> Tensor:
        """Return the state after step `at` (from 0), with one adapter, or a tensor of one per row (Eqs. 8-9)."""
        anchor = None if self.exponential else h0_BHD
        if not isinstance(self.bank, AdapterBank) or self.form != "additive":
            assert isinstance(adapter, int)
            weight_CD, delta_BHC = self.cross.weight * (1.0 + self.bank.matrix(adapter)), None
        elif isinstance(adapter, int):
            weight_CD, delta_BHC = self.cross.weight, self.bank.delta(h_BHD, adapter)
        else:
            weight_CD, delta_BHC = self.cross.weight, self.bank.delta_by_row(h_BHD, adapter)
        crossed: Tensor = self.cross(h_BHD, anchor, delta_BHC, weight_CD=weight_CD, scale_norm=self.norm(at))
        return crossed

    def logit(self, h_BHD: Tensor) -> Tensor:
        """Return one logit per row for the state `h`."""
        logit: Tensor = self.head(h_BHD)
        if self.limit is not None and not self.training:
            logit = logit.clamp(self.head.bias - self.limit, self.head.bias + self.limit)
        return logit[:, 0, 0]


class Recap(Parts):
    """The accuracy of an ensemble at one model's size, if trained by `recap fit`: FCN's towers, made recursive."""

    paper: ClassVar[str] = (
        "Beyond Interaction Capacity: Estimator Scaling with Recursive Models for CTR Prediction"
    )
    alphas_K: Tensor

    def __init__(self, config: RecapConfig, layout: Layout) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(layout, config.dim)
        width = layout.num_fields * config.dim
        rank = config.lora_rank or default_rank(config, layout)
        self.exponential = RecursiveTower(config, width, rank, config.exponential_dropout, exponential=True)
        self.linear = RecursiveTower(config, width, rank, config.linear_dropout, exponential=False)
        self.gate = nn.Linear(2 * width, 1) if config.fuse == "gate" else None
        if self.gate is not None:
            nn.init.zeros_(self.gate.weight)
            nn.init.zeros_(self.gate.bias)
        self.add_parts(config, layout)
        self.register_buffer("alphas_K", torch.tensor(config.depth_weights), persistent=False)
        self.epoch = config.sample_from
        """The current epoch of training, which the training loop sets."""

    def limit_towers(self, limit: float | None) -> None:
        """Limit the towers' logits in evaluation."""
        self.config = self.config.model_copy(update={"tower_limit": limit})
        self.exponential.limit = self.linear.limit = limit

    def begin_epoch(self) -> None:
        """Copy each step's home adapter to its other adapters, while routes are not sampled yet."""
        if self.epoch <= self.config.sample_from and self.config.sample_from:
            for tower in (self.exponential, self.linear):
                for step in range(self.config.depth):
                    assert isinstance(tower.bank, AdapterBank)
                    tower.bank.copy(step, self.config.choices(step)[1:])

    def forward(self, inputs: Inputs, route: Route | None = None, depth: int | None = None) -> Output:
        """Return one logit per row, read at `depth` (None: the full depth), and those of all trained depths.

        Without a `route`, training samples one, and evaluation takes the home route.
        """
        inputs, codes_BQ = self.apart(inputs)
        h0_BHD = halved(self.embedding(inputs), 1)
        steps = depth or self.config.depth
        depths = self.config.train_depths if self.training and depth is None else (steps,)
        columns = self._draw_columns(inputs) if route is None else (None,)
        beside_B = self.beside_logit(inputs, codes_BQ)
        logits_KB = torch.stack(
            [
                logit_B if beside_B is None else logit_B + beside_B
                for column in columns
                for logit_B in self._walk(h0_BHD, route, column, steps, depths)
            ]
        )
        several = len(columns) > 1
        alphas_K = self.alphas_K.repeat(len(columns)) / len(columns) if several else self.alphas_K
        last_B = logits_KB[len(depths) - 1 :: len(depths)].mean(0) if several else logits_KB[-1]
        return Output(last_B, {"logits_KB": logits_KB, "alphas_K": alphas_K})

    def _walk(
        self,
        h0_BHD: Tensor,
        route: Route | None,
        column: int | Tensor | None,
        steps: int,
        depths: tuple[int, ...],
    ) -> list[Tensor]:
        """Return the logits at `depths` on a route, in a column, or on adapters that are drawn step by step."""
        logits: list[Tensor] = []
        exponential, linear = h0_BHD, h0_BHD
        for at in range(steps):
            adapter = column if column is not None else self.choose_adapter(route, "exponential", at, h0_BHD)
            exponential = self.exponential.step(exponential, h0_BHD, at, adapter)
            # Drawn only now: dropout has drawn in between, and old runs must come out as they were.
            adapter = column if column is not None else self.choose_adapter(route, "linear", at, h0_BHD)
            linear = self.linear.step(linear, h0_BHD, at, adapter)
            if at + 1 in depths:
                logits.append(self.fuse(exponential, linear))
        return logits

    def fuse(self, exponential_BHD: Tensor, linear_BHD: Tensor) -> Tensor:
        """Return the mean of the towers' logits, or their mean weighted by a gate that sees both states."""
        exponential_B, linear_B = self.exponential.logit(exponential_BHD), self.linear.logit(linear_BHD)
        if self.gate is None:
            return (exponential_B + linear_B) / 2
        gate_B = torch.sigmoid(self.gate(torch.cat([exponential_BHD, linear_BHD], dim=-1)))[:, 0, 0]
        return gate_B * exponential_B + (1 - gate_B) * linear_B

    def _draw_columns(self, inputs: Inputs) -> tuple[int | Tensor | None, ...]:
        """Return the columns that a batch takes in training, or one for each row; None where there are no columns."""
        if self.config.binding != "columns" or not self.training:
            return (None,)
        if self.config.sampling == "all":
            return tuple(range(self.config.num_adapters))
        if self.config.sampling != "fixed":
            return (self.draw_adapter(0, inputs.ids_BW),)
        return (assign_columns(inputs.ids_BW, self.config.num_adapters),)

    def choose_adapter(self, route: Route | None, tower: str, at: int, h0_BHD: Tensor) -> int | Tensor:
        """Return the adapter of a tower at step `at`: that of the route, a random one, or the home adapter."""
        if route is None and self.training and self.epoch >= self.config.sample_from:
            return self.draw_adapter(at, h0_BHD)
        adapters: TowerRoute = getattr(route or self.config.home, tower)
        return adapters[at]

    def draw_adapter(self, at: int, rows: Tensor) -> int | Tensor:
        """Return a random adapter for step `at`, or one for each of the rows.

        It is drawn from torch's global generator, which the training loop seeds for each step.
        """
        choices = self.config.choices(at)
        if self.config.sampling == "batch":
            return choices[int(torch.randint(len(choices), ()))]
        return draw_for_rows(len(choices), rows) * choices.step + choices.start
