from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recap_ctr.errors import InputError
from recap_ctr.schema import Field, Schema, read_schema

NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)


@st.composite
def fields(draw: st.DrawFn, name: str) -> Field:
    kind = draw(st.sampled_from(["categorical", "multi", "numeric"]))
    values: dict[str, Any] = {"name": name, "kind": kind}
    if draw(st.booleans()):
        values["missing"] = draw(st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=2))
    if kind == "numeric":
        values["transform"] = draw(st.sampled_from(["value", "log-square", "quantiles", "linear"]))
        if values["transform"] in ("quantiles", "linear"):
            values["num_buckets"] = draw(st.integers(2, 65_536))
    elif draw(st.booleans()):
        values["hash_buckets"] = draw(st.integers(2, 2**31 - 3))
    elif draw(st.booleans()):
        values["min_count"] = draw(st.integers(1, 10**9))
    if kind == "multi":
        values |= draw(
            st.fixed_dictionaries(
                {
                    "separator": NAMES,
                    "max_len": st.integers(1, 99),
                    "pooling": st.sampled_from(["mean", "sum"]),
                }
            )
        )
    return Field.model_validate(values)


@st.composite
def schemas(draw: st.DrawFn) -> Schema:
    names = draw(st.lists(NAMES, min_size=4, max_size=8, unique=True))
    roles = draw(st.lists(st.sampled_from(["row_id", "weight", "group", "time"]), unique=True, max_size=2))
    label, *rest = names
    values: dict[str, Any] = {"label": label} | dict(zip(roles, rest, strict=False))
    values["fields"] = [draw(fields(name)) for name in rest[len(roles) :]]
    if draw(st.booleans()):
        values["columns"] = draw(st.permutations(names))
    return Schema.model_validate(values)


@pytest.mark.slow
@settings(derandomize=True, max_examples=100, deadline=None)
@given(schema=schemas())
def test_toml_and_back(schema: Schema, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("schema") / "schema.toml"
    path.write_bytes(schema.to_toml().encode())
    assert read_schema(path) == schema


def test_only_what_differs_from_the_defaults_is_written() -> None:
    schema = Schema(
        label="y", fields=(Field(name="u", kind="categorical", min_count=1), Field(name="t", kind="multi"))
    )
    assert schema.to_toml() == (
        "format = 1\n"
        'label = "y"\n'
        "fields = [\n"
        '    { name = "u", kind = "categorical" },\n'
        '    { name = "t", kind = "multi" },\n'
        "]\n"
    )


GOOD = 'label = "y"\n[[fields]]\nname = "u"\nkind = "categorical"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("label = ", "is not valid TOML"),
        ("label = 'y'\x00", "is not valid TOML"),
        ("", "label: Field required"),
        ('label = "y"', "fields: Field required"),
        ('label = "y"\nfields = []', "fields: Tuple should have at least 1 item"),
        ("lable = 1\n" + GOOD, "lable: unknown setting; choose from format, label, positive"),
        (GOOD + "knid = 1", "fields.0.knid: unknown setting"),
        (GOOD.replace("categorical", "category"), "fields.0.kind: Input should be 'categorical', 'multi' or"),
        (GOOD.replace("categorical", "category"), "(value: 'category')"),
        (GOOD + "min_count = 0", "fields.0.min_count: Input should be greater than 0 (value: 0)"),
        (GOOD + "hash_buckets = 2147483646", "fields.0.hash_buckets: Input should be less than 2147483646"),
        (GOOD + "max_len = 3", "field 'u': max_len applies to multi fields only"),
        (GOOD + 'transform = "quantiles"', "field 'u': transform applies to numeric fields only"),
        (GOOD + "hash_buckets = 9\nmin_count = 2", "hashed values are not counted, so min_count can't apply"),
        (
            GOOD.replace("categorical", "numeric") + "min_count = 2",
            "min_count applies to fields with a vocabulary",
        ),
        (
            GOOD.replace("categorical", "numeric") + 'transform = "linear"\nmin_count = 2',
            "min_count applies to fields with a vocabulary",
        ),
        (
            GOOD.replace("categorical", "numeric") + 'transform = "linear"\nnum_buckets = 1',
            "fields.0.num_buckets: Input should be greater than or equal to 2 (value: 1)",
        ),
        (
            GOOD.replace("categorical", "numeric") + "num_buckets = 9",
            "num_buckets applies to numeric fields with",
        ),
        (GOOD + '[[fields]]\nname = "u"\nkind = "multi"', "field 'u' is listed twice"),
        (GOOD.replace('"u"', '"y"'), "column 'y' can't be both the label and a field"),
        ('row_id = "u"\n' + GOOD, "column 'u' can't be both the row_id and a field"),
        ('weight = "u"\n' + GOOD, "column 'u' can't be both the weight and a field"),
        ('columns = ["y", "v"]\n' + GOOD, "column 'u' is not among columns"),
        ('columns = ["y", "u", "u"]\n' + GOOD, "columns holds a name twice"),
        (
            GOOD.replace("categorical", "numeric") + 'derive = "hour"',
            "derive applies to categorical fields only",
        ),
        (GOOD + 'derive = "minute"', "fields.0.derive: Input should be 'hour' or 'weekday'"),
        (GOOD + 'source = "t"', "field 'u': source applies to derived fields only"),
        (GOOD + 'unit = "s"', "field 'u': unit applies to derived fields only"),
        (GOOD + 'derive = "hour"\nsource = "y"', "column 'y' can't be both the label and a field"),
        (
            'columns = ["y", "u"]\n' + GOOD + 'derive = "hour"\nsource = "t"',
            "column 't' is not among columns",
        ),
        (
            GOOD + 'derive = "hour"\nsource = "t"\n[[fields]]\nname = "t"\nkind = "multi"',
            "field 'u': column 't' holds several values a row",
        ),
        ("format = 2\n" + GOOD, "format: Input should be 1 (value: 2)"),
        (GOOD.replace('"u"', '""'), "fields.0.name"),
        (GOOD.replace('"u"', f'"{"u" * 201}"'), "fields.0.name"),
    ],
)
def test_mistakes_are_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "schema.toml"
    path.write_text(text)
    with pytest.raises(InputError) as error:
        read_schema(path)
    assert str(error.value).startswith(str(path))
    assert message in str(error.value)


def test_a_number_between_quantiles_may_say_how_many(tmp_path: Path) -> None:
    path = tmp_path / "schema.toml"
    path.write_text(GOOD.replace("categorical", "numeric") + 'transform = "linear"\nnum_buckets = 8')
    assert read_schema(path).fields == (Field(name="u", kind="numeric", transform="linear", num_buckets=8),)


def test_broken_text_is_no_toml(tmp_path: Path) -> None:
    (tmp_path / "schema.toml").write_bytes(b'label = "\xff"')
    with pytest.raises(InputError, match="is not valid TOML"):
        read_schema(tmp_path / "schema.toml")


def test_time_and_group_may_be_fields_as_well() -> None:
    schema = Schema(
        label="y",
        group="u",
        time="t",
        fields=(Field(name="u", kind="categorical"), Field(name="t", kind="numeric")),
    )
    assert schema.roles == {"label": "y", "group": "u", "time": "t"}


@pytest.mark.parametrize(
    ("field", "width", "is_value", "has_number"),
    [
        (Field(name="x", kind="categorical"), 1, False, False),
        (Field(name="x", kind="multi", max_len=7), 7, False, False),
        (Field(name="x", kind="numeric"), 1, True, True),
        (Field(name="x", kind="numeric", transform="quantiles"), 1, False, False),
        (Field(name="x", kind="numeric", transform="linear"), 1, False, True),
    ],
)
def test_width(field: Field, width: int, is_value: bool, has_number: bool) -> None:
    assert (field.width, field.is_value, field.has_number) == (width, is_value, has_number)


def test_derived_fields_name_their_column_and_leave_other_fields_as_they_were() -> None:
    hour = Field(name="t_hour", kind="categorical", derive="hour", source="t", unit="ms")
    weekday = Field(name="t_weekday", kind="categorical", derive="weekday", source="t", unit="ms")
    site = Field(name="site", kind="categorical")
    schema = Schema(label="y", time="t", columns=("y", "t", "site"), fields=(hour, site, weekday))
    assert schema.input_columns == {"t": Field(name="t", kind="categorical"), "site": site}
    with_number = schema.model_copy(update={"fields": (hour, Field(name="t", kind="numeric"))})
    assert with_number.input_columns == {"t": Field(name="t", kind="numeric")}
    assert {"derive", "source", "unit"} <= hour.model_dump().keys()
    assert not {"derive", "source", "unit"} & site.model_dump().keys()


def test_a_derived_field_reads_back(tmp_path: Path) -> None:
    fields = (
        Field(name="ts_hour", kind="categorical", derive="hour", source="ts", unit="us"),
        Field(name="day", kind="categorical", derive="weekday"),
    )
    schema = Schema(label="y", fields=fields)
    (tmp_path / "schema.toml").write_text(schema.to_toml())
    assert read_schema(tmp_path / "schema.toml") == schema


def test_what_the_label_means_and_what_separates_columns(tmp_path: Path) -> None:
    site = Field(name="site", kind="categorical")
    schema = Schema(label="y", positive="yes", negative="no", separator="\t", fields=(site,))
    (tmp_path / "schema.toml").write_text(schema.to_toml())
    assert read_schema(tmp_path / "schema.toml") == schema
    # Fingerprints of schemas without these keys are those of before.
    assert not {"positive", "negative", "separator"} & Schema(label="y", fields=(site,)).model_dump().keys()
    with pytest.raises(ValueError, match="negative needs positive"):
        Schema(label="y", negative="no", fields=(site,))
    for odd in ("", ";;", '"', "\n", "é"):
        with pytest.raises(ValueError, match="separator"):
            Schema(label="y", separator=odd, fields=(site,))
