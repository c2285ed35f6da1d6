"""Commands for tomorrow's log: update a shipped model, and replay a log day by day."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from recap_ctr.cli.errors import BAD_INPUT
from recap_ctr.cli.options import (
    Force,
    Json,
    Quiet,
    Set,
    TrainThreads,
    drop_unset,
    limit_threads,
    parse_settings,
    require_torch,
)
from recap_ctr.cli.output import print_json, print_table, tell

if TYPE_CHECKING:
    from recap_ctr.recipe.update import UpdateReport

Confidence = Annotated[
    float | None,
    typer.Option(
        "--confidence",
        min=0.5,
        max=0.9999,
        help="Share of bootstrap samples in which logloss must be lower.  [default: 0.9]",
    ),
]
MaxChurn = Annotated[
    float | None,
    typer.Option(
        "--max-churn", min=0.0, help="Mean change of a score, relative to the mean score.  [default: 0.5]"
    ),
]
MaxCalibrationError = Annotated[
    float | None,
    typer.Option(
        "--max-calibration-error",
        min=0.0,
        help="Calibration error beyond that of the recalibrated model, relative to the click rate.  [default: 0.1]",
    ),
]
MaxUnknown = Annotated[
    float | None,
    typer.Option(
        "--max-unknown",
        min=0.0,
        max=1.0,
        help="Rise of a field's share of values that the model doesn't know.  [default: 0.5]",
    ),
]
MinRanking = Annotated[
    float | None,
    typer.Option(
        "--min-ranking",
        min=0.0,
        max=1.0,
        help="Share of its AUC above one half that the shipped model must still have.  [default: 0.5]",
    ),
]
ForgetAfter = Annotated[
    float | None,
    typer.Option(
        "--forget-after",
        min=0.0,
        metavar="DAYS",
        help="Give up the vectors of values that were not seen for this long.  [default: never]",
    ),
]


def update(
    artifact: Annotated[Path, typer.Argument(help="An artifact, or the fit that holds one.")],
    rows: Annotated[
        list[str],
        typer.Argument(metavar="NEW_ROWS...", help="Labelled rows that came since the last fit or update."),
    ],
    out: Annotated[Path, typer.Option("--out", help="Directory for the new artifact.")],
    confidence: Confidence = None,
    max_churn: MaxChurn = None,
    max_calibration_error: MaxCalibrationError = None,
    max_unknown: MaxUnknown = None,
    min_ranking: MinRanking = None,
    forget_after: ForgetAfter = None,
    delta: Annotated[
        Path | None, typer.Option("--delta", help="Also write what changed to this directory, for servers.")
    ] = None,
    settings: Set = None,
    threads: TrainThreads = None,
    force: Force = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a shipped model further on new rows, and ship the result only if it is better on the newest of them.

    Values keep their ids, and values that have become frequent get a vector. The newest fifth of the rows is held out.
    The new model, the shipped one, and the shipped one calibrated again are compared on these rows. If the new model is
    not better, or breaks a limit, the exit code is 2, the reasons are printed, and nothing is written. `recap fit
    --keep-state` keeps what updates need besides the model. --set takes settings of the update's training, such as
    passes=3 or replay=0.5.

    Example: recap update model/artifact monday.csv --out model-monday

    Example: recap update model/artifact monday.csv --out model-monday --delta monday-delta
    """
    limit_threads(threads)
    require_torch()
    from recap_ctr.recipe.update import update as update_model

    result = update_model(
        artifact,
        rows,
        out=out,
        settings={**parse_settings(settings), **drop_unset({"forget_after": forget_after})},
        gate=_limits(confidence, max_churn, max_calibration_error, max_unknown, min_ranking),
        delta=delta,
        threads=threads or 1,
        force=force,
        quiet=quiet,
    )
    if as_json:
        print_json({"out": str(out), **result.report.to_json()})
    else:
        _print_update(result.report)
    if not result.shipped:
        raise typer.Exit(BAD_INPUT)
    tell(quiet, f"Next: recap predict {out} rows.csv --out scores.csv")


def _limits(
    confidence: float | None,
    max_churn: float | None,
    max_calibration_error: float | None,
    max_unknown: float | None,
    min_ranking: float | None,
) -> dict[str, Any]:
    """Return the limits of the gate that options set."""
    return drop_unset(
        {
            "confidence": confidence,
            "max_churn": max_churn,
            "max_calibration_error": max_calibration_error,
            "max_unknown": max_unknown,
            "min_ranking": min_ranking,
        }
    )


def _print_update(report: "UpdateReport") -> None:
    gate = report.gate
    models = {
        "updated": (gate.updated, None),
        "shipped": (gate.shipped, gate.better_than_shipped),
        "shipped, calibrated again": (gate.recalibrated, gate.better_than_recalibrated),
    }
    print_table(
        [f"{gate.rows:,} newest rows", "AUC", "logloss", "calibration error", "updated is better"],
        [
            [
                name,
                f"{100 * judged.auc:.3f}",
                f"{judged.logloss:.5f}",
                f"{judged.calibration_error:.4f}",
                "" if won is None else f"in {100 * won:.1f} % of samples",
            ]
            for name, (judged, won) in models.items()
        ],
    )
    rows = report.rows
    typer.echo(
        f"Trained on {rows['trained']:,} new rows and {rows['replayed']:,} earlier ones;"
        f" {sum(report.added.values()):,} values added, {sum(report.forgotten.values()):,} forgotten;"
        f" scores change by {100 * gate.churn:.1f} %."
    )
    for reason in gate.reasons:
        typer.echo(f"refused: {reason}")


def apply(
    base: Annotated[Path, typer.Argument(help="The artifact that the delta was made from.")],
    delta: Annotated[Path, typer.Argument(help="What `recap update --delta` wrote.")],
    out: Annotated[Path, typer.Option("--out", help="Directory for the artifact that the delta leads to.")],
    force: Force = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Combine an artifact and a delta into the artifact that the delta leads to, bit for bit.

    A delta that was made from another artifact is refused. The training state is not part of a delta. A server takes a
    delta at its path as it takes a whole artifact.

    Example: recap apply model/artifact monday-delta --out model-monday
    """
    from recap_ctr.errors import InputError
    from recap_ctr.inference.delta import apply_delta

    if out.exists() and not force:
        raise InputError(f"{out} exists", fix="choose another --out, or replace it with --force")
    apply_delta(base, delta, out)
    if as_json:
        print_json({"out": str(out)})
        return
    tell(quiet, f"Next: recap predict {out} rows.csv --out scores.csv")


def backtest(
    log: Annotated[list[str], typer.Argument(metavar="LOG...", help="A labelled log of many periods.")],
    out: Annotated[Path, typer.Option("--out", help="Directory for all models, the figures and the page.")],
    label: Annotated[
        str | None, typer.Option("--label", help="The column that says whether there was a click.")
    ] = None,
    time: Annotated[
        str | None, typer.Option("--time", help="The column of moments.  [default: the schema's]")
    ] = None,
    schema: Annotated[Path | None, typer.Option("--schema", help="schema.toml.  [default: inferred]")] = None,
    every: Annotated[str, typer.Option("--every", help="The length of a period: 1d, 6h, 30m, 1w.")] = "1d",
    first: Annotated[
        int | None, typer.Option("--first", min=1, help="Periods of the first fit.  [default: half]")
    ] = None,
    budget: Annotated[float | None, typer.Option("--budget", min=0.1, help="Minutes of each fit.")] = None,
    settings: Set = None,
    update_settings: Annotated[
        list[str] | None,
        typer.Option(
            "--update",
            metavar="KEY=VALUE",
            help="A setting of the updates, such as passes=3; repeatable.",
        ),
    ] = None,
    confidence: Confidence = None,
    max_churn: MaxChurn = None,
    max_calibration_error: MaxCalibrationError = None,
    max_unknown: MaxUnknown = None,
    min_ranking: MinRanking = None,
    forget_after: ForgetAfter = None,
    threads: TrainThreads = None,
    force: Force = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Replay a log period by period, to compare updating with refitting every time and with doing neither.

    Every model is judged on the period after the rows that it has seen: AUC, logloss, calibration, churn and CPU time,
    on one page. After an interruption, the same command goes on. --set takes any key of a recipe, for all fits, and
    --update what --set takes at an update. With other settings of the updates, the fits of before are used again.

    Example: recap backtest log.csv --label click --time ts --every 1d --budget 2 --out replay
    """
    limit_threads(threads)
    require_torch()
    from recap_ctr.evaluation.backtest import STRATEGIES
    from recap_ctr.pages.backtest import HEADER, cells
    from recap_ctr.recipe.backtest import backtest as replay

    result = replay(
        log,
        out=out,
        label=label,
        time=time,
        schema=schema,
        every=every,
        first=first,
        settings=parse_settings(settings),
        budget=budget,
        update_settings={**parse_settings(update_settings), **drop_unset({"forget_after": forget_after})},
        gate=_limits(confidence, max_churn, max_calibration_error, max_unknown, min_ranking),
        threads=threads or 1,
        force=force,
        quiet=quiet,
    )
    if as_json:
        print_json(result.report.to_json())
        return
    print_table(list(HEADER), [list(cells(result.report, strategy)) for strategy in STRATEGIES])
    typer.echo(result.summary)
    tell(quiet, f"Open {result.page} for all periods.")
