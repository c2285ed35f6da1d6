"""Criteo_x4 on a generated train.txt."""

import gzip
import math
from pathlib import Path

import pytest

from recap_ctr.data.prepare import write_prepared_data
from recap_ctr.data.shards import SPLITS, PreparedData
from recap_ctr.data.source import Block, FileSource
from recap_ctr.datasets import criteo
from recap_ctr.datasets.catalogue import find_protocol
from recap_ctr.errors import InputError
from tests.support import layouts

NAMES = criteo.COLUMNS[1:]


def prepared(raw: Path, out: str = "out") -> PreparedData:
    return write_prepared_data(
        find_protocol("criteo-x4").preparation(raw, check=False), raw / out, quiet=True
    )[0]


def token(name: str, cell: str) -> str | None:
    """By the letter of the protocol: floats, missing is 0, bucketed, and 0 is no token."""
    if name.startswith("C"):
        return cell or None
    number = float(cell or 0)
    bucket = math.floor(math.log(number) ** 2) if number > 2 else int(number)
    return str(bucket) if bucket else None


@pytest.mark.slow
def test_fields_and_tokens(tmp_path: Path) -> None:
    lines = layouts.criteo(tmp_path)
    data = prepared(tmp_path)
    parts = layouts.splits([int(line[0]) for line in lines])
    for shard, rows in zip((data.train, data.valid, data.test), parts, strict=True):
        assert shard.rows.tolist() == rows
        assert shard.labels.tolist() == [int(lines[row][0]) for row in rows]
    assert [field.name for field in data.layout.fields] == [f"I{i}" for i in range(1, 14)] + [
        f"C{i}" for i in range(1, 27)
    ]
    for i, name in enumerate(NAMES, start=1):
        values = layouts.kept([token(name, line[i]) for line in lines], parts[0], 10)
        vocabulary = {values[row] for row in parts[0]} - {layouts.OOV}
        assert set(data.encoder.fields[i - 1].values) == vocabulary
        assert data.layout.fields[i - 1].size == len(vocabulary) + 2
        for shard in (data.train, data.valid, data.test):
            assert layouts.decoded(data, shard)[name] == [values[row] for row in shard.rows]


@pytest.mark.slow
def test_a_token_seen_ten_times_is_kept(tmp_path: Path) -> None:
    lines = layouts.criteo(tmp_path)
    train = layouts.splits([int(line[0]) for line in lines])[0]
    for line in lines:
        line[14], line[1] = "00000000", "1"
    for row in train[:10]:
        lines[row][14], lines[row][1] = "aaaaaaaa", "100"
    for row in train[10:19]:
        lines[row][14], lines[row][1] = "bbbbbbbb", "1000"
    layouts.write(tmp_path / "train.txt", lines, "\t")
    fields = {fitted.field.name: sorted(fitted.values) for fitted in prepared(tmp_path).encoder.fields}
    assert fields["C1"] == ["00000000", "aaaaaaaa"]
    assert fields["I1"] == ["1", "21"]


@pytest.mark.slow
def test_packed_and_published_files_give_the_same_rows(tmp_path: Path) -> None:
    lines = layouts.criteo(tmp_path)
    plain = prepared(tmp_path)
    (tmp_path / "gz").mkdir()
    (tmp_path / "gz" / "train.txt.gz").write_bytes(gzip.compress((tmp_path / "train.txt").read_bytes()))
    assert prepared(tmp_path / "gz").fingerprint == plain.fingerprint
    ready = tmp_path / "ready"
    ready.mkdir()
    for split, rows in zip(SPLITS, layouts.splits([int(line[0]) for line in lines]), strict=True):
        layouts.write(ready / f"{split}.csv", [criteo.COLUMNS, *(lines[row] for row in rows)], ",")
    data = prepared(ready)
    assert data.schema.columns is None
    assert data.manifest["splits"] == plain.manifest["splits"]
    assert data.manifest["fields"] == plain.manifest["fields"]
    for split in SPLITS:
        assert (getattr(data, split).ids == getattr(plain, split).ids).all()


@pytest.mark.slow
def test_raw_rows_are_scored_as_they_are(tmp_path: Path) -> None:
    layouts.criteo(tmp_path)
    data = prepared(tmp_path)
    rows, _ = next(FileSource([tmp_path / "train.txt"], data.schema.columns).blocks())
    taken = Block(rows.frame[data.train.rows], 1, "train.txt")
    assert (data.encoder.encode(taken).ids_BW == data.train.ids).all()


class TestBadFiles:
    def fails(self, raw: Path, message: str) -> None:
        with pytest.raises(InputError) as error:
            prepared(raw)
        assert message in str(error.value)
        assert not (raw / "out").exists()

    def test_missing(self, tmp_path: Path) -> None:
        self.fails(
            tmp_path, f"{tmp_path} lacks train.txt of Criteo (x4)\n  fix: get the raw files from https://"
        )
        (tmp_path / "valid.csv").touch()
        self.fails(tmp_path, f"{tmp_path} lacks train.csv, test.csv of Criteo (x4)")

    def test_columns(self, tmp_path: Path) -> None:
        lines = layouts.criteo(tmp_path)
        lines[57].pop()
        layouts.write(tmp_path / "train.txt", lines, "\t")
        self.fails(tmp_path, "train.txt: row 58 has 39 fields, expected 40")

    def test_labels_and_numbers(self, tmp_path: Path) -> None:
        lines = layouts.criteo(tmp_path)
        lines[57][0] = "2"
        layouts.write(tmp_path / "train.txt", lines, "\t")
        self.fails(tmp_path, "train.txt: row 58: the label 'Label' is '2', neither 0 nor 1")
        lines[57][0], lines[99][3] = "1", "x"
        layouts.write(tmp_path / "train.txt", lines, "\t")
        self.fails(tmp_path, "train.txt: row 100, field 'I3': 'x' is not a number")

    def test_truncated(self, tmp_path: Path) -> None:
        layouts.criteo(tmp_path)
        packed = gzip.compress((tmp_path / "train.txt").read_bytes())
        (tmp_path / "train.txt").unlink()
        (tmp_path / "train.txt.gz").write_bytes(packed[:-1000])
        self.fails(tmp_path, "can't be read: Compressed file ended before the end-of-stream marker")
