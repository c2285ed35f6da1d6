"""What each field contributes to a row, against the same raw rows scored without the field's value."""

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl
import pytest

import recap_ctr
from recap_ctr.data.encode import Encoded, Encoder, FittedField
from recap_ctr.data.source import Block
from recap_ctr.errors import InputError
from recap_ctr.inference.explain import contributions, largest, with_field_of
from recap_ctr.inference.scorer import Scorer
from recap_ctr.schema import Field, Schema
from tests.support.fake_engine import FakeEngine
from tests.support.running_server import JSON, serve_in_thread

FIELDS = ("site", "ad", "user", "price", "tags")


@pytest.fixture(scope="module")
def scorer(packed: Path) -> Scorer:
    return Scorer.load(packed, threads=1)


@pytest.fixture(scope="module")
def rows(click_log: pl.DataFrame) -> pl.DataFrame:
    """Return rows with an unseen site in every seventh, and a missing ad in every fifth."""
    return click_log.head(60).with_columns(
        pl.when(pl.col("row") % 7 == 0).then(pl.lit("new")).otherwise("site").alias("site"),
        pl.when(pl.col("row") % 5 == 0).then(None).otherwise("ad").alias("ad"),
    )


def brute_force(scorer: Scorer, rows: pl.DataFrame) -> dict[str, list[float]]:
    """Return each field's contributions from raw rows: with their values, and with the field's column emptied."""

    def logits(frame: pl.DataFrame) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return scorer.logits(Block(frame, 1, "rows"))

    whole = logits(rows)
    emptied = {name: rows.with_columns(pl.lit(None, rows[name].dtype).alias(name)) for name in FIELDS}
    return {name: (whole - logits(frame)).tolist() for name, frame in emptied.items()}


def test_contributions_are_those_of_raw_rows_without_the_value(scorer: Scorer, rows: pl.DataFrame) -> None:
    encoder = scorer.engine.encoder
    encoded = encoder.encode(Block(rows, 1, "rows"))
    contributions_BF = contributions(
        scorer.encoded_logits, encoder, encoded, scorer.logits(Block(rows, 1, "rows"))
    )

    expected = brute_force(scorer, rows)
    np.testing.assert_allclose(contributions_BF, np.array([expected[name] for name in FIELDS]).T, atol=1e-6)
    assert (np.abs(contributions_BF).max(axis=0) > 1e-3).all(), "every kind of field contributes to some row"
    assert not contributions_BF[(rows["row"] % 7 == 0).to_numpy(), 0].any(), "an unseen value adds nothing"
    assert not contributions_BF[(rows["row"] % 5 == 0).to_numpy(), 1].any(), "nor does a missing one"


def test_predict_names_the_largest_contributions(scorer: Scorer, rows: pl.DataFrame) -> None:
    explained = recap_ctr.predict(scorer, rows, explain=2)
    assert explained.columns == [*rows.columns, "score", "logit", "why_1", "why_2"]
    plain = recap_ctr.predict(scorer, rows)
    assert explained.drop("why_1", "why_2").equals(plain)

    expected = brute_force(scorer, rows)
    for number, row in enumerate(explained.iter_rows(named=True)):
        ranked = sorted(FIELDS, key=lambda name: -abs(expected[name][number]))
        for column, name in zip(("why_1", "why_2"), ranked, strict=False):
            value = f"{row[name]:g}" if name == "price" else row[name]
            assert row[column] == f"{name}={value} ({expected[name][number]:+.2f})"


def test_more_contributions_than_fields_leave_empty_cells(scorer: Scorer, rows: pl.DataFrame) -> None:
    without = rows.with_columns(
        pl.lit(None, pl.String).alias("tags"), pl.lit(None, pl.Float64).alias("price")
    )
    explained = recap_ctr.predict(scorer, without, explain=7)
    assert explained["why_7"].null_count() == explained["why_4"].null_count() == len(rows)
    assert not explained.filter(pl.col("row") % 35 != 0)["why_1"].has_nulls()
    with pytest.raises(InputError, match="column 'why_1' already"):
        recap_ctr.predict(scorer, rows.with_columns(pl.lit("").alias("why_1")), explain=1)


def test_values_are_shown_as_text_of_one_line_that_is_not_too_long() -> None:
    encoder = FakeEngine({}).encoder
    frame = pl.DataFrame(
        {
            "site": ["x" * 100],
            "user id": [7],
            "price": [6.5],
            "age": [None],
            "tags": [["x", "new"]],
            "device": ["phone"],
        },
        schema_overrides={"age": pl.Float64},
    )
    strengths = np.array([[6.0, -5.0, 4.0, 0.0, 2.0, -1.0]])
    row = largest(Block(frame, 1, "rows"), encoder, strengths, 6)[0]
    assert [str(entry) for entry in row] == [
        f"site={'x' * 59}… (+6.00)",
        "user id=7 (-5.00)",
        "price=6.5 (+4.00)",
        "tags=x|new (+2.00)",
        "device=phone (-1.00)",
    ]
    assert [entry.field for entry in largest(Block(frame, 1, "rows"), encoder, strengths, 2)[0]] == [
        "site",
        "user id",
    ]


def test_http_answers_what_predict_explains(scorer: Scorer, rows: pl.DataFrame) -> None:
    explained = recap_ctr.predict(scorer, rows, explain=3)
    bodies = [
        {name: value for name, value in row.items() if value is not None}
        for row in rows.select(FIELDS).iter_rows(named=True)
    ]
    with serve_in_thread(scorer.engine) as address:
        by_rows = address.score({"rows": bodies, "explain": 3}).json()["rows"]
        columns = {name: rows[name].to_list() for name in FIELDS}
        by_columns = address.ask("POST", "/score?explain=3", json.dumps({"columns": columns}), JSON)
    assert [row["contributions"] for row in by_rows] == by_columns.json()["columns"]["contributions"]
    for number, row in enumerate(by_rows):
        texts = [
            f"{entry['field']}={entry['value']} ({entry['contribution']:+.2f})"
            for entry in row["contributions"]
        ]
        shown = explained.row(number, named=True)
        assert texts == [shown[f"why_{at}"] for at in (1, 2, 3) if shown[f"why_{at}"] is not None]


def test_a_number_between_two_edges_is_removed_with_the_edge_below_it() -> None:
    """The id and the number of a linear field are those of a missing value, or of another row, together."""
    fields = (
        Field(name="site", kind="categorical"),
        Field(name="age", kind="numeric", transform="linear"),
        Field(name="price", kind="numeric"),
    )
    learnt = [
        FittedField(fields[0], pl.Series(["a", "b"]), np.ones(2, np.int64)),
        FittedField(fields[1], pl.Series(["0", "1", "2"]), np.ones(3, np.int64), edges=(10.0, 20.0, 60.0)),
        FittedField(fields[2], pl.Series([], dtype=pl.String), np.zeros(0, np.int64), 5.0, 2.0),
    ]
    encoder = Encoder(Schema(label="click", fields=fields), learnt)
    rows = pl.DataFrame({"site": ["a", "b", "z"], "age": [12.5, 60.0, None], "price": [1.0, 5.0, 7.0]})

    def logits(encoded: Encoded) -> npt.NDArray[np.float64]:
        return (encoded.ids_BW @ [1.0, 10.0, 100.0]) + encoded.values_BN @ [1000.0, 10_000.0]

    def encode(frame: pl.DataFrame) -> Encoded:
        return encoder.encode(Block(frame, 1, "rows"))

    encoded = encode(rows)
    explained = contributions(logits, encoder, encoded, logits(encoded))
    for number, field in enumerate(fields):
        emptied = rows.with_columns(pl.lit(None, rows[field.name].dtype).alias(field.name))
        assert explained[:, number].tolist() == (logits(encoded) - logits(encode(emptied))).tolist()
    (entry,) = largest(Block(rows.head(1), 1, "rows"), encoder, np.array([[0.0, 2.0, 1.0]]), 1)[0]
    assert str(entry) == "age=12.5 (+2.00)"

    other = rows.with_columns(age=pl.col("age").reverse())
    moved = with_field_of(encoded, encoder.layout.fields[1], encoded, np.array([2, 1, 0]))
    expected = encode(other)
    np.testing.assert_array_equal(moved.ids_BW, expected.ids_BW)
    np.testing.assert_array_equal(moved.values_BN, expected.values_BN)


def test_a_derived_field_is_shown_with_what_was_derived() -> None:
    hour = Field(name="ts_hour", kind="categorical", derive="hour", source="ts", unit="s")
    encoder = FakeEngine({}).encoder
    fitted = encoder.fields[0]
    derived = type(encoder)(
        encoder.schema.model_copy(update={"fields": (hour,)}),
        [type(fitted)(hour, pl.Series(["22"]), np.array([1]))],
    )
    frame = pl.DataFrame({"ts": [1_700_000_000]})
    entry = largest(Block(frame, 1, "rows"), derived, np.array([[0.25]]), 1)[0][0]
    assert str(entry) == "ts_hour=22 (+0.25)"
