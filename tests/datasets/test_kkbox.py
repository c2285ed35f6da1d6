"""KKBox_x1 on generated files: the published table, and the two ways to encode its lists."""

import gzip
import re
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from recap_ctr.data import source as source_module
from recap_ctr.data.prepare import prepare
from recap_ctr.data.shards import SPLITS, PreparedData
from recap_ctr.data.source import Block
from recap_ctr.datasets import kkbox
from recap_ctr.datasets.catalogue import protocol
from recap_ctr.errors import InputError
from tests.support import layouts

Row = dict[str, str]
SONGS = """song_id,song_length,genre_ids,artist_name,composer,lyricist,language
s1,200,465,Ann,Bo| Cy,,3.0
s2,210,465|958,"Bo"&Ann,Ann/Bo\\Cy;Dé,Dé,-1.0
s3,220,,Éa,"open quote,,52.0
s4,230,958|465|1|2,Cy|Bo|Ann|Dé,,,3.0,one,too many
s5,240,958,&,Zoë,Zoë,3.0
s6,250,465,Ann,,
"""
EXTRAS = """song_id,name,isrc
s1,Alpha,TWUM71200043
s2,"Beta,US1234567890
s3,Alpha,
s4,,JP1234567890
s6,Gamma,TWUM71200044
s9,Delta,XX1234567890
"""


def generate(raw: Path, rows: int = 400, extras: str = EXTRAS) -> list[Row]:
    """Rows of the published table, made the slow way."""
    rng = np.random.default_rng(0)
    ages = ["0", "1", "10", "11", "30", "60", "61", "95", "96", "-43", "1051"]
    members = [
        {"msno": f"u{i}=", "city": str(i % 3 + 1), "bd": ages[i % 11], "gender": ("male", "female", "")[i % 3],
         "registered_via": str(i % 4 + 3), "registration_init_time": "20110820", "expiration_date": "20170920"}
        for i in range(25)
    ]  # fmt: skip
    events = [
        {"msno": f"u{rng.integers(0, 25)}=", "song_id": f"s{rng.integers(1, 9)}",
         "source_system_tab": str(rng.choice(["my library", "null", ""])),
         "source_screen_name": str(rng.choice(["Explore", "Unknown"])), "source_type": "album",
         "target": str(rng.integers(0, 2))}
        for _ in range(rows)
    ]  # fmt: skip
    for name, lines in (("train", events), ("members", members)):
        layouts.write(raw / f"{name}.csv", [list(lines[0]), *(list(line.values()) for line in lines)], ",")
    (raw / "songs.csv").write_text(SONGS)
    (raw / "song_extra_info.csv").write_text(extras)

    def cut(text: str) -> dict[str, Row]:
        header, *lines = (line.strip().split(",") for line in text.splitlines())
        return {line[0]: dict(zip(header, line, strict=False)) for line in lines}

    def persons(cell: str) -> list[str]:
        names = (name.replace('"', "").strip() for name in re.split(r"[|\\/&;]", cell))
        return [name for name in names if name]

    songs, more = cut(SONGS), cut(extras)
    people = sorted({p for song in songs.values() for c in kkbox.PERSONS for p in persons(song.get(c, ""))})
    for song in songs.values():
        for column in kkbox.PERSONS:
            song[column] = " ".join(str(people.index(p) + 1) for p in persons(song.get(column, "")))
        song["genre_ids"] = song["genre_ids"].replace("|", " ")
        song["language"] = str(int(float(song["language"]))) if song.get("language") else ""
    names = sorted({song["name"] for song in more.values()})
    gaps = any(event["song_id"] not in more for event in events)
    users = sorted({row["msno"] for row in (*members, *events)})
    ids = sorted({*songs, *more, *(event["song_id"] for event in events)})
    table = []
    for event in events:
        song, extra = songs.get(event["song_id"], {}), more.get(event["song_id"], {})
        member = next(member for member in members if member["msno"] == event["msno"])
        row = member | song | event | {"label": event["target"], "isrc": extra.get("isrc", "")}
        row["name"] = str(names.index(extra["name"]) + 1) + ".0" * gaps if extra else ""
        row["msno"], row["song_id"] = str(users.index(row["msno"]) + 1), str(ids.index(row["song_id"]) + 1)
        table.append({name: row.get(name, "").replace("null", "") for name in kkbox.COLUMNS})
    return table


def published(raw: Path) -> list[Row]:
    source = kkbox.sources(protocol("kkbox-x1").raw_files(raw))["all"]
    frames = [block.frame for block, _ in source.blocks()]
    return pl.concat(frames).select(pl.col(kkbox.COLUMNS).fill_null("")).to_dicts()


def prepared(raw: Path, name: str = "kkbox-x1") -> PreparedData:
    return prepare(protocol(name).preparation(raw, check=False), raw / name, quiet=True)[0]


def test_the_published_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = generate(tmp_path)
    assert published(tmp_path) == table
    assert {row["composer"] for row in table} >= {
        "2 3",
        "1 2 3 4",
        "",
    }  # Ann, Bo, Cy, Dé, Zoë, open quote, Éa
    monkeypatch.setattr(source_module, "BLOCK_BYTES", 1_000)
    assert published(tmp_path) == table


def test_names_are_whole_numbers_if_none_is_missing(tmp_path: Path) -> None:
    table = generate(tmp_path, extras=EXTRAS + "s5,E,\ns7,F,\ns8,G,\n")
    assert published(tmp_path) == table
    assert not any("." in row["name"] for row in table)


def test_features() -> None:
    ages = ["0", "1", "10", "11", "20", "21", "60", "61", "95", "96", "", None, "-3"]
    frame = pl.DataFrame(
        {"bd": ages, "isrc": ["TWUM71200043", None] + [""] * 11}, schema_overrides={"bd": pl.String}
    )
    found = kkbox.features(Block(frame, 1, "here"))
    assert found["bd"].to_list() == [None, 1, 1, 2, 2, 3, 6, 7, 7, None, None, None, None]
    assert found["isrc"].to_list()[:2] == ["TW", None]
    with pytest.raises(InputError, match="here: row 4, column 'bd': 'old' is no age"):
        kkbox.features(Block(pl.DataFrame({"bd": ["1", "old"], "isrc": ["", ""]}), 3, "here"))


@pytest.mark.parametrize("name", ["kkbox-x1", "kkbox-x1-words"])
def test_fields_and_tokens(name: str, tmp_path: Path) -> None:
    table = generate(tmp_path)
    data = prepared(tmp_path, name)
    parts = layouts.splits([int(row["label"]) for row in table])
    shards = (data.train, data.valid, data.test)
    assert [shard.rows.tolist() for shard in shards] == parts
    assert [field.name for field in data.layout.fields] == list(kkbox.SIZES)
    for fitted, at in zip(data.encoder.fields, data.layout.fields, strict=True):
        cells = [row[at.name] for row in table]
        if at.name == "isrc":
            cells = [cell[:2] for cell in cells]
        if at.name == "bd":
            ages = [int(cell) for cell in cells]
            cells = [str(min((age + 9) // 10, 7)) if 1 <= age <= 95 else "" for age in ages]
        if at.name not in kkbox.LISTS:
            values = layouts.kept([cell or None for cell in cells], parts[0], 10)
            for shard in shards:
                assert layouts.decoded(data, shard)[at.name] == [values[row] for row in shard.rows]
            continue
        assert (at.pooling, at.width) == ("mean" if name == "kkbox-x1" else "sum", 3)
        pieces = [cell.split()[:3] for cell in cells]
        counted = (
            [[cell] if cell else [] for cell in cells] if name == "kkbox-x1" else [c.split() for c in cells]
        )
        seen = [token for row in parts[0] for token in counted[row]]
        known = {token for token in seen if seen.count(token) >= 10}
        assert set(fitted.values) == known
        assert at.size == len(known) + 2
        for shard in shards:
            assert layouts.decoded(data, shard)[at.name] == [
                [piece if piece in known else layouts.OOV for piece in pieces[row]] for row in shard.rows
            ]


def test_whole_cells_are_dead_rows_of_the_vocabulary(tmp_path: Path) -> None:
    generate(tmp_path)
    data = prepared(tmp_path)
    genres = data.encoder.fields[list(kkbox.SIZES).index("genre_ids")]
    assert {"465 958", "958 465 1 2", "465", "958"} == set(genres.values)
    # "1" never stands alone: it is unseen. Scoring finds what training found.
    rows = pl.DataFrame({field.name: ["465 1", None] for field in data.schema.fields})
    at = data.layout.fields[list(kkbox.SIZES).index("genre_ids")]
    ids = data.encoder.encode(Block(rows, 1, "rows")).ids_BW[:, at.start : at.start + 3] - at.offset
    assert ids.tolist() == [[genres.values.to_list().index("465") + 1, genres.oov, 0], [0, 0, 0]]
    words = prepared(tmp_path, "kkbox-x1-words").encoder.fields[list(kkbox.SIZES).index("genre_ids")]
    assert {"465", "958", "1", "2"} == set(words.values)  # "2" is always fourth: counted, never taken


def test_packed_and_published_files_give_the_same_rows(tmp_path: Path) -> None:
    table = generate(tmp_path)
    plain = prepared(tmp_path)
    (tmp_path / "gz").mkdir()
    for name in kkbox.PROTOCOL.files:
        (tmp_path / "gz" / f"{name}.gz").write_bytes(gzip.compress((tmp_path / name).read_bytes()))
    assert prepared(tmp_path / "gz").fingerprint == plain.fingerprint
    (tmp_path / "ready").mkdir()
    for split, rows in zip(SPLITS, layouts.splits([int(row["label"]) for row in table]), strict=True):
        lines = [kkbox.COLUMNS, *(list(table[row].values()) for row in rows)]
        layouts.write(tmp_path / "ready" / f"{split}.csv", lines, ",")
    ready = prepared(tmp_path / "ready")
    for split in SPLITS:
        assert (getattr(ready, split).ids == getattr(plain, split).ids).all()


def test_bad_files(tmp_path: Path) -> None:
    def fails(said: str) -> None:
        with pytest.raises(InputError) as error:
            prepared(tmp_path)
        assert said in str(error.value)

    fails("lacks train.csv, members.csv, songs.csv, song_extra_info.csv of KKBox (x1)")
    generate(tmp_path)
    for name, text, said in (
        (
            "song_extra_info.csv",
            EXTRAS + "s7,a,b,c\n",
            "song_extra_info.csv: line 8 has more than 3 fields: 's7,a",
        ),
        ("songs.csv", SONGS.replace("song_id", "id"), "songs.csv: the header line is 'id,song_length"),
        ("songs.csv", SONGS.partition("\n")[0], "songs.csv holds no rows"),
        ("songs.csv", SONGS + "s1,1,,,,,3\n", "train.csv: a user or song of its rows is listed twice"),
        ("members.csv", "msno,city\nu1=,2\n", "members.csv has no column 'bd'"),
        ("train.csv", "msno,song_id\nu1=,s1\n", "train.csv has no column 'target' (a whole number)"),
    ):
        good = (tmp_path / name).read_text()
        (tmp_path / name).write_text(text)
        fails(said)
        (tmp_path / name).write_text(good)
    lines = (tmp_path / "train.csv").read_text().splitlines()
    (tmp_path / "train.csv").write_text("\n".join([*lines[:5], lines[5][:-1] + "?", *lines[6:]]))
    fails("train.csv: row 5, column 'target': '?' is no whole number")
    (tmp_path / "train.csv").write_text("\n".join([*lines[:5], lines[5] + ",1", *lines[6:]]))
    fails("train.csv: row 5 has 7 fields, expected 6")
    (tmp_path / "songs.csv.gz").write_bytes(gzip.compress((tmp_path / "songs.csv").read_bytes())[:-20])
    (tmp_path / "songs.csv").unlink()
    (tmp_path / "train.csv").write_text("\n".join(lines))
    fails("songs.csv.gz can't be read: Compressed file ended")
