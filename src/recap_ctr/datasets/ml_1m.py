"""MovieLens-1M by FCN's protocol (ML_1M_7_x1): 7 fields, ratings of 3 dropped, random 8:1:1."""

import re
from collections.abc import Sequence
from pathlib import Path

import polars as pl

from recap_ctr.data.compression import open_text
from recap_ctr.data.source import FrameSource, Source, SourceFile
from recap_ctr.data.split import Split
from recap_ctr.datasets.download import Archive
from recap_ctr.datasets.protocol import Figures, Protocol, expect
from recap_ctr.errors import InputError
from recap_ctr.schema import Field, Schema

RATINGS = {1: 56_174, 2: 107_557, 3: 261_197, 4: 348_971, 5: 226_310}
DAMAGED = "use the files as they were downloaded"
VOCABULARIES = {"UserID": 6_042, "Gender": 4, "Age": 9, "Occupation": 23, "Release": 10, "Genres": 20}
SCHEMA = Schema(
    label="Label",
    fields=(
        *(
            Field(name=name, kind="categorical")
            for name in ("UserID", "Gender", "Age", "Occupation", "MovieID", "Release")
        ),
        Field(name="Genres", kind="multi", separator="|", max_len=5, pooling="mean"),
    ),
)


def release(year: int) -> str:
    """Return the release decade; years before 1920 count as the 1920s, years from 2000 on as the 1990s.

    >>> [release(year) for year in (1919, 1929, 1930, 1989, 1990, 2000)]
    ['1920', '1920', '1930', '1980', '1990', '1990']
    """
    return str(min(max(year // 10 * 10, 1920), 1990))


def inspect(files: Sequence[Path]) -> None:
    """Refuse raw files whose ratings do not add up to the published counts by stars."""
    counts = dict(_ratings(files[0])["Rating"].cast(pl.Int64).value_counts().sort("Rating").iter_rows())
    expect("ml-1m: ratings by stars", counts, RATINGS)


def frame(files: Sequence[Path]) -> pl.DataFrame:
    """Join ratings.dat, users.dat and movies.dat; the label is a rating above 3, and ratings of 3 are dropped."""
    ratings = _ratings(files[0])
    users = _dat(files[1], ["UserID", "Gender", "Age", "Occupation", "Zip"])
    _refuse_repeated(files[1], users["UserID"])
    movies = _movies(files[2])
    kept = ratings.filter(pl.col("Rating") != "3").with_columns(
        Label=(pl.col("Rating").cast(pl.Int8) > 3).cast(pl.Int8)
    )
    joined = kept.join(users, on="UserID", how="left", maintain_order="left")
    joined = joined.join(movies, on="MovieID", how="left", maintain_order="left")
    for column in ("Gender", "Release"):
        if joined[column].null_count():
            raise InputError(
                f"ml-1m: {joined[column].null_count()} ratings have no {column}; a file is incomplete",
                fix=DAMAGED,
            )
    return joined.select("Label", *(field.name for field in SCHEMA.fields))


def _ratings(path: Path) -> pl.DataFrame:
    table = _dat(path, ["UserID", "MovieID", "Rating", "Timestamp"])
    bad = (~table["Rating"].is_in([str(stars) for stars in RATINGS])).arg_true()
    if len(bad):
        raise InputError(
            f"{path}: line {bad[0] + 1}: the rating is {table['Rating'][bad[0]]!r}, not 1 to 5",
            fix=DAMAGED,
        )
    return table


def _dat(path: Path, names: list[str]) -> pl.DataFrame:
    """Read a GroupLens table: a row a line, its parts separated by two colons."""
    with open_text(path, encoding="iso-8859-1") as file:
        lines = pl.Series(file.read().rstrip("\n").split("\n"))
    parts = lines.str.split("::")
    bad = (parts.list.len() != len(names)).arg_true()
    if len(bad):
        raise InputError(
            f"{path}: line {bad[0] + 1} is not {'::'.join(names)}: {lines[bad[0]]!r}", fix=DAMAGED
        )
    return pl.DataFrame({name: parts.list.get(i) for i, name in enumerate(names)})


def _refuse_repeated(path: Path, keys: pl.Series) -> None:
    """Refuse a key on two lines, which would give each of its ratings two rows."""
    repeated = (~keys.is_first_distinct()).arg_true()
    if len(repeated):
        raise InputError(
            f"{path}: line {repeated[0] + 1}: {keys.name} {keys[repeated[0]]} appears a second time",
            fix=DAMAGED,
        )


def _movies(path: Path) -> pl.DataFrame:
    rows = []
    with open_text(path, encoding="iso-8859-1") as file:
        for number, line in enumerate(file, start=1):
            match = re.fullmatch(r"(\d+)::.*\((\d{4})\)\s*::(.*)", line.rstrip("\n"))
            if match is None:
                raise InputError(
                    f"{path}: line {number} is not MovieID::Title (Year)::Genres: {line!r}", fix=DAMAGED
                )
            rows.append((match[1], release(int(match[2])), match[3]))
    table = pl.DataFrame(rows, schema=["MovieID", "Release", "Genres"], orient="row")
    _refuse_repeated(path, table["MovieID"])
    return table


def sources(files: Sequence[Path]) -> dict[str, Source]:
    """Return the joined ratings."""
    return {"all": FrameSource(frame(files), [SourceFile.of(path) for path in files], "ratings.dat")}


PROTOCOL = Protocol(
    name="ml-1m",
    title="MovieLens-1M",
    files=("ratings.dat", "users.dat", "movies.dat"),
    homepage="https://grouplens.org/datasets/movielens/1m/",
    licence="research use, no redistribution (GroupLens)",
    schema=SCHEMA,
    figures=Figures(
        rows=(591_209, 73_901, 73_902),
        positives=575_281,
        sizes=VOCABULARIES,
        near={"MovieID": (3_643, 20)},  # how many movies have a training row depends on the split
    ),
    sources=sources,
    split=Split(seed=2024),
    inspect=inspect,
    archive=Archive(
        url="https://files.grouplens.org/datasets/movielens/ml-1m.zip",
        md5="c4d9eecfca2ab87c1945afe126590906",
        folder="ml-1m",
    ),
)
