"""Commands that score rows with a trained model: predict, evaluate, and score on a server."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from recap_ctr.cli.data import output_inputs
from recap_ctr.cli.errors import CommandError
from recap_ctr.cli.options import (
    ArtifactPath,
    Columns,
    DropUnlabelled,
    Force,
    Json,
    Quiet,
    RawRows,
    ScoresOut,
    Threads,
    TokenFile,
    UsedDepth,
    UsedRoutes,
    VerifyKey,
    limit_threads,
    parse_map,
)
from recap_ctr.cli.output import (
    compare_with_training,
    print_figures,
    print_json,
    tell,
    tell_unlabelled,
    tell_up_to_date,
    tell_values,
)
from recap_ctr.errors import InputError


def predict(
    artifact: ArtifactPath,
    rows: RawRows,
    out: ScoresOut = None,
    columns: Columns = None,
    routes: UsedRoutes = None,
    depth: UsedDepth = None,
    threads: Threads = None,
    explain: Annotated[
        int | None,
        typer.Option(
            "--explain",
            metavar="N",
            min=1,
            help="Add columns why_1 to why_N: what the fields of a row contribute most to its logit.",
        ),
    ] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option("--keep", metavar="COLUMN", help="Keep only this column; repeatable.  [default: all]"),
    ] = None,
    verify_key: VerifyKey = None,
    force: Force = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Score raw rows: keep every column, and add `score` (the calibrated probability) and `logit`.

    Example: recap predict run/artifact rows.csv --keep impression_id --out scores.csv

    Example: recap predict run/artifact rows.csv --out scores.csv

    Example: cat rows.csv | recap predict run/artifact - > scores.csv
    """
    limit_threads(threads)
    _refuse_two_outputs(as_json, out)
    from recap_ctr.data.sink import open_sink
    from recap_ctr.inference.calls import load
    from recap_ctr.inference.scorer import score
    from recap_ctr.storage.claims import is_made
    from recap_ctr.storage.places import is_remote, shown

    scorer = load(
        artifact,
        columns=parse_map(columns),
        routes=routes,
        depth=depth,
        threads=threads,
        verify_key=verify_key,
    )
    source = scorer.raw_rows.files(rows)
    inputs = None
    if out is not None and not is_remote(out):
        inputs = output_inputs(
            source, artifact=scorer.engine.manifest, map=columns, routes=routes, depth=depth
        )
        if inputs is not None and explain is not None:
            inputs["explain"] = explain
        if inputs is not None and keep:
            inputs["keep"] = keep
        if is_made(out, inputs, force=force):
            tell_up_to_date(out, as_json, quiet)
            return
    with open_sink(out, inputs, force=force) as sink:
        tally = score(scorer, source, sink, explain=explain or 0, keep=keep or None, quiet=quiet)
    findings = scorer.findings
    if as_json:
        listed = [finding.to_json() for finding in findings]
        print_json({"out": None if out is None else shown(out), **tally.to_dict(), "findings": listed})
    tell_values(quiet, tally)
    for finding in findings:
        tell(quiet, f"Warning: {finding.sentence}\n  fix: {finding.fix}")
    if out is not None:
        tell(quiet, f"{shown(out)}: score is the calibrated probability of a click, logit its logit.")
        if explain:
            tell(
                quiet, "why_1 is the field without whose value the logit would change most, and by how much."
            )
        tell(quiet, f"Next, once their clicks are known: recap evaluate {shown(artifact)} {shown(out)}")


def _refuse_two_outputs(as_json: bool, out: Path | None) -> None:
    if as_json and out is None:
        raise InputError(
            "--json needs --out: both would write to standard output", fix="add --out scores.csv"
        )


def evaluate(
    artifact: ArtifactPath,
    rows: Annotated[
        list[str], typer.Argument(metavar="ROWS...", help="Raw labelled rows; - is standard input.")
    ],
    columns: Columns = None,
    routes: UsedRoutes = None,
    depth: UsedDepth = None,
    negative_rate: Annotated[
        float, typer.Option("--negative-rate", help="Share of negatives kept in these rows.")
    ] = 1.0,
    drop_unlabelled: DropUnlabelled = False,
    threads: Threads = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure an artifact on raw labelled rows.

    Example: recap evaluate run/artifact fresh.parquet
    """
    limit_threads(threads)
    from recap_ctr.evaluation.sampling import negative_rate_shift
    from recap_ctr.inference.calls import evaluate as evaluate_rows
    from recap_ctr.inference.calls import load

    negative_rate_shift(negative_rate)  # It checks the range before any work is done.
    scorer = load(artifact, columns=parse_map(columns), routes=routes, depth=depth, threads=threads)
    evaluation = evaluate_rows(
        scorer, rows, negative_rate=negative_rate, drop_unlabelled=drop_unlabelled, quiet=quiet
    )
    if as_json:
        print_json(evaluation.to_json())
        return
    print_figures([("these rows", evaluation)])
    tell_values(quiet, evaluation.values)
    tell_unlabelled(quiet, evaluation.unlabelled)
    for sentence in compare_with_training(evaluation, scorer.engine.artifact.metrics):
        tell(quiet, sentence)


def score(
    url: Annotated[str, typer.Argument(metavar="URL", help="A server, such as http://127.0.0.1:8000.")],
    rows: RawRows,
    out: ScoresOut = None,
    routes: UsedRoutes = None,
    depth: UsedDepth = None,
    deadline_ms: Annotated[
        float, typer.Option("--deadline-ms", min=1, max=60_000, help="The deadline of each request.")
    ] = 10_000.0,
    timeout: Annotated[
        float, typer.Option("--timeout", min=0.1, help="Seconds for one request, retries included.")
    ] = 60.0,
    chunk_rows: Annotated[
        int, typer.Option("--chunk-rows", min=1, max=1_000_000, help="Rows of one request.")
    ] = 1000,
    token_file: TokenFile = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Score raw rows on a server: keep every column, and add probability, logit, raw_logit and disagreement.

    Example: recap score http://127.0.0.1:8000 rows.csv --out scores.csv
    """
    _refuse_two_outputs(as_json, out)
    from recap_ctr.data.sink import open_sink
    from recap_ctr.data.source import FileSource
    from recap_ctr.serve.client import Client, ServerError, score_rows
    from recap_ctr.serve.token import read_token

    if out is not None and out.exists() and not force:
        raise InputError(f"{out} exists", fix="choose another --out, or replace it with --force")
    with Client(
        url,
        token=read_token(token_file),
        routes=routes,
        depth=depth,
        deadline_ms=deadline_ms,
        timeout=timeout,
        chunk_rows=chunk_rows,
    ) as client:
        try:
            with open_sink(out, force=force) as sink:
                unused, absent = score_rows(client, FileSource(rows), sink, quiet=quiet)
        except ServerError as error:
            fix = "check that the server runs, then run the same command again"
            raise CommandError(str(error), fix) from None
        summary = client.summary
    if as_json:
        print_json({"out": str(out), **asdict(summary), "unused": unused, "absent": absent})
        return
    tell(
        quiet, f"{summary.rows:,} rows in {summary.requests:,} requests, {summary.retries:,} of them retries."
    )
    for names, meaning in (
        (unused, "Columns that are not fields of the model, and were not sent"),
        (absent, "Fields without a column, scored as missing"),
    ):
        if names:
            tell(quiet, f"{meaning}: {', '.join(names)}.")
    if summary.lowered:
        tell(
            quiet,
            f"{summary.lowered:,} requests were answered at a lowered dial: the server is busy. For the best scores"
            " set --routes and --depth, or try again later.",
        )
    if len(summary.models) > 1:
        tell(
            quiet,
            f"The server changed its model meanwhile: {', '.join(summary.models)}. Score again for one version.",
        )
