"""The first pass on disk: what comes back is what was written, in bounded memory."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from recap_ctr.data import source as source_module
from recap_ctr.data import spool as spool_module
from recap_ctr.data.count import CountedValues, seen_file
from recap_ctr.data.prepare import Preparation, write_prepared_data
from recap_ctr.data.source import FrameSource
from recap_ctr.data.spool import Spool, SpooledRows
from recap_ctr.errors import InputError
from recap_ctr.schema import Field, Schema
from tests.support.preparing import PLAIN, contents


def spooled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Spool, np.ndarray]:
    monkeypatch.setattr(spool_module, "SPOOL_ROWS", 4)
    rows = np.arange(22, dtype=np.int32).reshape(11, 2)
    spool = Spool(tmp_path / "0000", np.int32, 2)
    spool.append(rows[:3])
    spool.end_part()
    spool.append(rows[3:])
    spool.end_part()
    return spool, rows


def test_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool, rows = spooled(tmp_path, monkeypatch)
    blocks = list(spool.blocks())
    assert [len(block) for block in blocks] == [4, 4, 3]
    assert np.array_equal(np.concatenate(blocks), rows)
    assert np.array_equal(np.concatenate(list(spool.blocks(2, 9))), rows[2:9])


@pytest.mark.parametrize("length", [0, 1, 32, 63])
def test_a_short_read_is_an_error(length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that gives back less than was written must not look like a table with fewer values."""
    spool, _ = spooled(tmp_path, monkeypatch)
    with Path(spool.parts[1].path).open("r+b") as file:
        file.truncate(length)
    with pytest.raises(InputError, match=r"shorter than it was written.*\n  fix: check the disk"):
        list(spool.blocks())


@pytest.mark.slow
def test_counts_of_parts(tmp_path: Path) -> None:
    """A value of several parts is counted once, whatever the number of ranges, and seen if one part's rows train."""
    rng = np.random.default_rng(0)
    spool, words = Spool(tmp_path / "0000", np.int32, has_values=True), []
    for _ in range(12):
        block = pl.Series([f"w{number}" for number in rng.integers(0, 60, 20)])
        spool.append(spool.dictionary.codes(block.cast(spool.dictionary.dtype)))
        spool.end_part()
        words += block.to_list()
    splits = rng.integers(0, 3, len(words)).astype(np.uint8)
    expected = {
        word: (sum(w == word and not code for w, code in zip(words, splits, strict=True)), words.count(word))
        for word in words
    }
    for max_values in (1, 50, 10**6):
        rows = SpooledRows(PLAIN, {}, {"field:c": spool}, max_values, len(words))
        counted = CountedValues(rows, "field:c", splits, tmp_path / str(max_values))
        table = pl.concat(counted.ranges())
        assert len(table) == len(expected)
        assert {value: (train, total) for value, train, total in table.rows()} == expected
        counted.write_seen()
        for number, part in enumerate(spool.parts):
            values = pl.read_ipc(part.dictionary)["value"]
            seen = np.fromfile(seen_file(tmp_path / str(max_values), number), np.uint8)
            assert seen.tolist() == [int(expected[value][0] > 0) for value in values]


@pytest.mark.slow
@pytest.mark.parametrize("max_values", [5, 40])
def test_values_beyond_the_limit_change_nothing(
    max_values: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(source_module, "BLOCK_ROWS", 50)
    rng = np.random.default_rng(1)
    tags = [" ".join(f"t{tag}" for tag in rng.integers(0, 90, rng.integers(0, 4))) for _ in range(450)]
    frame = pl.DataFrame(
        {
            "y": rng.integers(0, 2, 450),
            "user": rng.zipf(1.4, 450) % 300,
            "ad": rng.integers(0, 9, 450),
            "tags": tags,
        }
    )
    fields = (
        Field(name="user", kind="categorical", min_count=2),
        Field(name="ad", kind="categorical"),
        Field(name="tags", kind="multi", min_count=3),
    )
    schema = Schema(label="y", group="user", fields=fields)
    made = []
    for name, limit in (("whole", 10**9), ("small", max_values)):
        preparation = Preparation(schema, {"all": FrameSource(frame)}, max_values=limit)
        data, _ = write_prepared_data(preparation, tmp_path / name)
        made.append(contents(data.path))
    assert made[0] == made[1]
    assert f"'user' has more than {max_values:,} values, which are counted on disk" in capfd.readouterr().err
