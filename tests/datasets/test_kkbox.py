"""KKBox_x1 on generated files: the published table, and the two ways to encode its lists."""

import gzip
from pathlib import Path

import polars as pl
import pytest

from recap_ctr.data import csv as csv_module
from recap_ctr.data.prepare import write_prepared_data
from recap_ctr.data.shards import SPLITS, PreparedData
from recap_ctr.data.source import Block
from recap_ctr.datasets import kkbox
from recap_ctr.datasets.catalogue import find_protocol
from recap_ctr.errors import InputError
from tests.support import layouts
from tests.support.kkbox_files import EXTRAS, SONGS, Row, generate


def published(raw: Path) -> list[Row]:
    source = kkbox.sources(find_protocol("kkbox-x1").raw_files(raw))["all"]
    frames = [block.frame for block, _ in source.blocks()]
    return pl.concat(frames).select(pl.col(kkbox.COLUMNS).fill_null("")).to_dicts()


def prepared(raw: Path, name: str = "kkbox-x1") -> PreparedData:
    return write_prepared_data(find_protocol(name).preparation(raw, check=False), raw / name, quiet=True)[0]


def test_the_published_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = generate(tmp_path)
    assert published(tmp_path) == table
    assert {row["composer"] for row in table} >= {
        "2 3",
        "1 2 3 4",
        "",
    }  # Ann, Bo, Cy, Dé, Zoë, open quote, Éa
    monkeypatch.setattr(csv_module, "BLOCK_BYTES", 1_000)
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
    features = kkbox.features(Block(frame, 1, "here"))
    assert features["bd"].to_list() == [None, 1, 1, 2, 2, 3, 6, 7, 7, None, None, None, None]
    assert features["isrc"].to_list()[:2] == ["TW", None]
    with pytest.raises(InputError, match="here: row 4, column 'bd': 'old' is not an age"):
        kkbox.features(Block(pl.DataFrame({"bd": ["1", "old"], "isrc": ["", ""]}), 3, "here"))


@pytest.mark.slow
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
        vocabulary = {token for token in seen if seen.count(token) >= 10}
        assert set(fitted.values) == vocabulary
        assert at.size == len(vocabulary) + 2
        for shard in shards:
            assert layouts.decoded(data, shard)[at.name] == [
                [piece if piece in vocabulary else layouts.OOV for piece in pieces[row]] for row in shard.rows
            ]


@pytest.mark.slow
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


@pytest.mark.slow
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
    def fails(message: str) -> None:
        with pytest.raises(InputError) as error:
            prepared(tmp_path)
        assert message in str(error.value)

    fails("lacks train.csv, members.csv, songs.csv, song_extra_info.csv of KKBox (x1)")
    generate(tmp_path)
    for name, text, message in (
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
        fails(message)
        (tmp_path / name).write_text(good)
    lines = (tmp_path / "train.csv").read_text().splitlines()
    (tmp_path / "train.csv").write_text("\n".join([*lines[:5], lines[5][:-1] + "?", *lines[6:]]))
    fails("train.csv: row 5, column 'target': '?' is not a whole number")
    (tmp_path / "train.csv").write_text("\n".join([*lines[:5], lines[5] + ",1", *lines[6:]]))
    fails("train.csv: row 5 has 7 fields, expected 6")
    (tmp_path / "songs.csv.gz").write_bytes(gzip.compress((tmp_path / "songs.csv").read_bytes())[:-20])
    (tmp_path / "songs.csv").unlink()
    (tmp_path / "train.csv").write_text("\n".join(lines))
    fails("songs.csv.gz can't be read: Compressed file ended")
