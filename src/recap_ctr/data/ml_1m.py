"""MovieLens-1M by FCN's protocol (ML_1M_7_x1): 7 fields, ratings of 3 dropped, random 8:1:1."""

import re
from pathlib import Path

import polars as pl

from recap_ctr.data.prepare import Preparation, Split
from recap_ctr.data.protocol import Protocol, expect
from recap_ctr.data.shards import PreparedData
from recap_ctr.data.source import FrameSource, SourceFile
from recap_ctr.errors import InputError
from recap_ctr.schema import Field, Schema

RATINGS = {1: 56_174, 2: 107_557, 3: 261_197, 4: 348_971, 5: 226_310}
VOCABULARIES = {"UserID": 6_042, "Gender": 4, "Age": 9, "Occupation": 23, "Release": 10, "Genres": 20}
MOVIES = range(3_621, 3_662)  # kept movies depend on the split: 3,641 in the published one, give or take 20
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
    """The release decade, the sparse ends closed: until 1929, the 1930s to 1980s, from 1990.

    >>> [release(year) for year in (1919, 1929, 1930, 1989, 1990, 2000)]
    ['1920', '1920', '1930', '1980', '1990', '1990']
    """
    return str(min(max(year // 10 * 10, 1920), 1990))


def frame(raw: Path) -> pl.DataFrame:
    ratings = _dat(raw / "ratings.dat", ["UserID", "MovieID", "Rating", "Timestamp"])
    users = _dat(raw / "users.dat", ["UserID", "Gender", "Age", "Occupation", "Zip"])
    movies = _movies(raw / "movies.dat")
    counts = dict(ratings["Rating"].cast(pl.Int64).value_counts().sort("Rating").iter_rows())
    expect("ml-1m: ratings by stars", counts, RATINGS)
    kept = ratings.filter(pl.col("Rating") != "3").with_columns(
        Label=(pl.col("Rating").cast(pl.Int8) > 3).cast(pl.Int8)
    )
    joined = kept.join(users, on="UserID", how="left", maintain_order="left")
    joined = joined.join(movies, on="MovieID", how="left", maintain_order="left")
    for column in ("Gender", "Release"):
        if joined[column].null_count():
            raise InputError(
                f"ml-1m: {joined[column].null_count()} ratings have no {column}; a file is incomplete"
            )
    return joined.select("Label", *(field.name for field in SCHEMA.fields))


def _dat(path: Path, names: list[str]) -> pl.DataFrame:
    """A GroupLens table: the separator is two colons, which reads as every second column empty."""
    doubled = [part for name in names for part in (name, f"_{name}")][:-1]
    schema = dict.fromkeys(doubled, pl.String)
    table = pl.read_csv(
        path, separator=":", has_header=False, schema=schema, quote_char=None, encoding="iso-8859-1"
    )
    return table.select(names)


def _movies(path: Path) -> pl.DataFrame:
    rows = []
    for number, line in enumerate(path.read_text(encoding="iso-8859-1").splitlines(), start=1):
        match = re.fullmatch(r"(\d+)::.*\((\d{4})\)\s*::(.*)", line)
        if match is None:
            raise InputError(f"{path}: line {number} is not MovieID::Title (Year)::Genres: {line!r}")
        rows.append((match[1], release(int(match[2])), match[3]))
    return pl.DataFrame(rows, schema=["MovieID", "Release", "Genres"], orient="row")


def preparation(raw: Path) -> Preparation:
    files = [SourceFile.of(path) for path in PROTOCOL.raw_files(raw)]
    source = FrameSource(frame(raw), files, "ratings.dat")
    return Preparation(SCHEMA, {"all": source}, Split(seed=2024), dataset="ml-1m")


def check(data: PreparedData) -> None:
    splits = data.manifest["splits"]
    sizes = tuple(splits[name]["rows"] for name in ("train", "valid", "test"))
    expect("ml-1m: rows of train, valid and test", sizes, (591_209, 73_901, 73_902))
    expect("ml-1m: positives", sum(split["positives"] for split in splits.values()), 575_281)
    found = {field["name"]: field["size"] for field in data.manifest["fields"]}
    for name, size in VOCABULARIES.items():
        expect(f"ml-1m: vocabulary size of {name}", found[name], size)
    if found["MovieID"] - 2 not in MOVIES:
        expect("ml-1m: movies in the training rows", found["MovieID"] - 2, "3,641 ± 20")


PROTOCOL = Protocol(
    title="MovieLens-1M",
    files=("ratings.dat", "users.dat", "movies.dat"),
    homepage="https://grouplens.org/datasets/movielens/1m/",
    licence="research use, no redistribution (GroupLens)",
    preparation=preparation,
    check=check,
)
