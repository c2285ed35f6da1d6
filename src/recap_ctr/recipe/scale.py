"""Forecast by formulas what training on any number of rows would take: bytes, messages and time.

Sizes are those of the files and tensors that this package makes, and tests compare them with real ones. Times are sizes
times `Speeds`, which `python -m benchmarks.speed.scale` measures on one core; the network and the disk are assumed.
Latency of messages, the operating system and other users of the machines are left out.

Shapes: V table rows, d vector size, B rows of a batch over all workers, W id columns, U distinct rows.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from recap_ctr.config import Frozen, Record, TrainConfig
from recap_ctr.data.layout import Layout
from recap_ctr.errors import InputError
from recap_ctr.models.catalogue import build
from recap_ctr.nn.group import alone
from recap_ctr.nn.interface import Inputs
from recap_ctr.nn.losses import LOSSES
from recap_ctr.nn.table import Table
from recap_ctr.storage.files import read_object
from recap_ctr.training.feed import MAX_BYTES, WINDOW_CHUNKS, window_of
from recap_ctr.training.loop import SAVE_SECONDS

SPEEDS = Path(__file__).with_name("speeds.json")
MAX_VALUES = 2**31 - 1  # Ids have 32 bits.
NPY_HEADER, ARRAYS = 128, ("ids", "labels", "rows")
DICTIONARY_BYTES = 28  # A value of up to 12 letters takes this much while preparing: hash, code and text.
TRIED_ROWS = (16, 48)
MOST_WORKERS = 1024


class Speeds(Record):
    """How many seconds a core takes for each kind of work, and what depends on the rows, as measured on a machine."""

    date: str
    machine: dict[str, str | int]
    prepare_cell: float
    """Seconds to prepare one field of one row."""
    step: float
    """Seconds that every step takes, whatever its size."""
    flop: float
    """Seconds for one operation of a matrix product in a step."""
    saved_byte: float
    """Seconds of a step for each byte that its forward pass keeps for its backward pass."""
    vector_number: float
    """Seconds to look up and update one number of a vector, for each look-up of a batch."""
    table_number: float
    """Seconds to update one number of the whole table in a step, as the `exact` update does."""
    forward: float
    """A scored row's time as a share of a trained row's."""
    judged_row: float
    """Seconds to compute AUC and logloss, for each validation row."""
    judged_bytes: float
    """Bytes that computing them takes for each validation row, its logit included."""
    drawn_number: float
    """Seconds to draw one number of the table's first values."""
    written_byte: float
    """Seconds to hash and write one byte of an artifact."""
    vocabulary_bytes: float
    """Bytes of a value and its count on disk."""
    distinct: tuple[float, float]
    """a and b of U = a · L^b, the distinct values among L look-ups."""
    process_bytes: int
    """Bytes of a worker before it has a model."""
    fit_error: float
    """Largest relative error of a step's formula among the steps that were measured."""


@dataclass(frozen=True)
class Workload:
    """What is to be trained, on how many rows, by how many workers."""

    rows: int
    vocabulary: int
    """Rows of the table over all fields, those of missing and rare values included."""
    fields: int
    model: str
    model_config: Frozen
    train: TrainConfig
    workers: int = 1
    valid_share: float = 0.1
    test_share: float = 0.1
    gigabits: float = 10.0
    """A worker's network, assumed."""
    disk_mb: float = 500.0
    """Megabytes a second that a worker's disk reads or writes, assumed."""

    def __post_init__(self) -> None:
        if not 3 * self.fields <= self.vocabulary <= MAX_VALUES:
            raise InputError(
                f"--vocabulary {self.vocabulary:,}: ids have 32 bits, and every field has at least 3 values",
                fix=f"choose a number from {3 * self.fields:,} to {MAX_VALUES:,}; hash or drop rare values",
            )

    @property
    def train_rows(self) -> int:
        """Return the rows that an epoch goes through."""
        return round(self.rows * (1 - self.valid_share - self.test_share))

    @property
    def valid_rows(self) -> int:
        """Return the rows that a validation scores."""
        return round(self.rows * self.valid_share)

    @property
    def averages(self) -> int:
        """Return how many averages of the weights are kept."""
        return 1 if self.train.ema is not None else len(self.train.ema_epochs)

    @property
    def row_bytes(self) -> int:
        """Return the bytes of a prepared row: its ids, its label and its number."""
        return 4 * self.fields + 1 + 8

    @property
    def share(self) -> float:
        """Return how many rows of a batch one worker has."""
        return self.train.batch_size / self.workers

    @property
    def shape(self) -> "ModelShape":
        """Return what the model is, apart from the number of values."""
        return model_shape(self.model, self.model_config, self.fields)


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model that do not depend on how many values its fields have."""

    dims: tuple[int, ...]
    """The vector size of each of its tables."""
    dense_parameters: int
    dense_state_bytes: int
    """Bytes of everything that is saved of the model besides its tables, statistics of norms included."""
    row_flops: float
    """Operations of matrix products for a row in a step."""
    row_saved_bytes: float
    """Bytes of a row that the forward pass keeps for the backward pass."""

    @property
    def dim(self) -> int:
        """Return how many numbers a value has over all tables."""
        return sum(self.dims)


@cache
def model_shape(name: str, config: Frozen, fields: int) -> ModelShape:
    """Return the shape of a model; its work is counted in two small steps, whose difference is that of a row."""
    layout = Layout.of_sizes([3] * fields)
    with alone(), torch.random.fork_rng(devices=[]):
        model = build(name, config, layout).train()
        counts = [_work(model, layout, rows) for rows in TRIED_ROWS]
    flops, saved = (
        (large - small) / (TRIED_ROWS[1] - TRIED_ROWS[0]) for small, large in zip(*counts, strict=True)
    )
    tables = {
        f"{prefix}.weight": module for prefix, module in model.named_modules() if isinstance(module, Table)
    }
    state = model.state_dict()
    return ModelShape(
        dims=tuple(table.weight.shape[1] for table in tables.values()),
        dense_parameters=sum(
            weight.numel() for path, weight in model.named_parameters() if path not in tables
        ),
        dense_state_bytes=sum(value.nbytes for path, value in state.items() if path not in tables),
        row_flops=flops,
        row_saved_bytes=saved,
    )


def _work(model: nn.Module, layout: Layout, rows: int) -> tuple[int, int]:
    """Return the operations of a step's matrix products, and the bytes that its forward pass keeps."""
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.tensor([[field.offset + 1 for field in layout.fields]] * rows, dtype=torch.int32)
    loss = LOSSES[str(model.config.loss)]  # type: ignore[union-attr]
    counter = FlopCounterMode(display=False)
    with counter, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss(model(Inputs(ids, torch.empty(rows, 0))), torch.zeros(rows), None).backward()  # type: ignore[no-untyped-call]
    for module in model.modules():
        if isinstance(module, Table):
            module.row_gradient = None
    return counter.get_total_flops(), sum(kept.values())


def read_speeds(path: Path = SPEEDS) -> Speeds:
    """Return the constants that `python -m benchmarks.speed.scale` wrote."""
    return Speeds.model_validate(read_object(path, "speeds"))


# Sizes, in bytes.


def disk_bytes(work: Workload, speeds: Speeds) -> dict[str, int]:
    """Return the bytes of everything that is on disk, by what it is."""
    shape, vectors = work.shape, 4 * work.vocabulary * work.shape.dim
    weights = vectors + shape.dense_state_bytes
    counters = 4 * work.vocabulary * len(shape.dims) if work.train.update == "fast" else 0
    average = weights + 2 * counters + 8
    return {
        "prepared rows": work.rows * work.row_bytes + 3 * len(ARRAYS) * NPY_HEADER,
        "codes while preparing": work.rows * (4 * work.fields + 2),
        "values while preparing": work.vocabulary * DICTIONARY_BYTES,
        "vocabularies": round(work.vocabulary * speeds.vocabulary_bytes),
        "state of a run": 3 * vectors
        + shape.dense_state_bytes
        + 8 * shape.dense_parameters
        + counters
        + work.averages * average,
        "best weights": weights,
        "artifact": weights,
    }


def memory_bytes(work: Workload, speeds: Speeds) -> dict[str, int]:
    """Return the bytes that one worker has in memory at its peak, by what they are."""
    shape, rows = work.shape, -(-work.vocabulary // work.workers)
    vectors, dense = 4 * rows * shape.dim, 4 * shape.dense_parameters
    is_fast = work.train.update == "fast"
    counters = 4 * rows * len(shape.dims)
    average = vectors + shape.dense_state_bytes + (2 * counters if is_fast else 0)
    return {
        "table": vectors,
        "moments": 2 * vectors,
        "last steps or gradient": counters if is_fast else vectors,
        "last places": counters,
        "averages": work.averages * average,
        "other weights, gradients, moments": shape.dense_state_bytes + 3 * dense,
        "batch": round(work.share * (work.fields * 4 + 8 + shape.row_saved_bytes)),
        "order of rows, or two windows": order_bytes(work),
        "validation": round(work.valid_rows * speeds.judged_bytes),
        "program": speeds.process_bytes,
    }


def order_bytes(work: Workload) -> int:
    """Return the bytes of an epoch's order, or of two windows and of the places of the rows of one."""
    row = 4 * work.fields + 1
    window_rows = window_of(work.train_rows * (row + 8) > MAX_BYTES, work.train)
    if window_rows == 0:
        return 8 * work.train_rows
    chunk = -(-window_rows // WINDOW_CHUNKS)
    rows = min(chunk * WINDOW_CHUNKS, work.train_rows)
    places = 17 if work.workers == 1 else 57
    return round(2 * rows * (row + 3) / work.workers) + rows * places + 2 * chunk * (row + 3)


def distinct_rows(work: Workload, speeds: Speeds) -> float:
    """Return how many distinct values a worker's share of a batch has, judging by rows that were measured."""
    lookups = work.share * work.fields
    a, b = speeds.distinct
    return min(lookups, a * math.pow(lookups, b), work.vocabulary)


def network_bytes(work: Workload, speeds: Speeds) -> dict[str, float]:
    """Return the bytes that one worker sends in a step: rows asked for and given, and sums by a ring."""
    others = (work.workers - 1) / work.workers
    rows = distinct_rows(work, speeds)
    return {
        "rows of tables": others * rows * sum(4 + 8 * dim for dim in work.shape.dims),
        "sums of gradients": 2 * others * 4 * work.shape.dense_parameters,
    }


# Times, in seconds.


@dataclass(frozen=True)
class StepTime:
    """Where a step's time goes: in this worker's computing, in messages, or in waiting for rows."""

    computing: float
    network: float
    reading: float

    @property
    def seconds(self) -> float:
        """Return the seconds of a step; rows are read ahead, which costs time only if it is slower than all else."""
        return max(self.computing + self.network, self.reading)

    @property
    def bottleneck(self) -> str:
        """Return the name of the part that takes longest."""
        return max(asdict(self), key=lambda part: asdict(self)[part])


def step_time(work: Workload, speeds: Speeds) -> StepTime:
    """Return where the time of a step goes. Every worker reads all rows of a batch, and keeps its share."""
    computing = speeds.step + work.share * trained_row_seconds(work, speeds)
    if work.train.update == "exact":
        computing += speeds.table_number * work.shape.dim * work.vocabulary / work.workers
    return StepTime(
        computing=computing,
        network=sum(network_bytes(work, speeds).values()) / _network(work),
        reading=work.train.batch_size * (4 * work.fields + 1) / _disk(work),
    )


def trained_row_seconds(work: Workload, speeds: Speeds) -> float:
    """Return what one more row adds to a step."""
    shape = work.shape
    return (
        speeds.flop * shape.row_flops
        + speeds.saved_byte * shape.row_saved_bytes
        + speeds.vector_number * work.fields * shape.dim
    )


def _network(work: Workload) -> float:
    return work.gigabits * 1e9 / 8


def _disk(work: Workload) -> float:
    return work.disk_mb * 1e6


def stage_seconds(work: Workload, speeds: Speeds) -> dict[str, float]:
    """Return the time of each stage. Preparation is one process, however many workers train."""
    shape, steps = work.shape, -(-work.train_rows // work.train.batch_size)
    vectors = 4 * work.vocabulary * shape.dim
    save = disk_bytes(work, speeds)["state of a run"] / work.workers / _disk(work)
    training = steps * step_time(work, speeds).seconds
    validated = work.averages + 1 if work.averages else 1
    scoring = work.valid_rows / work.workers * speeds.forward * trained_row_seconds(work, speeds)
    sent = 0.0 if work.workers == 1 else 2 * vectors / _network(work)  # For the checksum, and for the file.
    return {
        "prepare": speeds.prepare_cell * work.rows * work.fields,
        "first weights": speeds.drawn_number * work.vocabulary * shape.dim,
        "epoch, steps": training,
        "epoch, saving": training / SAVE_SECONDS * save,
        "validation": validated * (scoring + work.valid_rows * speeds.judged_row),
        "export": (vectors + shape.dense_state_bytes) * (speeds.written_byte + 1 / _disk(work)) + sent,
    }


# The plan.


@dataclass(frozen=True)
class Line:
    """The cost with one number of workers."""

    workers: int
    memory: int
    """Bytes of each worker."""
    step: float
    epoch: float
    """Its steps, the states saved meanwhile, and the validation at its end, in seconds."""
    all: float
    """From the raw rows to an artifact after one epoch."""
    bottleneck: str


def lines(work: Workload, speeds: Speeds) -> Iterator[Line]:
    """Yield the cost with 1, 2, 4, .. workers, as far as every worker has a row of each batch, and as planned."""
    most = min(MOST_WORKERS, work.train.batch_size)
    counts = {2**power for power in range(most.bit_length()) if 2**power <= most}
    for workers in sorted({*counts, work.workers}):
        yield line(replace(work, workers=workers), speeds)


def line(work: Workload, speeds: Speeds) -> Line:
    """Return the cost with the workers of `work`, and the stage or part of a step that takes longest."""
    stages = stage_seconds(work, speeds)
    step = step_time(work, speeds)
    longest = max(stages, key=lambda stage: stages[stage])
    epoch = sum(stages[name] for name in ("epoch, steps", "epoch, saving", "validation"))
    return Line(
        workers=work.workers,
        memory=sum(memory_bytes(work, speeds).values()),
        step=step.seconds,
        epoch=epoch,
        all=sum(stages.values()),
        bottleneck=step.bottleneck if longest == "epoch, steps" else longest,
    )


def plan_scale(work: Workload, speeds: Speeds) -> dict[str, Any]:
    """Return the whole plan as plain JSON values; sizes in bytes, times in seconds."""
    return {
        "kind": "scale",
        "workload": {
            "rows": work.rows,
            "vocabulary": work.vocabulary,
            "fields": work.fields,
            "workers": work.workers,
            "model": work.model,
            "model_config": work.model_config.model_dump(mode="json"),
            "train": work.train.model_dump(mode="json"),
            "train_rows": work.train_rows,
            "valid_rows": work.valid_rows,
        },
        "assumed": {"network_gigabits": work.gigabits, "disk_mb": work.disk_mb},
        "shape": asdict(work.shape),
        "distinct_rows_of_a_share": round(distinct_rows(work, speeds)),
        "disk_bytes": disk_bytes(work, speeds),
        "memory_bytes": memory_bytes(work, speeds),
        "network_bytes_a_step": {name: round(size) for name, size in network_bytes(work, speeds).items()},
        "step_seconds": asdict(step_time(work, speeds)),
        "stage_seconds": stage_seconds(work, speeds),
        "by_workers": [asdict(each) for each in lines(work, speeds)],
        "speeds": speeds.to_json(),
    }
