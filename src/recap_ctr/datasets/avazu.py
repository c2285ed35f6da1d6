"""Avazu's click-through-rate challenge by the protocol Avazu_x4: 24 categories, three of them from the time."""

from collections.abc import Sequence
from pathlib import Path

import polars as pl

from recap_ctr.data.source import Block, FileSource, Source
from recap_ctr.datasets.protocol import FOLDS, Figures, Protocol, Published
from recap_ctr.errors import InputError
from recap_ctr.schema import Field, Schema

SIZES = {
    "hour": 26,
    "C1": 9,
    "banner_pos": 9,
    "site_id": 4051,
    "site_domain": 5461,
    "site_category": 27,
    "app_id": 6545,
    "app_domain": 400,
    "app_category": 33,
    "device_id": 820509,
    "device_ip": 2903322,
    "device_model": 7259,
    "device_type": 7,
    "device_conn_type": 6,
    "C14": 2556,
    "C15": 10,
    "C16": 11,
    "C17": 434,
    "C18": 6,
    "C19": 70,
    "C20": 173,
    "C21": 62,
    "weekday": 9,
    "weekend": 4,
}
COLUMNS = ("id", "click", *(name for name in SIZES if not name.startswith("week")))
SCHEMA = Schema(
    label="click", fields=tuple(Field(name=name, kind="categorical", min_count=2) for name in SIZES)
)


def features(block: Block) -> pl.DataFrame:
    """Turn the time YYMMDDHH into hour (0 to 23), weekday (Sunday 0 to Saturday 6) and weekend (0 or 1)."""
    text = block.column("hour", "time of the row")
    days = pl.lit("20") + pl.col("hour").str.head(-2)
    # Match a pattern first, because the parsers of numbers and dates would accept a sign or a blank as a digit.
    is_time = pl.col("hour").str.contains(r"^[0-9]{6}([01][0-9]|2[0-3])$")
    parts = text.to_frame().select(
        hour=pl.when(is_time).then(pl.col("hour").str.tail(2)).cast(pl.Int8),
        weekday=pl.when(is_time).then(days).str.to_date("%Y%m%d", strict=False).dt.weekday() % 7,
    )
    bad = (parts["hour"].is_null() | parts["weekday"].is_null()).arg_true()
    if len(bad):
        raise InputError(
            f"{block.origin}: row {block.first_row + bad[0]}, column 'hour': {text[bad[0]]!r} is not a time"
            " YYMMDDHH",
            fix="use the raw file as it was downloaded",
        )
    return block.frame.with_columns(
        parts["hour"], parts["weekday"], weekend=parts["weekday"].is_in([0, 6]).cast(pl.Int8)
    )


def sources(files: Sequence[Path]) -> dict[str, Source]:
    """Return the rows of the file train."""
    return {"all": FileSource(files)}


PROTOCOL = Protocol(
    name="avazu-x4",
    title="Avazu (x4)",
    files=("train",),
    homepage="https://www.kaggle.com/c/avazu-ctr-prediction",
    licence="Kaggle competition rules",
    schema=SCHEMA,
    figures=Figures(
        rows=(32_343_172, 4_042_897, 4_042_898),
        positives=(5_492_052, 686_507, 686_507),
        sizes=SIZES,
    ),
    sources=sources,
    split=FOLDS,
    published=Published(
        page="https://huggingface.co/datasets/reczoo/Avazu_x4",
        columns=COLUMNS,
        md5=(
            "de3a27264cdabf66adf09df82328ccaa",
            "33232931d84d6452d3f956e936cab2c9",
            "3ebb774a9ca74d05919b84a3d402986d",
        ),
    ),
    features=features,
)
