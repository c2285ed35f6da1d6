"""What a worker of `benchmarks.speed.sharded` does. Its functions are jobs: their arguments are plain."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from recap_ctr.config import TrainConfig
from recap_ctr.data.layout import Layout
from recap_ctr.data.shards import PreparedData, Shard
from recap_ctr.models.catalogue import parse_model
from recap_ctr.nn.group import Group
from recap_ctr.nn.interface import Output
from recap_ctr.nn.norms import BatchNorm
from recap_ctr.training import checkpoint
from recap_ctr.training.loop import Trainer
from recap_ctr.training.workers import INTERFACE, loopback, member

MIB = 1 << 20


class CountingGroup(Group):
    """A group that counts the bytes that this worker sends: of look-ups, and of sums (by a ring)."""

    looked_up = 0
    summed = 0

    def _reduce(self, tensor: Tensor) -> None:
        self.summed += 2 * tensor.nbytes * (self.size - 1) // self.size
        super()._reduce(tensor)

    def _exchange(self, out: Tensor, tensor: Tensor, received: list[int], sent: list[int]) -> None:
        to_others = sum(sent) - sent[self.rank]
        self.looked_up += to_others * tensor.element_size() * tensor.shape[1:].numel()
        super()._exchange(out, tensor, received, sent)


class ZipfRows(PreparedData):
    """Rows with Zipf-distributed ids, in place of prepared data, with what the trainer reads."""

    def __init__(self, rows: int, num_fields: int, vocabulary: int) -> None:
        rng = np.random.default_rng(1)
        size = vocabulary // num_fields
        self._layout = Layout.of_sizes([size] * num_fields)
        used = min(size - 2, 50_000)  # As many in a large vocabulary, so that batches don't differ.
        # The inverse of the distribution function of frequencies 1 / rank.
        ranks = np.exp(rng.random((rows, num_fields)) * np.log(used)).astype(np.int32)
        ids = ranks * ((size - 2) // used) + np.arange(num_fields, dtype=np.int32) * size
        chance = 1 / (1 + np.exp(1 - np.sin(ranks * 12.9898).sum(1)))  # Every value has an effect.
        shard = Shard(
            ids=ids,
            values=np.empty((rows, 0), np.float32),
            labels=(rng.random(rows) < chance).astype(np.uint8),
            rows=np.arange(rows),
            weights=None,
            groups=None,
            times=None,
        )
        self.train = self.valid = shard

    @property
    def layout(self) -> Layout:
        """The sizes and positions of the fields."""
        return self._layout


@contextmanager
def worker(rank: int, size: int, meeting: str) -> Iterator[CountingGroup | None]:
    """Be a worker of a group of `size`; alone if that is one."""
    os.environ.setdefault(INTERFACE, loopback())
    torch.set_num_threads(1)
    if size == 1:
        yield None
        return
    group = CountingGroup(rank, size, local_size=size)
    with member(group, "cpu", meeting=Path(meeting)):
        yield group


def build(case: dict[str, Any]) -> Trainer:
    """Return the trainer of a case, in double precision if it wants that.

    With a `nudge`, the seed of a draw, every first weight is the next larger or the next smaller number, at random: it
    shows what rounding alone does.
    """
    torch.set_default_dtype(torch.float64 if case["double"] else torch.float32)
    try:
        rows = ZipfRows(*case["rows"])
        config = TrainConfig(**case["train"])
        trainer = Trainer(
            case["model"], parse_model(case["model"], case["settings"]), config, rows, torch.device("cpu")
        )
    finally:
        torch.set_default_dtype(torch.float32)
    if case.get("nudge"):
        draw = torch.Generator().manual_seed(case["nudge"])
        with torch.no_grad():
            for weight in trainer.model.parameters():
                sign = torch.randint(0, 2, weight.shape, generator=draw) * 2.0 - 1.0
                weight.copy_(torch.nextafter(weight, (sign * torch.inf).to(weight.dtype)))
    if case["double"]:
        loss = trainer.loss

        def loss_in_double(output: Output, labels_B: Tensor, weights_B: Tensor | None) -> Tensor:
            return loss(output, labels_B.double(), weights_B)

        trainer.loss = loss_in_double
    return trainer


def cancelled(model: nn.Module) -> list[str]:
    """Return the names of weights that have no effect in training, as a BatchNorm subtracts them again.

    Their gradients are rounding errors, which Adam makes as large as any other gradient.
    """
    names = []
    modules = list(model.named_modules())
    for (before, linear), (after, norm) in pairwise(modules):
        if isinstance(linear, nn.Linear) and isinstance(norm, BatchNorm):
            names += [f"{before}.bias", f"{after}.running_mean"]
    return names


def take_steps(rank: int, size: int, meeting: str, cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Train each case for its steps, from the state in `resume` if it has one, and write what it wants written."""
    ineffective = {}
    with worker(rank, size, meeting):
        for case in cases:
            trainer = build(case)
            ineffective[case["name"]] = cancelled(trainer.model)
            if "resume" in case:
                trainer.resume(Path(case["resume"]))
            for _ in range(case["steps"]):
                trainer.step()
            out = Path(case["out"])
            out.mkdir(parents=True, exist_ok=True)
            if case.get("save"):
                trainer.save(out)
            checkpoint.save_whole(out / "weights.safetensors", trainer.model)
    return ineffective


def measure(
    rank: int, size: int, meeting: str, case: dict[str, Any], limit_mib: int | None
) -> dict[str, Any]:
    """Train a case for its steps and save its state; return memory, bytes and time, or the lack of memory."""
    if limit_mib is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (limit_mib * MIB, limit_mib * MIB))
    try:
        with worker(rank, size, meeting) as group:
            trainer = build(case)
            trainer.step()
            if group is not None:
                group.looked_up = group.summed = 0
            started = time.perf_counter()
            for _ in range(case["steps"]):
                trainer.step()
            seconds = time.perf_counter() - started
            looked_up, summed = (0, 0) if group is None else (group.looked_up, group.summed)
            out = Path(case["out"])
            out.mkdir(parents=True, exist_ok=True)
            trainer.save(out)
            trainer.group.wait()
            state = [trainer.model.state_dict(), trainer.update.state()]
            table = sum(
                tensor.nbytes for tensors in state for name, tensor in tensors.items() if "table" in name
            )
    except (MemoryError, RuntimeError) as error:
        if "memory" not in str(error) and not isinstance(error, MemoryError):
            raise
        return {"out_of_memory": str(error).splitlines()[0]}
    steps = case["steps"]
    return {
        "table_mib": round(table / MIB, 1),
        "peak_mib": round(peak_mib()),
        "look_up_kib_per_step": round(looked_up / steps / 1024, 1),
        "sums_kib_per_step": round(summed / steps / 1024, 1),
        "ms_per_step": round(1e3 * seconds / steps, 1),
    }


def peak_mib() -> float:
    """Return the peak memory of this process since it was started."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    return 0.0
