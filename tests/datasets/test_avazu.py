"""Avazu_x4 on a generated file."""

import gzip
from datetime import date
from pathlib import Path

import polars as pl
import pytest

from recap_ctr.data.prepare import write_prepared_data
from recap_ctr.data.shards import SPLITS, PreparedData
from recap_ctr.data.source import Block
from recap_ctr.datasets import avazu
from recap_ctr.datasets.catalogue import find_protocol
from recap_ctr.errors import InputError
from tests.support import layouts


def prepared(raw: Path) -> PreparedData:
    return write_prepared_data(
        find_protocol("avazu-x4").preparation(raw, check=False), raw / "out", quiet=True
    )[0]


def tokens(line: list[str]) -> dict[str, str]:
    """By the letter of the protocol."""
    cells = dict(zip(layouts.AVAZU, line, strict=True))
    time = cells["hour"]
    sunday_is_0 = date(2000 + int(time[:2]), int(time[2:4]), int(time[4:6])).strftime("%w")
    cells |= {"hour": str(int(time[6:8])), "weekday": sunday_is_0, "weekend": str(int(sunday_is_0 in "06"))}
    return {name: value for name, value in cells.items() if name not in ("id", "click")}


def test_time() -> None:
    times = ["14102100", "14102523", "14102601", "14022912"]
    with pytest.raises(InputError, match="here: row 8, column 'hour': '14022912' is not a time YYMMDDHH"):
        avazu.features(Block(pl.DataFrame({"hour": times}), 5, "here"))
    features = avazu.features(Block(pl.DataFrame({"hour": times[:3]}), 5, "here"))
    assert features.select("hour", "weekday", "weekend").rows() == [(0, 2, 0), (23, 6, 1), (1, 0, 1)]


@pytest.mark.parametrize(
    "time", ["", None, "1410210", "141021000", "14102124", "14131200", "1410 100", "+1410210"]
)
def test_no_time(time: str | None) -> None:
    frame = pl.DataFrame({"hour": ["14102100", time]}, schema={"hour": pl.String})
    with pytest.raises(InputError, match="row 2, column 'hour'"):
        avazu.features(Block(frame, 1, "here"))


@pytest.mark.slow
def test_fields_and_tokens(tmp_path: Path) -> None:
    lines = layouts.avazu(tmp_path)
    data = prepared(tmp_path)
    parts = layouts.splits([int(line[1]) for line in lines])
    read = [tokens(line) for line in lines]
    assert (
        [field.name for field in data.layout.fields]
        == [*layouts.AVAZU[2:], "weekday", "weekend"]
        == list(read[0])
    )
    for shard, rows in zip((data.train, data.valid, data.test), parts, strict=True):
        assert shard.rows.tolist() == rows
    for i, name in enumerate(read[0]):
        values = layouts.kept([row[name] for row in read], parts[0], 2)
        assert data.layout.fields[i].size == len({values[row] for row in parts[0]} - {layouts.OOV}) + 2
        for shard in (data.train, data.valid, data.test):
            assert layouts.decoded(data, shard)[name] == [values[row] for row in shard.rows]


@pytest.mark.slow
def test_packed_and_published_files_give_the_same_rows(tmp_path: Path) -> None:
    lines = layouts.avazu(tmp_path)
    plain = prepared(tmp_path)
    (tmp_path / "gz").mkdir()
    (tmp_path / "gz" / "train.gz").write_bytes(gzip.compress((tmp_path / "train").read_bytes()))
    assert prepared(tmp_path / "gz").fingerprint == plain.fingerprint
    ready = tmp_path / "ready"
    ready.mkdir()
    for split, rows in zip(SPLITS, layouts.splits([int(line[1]) for line in lines]), strict=True):
        layouts.write(ready / f"{split}.csv", [layouts.AVAZU, *(lines[row] for row in rows)], ",")
    data = prepared(ready)
    for split in SPLITS:
        assert (getattr(data, split).ids == getattr(plain, split).ids).all()


def test_bad_files(tmp_path: Path) -> None:
    def fails(message: str) -> None:
        with pytest.raises(InputError) as error:
            prepared(tmp_path)
        assert message in str(error.value)

    fails("lacks train of Avazu (x4)")
    lines = layouts.avazu(tmp_path)
    packed = gzip.compress((tmp_path / "train").read_bytes())
    layouts.write(tmp_path / "train", [layouts.AVAZU, *lines[:20], lines[20][:-1]], ",")
    fails("train: row 21 has 23 fields, expected 24")
    lines[30][1] = "yes"
    layouts.write(tmp_path / "train", [layouts.AVAZU, *lines], ",")
    fails("train: row 31: the label 'click' is 'yes', neither 0 nor 1")
    layouts.write(tmp_path / "train", [[name.upper() for name in layouts.AVAZU], *lines], ",")
    fails("train has no column 'hour' (time of the row)")
    (tmp_path / "train").unlink()
    (tmp_path / "train.gz").write_bytes(packed[:-50])
    fails("train.gz can't be read: Compressed file ended")
