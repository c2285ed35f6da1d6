"""A student's pool: recombined rows, from which it learns by its teachers' logits alone.

Teachers score the pool once, and only their logits are kept. The rows are a function of the training rows: each process
makes them again (docs/decisions/0034).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from recap_ctr.axes.logits import Estimator, Floats, LogitTable, is_table
from recap_ctr.axes.predict import write_logits
from recap_ctr.axes.teachers import TeacherTargets
from recap_ctr.data.recombine import MAX_CELLS, Sides, num_cells, recombined, sides_of
from recap_ctr.data.shards import PreparedData, Shard, joined
from recap_ctr.errors import InputError
from recap_ctr.inference.torch_backend import load_artifact
from recap_ctr.jobs.executor import Job
from recap_ctr.storage.hashes import fingerprint
from recap_ctr.training.config import ARTIFACT, LOGITS, RunConfig
from recap_ctr.training.feed import Targets
from recap_ctr.training.report import PoolSummary

RECOMBINED = "recombined"  # What stands for the split in the logit tables.
ONE_SIDE = "all fields belong together"
SEED = 1  # One pool for all students, whatever their seeds: teachers score it once.


@dataclass(frozen=True, eq=False)
class Pool:
    """Recombined rows, and the teachers' probability of each."""

    rows: Shard
    targets: Floats

    def take(self, at: npt.NDArray[np.int64], num_rows: int) -> "Pool":
        """Return the rows that stand for the training rows at the positions `at`, of `num_rows` in all."""
        starts = np.arange(0, len(self.rows), num_rows)
        places = (starts[:, None] + at).ravel()
        return Pool(self.rows.take(places), self.targets[places])


@dataclass(frozen=True, eq=False)
class Recombination:
    """The recombined rows of prepared data: `ratio` of them for each training row."""

    data: PreparedData
    ratio: int

    def __post_init__(self) -> None:
        total = (1 + self.ratio) * num_cells(self.data.train)
        if total > MAX_CELLS:
            raise InputError(
                f"recombined is {self.ratio}: training and recombined rows would have {total:,} values together, and at"
                f" most {MAX_CELLS:,} are held in memory",
                fix="choose a smaller number, or 0",
            )

    @cached_property
    def sides(self) -> Sides:
        """Return the fields that stay together."""
        return sides_of(self.data.train, self.data.layout)

    @cached_property
    def inputs(self) -> str:
        """Return a fingerprint of what the rows depend on."""
        return fingerprint(
            {"data": self.data.fingerprint, "sides": self.sides, "ratio": self.ratio, "seed": SEED}
        )

    def rows(self, whole: PreparedData | None = None) -> Shard:
        """Return the rows, encoded as the log `whole` is, in which the training rows come first."""
        if whole is None:
            return recombined(self.data.train, self.data.layout, self.sides, self.ratio, SEED)
        train = whole.train.take(np.arange(len(self.data.train)))
        return recombined(train, whole.layout, self.sides, self.ratio, SEED)

    def table_of(self, run: Path) -> Path:
        """Return where the logit table of a teacher's run is: it has the name of what it is made from."""
        return run / LOGITS / f"{RECOMBINED}-{self.inputs[:10]}"

    def jobs(self, runs: Sequence[Path], *, threads: int, device: str) -> list[Job]:
        """Return the jobs that write the tables that are missing."""
        shared = {"data": str(self.data.path), "ratio": self.ratio, "threads": threads, "device": device}
        return [
            Job(f"{run.name} {RECOMBINED}", score_pool, {**shared, "run": str(run)})
            for run in dict.fromkeys(runs)
            if not is_table(self.table_of(run))
        ]

    def taught(self, student: RunConfig, teachers: Sequence[Path]) -> RunConfig:
        """Return the run as one that learns from these rows, too, by the logits of the runs `teachers`.

        In an epoch it sees a share of the training rows. Its patience is for as many passes over these as before.
        """
        if not teachers:
            return student
        changes = {"recombined": self.ratio, "patience": (1 + self.ratio) * student.train.patience}
        training = student.train.model_copy(update=changes)
        return replace(student, pool=tuple(self.table_of(teacher) for teacher in teachers), train=training)

    def summary(self, tables: Sequence[Path]) -> PoolSummary:
        """Return what a report says of a pool that the teachers of `tables` have scored."""
        return PoolSummary(
            rows=self.ratio * len(self.data.train),
            sides=[list(side) for side in self.sides],
            teachers=len(set(tables)),
        )


def score_pool(data: str, run: str, ratio: int, threads: int, device: str) -> None:
    """Write the logits of a finished run over the recombined rows. The arguments are plain, for a job."""
    torch.set_num_threads(threads)
    recombination = Recombination(PreparedData(Path(data), verify=False), ratio)
    model = load_artifact(Path(run) / ARTIFACT).model.to(torch.device(device))
    write_logits(
        recombination.table_of(Path(run)),
        {Estimator(Path(run).name): model},
        recombination.data,
        RECOMBINED,
        torch.device(device),
        rows=recombination.rows(),
        inputs=recombination.inputs,
    )


def read_pool(
    tables: Sequence[Path], ratio: int, data: PreparedData, whole: PreparedData | None = None
) -> Pool | None:
    """Return the rows that teachers have scored, with their mean; None without tables.

    `whole` is the log to train on, if it is not `data`: the training rows come first in it, maybe with other ids.
    """
    if not tables:
        return None
    recombination = Recombination(data, ratio)
    logit_tables = [LogitTable(path) for path in tables]
    for table in logit_tables:
        table.check(data)
        if table.inputs != recombination.inputs:
            raise InputError(
                f"{table.path} holds other recombined rows than these data and recombined = {ratio} give",
                fix="write the teacher's logits again, with `recap fit`",
            )
    return Pool(recombination.rows(whole), TeacherTargets(logit_tables, None)[:])


def with_pool(
    train: Shard, targets: Targets | None, pool: Pool | None, kd_weight: float
) -> tuple[Shard, Targets | None]:
    """Return all rows that a student learns from, and its teachers' probabilities of them.

    With λ = `kd_weight`, a training row costs ℓ(label) + λ · ℓ(target) (Eq. 13), and a recombined row λ · ℓ(target): as
    much as a row whose label is its target, at λ / (1 + λ) of the weight. Losses are weighted means over a batch.
    """
    if pool is None or targets is None:
        return train, targets
    weights = np.ones(len(train), np.float32) if train.weights is None else np.asarray(train.weights)
    pool_weights = np.ones(len(pool.rows), np.float32) if pool.rows.weights is None else pool.rows.weights
    real = Shard(train.ids, train.values, train.labels, train.rows, weights, None, None)
    share = np.float32(kd_weight / (1 + kd_weight))
    extra = Shard(
        pool.rows.ids, pool.rows.values, pool.targets, pool.rows.rows, share * pool_weights, None, None
    )
    return joined([real, extra]), np.concatenate([targets[:], pool.targets])
