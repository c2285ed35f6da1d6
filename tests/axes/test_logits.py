from pathlib import Path

import numpy as np
import polars as pl
import pytest

from recap_ctr.axes.logits import Estimator, Floats, LogitTable, LogitWriter, blocks, mean_logit
from recap_ctr.data.prepare import Preparation, write_prepared_data
from recap_ctr.data.shards import PreparedData
from recap_ctr.data.source import FrameSource
from recap_ctr.data.split import Split
from recap_ctr.errors import InputError
from recap_ctr.schema import Schema

TWO = (Estimator("seed-1", step=10), Estimator("seed-2", step=10, route="0-1", depth=3))


def write(
    path: Path, data: PreparedData, logits: Floats, estimators: tuple[Estimator, ...] = TWO
) -> LogitTable:
    with LogitWriter(path, data, "valid", estimators) as writer:
        for start in range(0, len(logits), 37):
            writer.write(logits[start : start + 37])
    return LogitTable(path)


def some_logits(data: PreparedData, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).normal(size=(len(data.valid), 2)).astype(np.float32)


@pytest.mark.slow
def test_round_trip_keeps_values_coordinates_and_rows(prepared: PreparedData, tmp_path: Path) -> None:
    logits = some_logits(prepared)

    table = write(tmp_path / "table", prepared, logits)

    assert np.array_equal(table.logits_NM, logits)
    assert np.array_equal(table.rows_N, prepared.valid.rows)
    assert table.estimators == TWO
    assert (table.data, table.split) == (prepared.fingerprint, "valid")
    table.check(prepared)


def test_mean_and_blocks_over_several_tables(prepared: PreparedData, tmp_path: Path) -> None:
    first, second = some_logits(prepared, 1), some_logits(prepared, 2)
    tables = [write(tmp_path / "a", prepared, first), write(tmp_path / "b", prepared, second)]
    together = np.concatenate([first, second], axis=1).astype(np.float64)

    assert np.array_equal(np.concatenate(list(blocks(tables, size=41))), together)
    np.testing.assert_allclose(mean_logit(tables), together.mean(axis=1), rtol=1e-6)


def test_other_data_and_other_splits_are_refused(
    prepared: PreparedData, tmp_path: Path, click_log: pl.DataFrame, click_schema: Schema
) -> None:
    table = write(tmp_path / "table", prepared, some_logits(prepared))
    source = FrameSource(click_log)
    other, _ = write_prepared_data(
        Preparation(click_schema, {"all": source}, Split(seed=99)), tmp_path / "data", quiet=True
    )

    with pytest.raises(InputError, match="made on other data"):
        table.check(other)
    with LogitWriter(tmp_path / "train", prepared, "train", TWO) as writer:
        writer.write(np.zeros((len(prepared.train), 2)))
    with pytest.raises(InputError, match="different rows"):
        list(blocks([table, LogitTable(tmp_path / "train")]))


def test_nothing_appears_before_all_rows_are_written(prepared: PreparedData, tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="rows were written"),
        LogitWriter(tmp_path / "t", prepared, "valid", TWO) as writer,
    ):
        writer.write(np.zeros((3, 2)))
    with (
        pytest.raises(InputError, match="not finite"),
        LogitWriter(tmp_path / "t", prepared, "valid", TWO) as writer,
    ):
        writer.write(np.array([[0.0, 1.0], [np.nan, 0.0]]))
    with pytest.raises(RuntimeError), LogitWriter(tmp_path / "t", prepared, "valid", TWO):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InputError, match="does not hold a logit table"):
        LogitTable(tmp_path / "t")


def test_a_damaged_file_is_refused(prepared: PreparedData, tmp_path: Path) -> None:
    table = write(tmp_path / "table", prepared, some_logits(prepared))
    file = table.path / "logits.npy"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)

    with pytest.raises(InputError, match="damaged"):
        LogitTable(table.path)


def test_an_estimator_may_fill_one_column_only(prepared: PreparedData, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="listed twice"):
        LogitWriter(tmp_path / "t", prepared, "valid", (TWO[0], TWO[0]))


def test_a_flipped_bit_of_the_manifest_is_noticed(prepared: PreparedData, tmp_path: Path) -> None:
    """The names of the columns decide what is learnt from a table."""
    with LogitWriter(tmp_path / "table", prepared, "valid", [Estimator("run-1", step=7)]) as writer:
        writer.write(np.zeros((len(prepared.valid), 1)))
    manifest = tmp_path / "table" / "manifest.json"
    whole = manifest.read_bytes()
    for at in range(len(whole)):
        manifest.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        with pytest.raises(InputError):
            LogitTable(tmp_path / "table")
