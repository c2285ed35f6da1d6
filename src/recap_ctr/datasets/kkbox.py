"""KKBox's music recommendation challenge by the protocol KKBox_x1: will the user play the song again within a month?

The published table numbers users, songs, names and persons by their place in sorted order. songs.csv and
song_extra_info.csv are no proper CSV (quotes open and never close), so they are cut at every comma.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import polars as pl

from recap_ctr.data import source
from recap_ctr.data.encode import column
from recap_ctr.data.source import Block, FileSource, MappedSource, Rows, Source, open_text
from recap_ctr.datasets.protocol import FOLDS, Figures, Protocol, Published, integers
from recap_ctr.errors import InputError
from recap_ctr.schema import Field, Schema

EVENT = ("msno", "song_id", "source_system_tab", "source_screen_name", "source_type")
MEMBER = ("city", "bd", "gender", "registered_via", "registration_init_time", "expiration_date")
SONG = ("song_length", "genre_ids", "artist_name", "composer", "lyricist", "language")
EXTRA = ("name", "isrc")
COLUMNS = ("label", *EVENT, *MEMBER, *SONG, *EXTRA)
PERSONS = ("artist_name", "composer", "lyricist")
SIZES = {
    "msno": 25963, "song_id": 53291, "source_system_tab": 10, "source_screen_name": 21, "source_type": 14, "city": 23,
    "gender": 4, "registered_via": 7, "language": 12, "genre_ids": 346, "artist_name": 11976, "isrc": 80, "bd": 9,
}  # fmt: skip
LISTS = ("genre_ids", "artist_name")
# What pandas takes for missing in train.csv and members.csv; the sources of an event can be "null".
ABSENT = (
    *("", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "N/A", "NA"),
    *("NULL", "NaN", "n/a", "nan", "null"),
)


def schema(pooling: Literal["mean", "sum"]) -> Schema:
    def field(name: str) -> Field:
        if name in LISTS:
            return Field(name=name, kind="multi", max_len=3, pooling=pooling, min_count=10)
        return Field(name=name, kind="categorical", min_count=10)

    return Schema(label="label", fields=tuple(map(field, SIZES)))


def features(block: Block) -> pl.DataFrame:
    """Of the recording's code only the country stays, and of the age its decade; impossible ages are missing."""
    age = column(block, "bd", "age").replace("", None)
    numbers = age.cast(pl.Float64, strict=False)
    bad = (numbers.is_null() & age.is_not_null()).arg_true()
    if len(bad):
        raise InputError(
            f"{block.origin}: row {block.first_row + bad[0]}, column 'bd': {age[bad[0]]!r} is no age",
            fix="use the raw file as it was downloaded",
        )
    decade = (numbers / 10).ceil().clip(1, 7).set(~numbers.is_between(1, 95).fill_null(False), None)
    country = column(block, "isrc", "recording code").str.head(2)
    return block.frame.with_columns(country, decade.cast(pl.Int8))


def sources(files: Sequence[Path]) -> dict[str, Source]:
    events, *beside = files
    return {"all": MappedSource(FileSource([events]), lambda: join(*files), beside)}


def join(events: Path, members: Path, songs: Path, extras: Path) -> Rows:
    """Rows of train.csv as rows of the published table."""
    seen = [
        [column(block, name, "id").unique() for name in ("msno", "song_id")]
        for block, _ in FileSource([events]).blocks()
    ]
    seen_users, seen_songs = (pl.concat(parts).unique() for parts in zip(*seen, strict=True))
    users = pl.concat(_present(block, ("msno", *MEMBER)) for block, _ in FileSource([members]).blocks())
    song_table, song_ids = _songs(songs, seen_songs)
    extra_table, extra_ids = _extras(extras, seen_songs)
    tables = (
        ("msno", users),
        ("song_id", song_table),
        ("song_id", extra_table),
        ("msno", _ranks(seen_users, users["msno"])),
        ("song_id", _ranks(seen_songs, song_ids, extra_ids)),
    )

    def rows(block: Block) -> pl.DataFrame:
        label = (integers(block, "target") > 0).cast(pl.Int8).cast(pl.String)
        frame = _present(block, EVENT).with_columns(label=label)
        for key, table in tables:
            frame = frame.join(table, on=key, how="left", maintain_order="left")
        if frame.height != block.frame.height:
            raise InputError(f"{block.origin}: a user or song of its rows is listed twice in the other files")
        return frame.with_columns(msno=pl.col("msno_rank"), song_id=pl.col("song_id_rank")).select(COLUMNS)

    return rows


def _present(block: Block, names: Sequence[str]) -> pl.DataFrame:
    """These columns, null where pandas would find nothing."""
    frame = pl.DataFrame([column(block, name, "of the raw file") for name in names])
    return frame.with_columns(pl.when(~pl.all().is_in(ABSENT)).then(pl.all()))


def _songs(path: Path, seen: pl.Series) -> tuple[pl.DataFrame, pl.Series]:
    """The songs that were seen, and the ids of all."""
    parts, ids, cells = [], [], []
    for part in _cut(path, ("song_id", *SONG)):
        ids.append(part["song_id"])
        cells += [part[name].unique().alias("cell") for name in PERSONS]
        parts.append(_only(part, seen))
    table, numbers = pl.concat(parts), _persons(pl.concat(cells).unique())
    for name in PERSONS:
        table = (
            table.join(numbers, left_on=name, right_on="cell", how="left")
            .drop(name)
            .rename({"numbers": name})
        )
    language = pl.col("language").cast(pl.Float64, strict=False).cast(pl.Int64).cast(pl.String)
    table = table.with_columns(pl.col("genre_ids").str.replace_all("|", " ", literal=True), language)
    return table, pl.concat(ids)


def _persons(cells: pl.Series) -> pl.DataFrame:
    """Each cell with the numbers of the persons in it: their places among all in sorted order."""
    names = (
        cells.to_frame()
        .with_columns(numbers=pl.col("cell").str.replace_all(r"[|\\/&;]", "|").str.split("|"))
        .explode("numbers")
        .with_columns(pl.col("numbers").str.replace_all('"', "", literal=True).str.strip_chars())
        .filter(pl.col("numbers") != "")
        .with_columns(pl.col("numbers").rank("dense").cast(pl.String))
    )
    return names.group_by("cell", maintain_order=True).agg(pl.col("numbers").str.join(" "))


def _extras(path: Path, seen: pl.Series) -> tuple[pl.DataFrame, pl.Series]:
    """Names and codes of the songs that were seen, and the ids of all."""
    table = pl.concat(_cut(path, ("song_id", *EXTRA), may_be_longer=False))
    ids, name = table["song_id"], table["name"].rank("dense").cast(pl.String)
    # As pandas wrote it: whole numbers, once some are missing, are floats.
    if not seen.is_in(ids.implode()).all() and not name.has_nulls():
        name = name + ".0"
    return _only(table.with_columns(name), seen), ids


def _only(table: pl.DataFrame, seen: pl.Series) -> pl.DataFrame:
    return table.filter(pl.col("song_id").is_in(seen.implode()))


def _cut(path: Path, names: Sequence[str], *, may_be_longer: bool = True) -> Iterator[pl.DataFrame]:
    """Lines cut at every comma, whatever quotes say; pieces beyond the last name are dropped, or an error."""
    with open_text(path) as file:
        header = file.readline().strip()
        if header.split(",") != list(names):
            raise InputError(f"{path}: the header line is {header!r}, expected {','.join(names)}")
        first = 2
        while lines := file.readlines(source.BLOCK_BYTES):
            table = pl.Series(lines).str.strip_chars().str.splitn(",", len(names) + 1).struct.unnest()
            table.columns = [*names, "more"]
            longer = table["more"].is_not_null().arg_true()
            if len(longer) and not may_be_longer:
                at = longer[0]
                raise InputError(
                    f"{path}: line {first + at} has more than {len(names)} fields: {lines[at].strip()!r}",
                    fix="use the raw file as it was downloaded",
                )
            first += len(lines)
            yield table.drop("more")
        if first == 2:
            raise InputError(f"{path} holds no rows", fix="check that the file was written completely")


def _ranks(seen: pl.Series, *others: pl.Series) -> pl.DataFrame:
    """The place of each id that was seen among all in sorted order, from 1, as text."""
    known = pl.concat([seen, *others]).drop_nulls().unique().sort().to_frame()
    name = f"{seen.name}_rank"
    ranks = known.with_row_index(name, offset=1).with_columns(pl.col(name).cast(pl.String))
    return ranks.filter(pl.col(seen.name).is_in(seen.implode()))


PROTOCOL = Protocol(
    name="kkbox-x1",
    title="KKBox (x1)",
    files=("train.csv", "members.csv", "songs.csv", "song_extra_info.csv"),
    homepage="https://www.kaggle.com/c/kkbox-music-recommendation-challenge",
    licence="Kaggle competition rules",
    schema=schema("mean"),
    figures=Figures(
        rows=(5_901_932, 737_743, 737_743),
        positives=(2_971_724, 371_466, 371_466),
        sizes=SIZES,
    ),
    sources=sources,
    split=FOLDS,
    published=Published(
        page="https://huggingface.co/datasets/reczoo/KKBox_x1",
        columns=COLUMNS,
        md5=(
            "195b1ae8fc2d9267d7c8656c07ea1304",
            "398e97ac139611a09bd61a58e4240a3e",
            "8c5f7add05a6f5258b6b3bcc00ba640b",
        ),
    ),
    features=features,
    counted=dict.fromkeys(LISTS, "cells"),
)
# The encoding of older FuxiCTR (BARS): genres and artists are counted one by one, and their vectors summed.
WORDS = replace(
    PROTOCOL,
    name="kkbox-x1-words",
    title="KKBox (x1), lists word by word",
    schema=schema("sum"),
    figures=replace(
        PROTOCOL.figures,
        sizes={name: size for name, size in SIZES.items() if name not in LISTS},
        total=92_258,
    ),
    counted=dict.fromkeys(LISTS, "pieces"),
)
