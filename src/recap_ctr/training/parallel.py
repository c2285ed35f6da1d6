"""Several runs side by side over one prepared data set, each in its own directory and with its logit tables."""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from recap_ctr.axes.logits import Estimator
from recap_ctr.axes.predict import write_logits
from recap_ctr.data.shards import PreparedData, Shard, held_out_shards
from recap_ctr.inference.torch_backend import load_artifact
from recap_ctr.jobs.engines import LOCAL, executor_for
from recap_ctr.jobs.executor import Executor, Job
from recap_ctr.models.boosted import Boosted
from recap_ctr.models.rates import Rates
from recap_ctr.training.boosted import with_codes
from recap_ctr.training.config import ARTIFACT, LOGITS, RunConfig
from recap_ctr.training.loop import is_begun
from recap_ctr.training.rates import training_rows
from recap_ctr.training.report import REPORT, RunReport, parse_report
from recap_ctr.training.run import reopen, run

Runs = dict[Path, RunReport]
"""Reports of finished runs, by directory."""


def run_many(
    configs: dict[Path, RunConfig],
    data: PreparedData,
    *,
    title: str,
    executor: Executor | str = LOCAL,
    quiet: bool = False,
    deadline: float | None = None,
    done: Callable[[Path, RunReport], None] | None = None,
    teach: bool = True,
) -> Runs:
    """Train several runs at the same time, each in its directory and with its logit tables; each can be resumed.

    `executor` may be the name of an engine; then as many run at a time as it has cores for their threads. At the
    `deadline`, a time of `time.time`, training ends with what it has. `done` is called with each run's directory and
    report as it ends. Without `teach` there are no logits of the training rows, which only students need.
    """
    if not configs:
        return {}
    threads = max(config.threads for config in configs.values())
    executor = executor_for(executor, threads, next(iter(configs.values())).device)
    directories = list(configs)
    jobs = [run_job(directory, config, data, deadline, teach=teach) for directory, config in configs.items()]
    reports: Runs = {}

    def receive(index: int, result: Any) -> None:
        directory = directories[index]
        reports[directory] = parse_report(result, str(directory))
        if done is not None:
            done(directory, reports[directory])

    executor.run(jobs, title=title, quiet=quiet, done=receive)
    return {directory: reports[directory] for directory in directories}


@contextmanager
def packed_early(
    configs: dict[Path, RunConfig], data: PreparedData, *, executor: Executor, quiet: bool
) -> Iterator[Runs]:
    """Pack runs as they are, even half-trained ones, while the context is open; they can be trained further later.

    A run without a validation is left out: to pack it would validate it early, and change how it ends.
    """
    begun = {path: config for path, config in configs.items() if (path / REPORT).is_file() or is_begun(path)}
    cut = [path for path in begun if not (path / REPORT).is_file()]
    try:
        yield run_many(
            begun,
            data,
            title="packing",
            executor=executor,
            quiet=quiet,
            deadline=time.time(),
            teach=False,
        )
    finally:
        for path in cut:
            if (path / REPORT).is_file():
                reopen(begun[path], path)


def run_job(
    directory: Path,
    config: RunConfig,
    data: PreparedData,
    deadline: float | None = None,
    *,
    teach: bool = True,
) -> Job:
    """Return the job of a run in a directory, with its logit tables; its result is the run's report as JSON."""
    arguments = {
        "data": str(data.path),
        "config": config.to_json(),
        "out": str(directory),
        "deadline": deadline,
        "teach": teach,
    }
    return Job(_job_name(directory), run_and_write_logits, arguments)


def run_and_write_logits(
    data: str, config: dict[str, Any], out: str, deadline: float | None = None, teach: bool = True
) -> dict[str, Any]:
    """Do a run and write its logits as tables next to it, of all rows or of those that are held out.

    The arguments are plain, for a job.
    """
    # Whoever gives out jobs has checked the data: each job would read all of them again.
    prepared = PreparedData(Path(data), verify=False)
    settings, directory = RunConfig.from_json(config), Path(out)
    report = run(settings, prepared, directory, deadline=deadline)
    splits = [*(["train"] if teach else []), *held_out_shards(prepared)]
    tables = {split: directory / LOGITS / split for split in splits}
    missing = {split: path for split, path in tables.items() if not path.is_dir()}
    if missing:
        loaded = load_artifact(directory / ARTIFACT)
        device = torch.device(settings.device)
        count = len(loaded.routes)  # Fewer than were wanted, where the model does not have as many.
        estimator = Estimator(
            f"{settings.model}-seed-{settings.train.seed}", route=f"mean of {count}" if count > 1 else None
        )
        for split, path in missing.items():
            rows = _without_own_clicks(loaded.model, prepared) if split == "train" else None
            write_logits(path, {estimator: loaded.model.to(device)}, prepared, split, device, rows=rows)
    return report.to_json()


def _without_own_clicks(model: nn.Module, data: PreparedData) -> Shard | None:
    """Return the training rows in the form that a model which counts clicks takes; None for other models."""
    if isinstance(model, Rates):
        return training_rows(model.config, data)
    return with_codes(model.config, data) if isinstance(model, Boosted) else None


def teacher_tables(directories: Sequence[Path], split: str) -> tuple[Path, ...]:
    """Return the paths of the runs' logit tables over one split."""
    return tuple(directory / LOGITS / split for directory in directories)


def _job_name(directory: Path) -> str:
    """Return a short name to show: the directory without its hash, with the one above it for a mere seed-N."""
    parts = (
        [directory.parent.name, directory.name] if directory.name.startswith("seed-") else [directory.name]
    )
    return " ".join(re.sub(r"-[0-9a-f]{10}$", "", part) for part in parts)
