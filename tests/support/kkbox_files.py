"""Small raw files of KKBox, and the rows of the table that its protocol publishes."""

import re
from pathlib import Path

import numpy as np

from recap_ctr.datasets import kkbox
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
    """Write the raw files, and return the rows of the published table, computed in plain loops."""
    rng = np.random.default_rng(0)
    ages = ["0", "1", "10", "11", "30", "60", "61", "95", "96", "-43", "1051"]
    members = [
        {
            "msno": f"u{i}=",
            "city": str(i % 3 + 1),
            "bd": ages[i % 11],
            "gender": ("male", "female", "")[i % 3],
            "registered_via": str(i % 4 + 3),
            "registration_init_time": "20110820",
            "expiration_date": "20170920",
        }
        for i in range(25)
    ]
    events = [
        {
            "msno": f"u{rng.integers(0, 25)}=",
            "song_id": f"s{rng.integers(1, 9)}",
            "source_system_tab": str(rng.choice(["my library", "null", ""])),
            "source_screen_name": str(rng.choice(["Explore", "Unknown"])),
            "source_type": "album",
            "target": str(rng.integers(0, 2)),
        }
        for _ in range(rows)
    ]
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
