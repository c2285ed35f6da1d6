from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any, get_args

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recap_ctr.data import source
from recap_ctr.data.infer import infer
from recap_ctr.data.inferred import Inferred
from recap_ctr.data.moments import write_moments
from recap_ctr.data.prepare import Preparation, write_prepared_data
from recap_ctr.data.source import FileSource, FrameSource
from recap_ctr.errors import InputError
from recap_ctr.schema import Field, Schema, TimeUnit, read_schema

ROWS = 1_000
RNG = np.random.default_rng(0)
CLICK = RNG.integers(0, 2, ROWS)
SITE = [f"site{i}" for i in RNG.integers(0, 30, ROWS)]


def inferred(columns: dict[str, Any], **settings: Any) -> Inferred:
    """Always with the label and one plain column, so that a schema exists whatever becomes of the others."""
    return infer(FrameSource(pl.DataFrame({"click": CLICK, "site": SITE} | columns)), "click", **settings)


def verdict(values: Any, name: str = "x") -> tuple[str, str, Field | None]:
    proposal = inferred({name: values})
    finding = next(finding for finding in proposal.findings if finding.column == name)
    field = next((field for field in proposal.schema.fields if field.name == name), None)
    assert (field is None) == (finding.verdict not in ("categorical", "multi", "numeric"))
    return finding.verdict, finding.reason, field


def as_words(values: Any) -> list[str]:
    return [str(value) for value in values]


def round_trip(proposal: Inferred, directory: Path) -> Schema:
    path = directory / "schema.toml"
    path.write_text(proposal.to_toml(), encoding="utf-8")
    return read_schema(path)


@pytest.mark.parametrize("text", [False, True], ids=["typed", "as text"])
@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("price", RNG.random(ROWS) * 100, Field(name="price", kind="numeric", transform="linear")),
        ("score", RNG.integers(0, 9, ROWS) / 2, Field(name="score", kind="categorical")),
        ("clicks_30d", RNG.integers(0, 9, ROWS), Field(name="clicks_30d", kind="categorical")),
        ("income", RNG.integers(0, 10**6, ROWS), Field(name="income", kind="numeric", transform="linear")),
        ("user_id", RNG.integers(0, 600, ROWS), Field(name="user_id", kind="categorical")),
        ("ZipCode", RNG.integers(501, 900, ROWS), Field(name="ZipCode", kind="categorical")),
        ("h", RNG.integers(0, 600, ROWS) + 2**60, Field(name="h", kind="categorical")),
        ("flag", RNG.integers(0, 2, ROWS) > 0, Field(name="flag", kind="categorical")),
    ],
)
def test_numbers_are_told_from_names_of_things(name: str, values: Any, expected: Field, text: bool) -> None:
    assert verdict(as_words(values) if text else values, name)[2] == expected


def test_leading_zeros_make_a_code() -> None:
    assert verdict([f"{i:05d}" for i in RNG.integers(0, 50_000, ROWS)])[0] == "categorical"


def test_words_for_missing_do_not_hide_a_numeric_column(tmp_path: Path) -> None:
    values = as_words(RNG.random(ROWS))
    values[3], values[5] = "NULL", "\\N"
    _, reason, field = verdict(values)
    assert field == Field(name="x", kind="numeric", transform="linear", missing=("NULL", "\\N"))
    assert "'NULL'" in reason


def test_infinity_is_announced() -> None:
    assert "INFINITY" in verdict([*as_words(RNG.random(ROWS - 1)), "inf"])[1]


def test_constants_and_empty_columns_are_left_out() -> None:
    assert verdict(["de"] * ROWS)[0] == "left out: constant"
    assert verdict([None] * ROWS)[0] == "left out: no values"
    # Present or not is something that can be learnt.
    assert verdict(["de", None] * (ROWS // 2))[0] == "categorical"


def test_missing_rate_and_cardinality_are_stated() -> None:
    assert "text, 3 values, 25.00% missing" in verdict(["a", "b", "c", None] * (ROWS // 4))[1]


class TestRowIds:
    @pytest.mark.parametrize(
        "values",
        [
            [f"{i:x}-{i * i}" for i in range(ROWS)],
            list(range(7, ROWS + 7)),
            as_words(range(ROWS, 0, -1)),
        ],
        ids=["text", "counter", "falling text"],
    )
    def test_distinct_values_name_the_row(self, values: Any) -> None:
        assert verdict(values)[0] == "row_id"

    def test_only_the_first_becomes_the_row_id(self) -> None:
        proposal = inferred({"a": [f"a{i}" for i in range(ROWS)], "b": [f"b{i}" for i in range(ROWS)]})
        assert proposal.schema.row_id == "a"
        assert [f.verdict for f in proposal.findings[2:]] == ["row_id", "left out: identifies rows"]

    def test_measurements_are_no_ids(self) -> None:
        distinct = RNG.permutation(10**6)[:ROWS]
        assert verdict(distinct)[0] == "numeric"
        assert verdict(distinct, "impression_id")[0] == "row_id"
        assert verdict(np.sort(RNG.random(ROWS)))[0] == "numeric"

    def test_few_rows_prove_nothing(self) -> None:
        frame = pl.DataFrame({"click": [0, 1] * 40, "x": [f"v{i}" for i in range(80)]})
        proposal = infer(FrameSource(frame), "click")
        assert proposal.schema.fields == (Field(name="x", kind="categorical", min_count=2),)


class TestLeaks:
    @pytest.mark.parametrize(
        "values",
        [
            CLICK,
            1 - CLICK,
            np.where(CLICK, "yes", "no"),
            np.where(CLICK, RNG.integers(4, 6, ROWS), RNG.integers(1, 3, ROWS)),
            pl.Series(RNG.random(ROWS)).set(pl.Series(CLICK == 0), None),
            np.where(CLICK, RNG.random(ROWS), 0.0),
            [["a"] if c else [] for c in CLICK],
        ],
        ids=["copy", "opposite", "renamed", "rating", "present when clicked", "zero unless clicked", "list"],
    )
    def test_what_gives_the_label_away_is_left_out_loudly(self, values: Any) -> None:
        assert verdict(values)[0] == "left out: COPIES THE LABEL"

    def test_a_time_of_the_click_is_no_time(self) -> None:
        when = [f"2026-01-{1 + i % 28:02d} 10:00:00" if c else None for i, c in enumerate(CLICK)]
        proposal = inferred({"attributed_time": when})
        assert proposal.schema.time is None
        assert proposal.findings[2].verdict == "left out: COPIES THE LABEL"

    def test_a_coincidence_in_few_rows_is_no_leak(self) -> None:
        click = [0] * 98 + [1, 1]
        frame = pl.DataFrame({"click": click, "x": ["a"] * 98 + ["b", "c"], "y": ["p", "q"] * 50})
        assert {f.name for f in infer(FrameSource(frame), "click").schema.fields} == {"x", "y"}

    def test_a_strong_feature_is_no_leak(self) -> None:
        assert verdict(np.where(RNG.random(ROWS) < 0.02, 1 - CLICK, CLICK))[0] == "categorical"


class TestTime:
    START = datetime(2026, 1, 30)

    @pytest.mark.parametrize(
        ("name", "values", "derived"),
        [
            ("x", [datetime(2026, 1, 1) + timedelta(seconds=i) for i in range(ROWS)], []),
            ("x", [date(2026, 1, 1) + timedelta(days=i % 9) for i in range(ROWS)], ["weekday"]),
            (
                "x",
                [str(datetime(2026, 1, 1) + timedelta(minutes=i * 7919 % ROWS)) for i in range(ROWS)],
                ["hour"],
            ),
            ("x", [f"2026-01-{1 + i % 28:02d}T00:00:00Z" for i in range(ROWS)], ["weekday"]),
            ("Timestamp", RNG.integers(956_703_932, 1_046_454_590, ROWS), ["hour", "weekday"]),
            ("ts", as_words(1_700_000_000_000 + RNG.integers(0, 10**9, ROWS)), ["hour", "weekday"]),
            ("hour", [14_102_100 + i // 50 for i in range(ROWS)], ["hour"]),
            ("hour", ["14102100"] * ROWS, []),
            ("registration_date", [20_260_101 + i % 28 for i in range(ROWS)], ["weekday"]),
            ("time", np.cumsum(RNG.integers(0, 5, ROWS)), []),
        ],
        ids=[
            "datetime",
            "date",
            "iso",
            "zone",
            "epoch",
            "millis",
            "avazu",
            "one-hour",
            "yyyymmdd",
            "counter",
        ],
    )
    def test_becomes_time_and_no_feature(self, name: str, values: Any, derived: list[str]) -> None:
        proposal = inferred({name: values})
        assert proposal.schema.time == name
        assert [field.name for field in proposal.schema.fields] == [
            "site",
            *(f"{name}_{part}" for part in derived),
        ]

    @pytest.mark.parametrize(
        ("name", "values"),
        [
            ("hour", RNG.integers(0, 24, ROWS)),
            ("hour", np.sort(RNG.integers(0, 24, ROWS))),
            ("time_on_page", RNG.integers(0, 5_000, ROWS)),
            ("x", RNG.integers(956_703_932, 1_046_454_590, ROWS)),
            ("daytime", ["morning", "noon"] * (ROWS // 2)),
            ("departure_time", np.tile(np.arange(ROWS // 20) * 3, 20)),
        ],
    )
    def test_durations_and_hours_of_the_day_stay_features(self, name: str, values: Any) -> None:
        assert inferred({name: values}).schema.time is None
        assert verdict(values, name)[2] is not None

    @pytest.mark.parametrize("per_second", [1, 1_000, 1_000_000])
    def test_what_rises_with_the_rows_like_a_clock_needs_no_name(self, per_second: int) -> None:
        seconds = 1_700_000_000 + np.sort(RNG.integers(0, 10**6, ROWS))
        assert inferred({"x": seconds * per_second}).schema.time == "x"
        assert inferred({"x": RNG.permutation(seconds) * per_second}).schema.time is None
        assert inferred({"epoch": RNG.permutation(seconds) * per_second}).schema.time == "epoch"
        assert inferred({"ad_id": seconds * per_second}).schema.time is None

    def test_an_id_that_counts_the_rows_is_no_clock(self) -> None:
        proposal = inferred({"x": 1_700_000_000 + np.arange(ROWS)})
        assert (proposal.schema.time, proposal.schema.row_id) == (None, "x")

    def test_the_finest_complete_one_is_taken(self) -> None:
        moments = [self.START + timedelta(minutes=i) for i in range(ROWS)]
        gaps = [None, *moments[1:]]
        proposal = inferred({"day": [m.date() for m in moments], "at": moments, "seen": gaps})
        assert proposal.schema.time == "at"
        assert [(f.column, f.verdict) for f in proposal.findings[2:]] == [
            ("day", "left out: time"),
            ("at", "time"),
            ("seen", "left out: time"),
            ("at_hour", "categorical"),
        ]

    @pytest.mark.parametrize("unit", get_args(TimeUnit))
    @pytest.mark.parametrize("text", [False, True], ids=["numbers", "text"])
    def test_hour_and_weekday_are_fields_of_every_unit(self, unit: TimeUnit, text: bool) -> None:
        values = write_moments(1_700_000_000 + 3_601 * np.arange(ROWS), unit)
        if not text and unit != "iso":
            values = values.cast(pl.Int64)
        proposal = inferred({"ts": values})
        derived = [field for field in proposal.schema.fields if field.derive]
        expected = [
            Field(name=f"ts_{part}", kind="categorical", derive=part, source="ts", unit=unit)
            for part in (("weekday",) if unit == "yyyymmdd" else ("hour", "weekday"))
        ]
        assert derived == expected

    def test_reasons_are_stated(self, tmp_path: Path) -> None:
        proposal = inferred({"ts": 1_700_000_000 + 3_601 * np.arange(ROWS)})
        assert round_trip(proposal, tmp_path) == proposal.schema
        assert "# hour of the day of 'ts': 24 occur; in UTC, from moments as 's'" in proposal.to_toml()
        assert "# day of the week of 'ts': the rows span 42 days; in UTC" in proposal.to_toml()

    def test_a_column_that_says_the_same_makes_a_derived_field_needless(self) -> None:
        moments = [self.START + timedelta(minutes=37 * i) for i in range(ROWS)]
        shanghai = [f"h{(moment.hour + 8) % 24}" for moment in moments]
        proposal = inferred({"at": moments, "hour": shanghai})
        assert [field.name for field in proposal.schema.fields] == ["site", "hour", "at_weekday"]
        shanghai[500] = "h25"
        proposal = inferred({"at": moments, "hour": shanghai})
        assert [field.name for field in proposal.schema.fields] == ["site", "hour", "at_hour", "at_weekday"]

    def test_the_hour_may_come_from_a_finer_column_than_the_split(self) -> None:
        day = [20_260_101 + i // 50 for i in range(ROWS)]
        shuffled = [
            f"2026-01-{1 + i // 50:02d} {i * 7 % 50 // 3:02d}:{i * 31 % 60:02d}:{i % 60:02d}"
            for i in range(ROWS)
        ]
        proposal = inferred({"date": day, "shown_at": shuffled})
        assert proposal.schema.time == "date"
        sources = {field.name: field.source for field in proposal.schema.fields if field.derive}
        assert sources == {"shown_at_hour": "shown_at", "date_weekday": "date"}

    def test_a_new_name_differs_from_every_column(self) -> None:
        moments = [self.START + timedelta(minutes=i) for i in range(ROWS)]
        proposal = inferred({"at": moments, "at_hour": RNG.integers(0, 9, ROWS)})
        assert [field.name for field in proposal.schema.fields] == ["site", "at_hour", "at_hour_"]

    def test_gaps_do_not_hide_the_hour(self) -> None:
        gaps = [None, *(self.START + timedelta(minutes=i) for i in range(1, ROWS))]
        proposal = inferred({"at": gaps})
        assert proposal.schema.time is None
        assert [field.name for field in proposal.schema.fields] == ["site", "at_hour"]
        assert proposal.untimed is not None
        assert proposal.untimed.reason == "'at' has no time in 1 of 1,000 rows (0.1%)"
        reasons = {finding.column: finding.reason for finding in proposal.findings}
        assert reasons["at"].endswith("it has no time in 1 of 1,000 rows (0.1%), and so can't order them")

    def test_rows_whose_time_can_not_be_read_lack_one_too(self) -> None:
        moments = [str(self.START + timedelta(minutes=i)) for i in range(ROWS)]
        proposal = inferred({"at": [None, None, "never", "never", "never", *moments[5:]]})
        assert proposal.untimed is not None
        assert proposal.untimed.reason == "'at' has no time in 5 of 1,000 rows (0.5%)"
        first = inferred({"at": [None, *moments[1:]]}, max_rows=500)
        assert first.untimed is not None
        assert first.untimed.reason == "'at' has no time in 1 of 500 rows (0.2%), of those read first"

    @pytest.mark.parametrize(
        "spelling",
        [
            "%d.%m.%Y %H:%M",
            "%m/%d/%Y",
            "%m/%d/%y %H:%M",
            "%d/%b/%Y:%H:%M:%S +0000",
            "%a %b %d %H:%M:%S %Y",
            "%b %d, %Y",
            "%Y%m%dT%H%M%SZ",
            "%Y-%m-%d %I:%M %p",
        ],
    )
    def test_dates_in_another_spelling_are_noticed(self, spelling: str) -> None:
        dates = [(self.START + timedelta(hours=i)).strftime(spelling) for i in range(ROWS)]
        proposal = inferred({"x": dates})
        finding = next(finding for finding in proposal.findings if finding.column == "x")
        assert finding.verdict == "left out: dates that can't be read"
        assert "; write it like 2026-01-31 23:59:00, to split by it" in finding.reason
        assert proposal.untimed is not None
        assert proposal.untimed.reason.startswith("'x' holds dates such as '")
        assert "write it like 2026-01-31 23:59:00, then use --split time" in proposal.untimed.fix
        moments = [self.START + timedelta(minutes=i) for i in range(ROWS)]
        assert inferred({"x": dates, "at": moments}).untimed is None

    @pytest.mark.parametrize(
        "values",
        [
            ["1.2.2", "10.0.1", "9.1"],
            ["192.168.0.1", "10.1.2.3"],
            ["may 12", "june", "dec"],
            ["1/2", "3-4-5"],
        ],
    )
    def test_versions_and_addresses_are_no_dates(self, values: list[str]) -> None:
        assert verdict((values * ROWS)[:ROWS])[0] == "categorical"

    def test_where_another_column_can_order_the_rows_gaps_do_not_matter(self) -> None:
        moments = [self.START + timedelta(minutes=i) for i in range(ROWS)]
        assert inferred({"at": [None, *moments[1:]], "date": moments}).untimed is None
        assert inferred({}).untimed is None


class TestMulti:
    def test_separators(self) -> None:
        genres = ["Drama", "Comedy|Drama", "Action|Comedy|War", "War"] * (ROWS // 4)
        assert verdict(genres)[2] == Field(name="x", kind="multi", separator="|", max_len=3)
        assert verdict([g.replace("|", "^") for g in genres])[2] == Field(
            name="x", kind="multi", separator="^", max_len=3
        )

    def test_length_covers_most_rows_within_limits(self) -> None:
        tags = [f"t{i}" for i in range(40)]
        long = [";".join(RNG.permutation(tags)[: 3 if i % 10 else 40]) for i in range(ROWS)]
        rare = [";".join(RNG.permutation(tags)[: 3 if i % 50 else 40]) for i in range(ROWS)]
        single = [";".join(RNG.permutation(tags)[: 1 if i % 50 else 2]) for i in range(ROWS)]
        fields = [verdict(values)[2] for values in (long, rare, single)]
        assert [field.max_len for field in fields if field] == [20, 3, 2]

    def test_lists(self) -> None:
        lists = [list(range(i % 4)) for i in range(ROWS)]
        assert verdict(lists)[2] == Field(name="x", kind="multi", max_len=3)
        arrays = pl.Series([[i % 5, 7] for i in range(ROWS)], dtype=pl.Array(pl.Int64, 2))
        assert verdict(arrays)[2] == Field(name="x", kind="multi", max_len=2)

    @pytest.mark.parametrize("separator", [" ", ","])
    def test_words_that_come_again_and_again_are_values(self, separator: str) -> None:
        words = [f"w{i}" for i in range(60)]
        values = [separator.join(RNG.choice(words, RNG.integers(2, 6))) for _ in range(ROWS)]
        assert verdict(values)[2] == Field(name="x", kind="multi", separator=separator, max_len=5)

    def test_spaces_inside_plain_values_do_not_split_them(self) -> None:
        cities = ["New York", "San Francisco", "San Diego", "Bonn", "Los Angeles"] * (ROWS // 5)
        assert verdict(cities)[2] == Field(name="x", kind="categorical")


class TestMinCount:
    @pytest.mark.parametrize(("rows", "least"), [(99_999, 1), (100_000, 2), (5_000_000, 2), (5_000_001, 10)])
    def test_grows_with_the_rows_of_the_whole_source(self, rows: int, least: int) -> None:
        class Part(FrameSource):
            """Says it has more rows than it gives, as a source of which only the head is read has."""

            def __init__(self) -> None:
                super().__init__(pl.DataFrame({"click": CLICK, "site": SITE}))
                self.total_bytes = rows

        proposal = infer(Part(), "click", max_rows=ROWS)
        assert proposal.schema.fields[0].min_count == least
        assert f"min_count {least}" in proposal.findings[1].reason

    def test_mostly_singletons(self) -> None:
        values = [f"v{i}" for i in range(600)] + ["common"] * 400
        assert verdict(values)[2] == Field(name="x", kind="categorical", min_count=2)


def test_ignored_columns_teach_nothing_whatever_they_hold(tmp_path: Path) -> None:
    moments = [datetime(2026, 1, 1) + timedelta(minutes=minute) for minute in range(ROWS)]
    columns = {"bought": as_words(CLICK), "ts": moments, "age": RNG.integers(18, 80, ROWS)}
    assert inferred(columns).schema.time == "ts"

    proposal = inferred(columns, ignore=["bought", "ts"])

    assert [field.name for field in proposal.schema.fields] == ["site", "age"]
    assert proposal.schema.time is None and proposal.untimed is None
    assert proposal.describe_left_out() == "left out: 'bought' (ignored), 'ts' (ignored)"
    assert round_trip(proposal, tmp_path) == proposal.schema


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ignore": ["sight"]}, "no column 'sight' (ignored); did you mean 'site'?"),
        ({"ignore": ["click"]}, "'click' is named as the label and as a column to ignore"),
        ({"ignore": ["site"], "group": "site"}, "'site' is named as the group and as a column to ignore"),
    ],
)
def test_columns_that_can_not_be_ignored(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        inferred({}, **settings)
    assert message in str(error.value)


def test_weights_are_suggested_not_used(tmp_path: Path) -> None:
    proposal = inferred({"sample_weight": RNG.random(ROWS)})
    assert proposal.schema.weight is None
    assert [field.name for field in proposal.schema.fields] == ["site"]
    assert '\n# weight = "sample_weight"\n' in proposal.to_toml()
    assert verdict(RNG.normal(size=ROWS), "weight")[0] == "numeric"


def test_what_cannot_be_a_field_is_left_out() -> None:
    proposal = inferred(
        {
            "": list(range(ROWS)),
            "s": [{"a": 1}] * ROWS,
            "b": [b"\0"] * ROWS,
            "n": [[[1]]] * ROWS,
            "d": [timedelta(1)] * ROWS,
            "x" * 201: SITE,
        }
    )
    assert [f.verdict.split(":")[0] for f in proposal.findings[2:]] == ["left out"] * 6


def test_no_field_left() -> None:
    with pytest.raises(InputError, match="no column can serve as a field") as error:
        infer(FrameSource(pl.DataFrame({"click": CLICK, "x": ["a"] * ROWS})), "click")
    assert "'x': left out: constant" in str(error.value)


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        ({"x": [1, 2]}, r"no column 'click' \(label\)"),
        ({"click": [0, 2], "x": [1, 2]}, "row 2: the label 'click' is '2', neither 0 nor 1"),
        ({"click": [0, None], "x": [1, 2]}, "row 2: the label 'click' is missing"),
        ({"click": [], "x": []}, "holds no rows"),
    ],
)
def test_bad_labels(frame: dict[str, list[Any]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        infer(FrameSource(pl.DataFrame(frame)), "click")


def test_one_class_only_is_said() -> None:
    proposal = infer(FrameSource(pl.DataFrame({"click": [0] * 9, "x": ["a", "b", "c"] * 3})), "click")
    assert "ONE CLASS ONLY" in proposal.findings[0].reason


@pytest.mark.slow
def test_blocks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = {
        "id": list(range(ROWS)),
        "price": RNG.random(ROWS).round(3),
        "tags": [list(range(i % 4)) for i in range(ROWS)],
        "when": [str(date(2026, 1, 1) + timedelta(days=i // 10)) for i in range(ROWS)],
        "late": [None] * 900 + ["a", "b"] * 50,
    }
    whole = inferred(columns)
    monkeypatch.setattr("recap_ctr.data.source.BLOCK_ROWS", 47)
    assert inferred(columns) == whole


def test_only_the_first_rows_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recap_ctr.data.source.BLOCK_ROWS", 64)
    frame = pl.DataFrame({"click": [*CLICK[:100], *["bad"] * 900], "x": ["a", "b"] * 500}, strict=False)
    proposal = infer(FrameSource(frame), "click", max_rows=100)
    assert proposal.rows == 100
    with pytest.raises(InputError, match="row 101"):
        infer(FrameSource(frame), "click", max_rows=101)


def test_distinct_values_are_capped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recap_ctr.data.source.BLOCK_ROWS", 100)
    monkeypatch.setattr("recap_ctr.data.summary.MAX_VALUES", 50)
    proposal = inferred({"id": [f"i{i}" for i in range(ROWS)], "few": ["a", "b"] * (ROWS // 2)})
    reasons = {f.column: f.reason for f in proposal.findings}
    assert "over 50 values" in reasons["id"]
    assert proposal.schema.row_id == "id"
    assert "text, 2 values" in reasons["few"]


def test_files_without_header_keep_their_names(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text("".join(f"{c}\t{s}\t{i % 7}\n" for i, (c, s) in enumerate(zip(CLICK, SITE, strict=True))))
    proposal = infer(FileSource([path], ["y", "site", "n"]), "y")
    assert proposal.schema.columns == ("y", "site", "n")
    assert round_trip(proposal, tmp_path) == proposal.schema


def test_the_proposal_can_be_prepared(tmp_path: Path) -> None:
    """From a text file to shards without a hand on the schema, and all figures as announced."""
    price = pl.Series(as_words(RNG.random(ROWS).round(4))).set(pl.Series(RNG.random(ROWS) < 0.1), "NA")
    frame = pl.DataFrame(
        {
            "id": [f"{i:08x}" for i in range(ROWS)],
            "click": CLICK,
            "when": [1_700_000_000 + i for i in range(ROWS)],
            "site": SITE,
            "price": price,
            "tags": ["|".join(RNG.choice(["a", "b", "c"], RNG.integers(1, 4))) for _ in range(ROWS)],
            "country": ["de"] * ROWS,
        }
    )
    frame.write_csv(tmp_path / "log.csv")
    source = FileSource([tmp_path / "log.csv"])
    proposal = infer(source, "click")
    schema = round_trip(proposal, tmp_path)
    assert schema == proposal.schema
    assert (schema.row_id, schema.time) == ("id", "when")
    assert [(field.name, field.kind) for field in schema.fields] == [
        ("site", "categorical"),
        ("price", "numeric"),
        ("tags", "multi"),
    ]
    data, _ = write_prepared_data(Preparation(schema, {"all": source}), tmp_path / "out", quiet=True)
    assert [field.size for field in data.layout.fields] == [32, 67, 5]


def test_toml_reads_as_a_document() -> None:
    proposal = infer(
        FrameSource(pl.DataFrame({"click": CLICK, "site": SITE, "same": CLICK, "n": [1] * ROWS})), "click"
    )
    assert proposal.to_toml() == (
        "# Inferred from 1,000 rows of the data frame.\n"
        "# Check each reason: what you know of the columns counts for more.\n"
        "format = 1\n"
        "\n"
        f"# integer, 2 values, none missing; {CLICK.mean():.2%} of the rows are clicks\n"
        'label = "click"\n'
        "\n"
        "# Columns left out:\n"
        "#   'same': COPIES THE LABEL (integer, 2 values, none missing; each of its values has one label;"
        " a field must be known before the click)\n"
        "#   'n': constant (integer, 1 value, none missing; every row has '1', so there is nothing to learn)\n"
        "\n"
        "# text, 30 values, none missing; not numbers; min_count 1 at 1,000 rows\n"
        "[[fields]]\n"
        'name = "site"\n'
        'kind = "categorical"\n'
    )


CELLS = st.one_of(
    st.none(),
    st.text(max_size=6),
    st.integers(-(2**70), 2**70).map(str),
    st.floats(width=32).map(str),
    st.sampled_from(["2026-01-01", "NA", "a|b", "a;b;c", "1", "0", "\n", '"']),
)


@pytest.mark.slow
@settings(derandomize=True, max_examples=30, deadline=None)
@given(data=st.data())
def test_any_table_gives_a_schema_that_reads_back(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rows = data.draw(st.integers(2, 30))
    names = data.draw(st.lists(st.text(min_size=1, max_size=8), max_size=4, unique=True))
    columns = {
        name: data.draw(st.lists(CELLS, min_size=rows, max_size=rows))
        for name in names
        if name not in ("click", "plain")
    }
    frame = pl.DataFrame(
        {"click": [i % 2 for i in range(rows)], "plain": ["a", "b"] * (rows // 2) + ["c"] * (rows % 2)}
        | columns,
        schema_overrides=dict.fromkeys(columns, pl.String),
    )
    try:
        proposal = infer(FrameSource(frame), "click")
    except InputError as error:  # few rows, and the plain column may follow the label by accident
        assert "no column can serve" in str(error)
        return
    assert [f.column for f in proposal.findings] == frame.columns
    assert round_trip(proposal, tmp_path_factory.mktemp("toml")) == proposal.schema


def test_ids_with_no_name_of_an_id_are_seen_by_what_they_predict() -> None:
    """Ids are spread evenly, and each predicts by itself; a measurement's neighbours predict as well as itself."""
    rng = np.random.default_rng(1)
    rows, ids = 20_000, 3_000
    drawn = rng.integers(0, ids, rows)

    def kind_of(logit: Any, values: Any) -> tuple[str, str]:
        click = (rng.random(rows) < 1 / (1 + np.exp(-logit))).astype(int)
        schema = infer(FrameSource(pl.DataFrame({"click": click, "x": values})), "click")
        finding = next(finding for finding in schema.findings if finding.column == "x")
        return finding.verdict, finding.reason

    by_itself = rng.normal(0, 1.5, ids)[drawn]
    verdict, reason = kind_of(by_itself, drawn)
    assert verdict == "categorical" and "each predicts clicks where its neighbours do not" in reason
    assert kind_of(np.sin(drawn / 500), drawn)[0] == "numeric"
    assert kind_of(by_itself, drawn**3)[0] == "numeric", "uneven numbers are measurements"
    assert kind_of(np.zeros(rows), drawn)[0] == "numeric"


def test_whole_numbers_are_numbers_if_their_order_counts() -> None:
    """Neighbouring ages are clicked alike; neighbouring codes are not, and a few values need no order."""
    rng = np.random.default_rng(1)
    rows = 20_000

    def choice_for(values: Any, logit: Any, name: str = "x") -> tuple[str, str]:
        click = (rng.random(rows) < 1 / (1 + np.exp(-logit))).astype(int)
        proposal = infer(FrameSource(pl.DataFrame({"click": click, name: values})), "click")
        finding = next(finding for finding in proposal.findings if finding.column == name)
        return finding.verdict, finding.reason

    ages = rng.integers(15, 90, rows)
    verdict, reason = choice_for(ages, np.sin(ages / 15))
    assert verdict == "numeric" and "clicked as often as those next to them" in reason
    assert choice_for(ages, np.sin(ages / 15), "age_id")[0] == "categorical", "the name is that of an id"
    for num_codes in (21, 50, 300):
        codes = rng.integers(0, num_codes, rows)
        assert choice_for(codes, rng.normal(0, 1, num_codes)[codes])[0] == "categorical"
    assert choice_for(codes, np.zeros(rows))[0] == "categorical", "nothing says that their order counts"
    weekdays = rng.integers(0, 7, rows)
    assert choice_for(weekdays, weekdays / 3)[0] == "categorical"
    views = np.floor(rng.lognormal(3, 1.2, rows))  # Some three hundred different ones, the large ones rare.
    assert choice_for(views, np.log1p(views) - 4)[0] == "numeric"


@pytest.mark.parametrize(("name", "kind"), [("user", "categorical"), ("clicks_of_user", "numeric")])
def test_a_column_that_is_named_after_a_thing_holds_its_ids(name: str, kind: str) -> None:
    assert verdict(RNG.integers(0, 600, ROWS), name)[0] == kind


class TestLabels:
    def infer(self, values: Any, **options: Any) -> Inferred:
        return infer(FrameSource(pl.DataFrame({"y": values, "site": SITE})), "y", **options)

    @pytest.mark.parametrize(
        ("click", "other", "meaning"),
        [("Yes", "No", ("yes", "no")), (1, -1, ("1", "-1")), ("click", "skip", ("click", "skip"))],
    )
    def test_words_are_recognised_and_said(
        self, click: Any, other: Any, meaning: tuple[str, str], tmp_path: Path
    ) -> None:
        proposal = self.infer(np.where(CLICK, click, other))
        assert (proposal.schema.positive, proposal.schema.negative) == meaning
        assert proposal.notes == (f"label 'y': {meaning[0]!r} counts as a click; pass --positive to choose",)
        reason = proposal.findings[0].reason
        assert (
            f"{meaning[0]!r} counts as a click, {meaning[1]!r} as none; {CLICK.mean():.2%} of the" in reason
        )
        assert round_trip(proposal, tmp_path) == proposal.schema

    def test_a_word_for_no_label_is_no_value(self) -> None:
        values = ["NULL", *np.where(CLICK, "yes", "no")[1:]]
        assert self.infer(values, drop_unlabelled=True).schema.positive == "yes"
        with pytest.raises(InputError, match="row 1: the label 'y' is missing") as error:
            self.infer(values)
        assert "--drop-unlabelled" in str(error.value)

    def test_plain_labels_leave_no_trace(self) -> None:
        proposal = self.infer(CLICK)
        assert (proposal.schema.positive, proposal.schema.negative, proposal.notes) == (None, None, ())
        assert not {"positive", "negative", "separator"} & proposal.schema.model_dump().keys()

    def test_the_users_choice(self) -> None:
        proposal = self.infer(np.where(CLICK, "Buy", "view"), positive="buy")
        assert (proposal.schema.positive, proposal.schema.negative, proposal.notes) == ("buy", None, ())
        assert "'buy' counts as a click, any other value as none" in proposal.findings[0].reason
        against = self.infer(np.where(CLICK, "yes", "no"), positive="no")
        assert f"{1 - CLICK.mean():.2%} of the rows are clicks" in against.findings[0].reason

    @pytest.mark.parametrize(
        ("values", "options", "message"),
        [
            (
                ["good", "bad"],
                {},
                "the values 'bad' and 'good', .*\n  fix: --positive bad or --positive good",
            ),
            (["yes", "no", "maybe", "no"], {}, "row 1: the label 'y' is 'yes', neither 0 nor 1"),
            (["buy", "view"], {"positive": "by"}, "is never 'by'; its values are 'buy', 'view'"),
            (["yes", None], {}, "row 2: the label 'y' is missing"),
        ],
    )
    def test_what_is_refused(self, values: list[Any], options: dict[str, Any], message: str) -> None:
        with pytest.raises(InputError, match=message):
            self.infer(values * (ROWS // len(values)), **options)

    def test_a_log_sorted_by_its_label(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(source, "BLOCK_ROWS", 100)
        assert self.infer(np.sort(np.where(CLICK, "yes", "no"))).schema.positive == "yes"
        late = ["yes", "no"] * (ROWS // 2 - 1) + ["yes", "perhaps"]
        with pytest.raises(InputError, match="row 1000: the label 'y' is 'perhaps', neither 'yes' nor 'no'"):
            self.infer(late)

    def test_rows_without_a_label_may_be_dropped(self) -> None:
        values = pl.Series(CLICK).set(pl.Series(np.arange(ROWS) % 10 == 3), None)
        assert self.infer(values, drop_unlabelled=True).rows == ROWS * 9 // 10
        with pytest.raises(InputError, match="holds no rows with a label"):
            self.infer([None] * ROWS, drop_unlabelled=True)


class TestNamedRoles:
    def test_weight_and_group(self, tmp_path: Path) -> None:
        frame = pl.DataFrame({"click": CLICK, "site": SITE, "w": RNG.random(ROWS)})
        proposal = infer(FrameSource(frame), "click", weight="w", group="site")
        assert (proposal.schema.weight, proposal.schema.group) == ("w", "site")
        assert [field.name for field in proposal.schema.fields] == ["site"]
        assert [finding.verdict for finding in proposal.findings] == ["label", "categorical", "weight"]
        assert round_trip(proposal, tmp_path) == proposal.schema

    @pytest.mark.parametrize("role", ["weight", "group"])
    def test_a_column_that_is_not_there(self, role: str) -> None:
        options: dict[str, Any] = {role: "sites"}
        frame = pl.DataFrame({"click": CLICK, "site": SITE})
        with pytest.raises(InputError, match=rf"no column 'sites' \({role}\); did you mean 'site'"):
            infer(FrameSource(frame), "click", **options)

    def test_the_separator_is_kept(self, tmp_path: Path) -> None:
        frame = pl.DataFrame({"click": CLICK, "site": SITE})
        frame.write_csv(tmp_path / "t.csv", separator=":")
        proposal = infer(FileSource([tmp_path / "t.csv"], separator=":"), "click")
        assert proposal.schema.separator == ":"
        assert round_trip(proposal, tmp_path) == proposal.schema


class TestRefusalsWithAdvice:
    @pytest.mark.parametrize(
        "values",
        [
            [f"{x:.1f}".replace(".", ",") for x in RNG.random(ROWS) * 4],
            [f"{x:.2f}".replace(".", ",") if x < 1 else "3" for x in RNG.random(ROWS) * 2],
            ["1,5", "2,5", "NA", "7"] * (ROWS // 4),
            [f"1.{i % 900 + 100},5" for i in range(ROWS)],
            [f"{i % 9 + 1},{i % 900 + 100}" for i in range(ROWS)],
        ],
        ids=["few", "some whole", "missing words", "points for thousands", "commas for thousands"],
    )
    def test_numbers_with_commas_are_never_lists(self, values: list[str]) -> None:
        verdict_, reason, field = verdict(values)
        assert (verdict_, field) == ("left out: numbers with commas", None)
        assert "such as '" in reason and "write it with a point for decimals" in reason

    @pytest.mark.parametrize(
        "spelling", ["${}.30", "{},30 €", "-£1,2{}.50", "1.2{},50\xa0EUR", "usd {}", "{}.5%", "CHF 1'2{}.5"]
    )
    def test_prices_as_text_are_noticed(self, spelling: str) -> None:
        values = [spelling.format(i % 90 + 10) for i in range(ROWS)]
        values[::40] = ["NA"] * len(values[::40])
        verdict_, reason, field = verdict(values)
        assert (verdict_, field) == ("left out: numbers with signs", None)
        assert "; such as " in reason and "write plain numbers, such as 12.30" in reason

    @pytest.mark.parametrize(
        "values", [["5%", "10%", "25%"], [f"eur{i}x" for i in range(50)], [f"${'$' * i}" for i in range(30)]]
    )
    def test_few_amounts_and_other_texts_are_categories(self, values: list[str]) -> None:
        assert verdict((values * ROWS)[:ROWS])[0] == "categorical"

    @pytest.mark.parametrize("prefix", ["", "t"])
    def test_lists_are_still_lists(self, prefix: str) -> None:
        sizes = RNG.integers(1, 5, ROWS)
        values = [",".join(f"{prefix}{i}" for i in RNG.permutation(9)[:size]) for size in sizes]
        field = verdict(values)[2]
        assert field is not None and (field.kind, field.separator) == ("multi", ",")

    @pytest.mark.parametrize(
        "values",
        [["['a', 'b']", "['c']", "[]"], ['["a", "b"]', '["c"]', None], ["[0.1, 0.2]", "[3]", "[4, 5]"]],
    )
    def test_lists_as_text_are_noticed(self, values: list[Any]) -> None:
        verdict_, reason, _ = verdict((values * ROWS)[:ROWS])
        assert verdict_ == "left out: lists as text"
        assert "write the values as a|b for a multi field, or save real lists" in reason

    def test_brackets_around_some_values_are_no_lists(self) -> None:
        assert verdict(["[ad]", "site", "app", "web"] * (ROWS // 4))[0] == "categorical"

    def test_embeddings_are_refused_and_ids_are_not(self) -> None:
        verdict_, reason, _ = verdict([[0.5, -1.25], [3.0]] * (ROWS // 2))
        assert verdict_ == "left out: lists of numbers"
        assert "such as those of an embedding" in reason
        field = verdict([[1.0, 2.0], [3.0]] * (ROWS // 2))[2]
        assert field is not None and field.kind == "multi"

    def test_structs_in_lists_are_refused_by_name(self) -> None:
        verdict_, reason, _ = verdict([[{"id": 1}], [{"id": 2}]] * (ROWS // 2))
        assert verdict_ == "left out: its type"
        assert "write a list of plain values for each part of the structs" in reason

    def test_what_was_left_out_is_one_sentence(self) -> None:
        proposal = inferred({"price": ["1,5", "2,5"] * (ROWS // 2), "same": ["x"] * ROWS})
        assert proposal.describe_left_out() == "left out: 'price' (numbers with commas), 'same' (constant)"
        assert inferred({}).describe_left_out() == ""
