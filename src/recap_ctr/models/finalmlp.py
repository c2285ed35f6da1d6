"""FinalMLP: two MLPs on differently gated inputs, fused by a bilinear form.

Shapes: B batch, F fields, d vector size, D = F * d, H heads, I and J a head's share of the streams' units,
W id columns, N value columns.
"""

from dataclasses import replace
from typing import ClassVar, Literal, Self

import torch
from pydantic import Field, PositiveInt, model_validator
from torch import Tensor, nn

from recap_ctr.config import Frozen
from recap_ctr.data.layout import FieldLayout, Layout
from recap_ctr.errors import InputError
from recap_ctr.nn.embedding import Embedding
from recap_ctr.nn.initial import linear, normal_
from recap_ctr.nn.interface import Inputs, Output
from recap_ctr.nn.mlp import MLP


class FinalMLPConfig(Frozen):
    """The config of FinalMLP; 1 and 2 number its two streams."""

    dim: PositiveInt = 16
    units1: tuple[PositiveInt, ...] = Field((400, 400, 400), min_length=1)
    batch_norm1: bool = True
    dropout1: float = Field(0.2, ge=0, lt=1)
    units2: tuple[PositiveInt, ...] = Field((400, 400, 400), min_length=1)
    batch_norm2: bool = True
    dropout2: float = Field(0.2, ge=0, lt=1)
    num_heads: PositiveInt = 10
    """Slices of both streams' last layers; each slice has a separate bilinear form."""
    feature_selection: bool = True
    """Gate each stream's inputs."""
    selection_units: tuple[PositiveInt, ...] = Field((400,), min_length=1)
    context1: tuple[str, ...] = ()
    """Names of the fields that the first stream's gates depend on; empty: the same gates for all rows."""
    context2: tuple[str, ...] = ()
    loss: Literal["bce"] = "bce"

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name, units in (("units1", self.units1), ("units2", self.units2)):
            if units[-1] % self.num_heads:
                raise ValueError(
                    f"num_heads {self.num_heads} must divide the last of {name}, which is {units[-1]}"
                )
        for name, context in (("context1", self.context1), ("context2", self.context2)):
            if context and not self.feature_selection:
                raise ValueError(f"{name} needs feature_selection")
            if len(set(context)) < len(context):
                raise ValueError(f"{name} names a field twice")
        return self


class Context(nn.Module):
    """Flattened vectors of some fields, from a separate table that holds only these fields' values."""

    shift_W: Tensor

    def __init__(self, layout: Layout, names: tuple[str, ...], dim: int) -> None:
        super().__init__()
        by_name = {field.name: field for field in layout.fields}
        fields: list[FieldLayout] = []
        shifts: list[int] = []
        self._columns: list[int] = []
        self._value_columns: list[int] = []
        offset = 0
        for name in names:
            if name not in by_name:
                raise InputError(
                    f"no field {name!r} for FinalMLP's context", fix=f"choose from {', '.join(by_name)}"
                )
            field = by_name[name]
            value_column = None if field.value_column is None else len(self._value_columns)
            fields.append(replace(field, offset=offset, start=len(self._columns), value_column=value_column))
            shifts += [field.offset - offset] * field.width
            self._columns += range(field.start, field.start + field.width)
            self._value_columns += [] if field.value_column is None else [field.value_column]
            offset += field.size
        self.embedding = Embedding(Layout(tuple(fields)), dim)
        self.register_buffer("shift_W", torch.tensor(shifts, dtype=torch.int32), persistent=False)

    def forward(self, inputs: Inputs) -> Tensor:
        """Return the fields' vectors in one row each."""
        ids_BW = inputs.ids_BW[:, self._columns] - self.shift_W
        e_BFd: Tensor = self.embedding(Inputs(ids_BW, inputs.values_BN[:, self._value_columns]))
        return e_BFd.flatten(1)


class Selection(nn.Module):
    """Gates between 0 and 2 for one stream's inputs, about 1 at the start.

    Without a context only the last bias learns: the input is zero, so ReLU outputs zero and passes no gradient.
    """

    def __init__(self, config: FinalMLPConfig, layout: Layout, context: tuple[str, ...]) -> None:
        super().__init__()
        self.context = Context(layout, context, config.dim) if context else None
        self.constant_1d = None if context else nn.Parameter(torch.zeros(1, config.dim))
        self.gate = nn.Sequential(
            MLP(max(1, len(context)) * config.dim, config.selection_units),
            linear(config.selection_units[-1], layout.num_fields * config.dim),
        )

    def forward(self, inputs: Inputs) -> Tensor:
        """Return one gate per coordinate."""
        context = self.constant_1d if self.context is None else self.context(inputs)
        return 2.0 * torch.sigmoid(self.gate(context))


class Bilinear(nn.Module):
    """The sum over heads of a bilinear form of the two streams' slices."""

    def __init__(self, units1: int, units2: int, num_heads: int) -> None:
        super().__init__()
        self.weight_HIJ = nn.Parameter(torch.empty(num_heads, units1 // num_heads, units2 // num_heads))
        # Published code initialises it as a matrix of one column, far smaller than Xavier's rule for one head.
        normal_(self.weight_HIJ, (2 / (self.weight_HIJ.numel() + 1)) ** 0.5)

    def forward(self, h1_BU: Tensor, h2_BU: Tensor) -> Tensor:
        """Return one number per row."""
        H = len(self.weight_HIJ)
        h1_BHI, h2_BHJ = (h_BU.view(h_BU.shape[0], H, -1) for h_BU in (h1_BU, h2_BU))
        return torch.einsum("bhi,hij,bhj->b", h1_BHI, self.weight_HIJ, h2_BHJ)


class FinalMLP(nn.Module):
    """A strong and cheap default made of MLPs: two streams, each with different weights on the fields."""

    paper: ClassVar[str] = "Mao et al., FinalMLP, AAAI 2023 (arXiv 2304.00902)"

    def __init__(self, config: FinalMLPConfig, layout: Layout) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(layout, config.dim)
        contexts = (config.context1, config.context2) if config.feature_selection else ()
        self.selections = nn.ModuleList(Selection(config, layout, context) for context in contexts)
        width = layout.num_fields * config.dim
        self.stream1 = MLP(width, config.units1, batch_norm=config.batch_norm1, dropout=config.dropout1)
        self.stream2 = MLP(width, config.units2, batch_norm=config.batch_norm2, dropout=config.dropout2)
        self.head1, self.head2 = linear(config.units1[-1], 1), linear(config.units2[-1], 1)
        self.bilinear = Bilinear(config.units1[-1], config.units2[-1], config.num_heads)

    def forward(self, inputs: Inputs) -> Output:
        """Return one logit per row."""
        x_BD = self.embedding(inputs).flatten(1)
        x1_BD, x2_BD = [x_BD * selection(inputs) for selection in self.selections] or (x_BD, x_BD)
        h1_BU, h2_BU = self.stream1(x1_BD), self.stream2(x2_BD)
        linear_B1: Tensor = self.head1(h1_BU) + self.head2(h2_BU)
        return Output(linear_B1.squeeze(-1) + self.bilinear(h1_BU, h2_BU), {})
