"""Commands that compare rows with the training rows of a model: check and drift."""

from pathlib import Path
from typing import Annotated

import typer

from recap_ctr.cli.errors import FINDINGS
from recap_ctr.cli.options import (
    ArtifactPath,
    Columns,
    Json,
    Quiet,
    RawRows,
    Threads,
    limit_threads,
    parse_map,
)
from recap_ctr.cli.output import print_json, print_table, tell
from recap_ctr.errors import InputError


def check(
    rows: RawRows,
    against: Annotated[
        Path, typer.Option("--against", help="An artifact, or the run or fit that holds one.")
    ],
    columns: Columns = None,
    threads: Threads = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Look for faults in raw rows: anything unusual in comparison with a model's training rows.

    It finds values that have become constant, are spelled in another way, are missing or unseen; a click rate that has
    moved; and repeated rows. The limits come from the variation between periods of the training rows. The exit code is
    3 if there are findings.

    Example: recap check today.parquet --against model/artifact
    """
    limit_threads(threads)
    from recap_ctr.inference.calls import check as check_rows

    result = check_rows(rows, against, columns=parse_map(columns), quiet=quiet)
    if as_json:
        print_json(result.to_json())
    else:
        for finding in result.findings:
            typer.echo(f"{finding.sentence}\n  fix: {finding.fix}")
        if not result.findings and result.enough:
            typer.echo(f"{result.rows:,} rows: nothing unusual.")
        if not result.enough:
            typer.echo(f"{result.rows:,} rows are too few to judge.")
    if not quiet and not as_json:
        tell(quiet, "")
        header = ["field", "missing", "usual", "unseen", "usual", "stability index"]
        shares = [
            [
                field.name,
                *(f"{share:.2%}" for share in (field.missing, field.usual_missing)),
                *(f"{share:.2%}" for share in (field.unseen, field.usual_unseen)),
                f"{field.psi:.3f}",
            ]
            for field in result.fields
        ]
        print_table(header, shares)
    if result.findings:
        raise typer.Exit(FINDINGS)


def drift(
    artifact: ArtifactPath,
    rows: RawRows,
    every: Annotated[
        str, typer.Option("--every", help="Length of a period, in hours (6h) or days (1d).")
    ] = "1d",
    out: Annotated[Path | None, typer.Option("--out", help="Directory for a page with the series.")] = None,
    max_psi: Annotated[
        float | None,
        typer.Option("--max-psi", min=0, help="Largest stability index.  [default: from the training rows]"),
    ] = None,
    max_unseen: Annotated[
        float | None,
        typer.Option(
            "--max-unseen", min=0, max=1, help="Largest unseen share.  [default: from the training rows]"
        ),
    ] = None,
    max_calibration: Annotated[
        float, typer.Option("--max-calibration", min=0, help="How far the calibration ratio may be from 1.")
    ] = 0.1,
    columns: Columns = None,
    threads: Threads = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure, period by period, how far rows drift from the training rows, and whether probabilities still hold.

    It shows, for each field, the shares of unseen and rare values and the population stability index, and the
    calibration ratio if rows have labels. The exit code is 3 if a figure is beyond its limit.

    Example: recap drift model/artifact this_week.parquet --out drift
    """
    limit_threads(threads)
    from recap_ctr.inference.calls import load
    from recap_ctr.inference.drift import DriftLimits, measure_drift
    from recap_ctr.pages.drift import lead, period_name, write_drift

    limits = DriftLimits(psi=max_psi, unseen=max_unseen, calibration=max_calibration)
    scorer = load(artifact, columns=parse_map(columns), threads=threads)
    report = measure_drift(scorer, rows, every=parse_period(every), limits=limits, quiet=quiet)
    if out is not None:
        tell(quiet, f"{write_drift(out, report)}: the series as charts.")
    if as_json:
        print_json(report.to_json())
    else:
        typer.echo(lead(report))
        for finding in report.findings:
            typer.echo(f"{period_name(finding.start, finding.period)}: {finding.sentence}")
    if report.findings:
        tell(quiet, "Next: recap check the same rows for faults; if there are none, fit the model again.")
        raise typer.Exit(FINDINGS)


def parse_period(text: str) -> int:
    """Return the seconds of a period that is written as 6h or 1d.

    >>> parse_period("6h"), parse_period("1d")
    (21600, 86400)
    """
    number, unit = text[:-1], {"h": 3_600, "d": 86_400}.get(text[-1:])
    if unit is None or not number.isdecimal() or not 0 < int(number) <= 10_000:
        raise InputError(
            f"--every {text}: expected hours or days", fix="write, for example, --every 6h or --every 1d"
        )
    return int(number) * unit
