"""Rows as scikit-learn's users have them, X, y and sample weights, as tables with a schema."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
from sklearn.utils import assert_all_finite, check_consistent_length, column_or_1d
from sklearn.utils.multiclass import check_classification_targets, type_of_target

from recap_ctr.data.inferred import LEFT_OUT
from recap_ctr.data.prepare import Preparation
from recap_ctr.data.source import FrameSource
from recap_ctr.data.split import Split
from recap_ctr.data.table import open_table
from recap_ctr.schema import Schema

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows with their labels and, where there are any, their weights."""

    frame: pl.DataFrame
    y: Array
    weights: Floats | None

    def table(self, schema: Schema, classes: Array, weighted: bool) -> pl.DataFrame:
        """Return the frame with y, as 0 and 1, and, if `weighted`, the weights under the schema's names."""
        table = self.with_label(schema.label, classes)
        if not weighted:
            return table
        weights = np.ones(len(self.y)) if self.weights is None else self.weights
        return table.with_columns(pl.Series(schema.weight, weights))

    def with_label(self, name: str, classes: Array) -> pl.DataFrame:
        """Return the frame with y, as 0 and 1, in the column `name`."""
        return self.frame.with_columns(pl.Series(name, np.searchsorted(classes, self.y)))


def labelled_rows(frame: pl.DataFrame, y: Any, sample_weight: Any = None) -> Rows:
    """Return rows after checking that each has a label and a weight; leave out rows of weight 0."""
    y = column_or_1d(y, warn=True)
    assert_all_finite(y, input_name="y")
    check_classification_targets(y)
    weights = None if sample_weight is None else column_or_1d(sample_weight, dtype=np.float64)
    check_consistent_length(frame, y, weights)
    if weights is None or weights.all():
        return Rows(frame, y, weights)
    is_kept = weights != 0
    if not is_kept.any():
        raise ValueError("Sample weights must contain at least one non-zero number.")
    return Rows(frame.filter(is_kept), y[is_kept], weights[is_kept])


def two_classes(y: Array) -> Array:
    """Return the two classes in y, in order; refuse more and fewer."""
    if (kind := type_of_target(y)) != "binary":
        raise ValueError(f"Only binary classification is supported. The type of the target is {kind}.")
    classes = np.unique(y)
    if len(classes) < 2:
        raise ValueError(f"y holds {'1 class' if len(y) else 'no class'}, but two are needed")
    return classes


def is_weighted(*parts: Rows | None) -> bool:
    """Return whether some of the rows have weights; the others then weigh 1."""
    return any(rows is not None and rows.weights is not None for rows in parts)


def describe_columns(
    rows: Rows, classes: Array, label: str, schema: Schema | None, *, weighted: bool
) -> tuple[Schema, dict[str, str]]:
    """Return the schema of the rows, and the columns that inference made no field of, each with the reason.

    Without a `schema` it is inferred as `recap fit` does. `label` and the weights get names that no column has.
    """
    dropped: dict[str, str] = {}
    if schema is None:
        name = free_name(label, rows.frame.columns)
        table = open_table(rows.with_label(name, classes), label=name)
        schema = table.schema
        fields = {*schema.input_columns, *(field.name for field in schema.fields)}
        for finding in table.inferred.findings if table.inferred else ():
            if finding.column not in fields and finding.column != name:
                dropped[finding.column] = f"{finding.verdict.removeprefix(LEFT_OUT)}: {finding.reason}"
    elif not isinstance(schema, Schema):
        raise ValueError(f"schema is a {type(schema).__name__}, not a recap_ctr.Schema")
    if weighted and schema.weight is None:
        name = free_name("weight", [*rows.frame.columns, schema.label])
        schema = schema.model_copy(update={"weight": name, "columns": None})
    return schema, dropped


def preparation(
    schema: Schema, classes: Array, rows: Rows, valid: Rows | None, *, fraction: float, seed: int
) -> Preparation:
    """Return how to prepare the rows, with those in `valid` held out or, without any, a `fraction` of each class."""
    weighted = is_weighted(rows, valid)
    table = rows.table(schema, classes, weighted)
    if valid is not None:
        tables = {"train": table, "valid": valid.table(schema, classes, weighted)}
        sources = {name: FrameSource(part, origin=f"the {name} rows") for name, part in tables.items()}
        return Preparation(schema, {**sources}, Split(kind="files"))
    # One table with a split column, not two tables: an error then names the row by its number in X.
    column = free_name("split", table.columns)
    split = pl.Series(column, _hold_out(rows.y, classes, fraction, seed))
    return Preparation(
        schema, {"all": FrameSource(table.with_columns(split))}, Split(kind="column", column=column)
    )


def _hold_out(y: Array, classes: Array, fraction: float, seed: int) -> Array:
    """Return `valid` for a share of each class, but one row at least, and `train` for the other rows."""
    rng = np.random.default_rng(seed)
    split = np.full(len(y), "train")
    for label in classes:
        members = np.flatnonzero(y == label)
        if len(members) < 2:
            raise ValueError(
                f"class {label!s} has one row only: training and validation need one row each of every class"
            )
        count = min(max(round(fraction * len(members)), 1), len(members) - 1)
        split[rng.choice(members, count, replace=False)] = "valid"
    return split


def free_name(name: str, taken: Iterable[str]) -> str:
    """Return `name`, with as many underscores in front as it takes to differ from all names in `taken`.

    >>> free_name("label", ["ad", "label"])
    '_label'
    """
    while name in taken:
        name = f"_{name}"
    return name
