"""The order of training rows: every row once an epoch, another order each time, and windows that need little memory."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from recap_ctr.config import TrainConfig, parse
from recap_ctr.data.shards import PreparedData
from recap_ctr.errors import InputError
from recap_ctr.models.catalogue import parse_model
from recap_ctr.nn.group import Group
from recap_ctr.training import feed
from recap_ctr.training.feed import (
    WINDOW_ROWS,
    Shuffled,
    Targets,
    Windowed,
    choose_window,
    feed_of,
    permuted,
)
from recap_ctr.training.loop import Trainer, train
from tests.support.golden import SMALL, small_data
from tests.support.plain_rows import PlainRows, plain_rows
from tests.support.training_state import bits

CPU = torch.device("cpu")


def windowed(
    data: PlainRows,
    *,
    window_rows: int = 128,
    batch_size: int = 100,
    seed: int = 1,
    max_epochs: int = 100,
    targets: Targets | None = None,
    group: Group | None = None,
) -> Windowed:
    config = TrainConfig(batch_size=batch_size, seed=seed, max_epochs=max_epochs, window_rows=window_rows)
    made = feed_of(data.train, config, targets, group or Group(), window_rows)
    assert isinstance(made, Windowed)
    return made


def epoch_rows(
    source: Windowed, num_rows: int, epoch: int, *, batch_size: int = 100, group: Group | None = None
) -> npt.NDArray[np.int64]:
    """Return the numbers of the rows of an epoch in the order in which they come; a row's first id is its number."""
    numbers = []
    for step in range(-(-num_rows // batch_size)):
        count = min(batch_size, num_rows - step * batch_size)
        batch, _ = source.take(epoch, step, (group or Group()).share(count))
        numbers.append(batch.ids_BW[:, 0])
    return np.concatenate(numbers).astype(np.int64)


@pytest.mark.parametrize("num_rows", [1, 2, 99, 128, 129, 1_000, 1_777])
@pytest.mark.parametrize("window_rows", [1, 64, 130, 5_000])
def test_an_epoch_has_every_row_once_in_an_order_of_its_own(num_rows: int, window_rows: int) -> None:
    data = plain_rows(num_rows)
    source = windowed(data, window_rows=window_rows)

    epochs = [epoch_rows(source, num_rows, epoch) for epoch in range(3)]

    for rows in epochs:
        assert sorted(rows.tolist()) == list(range(num_rows))
    if num_rows > 50:
        assert (epochs[0] != epochs[1]).any()
        assert (epochs[1] != epochs[2]).any()
        other_seed = epoch_rows(windowed(data, window_rows=window_rows, seed=2), num_rows, 0)
        assert (other_seed != epochs[0]).any()
    again = windowed(data, window_rows=window_rows)
    assert (epoch_rows(again, num_rows, 2) == epochs[2]).all()


def test_rows_come_from_all_over_the_shard() -> None:
    """A window of 64 chunks is spread, and no two neighbours of the shard stay neighbours more often than by chance."""
    rows = epoch_rows(windowed(plain_rows(20_000), window_rows=640), 20_000, 0)
    first_window = rows[:640]
    assert np.histogram(first_window, bins=4, range=(0, 20_000))[0].min() > 60
    assert (np.abs(np.diff(rows)) == 1).mean() < 0.01


def test_a_batch_has_the_labels_weights_and_targets_of_its_rows() -> None:
    data = plain_rows(900)
    rng = np.random.default_rng(0)
    weights, targets = rng.random(900, np.float32), rng.random(900, np.float32)
    shard = data.train
    object.__setattr__(shard, "weights", weights)
    source = windowed(data, targets=targets)

    for step in range(9):
        batch, batch_targets = source.take(0, step, slice(0, 100))
        numbers = batch.ids_BW[:, 0]
        np.testing.assert_array_equal(batch.ids_BW, shard.ids[numbers])
        np.testing.assert_array_equal(batch.labels_B, shard.labels[numbers])
        np.testing.assert_array_equal(batch.weights_B, weights[numbers])
        np.testing.assert_array_equal(batch_targets, targets[numbers])


@pytest.mark.parametrize("batch_size", [37, 100, 400])
def test_a_jump_leads_to_the_same_rows(batch_size: int) -> None:
    data = plain_rows(1_111)
    whole = epoch_rows(windowed(data, batch_size=batch_size), 1_111, 1, batch_size=batch_size)
    for step in range(-(-1_111 // batch_size)):
        stop = min((step + 1) * batch_size, 1_111)
        place = slice(0, stop - step * batch_size)
        batch, _ = windowed(data, batch_size=batch_size).take(1, step, place)
        np.testing.assert_array_equal(batch.ids_BW[:, 0], whole[step * batch_size : stop])


@pytest.mark.parametrize("size", [2, 3])
def test_workers_share_the_batches_of_one(size: int) -> None:
    """Each worker keeps its share of every batch, also in the last one, and after a jump into an epoch."""
    data = plain_rows(1_030)
    alone = epoch_rows(windowed(data), 1_030, 0)
    for rank in range(size):
        group = Group(rank, size)
        source = windowed(data, group=group)
        expected = []
        for step in range(11):
            batch = alone[step * 100 : (step + 1) * 100]
            expected.append(batch[group.share(len(batch))])
        np.testing.assert_array_equal(epoch_rows(source, 1_030, 0, group=group), np.concatenate(expected))
        jumped, _ = windowed(data, group=group).take(0, 7, group.share(100))
        np.testing.assert_array_equal(jumped.ids_BW[:, 0], expected[7])


@pytest.mark.parametrize("count", [1, 2, 3, 10, 64, 65, 1_000])
def test_the_permutation_of_chunks(count: int) -> None:
    numbers = np.arange(count, dtype=np.uint64)
    images = permuted(numbers, count, seed=5)
    assert sorted(images.tolist()) == list(range(count))
    np.testing.assert_array_equal(permuted(numbers[count // 2 :], count, seed=5), images[count // 2 :])
    if count == 1_000:
        assert (images != permuted(numbers, count, seed=6)).mean() > 0.9
        assert abs(np.corrcoef(images, np.arange(count))[0, 1]) < 0.15


def test_a_thread_reads_ahead_and_not_beyond_the_last_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    data, readers, counts = plain_rows(1_000), set(), []
    read = type(data.train).read

    def noted(shard: Any, rows: slice) -> object:
        if shard is not data.train:  # A thread of an earlier test may still be reading ahead.
            return read(shard, rows)
        readers.add(threading.current_thread().name.partition("_")[0])
        counts.append(rows.stop - rows.start)
        return read(shard, rows)

    monkeypatch.setattr(type(data.train), "read", noted)
    source = windowed(data, max_epochs=2)
    for epoch in range(2):
        epoch_rows(source, 1_000, epoch)
    assert readers == {"recap-reader"}
    assert sum(counts) == 2_000


def test_rows_are_read_in_windows_only_where_they_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = plain_rows(500).train
    size = feed.shuffled_bytes(rows)
    assert size == 500 * (3 * 4 + 1 + 8)

    def chosen(**settings: int) -> int:
        return choose_window(rows, TrainConfig(**settings), Group())

    for memory, expected in [(None, 0), (2 * size, 0), (2 * size - 1, WINDOW_ROWS)]:
        monkeypatch.setattr(feed, "memory_bytes", lambda memory=memory: memory)
        assert chosen() == expected
    assert chosen(window_rows=0) == 0
    assert chosen(window_rows=300) == 300
    monkeypatch.setattr(feed, "memory_bytes", lambda: 100 * size)
    monkeypatch.setattr(feed, "MAX_BYTES", size - 1)
    assert chosen() == WINDOW_ROWS
    assert isinstance(feed_of(rows, TrainConfig(), None, Group(), 0), Shuffled)
    with pytest.raises(InputError, match="window_rows"):
        parse(TrainConfig, {"window_rows": -1}, "test")


def test_runs_of_before_keep_their_names() -> None:
    assert "window_rows" not in TrainConfig().model_dump(mode="json")
    assert TrainConfig(window_rows=0).model_dump(mode="json")["window_rows"] == 0


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    return small_data(tmp_path_factory.mktemp("feed") / "data")


def test_rows_are_read_from_their_files(data: PreparedData) -> None:
    mapped = data.train.batch(slice(70, 91))
    read = data.train.read(slice(70, 91))
    np.testing.assert_array_equal(read.ids_BW, mapped.ids_BW)
    np.testing.assert_array_equal(read.labels_B, mapped.labels_B)
    assert read.values_BN.shape == mapped.values_BN.shape
    some = data.train.take(np.arange(50, 200))
    np.testing.assert_array_equal(some.read(slice(20, 41)).ids_BW, read.ids_BW)


def test_a_file_that_is_cut_short_is_an_error(tmp_path: Path) -> None:
    data = small_data(tmp_path / "data")
    rows, file = data.train, data.path / "train" / "ids.npy"
    with file.open("r+b") as cut:
        cut.truncate(file.stat().st_size - 4)
    with pytest.raises(InputError, match="cut short"):
        rows.read(slice(len(rows) - 10, len(rows)))


@pytest.mark.slow
@pytest.mark.parametrize("update", ["exact", "fast"])
def test_a_resumed_run_has_the_same_bits(data: PreparedData, update: str, tmp_path: Path) -> None:
    config = parse(
        TrainConfig,
        {"batch_size": 256, "max_epochs": 2, "window_rows": 640, "update": update, "ema": 0.9},
        "test",
    )
    model = parse_model("fcn", SMALL)

    def whole(out: Path) -> None:
        train("fcn", model, config, data, out, device=CPU, quiet=True)

    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    whole(tmp_path / "whole")
    part = Trainer("fcn", model, config, data, CPU)
    for _ in range(5):  # In the middle of an epoch, and of a window.
        part.step()
    part.save(tmp_path / "parts")
    whole(tmp_path / "parts")

    assert bits(tmp_path / "parts") == bits(tmp_path / "whole")
    shuffled = Trainer("fcn", model, config.model_copy(update={"window_rows": 0}), data, CPU)
    shuffled.step()
    first = Trainer("fcn", model, config, data, CPU)
    first.step()
    assert shuffled.progress.loss_sum != first.progress.loss_sum


@pytest.mark.slow
def test_a_run_keeps_its_window_on_a_larger_machine(
    data: PreparedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the first machine chose is in the state, and said."""
    config, model = TrainConfig(batch_size=256, max_epochs=1, update="fast"), parse_model("fcn", SMALL)
    monkeypatch.setattr(feed, "WINDOW_ROWS", 640)
    monkeypatch.setattr(feed, "memory_bytes", lambda: 1)
    (tmp_path / "parts").mkdir()
    (tmp_path / "whole").mkdir()
    train("fcn", model, config, data, tmp_path / "whole", device=CPU)
    assert "random windows of 640" in capsys.readouterr().err
    part = Trainer("fcn", model, config, data, CPU)
    part.step()
    part.save(tmp_path / "parts")

    monkeypatch.setattr(feed, "memory_bytes", lambda: 1 << 40)
    train("fcn", model, config, data, tmp_path / "parts", device=CPU, quiet=True)

    assert bits(tmp_path / "parts") == bits(tmp_path / "whole")
