"""The protocol on a generated directory of GroupLens' layout; the real ratings never enter a test."""

import gzip
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from recap_ctr.data.prepare import write_prepared_data
from recap_ctr.data.shards import PreparedData
from recap_ctr.data.split import Split
from recap_ctr.datasets import ml_1m
from recap_ctr.datasets.catalogue import find_protocol
from recap_ctr.errors import InputError

USERS, MOVIES = 30, 20


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    users = [f"{u}::{'MF'[u % 2]}::{(1, 18, 25)[u % 3]}::{u % 21}::{u:05d}-{u}" for u in range(1, USERS + 1)]
    genres = ["Drama", "Comedy|Drama", "Action|Adventure|Comedy|Drama|War|Western"]
    titles = ["Plain", "Colons: Here", "Twelve (1957 remake)", "Médée"]
    movies = [f"{m}::{titles[m % 4]} ({1915 + 5 * m % 90})::{genres[m % 3]}" for m in range(1, MOVIES + 1)]
    ratings = [
        f"{u}::{m}::{rng.integers(1, 6)}::{978_300_000 + u}"
        for u in range(1, USERS + 1)
        for m in range(1, MOVIES + 1)
    ]
    for name, lines in (("users", users), ("movies", movies), ("ratings", ratings)):
        (tmp_path / f"{name}.dat").write_text("\n".join(lines) + "\n", encoding="iso-8859-1")
    return tmp_path


def stars(raw: Path) -> dict[int, int]:
    lines = (raw / "ratings.dat").read_text().splitlines()
    return dict(sorted(Counter(int(line.split("::")[2]) for line in lines).items()))


def test_release_closes_the_sparse_ends() -> None:
    years = {1919: "1920", 1929: "1920", 1930: "1930", 1989: "1980", 1990: "1990", 2000: "1990"}
    assert {year: ml_1m.release(year) for year in years} == years


def frame(raw: Path) -> pl.DataFrame:
    return ml_1m.frame(find_protocol("ml-1m").raw_files(raw))


def test_rows(raw: Path) -> None:
    table = frame(raw)
    assert table.columns == ["Label", *(field.name for field in ml_1m.SCHEMA.fields)]
    lines = [line.split("::") for line in (raw / "ratings.dat").read_text().splitlines()]
    kept = [line for line in lines if line[2] != "3"]
    assert table["Label"].to_list() == [int(int(line[2]) > 3) for line in kept]
    assert table["MovieID"].to_list() == [line[1] for line in kept]
    first = table.row(0, named=True)
    movie = int(first["MovieID"])
    assert first["Release"] == ml_1m.release(1915 + 5 * movie % 90)
    assert first["Genres"].split("|")[0] in ("Drama", "Comedy", "Action")
    assert (first["Gender"], first["Age"], first["Occupation"]) == ("F", "18", "1")


def test_wrong_counts_are_named(raw: Path) -> None:
    with pytest.raises(InputError) as error:
        find_protocol("ml-1m").preparation(raw)
    assert str(error.value).startswith(
        f"ml-1m: ratings by stars: found {stars(raw)}, the published protocol has {ml_1m.RATINGS}\n"
        "  fix: check the raw files"
    )


def test_every_figure_is_checked(raw: Path) -> None:
    ratings = stars(raw)
    public = find_protocol("ml-1m")
    data, _ = write_prepared_data(public.preparation(raw, check=False), raw / "out", quiet=True)
    rows = Split().sizes(sum(ratings.values()) - ratings[3])
    assert data.name == "ml-1m-unchecked"
    assert (len(data.train), len(data.valid), len(data.test)) == rows
    assert data.train.ids.shape[1] == 6 + 5
    sizes = {field["name"]: field["size"] for field in data.manifest["fields"]}
    assert (sizes["UserID"], sizes["Gender"], sizes["Age"], sizes["Genres"]) == (USERS + 2, 4, 5, 7)
    figures = public.figures

    def fails_with(message: str) -> None:
        with pytest.raises(InputError) as error:
            replace(public, figures=figures).check(data, raw)
        assert str(error.value).startswith(f"ml-1m: {message}")

    # One figure after the other is set to the tiny data's, so that the next one comes to light.
    fails_with(
        f"rows of train, valid and test: found {rows}, the published protocol has (591209, 73901, 73902)"
    )
    figures = replace(figures, rows=rows)
    positives = ratings[4] + ratings[5]
    fails_with(f"positives: found {positives}, the published protocol has 575281")
    figures = replace(figures, positives=positives)
    fails_with(f"vocabulary size of UserID: found {USERS + 2}, the published protocol has 6042")
    figures = replace(figures, sizes={name: sizes[name] for name in figures.sizes})
    fails_with(f"vocabulary size of MovieID: found {MOVIES + 2}, the published protocol has 3,643 ± 20")
    figures = replace(figures, near={"MovieID": (MOVIES, 2)})
    replace(public, figures=figures).check(data, raw)
    assert data.name == PreparedData(raw / "out").name == "ml-1m"


def test_a_broken_movie_is_named(raw: Path) -> None:
    with (raw / "movies.dat").open("a") as file:
        file.write("99::No year::Drama\n")
    with pytest.raises(InputError, match=rf"movies.dat: line {MOVIES + 1} is not MovieID::Title \(Year\)"):
        frame(raw)


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        (
            "ratings",
            "1::2::five::9",
            "line 601: the rating is 'five', not 1 to 5\n  fix: use the files as",
        ),
        ("ratings", "1::2::0::9", "line 601: the rating is '0', not 1 to 5"),
        ("ratings", "1::2::5::9::9", "line 601 is not UserID::MovieID::Rating::Timestamp: '1::2::5::9::9'"),
        ("ratings", "1::2::5", "line 601 is not UserID::MovieID::Rating::Timestamp: '1::2::5'"),
        ("ratings", "\n1::2::5::9", "line 601 is not UserID::MovieID::Rating::Timestamp: ''"),
        ("users", "7::M::1::2::3", "line 31: UserID 7 appears a second time"),
        ("users", "31::M::1::2:3", "line 31 is not UserID::Gender::Age::Occupation::Zip"),
        ("movies", "3::Again (1999)::Drama", "line 21: MovieID 3 appears a second time"),
    ],
)
def test_a_damaged_line_is_named(name: str, line: str, message: str, raw: Path) -> None:
    with (raw / f"{name}.dat").open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(InputError) as error:
        frame(raw)
    assert f"{name}.dat: {message}" in str(error.value)


@pytest.mark.parametrize("name", ["ratings", "users", "movies"])
def test_a_packed_file_gives_the_same_rows_or_is_refused(name: str, raw: Path) -> None:
    table, file = frame(raw), raw / f"{name}.dat"
    packed = gzip.compress(file.read_bytes())
    file.unlink()
    (raw / f"{name}.dat.gz").write_bytes(packed)
    assert frame(raw).equals(table)
    (raw / f"{name}.dat.gz").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(
        InputError, match=rf"{name}.dat.gz can't be read: .*\n  fix: check that the file is complete"
    ):
        frame(raw)


def test_ratings_of_nobody_are_named(raw: Path) -> None:
    users = (raw / "users.dat").read_text().splitlines()
    (raw / "users.dat").write_text("\n".join(users[:-1]) + "\n")
    with pytest.raises(InputError, match="ratings have no Gender; a file is incomplete"):
        frame(raw)


def test_missing_files_and_unknown_sets(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"lacks ratings.dat, users.dat, movies.dat of MovieLens-1M\n  fix: get"
    ):
        find_protocol("ml-1m").preparation(tmp_path)
    with pytest.raises(
        InputError, match=r"no data set 'ml-2m'; did you mean 'ml-1m'\?\n  fix: choose from criteo"
    ):
        find_protocol("ml-2m")
