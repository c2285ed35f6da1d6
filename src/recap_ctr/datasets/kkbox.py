"""KKBox's music recommendation challenge by the protocol KKBox_x1: does a user play a song again within a month.

The published table numbers users, songs, names and persons by their place in sorted order. songs.csv and
song_extra_info.csv are not valid CSV (quotes open and never close), so they are cut at every comma.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import polars as pl

from recap_ctr.data import csv
from recap_ctr.data.compression import open_text
from recap_ctr.data.source import Block, FileSource, MappedSource, RowFunction, Source
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
    "msno": 25963,
    "song_id": 53291,
    "source_system_tab": 10,
    "source_screen_name": 21,
    "source_type": 14,
    "city": 23,
    "gender": 4,
    "registered_via": 7,
    "language": 12,
    "genre_ids": 346,
    "artist_name": 11976,
    "isrc": 80,
    "bd": 9,
}
LISTS = ("genre_ids", "artist_name")
# What pandas takes for missing in train.csv and members.csv; the sources of an event can be "null".
MISSING = (
    *("", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "N/A", "NA"),
    *("NULL", "NaN", "n/a", "nan", "null"),
)


def schema(pooling: Literal["mean", "sum"]) -> Schema:
    """Return the schema, with genres and artists pooled by mean or sum."""

    def field(name: str) -> Field:
        if name in LISTS:
            return Field(name=name, kind="multi", max_len=3, pooling=pooling, min_count=10)
        return Field(name=name, kind="categorical", min_count=10)

    return Schema(label="label", fields=tuple(map(field, SIZES)))


def features(block: Block) -> pl.DataFrame:
    """Reduce the recording's code to its country and the age to its decade; impossible ages become missing."""
    age = block.column("bd", "age").replace("", None)
    numbers = age.cast(pl.Float64, strict=False)
    bad = (numbers.is_null() & age.is_not_null()).arg_true()
    if len(bad):
        raise InputError(
            f"{block.origin}: row {block.first_row + bad[0]}, column 'bd': {age[bad[0]]!r} is not an age",
            fix="use the raw file as it was downloaded",
        )
    decade = (numbers / 10).ceil().clip(1, 7).set(~numbers.is_between(1, 95).fill_null(False), None)
    country = block.column("isrc", "recording code").str.head(2)
    return block.frame.with_columns(country, decade.cast(pl.Int8))


def sources(files: Sequence[Path]) -> dict[str, Source]:
    """Return the rows of train.csv, joined with the other files as in the published table."""
    events, *lookup_files = files
    return {"all": MappedSource(FileSource([events]), lambda: join(*files), lookup_files)}


def join(events: Path, members: Path, songs: Path, extras: Path) -> RowFunction:
    """Return a function that turns rows of train.csv into rows of the published table."""
    ids = [
        [block.column(name, "id").unique() for name in ("msno", "song_id")]
        for block, _ in FileSource([events]).blocks()
    ]
    event_users, event_songs = (pl.concat(parts).unique() for parts in zip(*ids, strict=True))
    users = pl.concat(_present(block, ("msno", *MEMBER)) for block, _ in FileSource([members]).blocks())
    song_table, song_ids = _songs(songs, event_songs)
    extra_table, extra_ids = _extras(extras, event_songs)
    tables = (
        ("msno", users),
        ("song_id", song_table),
        ("song_id", extra_table),
        ("msno", _ranks(event_users, users["msno"])),
        ("song_id", _ranks(event_songs, song_ids, extra_ids)),
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
    """Return the named columns, null where pandas would take a cell for missing."""
    frame = pl.DataFrame([block.column(name, "of the raw file") for name in names])
    return frame.with_columns(pl.when(~pl.all().is_in(MISSING)).then(pl.all()))


def _songs(path: Path, event_songs: pl.Series) -> tuple[pl.DataFrame, pl.Series]:
    """Return the songs of the events, and the ids of all songs."""
    parts, ids, cells = [], [], []
    for part in _cut(path, ("song_id", *SONG)):
        ids.append(part["song_id"])
        cells += [part[name].unique().alias("cell") for name in PERSONS]
        parts.append(_select_songs(part, event_songs))
    table, numbers = pl.concat(parts), _persons(pl.concat(cells).unique())
    for name in PERSONS:
        joined = table.join(numbers, left_on=name, right_on="cell", how="left")
        table = joined.drop(name).rename({"numbers": name})
    language = pl.col("language").cast(pl.Float64, strict=False).cast(pl.Int64).cast(pl.String)
    table = table.with_columns(pl.col("genre_ids").str.replace_all("|", " ", literal=True), language)
    return table, pl.concat(ids)


def _persons(cells: pl.Series) -> pl.DataFrame:
    """Return each cell with the numbers of the persons in it: their places among all in sorted order."""
    names = (
        cells.to_frame()
        .with_columns(numbers=pl.col("cell").str.replace_all(r"[|\\/&;]", "|").str.split("|"))
        .explode("numbers")
        .with_columns(pl.col("numbers").str.replace_all('"', "", literal=True).str.strip_chars())
        .filter(pl.col("numbers") != "")
        .with_columns(pl.col("numbers").rank("dense").cast(pl.String))
    )
    return names.group_by("cell", maintain_order=True).agg(pl.col("numbers").str.join(" "))


def _extras(path: Path, event_songs: pl.Series) -> tuple[pl.DataFrame, pl.Series]:
    """Return names and codes of the songs of the events, and the ids of all songs."""
    table = pl.concat(_cut(path, ("song_id", *EXTRA), may_be_longer=False))
    ids, name = table["song_id"], table["name"].rank("dense").cast(pl.String)
    # Write names as pandas did, to which whole numbers are floats once some are missing.
    if not event_songs.is_in(ids.implode()).all() and not name.has_nulls():
        name = name + ".0"
    return _select_songs(table.with_columns(name), event_songs), ids


def _select_songs(table: pl.DataFrame, songs: pl.Series) -> pl.DataFrame:
    return table.filter(pl.col("song_id").is_in(songs.implode()))


def _cut(path: Path, names: Sequence[str], *, may_be_longer: bool = True) -> Iterator[pl.DataFrame]:
    """Yield lines cut at every comma, also inside quotes; pieces beyond the last name are dropped, or an error."""
    with open_text(path) as file:
        header = file.readline().strip()
        if header.split(",") != list(names):
            raise InputError(f"{path}: the header line is {header!r}, expected {','.join(names)}")
        first_line = 2
        while lines := file.readlines(csv.BLOCK_BYTES):
            table = pl.Series(lines).str.strip_chars().str.splitn(",", len(names) + 1).struct.unnest()
            table.columns = [*names, "more"]
            longer = table["more"].is_not_null().arg_true()
            if len(longer) and not may_be_longer:
                index = longer[0]
                raise InputError(
                    f"{path}: line {first_line + index} has more than {len(names)} fields:"
                    f" {lines[index].strip()!r}",
                    fix="use the raw file as it was downloaded",
                )
            first_line += len(lines)
            yield table.drop("more")
        if first_line == 2:
            raise InputError(f"{path} holds no rows", fix="check that the file was written completely")


def _ranks(event_ids: pl.Series, *other_ids: pl.Series) -> pl.DataFrame:
    """Return the place of each id of the events among all ids in sorted order, from 1, as text."""
    all_ids = pl.concat([event_ids, *other_ids]).drop_nulls().unique().sort().to_frame()
    name = f"{event_ids.name}_rank"
    ranks = all_ids.with_row_index(name, offset=1).with_columns(pl.col(name).cast(pl.String))
    return ranks.filter(pl.col(event_ids.name).is_in(event_ids.implode()))


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
