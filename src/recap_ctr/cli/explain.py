"""The command that says which fields a model relies on."""

from typing import TYPE_CHECKING, Annotated

import typer

from recap_ctr.cli.options import (
    ArtifactPath,
    Columns,
    DropUnlabelled,
    Json,
    Quiet,
    Seed,
    Threads,
    UsedDepth,
    UsedRoutes,
    limit_threads,
    parse_map,
)
from recap_ctr.cli.output import print_json, print_table, tell, tell_unlabelled

if TYPE_CHECKING:
    from recap_ctr.inference.importance import Change, Importance


def explain(
    artifact: ArtifactPath,
    rows: Annotated[
        list[str], typer.Argument(metavar="ROWS...", help="Raw labelled rows; - is standard input.")
    ],
    max_rows: Annotated[
        int, typer.Option("--rows", min=2, help="Use at most this many rows, drawn at random.")
    ] = 50_000,
    repeats: Annotated[int, typer.Option("--repeats", min=1, max=1000, help="Shuffles of each field.")] = 5,
    seed: Seed = 1,
    columns: Columns = None,
    drop_unlabelled: DropUnlabelled = False,
    routes: UsedRoutes = None,
    depth: UsedDepth = None,
    threads: Threads = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure how much a model relies on each field, by shuffling its values between rows (permutation importance).

    For single rows, see `recap predict --explain 3`.

    Example: recap explain run/artifact fresh.parquet
    """
    limit_threads(threads)
    from recap_ctr.inference.calls import explain as explain_rows
    from recap_ctr.inference.calls import load

    scorer = load(artifact, columns=parse_map(columns), routes=routes, depth=depth, threads=threads)
    importance = explain_rows(
        scorer,
        rows,
        max_rows=max_rows,
        repeats=repeats,
        seed=seed,
        drop_unlabelled=drop_unlabelled,
        quiet=quiet,
    )
    if as_json:
        print_json(importance.to_json())
        return
    header = ["field", "AUC drop, points", "95 % interval", "logloss rise", "95 % interval"]
    print_table(
        header,
        [
            [field.field, *_cells(field.auc_drop, 100, 3), *_cells(field.logloss_rise, 1, 5)]
            for field in importance.fields
        ],
    )
    tell_unlabelled(quiet, importance.unlabelled)
    for sentence in sentences(importance):
        tell(quiet, sentence)


def _cells(change: "Change", factor: float, digits: int) -> list[str]:
    value, low, high = (f"{factor * number:.{digits}f}" for number in (change.value, change.low, change.high))
    return [value, f"{low} to {high}"]


def sentences(importance: "Importance") -> list[str]:
    """Return what the figures mean, and what they don't."""
    first = importance.fields[0]
    text = (
        f"On {importance.rows:,} rows the model's AUC is {100 * importance.auc:.2f}. Shuffling {first.field} costs"
        f" most: {100 * first.auc_drop.value:.2f} points."
    )
    unclear = [field.field for field in importance.fields if not field.auc_drop.is_clear]
    lines = [text, f"Intervals are over rows and over {importance.repeats} shuffles of each field."]
    if unclear:
        lines.append(f"No clear effect on the AUC: {', '.join(unclear)}.")
    lines.append(
        "This is what the model relies on, not what causes clicks; fields that say the same stand in for each other."
    )
    return lines
