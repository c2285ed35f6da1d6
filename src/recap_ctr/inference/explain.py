"""Why a row gets its score: what each of its fields contributes to the logit.

A field's contribution is the logit of the row minus the logit of the same row without a value in that field. It says
what the model does, not what would happen if the value were changed in the world. Contributions don't sum to the logit:
fields act together, and each is removed from a row that keeps all others.

Shapes: B rows, F fields.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from recap_ctr.data.encode import Encoded, Encoder, as_numbers, raw_categories
from recap_ctr.data.layout import FieldLayout
from recap_ctr.data.source import Block
from recap_ctr.data.text import as_text
from recap_ctr.errors import InputError
from recap_ctr.schema import Field

MAX_SHOWN = 60  # characters of a value
Floats = npt.NDArray[np.float64]
LogitFunction = Callable[[Encoded], Floats]
"""What returns one logit per encoded row: an engine at one of its settings."""


class Contribution(NamedTuple):
    """What one field of a row contributes to its logit.

    >>> print(Contribution("site", "news", 0.8312))
    site=news (+0.83)
    """

    field: str
    value: str
    contribution: float

    def __str__(self) -> str:
        return f"{self.field}={self.value} ({self.contribution:+.2f})"


def missing_row(encoder: Encoder) -> Encoded:
    """Return one encoded row in which every field is missing."""
    names = list(encoder.schema.input_columns)
    frame = pl.DataFrame({name: [None] for name in names}, dict.fromkeys(names, pl.String))
    return encoder.encode(Block(frame, 1, "a row without values"))


def with_field_of(
    encoded: Encoded, field: FieldLayout, other: Encoded, rows: npt.NDArray[np.integer[Any]]
) -> Encoded:
    """Return `encoded` with the ids and numbers of one field taken from the `rows` of `other`."""
    ids_BW, values_BN = encoded.ids_BW.copy(), encoded.values_BN
    columns = slice(field.start, field.start + field.width)
    ids_BW[:, columns] = other.ids_BW[rows, columns]
    if field.value_column is not None:
        values_BN = values_BN.copy()
        values_BN[:, field.value_column] = other.values_BN[rows, field.value_column]
    return replace(encoded, ids_BW=ids_BW, values_BN=values_BN)


def contributions(logits: LogitFunction, encoder: Encoder, encoded: Encoded, logit_B: Floats) -> Floats:
    """Return what each field adds to the logit of each row, rows × fields; `logit_B` are the logits of the rows.

    Every row is scored once more for each field.
    """
    missing, first_row = missing_row(encoder), np.zeros(len(logit_B), np.int64)
    without_FB = [
        logits(with_field_of(encoded, field, missing, first_row)) for field in encoder.layout.fields
    ]
    return np.asarray(logit_B[:, None] - np.stack(without_FB, axis=1))


def largest(block: Block, encoder: Encoder, contributions_BF: Floats, count: int) -> list[list[Contribution]]:
    """Return, for each raw row of a block, its `count` largest contributions, of either sign, largest first.

    Fields that contribute nothing are left out: those without a value, and those whose value is unseen.
    """
    order_BN = np.argsort(-np.abs(contributions_BF), axis=1, kind="stable")[:, :count]
    fields = [fitted.field for fitted in encoder.fields]
    texts = {index: _texts(block, fields[index]) for index in np.unique(order_BN).tolist()}
    return [
        [
            Contribution(fields[index].name, texts[index][row] or "", float(contributions_BF[row, index]))
            for index in order
            if contributions_BF[row, index]
        ]
        for row, order in enumerate(order_BN.tolist())
    ]


def _texts(block: Block, field: Field) -> list[str | None]:
    """Return the values of a field as text, cut where they are long; None where they are missing."""
    if field.kind == "numeric":
        numbers = as_numbers(block, field).to_list()
        return [None if number is None else f"{number:g}" for number in numbers]
    if field.derive is not None:
        return raw_categories(block, field).to_list()
    raw = block.column(field.column, "field").alias("")
    if isinstance(raw.dtype, pl.List | pl.Array):
        raw = (
            raw.cast(pl.List(raw.dtype.inner))
            .list.eval(pl.element().cast(pl.String))
            .list.join(field.separator)
        )
    return [value and _cut(value) for value in as_text(raw, field.missing).to_list()]


def _cut(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "…"


def explanation_columns(
    logits: LogitFunction, encoder: Encoder, block: Block, logit_B: Floats, count: int
) -> list[pl.Series]:
    """Return the columns why_1, why_2, .. of raw rows: their largest contributions as text, null where none is left."""
    contributions_BF = contributions(logits, encoder, encoder.encode(block), logit_B)
    rows = largest(block, encoder, contributions_BF, count)
    return [
        pl.Series(name, [str(row[at]) if at < len(row) else None for row in rows], dtype=pl.String)
        for at, name in enumerate(explanation_names(count))
    ]


def explanation_names(count: int) -> list[str]:
    """Return the names of the columns that explain a score.

    >>> explanation_names(2)
    ['why_1', 'why_2']
    """
    if count < 0:
        raise InputError(f"{count} contributions can't be shown", fix="ask for 1 or more")
    return [f"why_{number}" for number in range(1, count + 1)]
