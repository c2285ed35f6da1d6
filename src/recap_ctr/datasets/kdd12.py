"""KDD Cup 2012, track 2, by FCN's protocol (KDD12_x10): one row a line, joined with the user profiles, 8:1:1."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars as pl

from recap_ctr.data.source import Block, FileSource, MappedSource, RowFunction, Source
from recap_ctr.data.split import Split
from recap_ctr.datasets.protocol import Figures, Protocol, integers
from recap_ctr.errors import InputError
from recap_ctr.schema import Field, Schema

COLUMNS = (
    *("Click", "Impression", "DisplayURL", "AdID", "AdvertiserID", "Depth", "Position"),
    *("QueryID", "KeywordID", "TitleID", "DescriptionID", "UserID"),
)
BUCKETED = ("Depth", "Position", "Impression")
IDS = (
    *("DisplayURL", "AdID", "AdvertiserID", "QueryID", "KeywordID", "TitleID", "DescriptionID", "UserID"),
    *("Gender", "Age"),
)
EXACT = {"Depth": 4, "Position": 4, "Gender": 5, "Age": 9}
NEAR = {
    "Impression": 91,
    "DisplayURL": 22592,
    "AdID": 280098,
    "AdvertiserID": 14417,
    "QueryID": 997506,
    "KeywordID": 358327,
    "TitleID": 762416,
    "DescriptionID": 614456,
    "UserID": 1618171,
}
SCHEMA = Schema(
    label="Click",
    fields=(
        *(Field(name=name, kind="numeric", transform="log-square", min_count=10) for name in BUCKETED),
        *(Field(name=name, kind="categorical", min_count=10) for name in IDS),
    ),
)


def sources(files: Sequence[Path]) -> dict[str, Source]:
    """Return the rows of training.txt, joined with userid_profile.txt."""
    rows, profiles = files
    return {"all": MappedSource(FileSource([rows], COLUMNS), lambda: join(profiles), [profiles])}


def join(profiles: Path) -> RowFunction:
    """Return a function that adds Gender and Age by UserID and drops rows of users without a profile.

    It also makes Click the label: 1 if there were any clicks.
    """
    kinds: dict[str, type[pl.DataType]] = {"UserID": pl.UInt32, "Gender": pl.UInt8, "Age": pl.UInt8}
    parts = (
        pl.DataFrame([integers(block, name).cast(kind, strict=False) for name, kind in kinds.items()])
        for block, _ in FileSource([profiles], list(kinds)).blocks()
    )
    table = pl.concat(parts).sort("UserID")
    if any(series.has_nulls() for series in table):
        raise InputError(f"{profiles}: a number is too large, or below 0", fix="check the file")
    users = table["UserID"].to_numpy()
    if (repeated := np.flatnonzero(users[1:] == users[:-1])).size:
        raise InputError(f"{profiles}: user {users[repeated[0]]} has two profiles", fix="check the file")

    def rows(block: Block) -> pl.DataFrame:
        for name in BUCKETED:  # checked before rows are dropped, while row numbers are those of the file
            integers(block, name)
        row_users = integers(block, "UserID").to_numpy()
        # A binary search, because a join would hash 24 million users again for every block.
        places = np.minimum(np.searchsorted(users, row_users), len(users) - 1)
        clicked = (integers(block, "Click") > 0).cast(pl.Int8)
        joined = block.frame.with_columns(
            clicked, table["Gender"].gather(places), table["Age"].gather(places)
        )
        return joined.filter(pl.Series(users[places] == row_users))

    return rows


PROTOCOL = Protocol(
    name="kdd12",
    title="KDD Cup 2012, track 2",
    files=("training.txt", "userid_profile.txt"),
    homepage="https://www.kaggle.com/c/kddcup2012-track2",
    licence="Kaggle competition rules",
    schema=SCHEMA,
    figures=Figures(
        rows=(113_096_830, 14_137_104, 14_137_104),
        sizes=EXACT,
        near={name: (size, max(size // 200, 5)) for name, size in NEAR.items()},
    ),
    sources=sources,
    split=Split(seed=2024),
)
