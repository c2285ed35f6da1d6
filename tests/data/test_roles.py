"""Columns with a role are read in many spellings, and an error names the row."""

import math
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from recap_ctr.data.prepare import Preparation, write_prepared_data
from recap_ctr.data.roles import drop_unlabelled, read_labels, read_times, recognise_labels
from recap_ctr.data.source import Block, FrameSource
from recap_ctr.errors import InputError
from tests.support.preparing import PLAIN, arrays, prepared, simple


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0, -1.0], "row 2: the weight 'w' is -1.0; it must be 0 or more"),
        ([1.0, None], "row 2: the weight 'w' is missing"),
        ([1.0, 1e39], "row 2: the weight 'w' is 1e+39"),
        (["1", "x"], "row 2: the weight 'w' is 'x'; it must be 0 or more"),
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
        *([False, True], ["False", "True"], ["FALSE", " True "]),
    ],
)
def test_labels_in_many_spellings(labels: list[Any], tmp_path: Path) -> None:
    data = prepared(simple(40).with_columns(y=pl.Series(labels * 20)), tmp_path / "out")
    np.testing.assert_array_equal(data.train.labels, data.train.rows % 2)


class TestLabels:
    def labels(self, values: list[Any], *meaning: str | None) -> list[int]:
        return list(read_labels(Block(pl.DataFrame({"y": values}), 1, "t.csv"), "y", *meaning))

    def test_one_value_against_all_others(self) -> None:
        assert self.labels(["Buy", "view", " buy", "cart"], "buy") == [1, 0, 1, 0]
        assert self.labels([1.0, -1.0, 1.0], "1.0") == [1, 0, 1]
        assert self.labels(["yes", "no"], "no", "yes") == [0, 1]

    @pytest.mark.parametrize(
        ("values", "meaning", "message"),
        [
            (
                ["yes", "Maybe"],
                ("yes", "no"),
                "t.csv: row 2: the label 'y' is 'Maybe', neither 'yes' nor 'no'",
            ),
            (["yes", None], ("yes",), "t.csv: row 2: the label 'y' is missing"),
            (["1", ""], (), "or pass --drop-unlabelled"),
            (["1", "2"], (), "say with --positive (in a schema: positive) which value is a click"),
            ([[1], [2]], (), "column 'y' is of type List(Int64), which holds no categories"),
        ],
    )
    def test_bad_labels(self, values: list[Any], meaning: tuple[str, ...], message: str) -> None:
        with pytest.raises(InputError) as error:
            self.labels(values, *meaning)
        assert message in str(error.value)

    @pytest.mark.parametrize(
        ("values", "meaning"),
        [
            (["yes", "no"], ("yes", "no")),
            (["n", "y"], ("y", "n")),
            (["-1", "1"], ("1", "-1")),
            (["skip", "click"], ("click", "skip")),
            (["clicked", "not clicked"], ("clicked", "not clicked")),
            (["impression", "click"], ("click", "impression")),
            (["yes"], ("yes", None)),
            (["0", "1"], None),
            (["false", "true"], None),
            (["1", "0", "2"], None),
            (["0", "2"], None),
            ([], None),
        ],
    )
    def test_what_is_recognised(self, values: list[str], meaning: tuple[str, str | None] | None) -> None:
        assert recognise_labels(values, "y") == meaning

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            (["good", "bad"], "has the values 'bad' and 'good', which do not say what a click is"),
            (["1", "2"], "has the values '1' and '2'"),
            (["no"], "has one value only, 'no'"),
        ],
    )
    def test_other_values_are_named(self, values: list[str], message: str) -> None:
        with pytest.raises(InputError) as error:
            recognise_labels(values, "y")
        assert message in str(error.value)
        assert str(error.value).endswith(" or ".join(f"--positive {value}" for value in sorted(values)))

    def test_na_nan_and_null_are_no_labels(self) -> None:
        block = Block(
            pl.DataFrame({"y": ["1", "NA", "0", " nan", "n/a", None, "NULL", r"\N", "1"]}), 1, "t.csv"
        )
        kept = drop_unlabelled(block, "y")
        assert kept.frame["y"].to_list() == ["1", "0", "1"]
        assert [kept.row(i) for i in range(3)] == [1, 3, 9]

    def test_a_word_for_no_label_points_to_the_option(self) -> None:
        with pytest.raises(InputError, match=r"row 2: the label 'y' is missing \('NULL'\)") as error:
            read_labels(Block(pl.DataFrame({"y": ["1", "NULL"]}), 1, "t.csv"), "y")
        assert "--drop-unlabelled" in str(error.value)

    def test_rows_keep_their_numbers_when_others_are_dropped(self, tmp_path: Path) -> None:
        frame = simple(40, w=[*[1.0] * 9, -1.0, *[1.0] * 30])
        frame = frame.with_columns(y=pl.when(pl.int_range(40) % 4 == 2).then(None).otherwise(pl.col("y")))
        block = drop_unlabelled(Block(frame, 101, "t.csv"), "y")
        assert block.frame.height == 30
        assert [block.row(i) for i in range(4)] == [101, 102, 104, 105]
        schema = PLAIN.model_copy(update={"weight": "w"})
        preparation = Preparation(schema, {"all": FrameSource(frame)}, drop_unlabelled=True)
        with pytest.raises(InputError, match=r"row 10: the weight 'w' is -1\.0"):
            write_prepared_data(preparation, tmp_path / "out", quiet=True)

    def test_dropped_rows_are_counted_and_change_nothing_else(self, tmp_path: Path) -> None:
        whole = simple(80)
        gaps = whole.with_columns(y=pl.when(pl.int_range(80) < 40).then(pl.col("y")))
        with pytest.raises(InputError, match="row 41: the label 'y' is missing"):
            prepared(gaps, tmp_path / "refused")
        preparation = Preparation(PLAIN, {"all": FrameSource(gaps)}, drop_unlabelled=True)
        data, _ = write_prepared_data(preparation, tmp_path / "dropped", quiet=True)
        assert data.manifest["unlabelled"] == 40
        assert arrays(tmp_path / "dropped") == arrays(prepared(whole.head(40), tmp_path / "kept").path)


def test_times_may_name_utc() -> None:
    texts = ["2026-01-31 00:00:01 UTC", "2026-01-31 00:00:00.5 UTC"]
    times = read_times(Block(pl.DataFrame({"t": texts}), 1, "t.csv"), "t")
    assert (times[0] - times[1]).item() == 500_000
