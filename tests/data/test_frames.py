"""Tables in memory as frames: exact, or refused."""

from datetime import datetime
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest

from recap_ctr.data.frames import as_frame
from recap_ctr.errors import InputError


class TestAsFrame:
    @pytest.mark.parametrize(
        ("column", "expected"),
        [
            (pd.Series([1, None], dtype="Int64"), [1, None]),
            (pd.Series([2**63 + 5, None], dtype="UInt64"), [2**63 + 5, None]),
            (pd.Series([2**63 + 5, None], dtype=object), [2**63 + 5, None]),
            (pd.Series([2**53 + 1, 2], dtype="int64"), [2**53 + 1, 2]),
            (pd.Series(["a", None], dtype="string"), ["a", None]),
            (pd.Series(["a", None]), ["a", None]),
            (pd.Series(["a", None], dtype="category"), ["a", None]),
            (pd.Series([True, None], dtype="boolean"), [True, None]),
            (pd.Series([1, "a", None, float("nan")], dtype=object), ["1", "a", None, None]),
            (pd.Series([[1, 2], None]), [[1, 2], None]),
            (pd.Series([np.array(["a"]), None]), [["a"], None]),
            (pd.to_datetime(pd.Series(["2026-01-31", None])), [datetime(2026, 1, 31), None]),
        ],
        ids=lambda value: str(getattr(value, "dtype", "")),
    )
    def test_pandas_columns_stay_exact(self, column: Any, expected: list[Any]) -> None:
        assert as_frame(pd.DataFrame({"x": column}))["x"].to_list() == expected

    def test_other_tables(self) -> None:
        table = {"a": [1, 2], "b": ["x", None]}
        frame = pl.DataFrame(table)
        assert as_frame(frame) is frame
        assert as_frame(frame.lazy()).equals(frame)
        assert as_frame(table).equals(frame)
        assert as_frame(np.array([[1, 2], [3, 4]])).to_dict(as_series=False) == {"x0": [1, 3], "x1": [2, 4]}
        named = as_frame(np.array([["p", None], ["q", "r"]], object), ["u", "v"])
        assert named.to_dict(as_series=False) == {"u": ["p", "q"], "v": [None, "r"]}

    @pytest.mark.parametrize(
        ("table", "text"),
        [
            (pd.DataFrame([[1, 2]], columns=["a", "a"]), "column 'a' appears twice in the table"),
            (np.zeros(3), "Expected 2D array, got 1D"),
            ([[1, 2]], "can't read rows from list"),
        ],
    )
    def test_other_objects_are_refused(self, table: Any, text: str) -> None:
        with pytest.raises(InputError, match=text):
            as_frame(table)
