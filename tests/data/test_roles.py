"""Columns with a role are read in many spellings, and an error names the row."""

import math
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from recap_ctr.errors import InputError
from tests.support.preparing import PLAIN, prepared, simple


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0, -1.0], "row 2: the weight 'w' is -1.0; it must be 0 or more"),
        ([1.0, None], "row 2: the weight 'w' is missing"),
        ([1.0, 1e39], "row 2: the weight 'w' is 1e+39"),
        (["1", "x"], "row 2, field 'w': 'x' is not a number"),
    ],
)
def test_bad_weights(values: list[Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        prepared(simple(40, w=values * 20), tmp_path / "out", PLAIN.model_copy(update={"weight": "w"}))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["5", None], "row 2: the time 't' is missing\n  fix: use a number, or a date such as"),
        (["5", "soon"], "row 2: the time 't' is 'soon'"),
        (["2026-01-31", "2026-02-30"], "row 2: the time 't' is '2026-02-30'"),
        ([1.0, math.inf], "row 2: the time 't' is inf"),
        ([[1], [2]], "the time 't' is of type List(Int64)"),
    ],
)
def test_bad_times(values: list[Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        prepared(simple(40, t=values * 20), tmp_path / "out", PLAIN.model_copy(update={"time": "t"}))
    assert message in str(error.value)


@pytest.mark.parametrize(
    "labels",
    [
        *(["0", "1"], [0.0, 1.0], ["0.0", "1.0"], ["0.00", "1.00"], [Decimal("0.00"), Decimal("1.00")]),
        *([False, True], ["False", "True"]),
    ],
)
def test_labels_in_many_spellings(labels: list[Any], tmp_path: Path) -> None:
    data = prepared(simple(40).with_columns(y=pl.Series(labels * 20)), tmp_path / "out")
    np.testing.assert_array_equal(data.train.labels, data.train.rows % 2)
