"""The formulas of `recap plan --rows` against real files, real tensors and counted messages."""

import gc
import json
import tracemalloc
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from benchmarks.speed.scale import RESULT
from recap_ctr.config import TrainConfig, parse
from recap_ctr.data import prepare
from recap_ctr.errors import InputError
from recap_ctr.models.catalogue import parse_model
from recap_ctr.nn.group import Group, joined
from recap_ctr.nn.weights import load_tensors
from recap_ctr.recipe.scale import (
    SPEEDS,
    Speeds,
    Workload,
    disk_bytes,
    line,
    memory_bytes,
    model_shape,
    network_bytes,
    plan_scale,
    read_speeds,
    stage_seconds,
    step_time,
)
from recap_ctr.training import feed
from recap_ctr.training.feed import Shuffled, feed_of
from recap_ctr.training.loop import BEST, STATE, Trainer
from tests.support.golden import small_data
from tests.support.plain_rows import plain_rows

CPU = torch.device("cpu")
SPEED = read_speeds()
SETTINGS: dict[str, dict[str, Any]] = {
    "fcn": {"dim": 4, "num_exponential_layers": 1, "num_linear_layers": 1},
    "wide-deep": {"dim": 4, "units": (8,)},
    "lr": {},
}


def workload(model: str = "fcn", *, workers: int = 1, **values: Any) -> Workload:
    settings = {"batch_size": 256, **values.pop("train", {})}
    defaults = {"rows": 3_000, "vocabulary": 3_100, "fields": 3}
    return Workload(
        **{**defaults, **values},
        model=model,
        model_config=parse_model(model, SETTINGS[model]),
        train=parse(TrainConfig, settings, "test"),
        workers=workers,
    )


def tensor_bytes() -> int:
    """Return the bytes of all tensors of this process; views of one storage count once."""
    gc.collect()
    storages = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
        for each in gc.get_objects()
        if isinstance(each, Tensor) and not isinstance(each, FakeTensor)  # Exports leave some behind.
    }
    return sum(storages.values())


def test_the_constants_of_the_package_are_those_that_were_measured() -> None:
    assert json.loads(RESULT.read_text()) == json.loads(SPEEDS.read_text())
    times = SPEED.model_dump(exclude={"date", "machine", "distinct", "process_bytes", "fit_error"})
    assert all(value >= 0 for value in times.values())
    assert SPEED.machine["cores_measured"] == 1


@pytest.mark.slow
def test_prepared_rows_and_the_codes_before_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: dict[str, int] = {}

    class Measuring:
        @staticmethod
        def rmtree(directory: Path) -> None:
            sizes.update({file.name: file.stat().st_size for file in directory.iterdir() if file.is_file()})

    monkeypatch.setattr(prepare, "shutil", Measuring)
    data = small_data(tmp_path / "data")
    shards = [file for split in ("train", "valid", "test") for file in (data.path / split).iterdir()]

    values = sum(fitted.size - 2 for fitted in data.encoder.fields)
    planned = disk_bytes(workload(rows=4_000, fields=4, vocabulary=values), SPEED)
    dictionaries = [size for name, size in sizes.items() if name.endswith(".values")]

    assert sum(file.stat().st_size for file in shards) == planned["prepared rows"]
    assert sum(sizes.values()) - sum(dictionaries) == planned["codes while preparing"]
    headers = sum(dictionaries) - planned["values while preparing"]
    assert 0 < headers < 2_000 * len(dictionaries)
    assert len(data.train) == workload(rows=4_000).train_rows
    assert len(data.valid) == workload(rows=4_000).valid_rows


@pytest.mark.parametrize("update", ["exact", "fast"])
@pytest.mark.parametrize("averages", [{}, {"ema": 0.9}, {"ema_epochs": (1.0, 2.0)}])
@pytest.mark.parametrize("model", SETTINGS)
def test_state_and_weights_on_disk(model: str, averages: dict[str, Any], update: str, tmp_path: Path) -> None:
    rows = plain_rows(3_000)
    work = workload(model, train={"update": update, **averages})
    trainer = Trainer(model, work.model_config, work.train, rows, CPU)
    trainer.save(tmp_path)
    trainer.save_selected(tmp_path)

    planned = disk_bytes(work, SPEED)

    for file, name in ((STATE, "state of a run"), (BEST, "best weights")):
        stored = sum(tensor.nbytes for tensor in load_tensors(tmp_path / file)[0].values())
        assert stored == planned[name], name


@pytest.mark.slow
@pytest.mark.parametrize("update", ["exact", "fast"])
@pytest.mark.parametrize("averages", [{}, {"ema": 0.9}])
@pytest.mark.parametrize("model", SETTINGS)
def test_memory_of_a_trainer(model: str, averages: dict[str, Any], update: str) -> None:
    rows, before = plain_rows(3_000), tensor_bytes()
    work = workload(model, train={"update": update, **averages})
    trainer = Trainer(model, work.model_config, work.train, rows, CPU)
    trainer.step()

    planned = memory_bytes(work, SPEED)
    for part in ("batch", "order of rows, or two windows", "validation", "program"):
        del planned[part]

    gradients = 4 * work.shape.dense_parameters  # Gone after a step.
    assert tensor_bytes() - before == pytest.approx(sum(planned.values()) - gradients, rel=0.002, abs=64)
    assert trainer.progress.step == 1


class AtOnce:
    """An executor whose work is done when it is handed over: a peak that no thread's progress decides."""

    def __init__(self, *settings: Any) -> None:
        pass

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function(*arguments))
        return future


@pytest.mark.parametrize("workers", [1, 4])
def test_memory_of_windows_does_not_grow_with_the_rows(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is allocated in an epoch, at its peak, beside the formula, on few rows and on four times as many.

    Each window is read in full while the one before it is held: the most that a reading thread can add. As in
    training, a batch is in use until the next one is there; some batches cross the end of a window.
    """
    monkeypatch.setattr(feed, "ThreadPoolExecutor", AtOnce)
    peaks = []
    for rows in (20_000, 80_000):
        shard = plain_rows(rows, num_fields=10).train
        config = TrainConfig(batch_size=300, window_rows=8_192)
        group = Group(0, workers)
        batches = feed_of(shard, config, None, group, 8_192)
        tracemalloc.start()
        in_use = None
        for step in range(rows // 300):
            in_use = batches.take(0, step, group.share(300))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert in_use is not None
    work = workload(fields=10, rows=100_000, workers=workers, train={"window_rows": 8_192})
    assert peaks[1] < 1.05 * peaks[0]
    planned = memory_bytes(work, SPEED)["order of rows, or two windows"]
    assert 0.75 * planned < peaks[1] < 1.08 * planned  # The parts do not all peak at the same moment.
    shuffled = replace(work, train=TrainConfig())
    assert memory_bytes(shuffled, SPEED)["order of rows, or two windows"] == 8 * work.train_rows


def test_a_workers_block_is_its_share_of_the_table() -> None:
    whole, part = (memory_bytes(workload(vocabulary=6_400, workers=count), SPEED) for count in (1, 64))
    for name in ("table", "moments", "last steps or gradient", "last places"):
        assert part[name] * 64 == whole[name]
    assert part["program"] == whole["program"]


class Counting(Group):
    """The first of two workers with the same rows, which counts what it sends."""

    def __init__(self) -> None:
        super().__init__(rank=0, size=2)
        self.exchanged, self.largest_sum = 0, 0

    def _reduce(self, tensor: Tensor) -> None:
        self.largest_sum = max(self.largest_sum, tensor.nbytes)

    def _exchange(self, out: Tensor, tensor: Tensor, received: list[int], sent: list[int]) -> None:
        self.exchanged += sent[1] * tensor.element_size() * tensor.shape[1:].numel()
        here = tensor[: sent[0]]  # The twin sends the same to this worker, as far as it asks for rows.
        out.copy_(torch.cat([here, here]) if received[0] == received[1] == sent[0] else torch.zeros_like(out))


@pytest.mark.parametrize("model", ["fcn", "wide-deep"])
def test_messages_of_a_step(model: str) -> None:
    rows = plain_rows(3_000)
    work = workload(model, workers=2, train={"batch_size": 1_024, "update": "fast"})
    with joined(Counting()) as group:
        trainer = Trainer(model, work.model_config, work.train, rows, CPU)
        trainer.step()
        assert isinstance(group, Counting)
    assert isinstance(trainer.feed, Shuffled)
    share = trainer.feed.order(0)[:512]
    distinct = len(set(rows.train.ids[share].ravel().tolist()))
    # U = a · L^b with b = 0 is as many as there are.
    planned = network_bytes(work, SPEED.model_copy(update={"distinct": (float(distinct), 0.0)}))

    assert group.exchanged == pytest.approx(planned["rows of tables"], rel=0.05)
    assert group.largest_sum == 4 * work.shape.dense_parameters
    assert planned["sums of gradients"] == group.largest_sum  # 2 (n - 1) / n of it, for n = 2.


def test_the_work_of_a_network_by_hand() -> None:
    shape = model_shape("dnn", parse_model("dnn", {"dim": 4, "units": (8, 5)}), fields=3)
    weights = 12 * 8 + 8 * 5 + 5
    assert shape.dims == (4,)
    assert shape.row_flops == 2 * 3 * weights  # A product and a sum, forward, and twice backward.


def test_times_follow_from_sizes() -> None:
    """Each stage by its definition, with constants that are easy to tell apart."""
    speeds = SPEED.model_copy(
        update={"step": 1.0, "flop": 0.0, "saved_byte": 0.0, "vector_number": 1e-3, "prepare_cell": 1e-3}
    )
    work = workload("fcn", workers=4, rows=10_240, train={"update": "fast"})
    trained = work.train_rows  # 8,192 rows are 32 batches of 256.

    step = step_time(work, speeds)
    assert step.computing == pytest.approx(1.0 + 64 * 3 * 4 * 1e-3)
    assert step.reading == pytest.approx(256 * 13 / 500e6)
    assert step.network == pytest.approx(sum(network_bytes(work, speeds).values()) / 1.25e9)
    assert step.bottleneck == "computing"

    stages = stage_seconds(work, speeds)
    assert trained == 8_192
    assert stages["prepare"] == pytest.approx(10_240 * 3 * 1e-3)
    assert stages["epoch, steps"] == pytest.approx(32 * step.seconds)
    exact = work.train.model_copy(update={"update": "exact"})
    longer = step_time(replace(work, train=exact), speeds.model_copy(update={"table_number": 1.0}))
    assert longer.computing - step.computing == pytest.approx(3_100 * 4 / 4)


def test_the_bottleneck_moves_to_what_workers_do_not_divide() -> None:
    def longest(workers: int, gigabits: float = 10.0, **speeds: float) -> str:
        work = workload(rows=4_300_000_000, vocabulary=1_000_000, fields=39, workers=workers)
        training = work.train.model_copy(update={"batch_size": 65_536})
        work = replace(work, train=training, disk_mb=1e6, gigabits=gigabits)
        return line(work, SPEED.model_copy(update=speeds)).bottleneck

    assert longest(1, prepare_cell=1e-8) == "computing"
    assert longest(1024, prepare_cell=1e-8) == "prepare"
    assert longest(1024, gigabits=0.01, prepare_cell=1e-8) == "network"


@pytest.mark.parametrize("vocabulary", [8, 2**31])
def test_a_vocabulary_that_ids_can_not_hold_is_refused(vocabulary: int) -> None:
    with pytest.raises(InputError, match="ids have 32 bits"):
        workload(vocabulary=vocabulary)


def test_the_plan_is_plain_json() -> None:
    plan = plan_scale(workload(workers=3), SPEED)
    assert json.loads(json.dumps(plan))["workload"]["workers"] == 3
    assert [each["workers"] for each in plan["by_workers"]][:4] == [1, 2, 3, 4]
    assert Speeds.model_validate(plan["speeds"]) == SPEED
