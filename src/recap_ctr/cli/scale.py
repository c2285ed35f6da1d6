"""What `recap plan --rows` prints without data: sizes, times, and where more workers stop helping."""

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from recap_ctr.cli.options import drop_unset, parse_settings
from recap_ctr.cli.output import print_table
from recap_ctr.errors import InputError

if TYPE_CHECKING:
    from recap_ctr.recipe.scale import Workload

# One average of the weights and the update whose cost does not grow with the vocabulary: what large data need.
TRAINING = {"update": "fast", "ema": 0.999}
_UNITS = ("B", "KB", "MB", "GB", "TB", "PB")
_SPANS = ((86_400.0, "days"), (3_600.0, "hours"), (60.0, "minutes"), (1.0, "s"), (0.0, "ms"))


def workload(
    *,
    rows: float,
    vocabulary: float | None,
    workers: int,
    fields: int,
    model: str,
    dim: int | None,
    batch_size: int | None,
    settings: list[str] | None,
    ratio: str,
    gigabits: float,
    disk_mb: float,
) -> "Workload":
    """Return what the options describe; --set takes the tables `train` and `model` of `recap train`."""
    from recap_ctr.config import TrainConfig, parse
    from recap_ctr.data.split import parse_ratio
    from recap_ctr.models.catalogue import parse_model
    from recap_ctr.recipe.scale import Workload

    if vocabulary is None:
        raise InputError(
            "--rows without --vocabulary: the table's size decides most",
            fix="add --vocabulary N, the distinct values over all fields",
        )
    tables = parse_settings(settings)
    unknown = tables.keys() - {"train", "model"}
    if unknown:
        raise InputError(f"--set {min(unknown)}: no such table with --rows", fix="use train.KEY or model.KEY")
    options: dict[str, Any] = drop_unset({"train": {"batch_size": batch_size}, "model": {"dim": dim}})
    training = {**TRAINING, **options.get("train", {}), **tables.get("train", {})}
    config = parse(TrainConfig, training, "plan")
    if config.batch_size < workers:
        raise InputError(
            f"{workers:,} workers, and batches of {config.batch_size:,} rows",
            fix="raise --batch-size: every worker needs a row of each batch",
        )
    train, valid, test = parse_ratio(ratio)
    return Workload(
        rows=round(rows),
        vocabulary=round(vocabulary),
        fields=fields,
        model=model,
        model_config=parse_model(model, {**options.get("model", {}), **tables.get("model", {})}),
        train=config,
        workers=workers,
        valid_share=valid / (train + valid + test),
        test_share=test / (train + valid + test),
        gigabits=gigabits,
        disk_mb=disk_mb,
    )


def print_scale(plan: dict[str, Any]) -> None:
    """Print a plan as tables and sentences."""
    work = plan["workload"]
    typer.echo(
        f"{work['rows']:,} rows of {work['fields']} fields with {work['vocabulary']:,} values; {work['model']},"
        f" batches of {work['train']['batch_size']:,}, update {work['train'].get('update', 'exact')},"
        f" {_workers(work['workers'])}\n"
    )
    _print_sizes("on disk", plan["disk_bytes"])
    _print_sizes("memory of a worker", plan["memory_bytes"])
    _print_sizes("sent by a worker in a step", plan["network_bytes_a_step"])
    print_table(["stage", "time"], [[name, span(seconds)] for name, seconds in plan["stage_seconds"].items()])
    print_table(
        ["workers", "memory each", "step", "an epoch", "rows to artifact", "longest"],
        [
            [
                f"{line['workers']:,}",
                size(line["memory"]),
                span(line["step"]),
                span(line["epoch"]),
                span(line["all"]),
                line["bottleneck"],
            ]
            for line in plan["by_workers"]
        ],
    )
    for sentence in sentences(plan):
        typer.echo(sentence)


def _print_sizes(title: str, sizes: dict[str, float]) -> None:
    total = [["together", size(sum(sizes.values()))]]
    print_table([title, "size"], [[name, size(count)] for name, count in sizes.items()] + total)


def sentences(plan: dict[str, Any]) -> list[str]:
    """Return what takes longest, where that changes with more workers, and what the numbers rest on."""
    lines, workers = plan["by_workers"], plan["workload"]["workers"]
    planned = next(line for line in lines if line["workers"] == workers)
    moves = [
        f"{after['bottleneck']} from {_workers(after['workers'])} on"
        for before, after in pairwise(lines)
        if before["bottleneck"] != after["bottleneck"]
    ]
    machine, assumed = plan["speeds"]["machine"], plan["assumed"]
    return [
        f"With {_workers(workers)}, {planned['bottleneck']} takes longest."
        f" With one it is {lines[0]['bottleneck']}{', and ' if moves else ''}{', '.join(moves)}.",
        f"Times are those of one core of {machine['processor']} for each worker, measured on"
        f" {plan['speeds']['date']} (a step's formula is within {plan['speeds']['fit_error']:.0%} of what it was"
        f" measured on); {assumed['network_gigabits']:g} Gbit/s and {assumed['disk_mb']:g} MB/s are assumed.",
    ]


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count:,} workers"


def size(count: float) -> str:
    """Return a number of bytes in words, in steps of a thousand.

    >>> size(57_600_000_000)
    '57.6 GB'
    """
    for unit in _UNITS:
        if count < 1000 or unit == _UNITS[-1]:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


def span(seconds: float) -> str:
    """Return a time in the unit in which it is not small.

    >>> span(5400.0), span(0.0123)
    ('90.0 minutes', '12.3 ms')
    """
    for length, unit in _SPANS:
        if seconds >= 2 * length:
            return f"{seconds / length:,.1f} {unit}" if length else f"{1000 * seconds:,.1f} {unit}"
    raise AssertionError


def refuse_mixture(data: Path | None, rows: float | None, out: Path | None, workers: int) -> None:
    """Refuse options of both ways to plan at once, and none of either."""
    if rows is None and data is None:
        raise InputError("nothing to plan", fix="name prepared data, or describe some with --rows")
    if rows is None and workers != 1:
        raise InputError("--workers goes with --rows", fix="remove it; `recap train` has the option")
    if rows is not None and (data is not None or out is not None):
        named = "prepared data" if data is not None else "--out"
        raise InputError(f"--rows and {named}", fix="remove one of them: --rows plans without data")
