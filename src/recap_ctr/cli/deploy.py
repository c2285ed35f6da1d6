"""Commands that put a model into production: export, the dial, and the server."""

import os
from pathlib import Path
from typing import Annotated

import typer

from recap_ctr.cli.options import (
    ArtifactPath,
    ExportFormat,
    Json,
    Quiet,
    Threads,
    TokenFile,
    VerifyKey,
    limit_threads,
    require_torch,
)
from recap_ctr.cli.output import print_json, print_table, tell
from recap_ctr.errors import InputError
from recap_ctr.jobs.machine import num_cores


def export(
    artifact: ArtifactPath,
    format_: Annotated[
        ExportFormat, typer.Option("--format", help="What to export to; ONNX Runtime runs onnx.")
    ] = ExportFormat.onnx,
    routes: Annotated[
        int | None,
        typer.Option("--routes", min=1, help="Add a graph for this many routes.  [default: the dial]"),
    ] = None,
    depth: Annotated[
        int | None,
        typer.Option("--depth", min=1, help="Add a graph for this trained depth.  [default: the dial]"),
    ] = None,
    int8: Annotated[
        bool,
        typer.Option(
            "--int8",
            help="Products in 8 bits, where that is faster for at most 0.0001 of logloss; needs --data.",
        ),
    ] = False,
    data: Annotated[
        Path | None,
        typer.Option("--data", help="The prepared data: measure every setting on its validation rows."),
    ] = None,
    threads: Threads = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Put a graph for each setting of the dial into an artifact, which then needs no PyTorch to score or serve.

    Example: recap export run/artifact --data data

    Example: recap export run/artifact --int8 --data data
    """
    limit_threads(threads)
    require_torch("export")
    import torch

    try:
        from recap_ctr.inference.export import export as export_graphs
    except ModuleNotFoundError as error:
        if error.name not in ("onnx", "onnxscript"):
            raise
        raise InputError(f"this command needs {error.name}", fix="pip install 'recap-ctr[export]'") from None
    from recap_ctr.data.shards import PreparedData
    from recap_ctr.storage.places import output_directory, shown

    torch.set_num_threads(threads or num_cores())
    prepared = None if data is None else PreparedData(data)
    with output_directory(artifact) as directory:
        graphs = export_graphs(directory, routes=routes, depth=depth, int8=int8, data=prepared, quiet=quiet)
    if as_json:
        print_json({"artifact": shown(artifact), "graphs": [graph.to_dict() for graph in graphs]})
        return
    rows = []
    for graph in graphs:
        exported = graph.exported
        quality = [f"{graph.quality[key]:.5f}" for key in ("auc", "logloss")] if graph.quality else ["", ""]
        size = f"{len(exported.graph):,}"
        rows.append([str(graph.setting), exported.precision, size, f"{exported.parity:.1e}", *quality])
    print_table(["setting", "precision", "bytes", "from torch", "AUC", "logloss"], rows)
    for graph in graphs:
        if graph.rounding is not None:
            typer.echo(f"int8, {graph.setting}: {graph.rounding}")
    tell(quiet, f"Next: recap dial {shown(artifact)}")


def dial(
    artifact: ArtifactPath,
    seconds: Annotated[float, typer.Option("--seconds", min=0.0, help="How long to measure.")] = 3.0,
    out: Annotated[
        Path | None, typer.Option("--out", help="Directory for a page with the curve, and its numbers.")
    ] = None,
    threads: Threads = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure what each setting of a model costs on this machine, and show it beside the setting's accuracy.

    Example: recap dial run/artifact --threads 1 --out dial
    """
    limit_threads(threads)
    from recap_ctr.inference.dial import measure_costs, positions
    from recap_ctr.inference.engine import Engine
    from recap_ctr.pages.dial import HEADER, cells, in_words, write_dial

    engine = Engine.load(artifact, threads=threads)
    measured = positions(engine, measure_costs(engine, seconds=seconds))
    poor = engine.artifact.poor_settings
    words = in_words(measured, poor)
    page = None
    if out is not None:
        page = write_dial(out, engine.manifest["model"]["name"], measured, threads or num_cores(), poor)
    if as_json:
        print_json({"settings": [position.to_dict() for position in measured], "words": words})
        return
    print_table(list(HEADER), [cells(position) for position in measured])
    typer.echo(words)
    if page is not None:
        tell(quiet, f"Open {page}; its figures are next to it.")


def serve(
    artifact: Annotated[
        Path, typer.Argument(help="An artifact, the run or fit that holds one, or a link to either.")
    ],
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; any other than loopback needs a token.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Port to listen on; 0 takes a free one.")
    ] = 8000,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-host",
            help="Without a token: another host name to answer to, such as a proxy's; repeatable.",
        ),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-origin",
            help="The origin of web pages whose scripts may ask, such as https://example.com; repeatable.",
        ),
    ] = None,
    workers: Annotated[
        int, typer.Option("--workers", min=1, max=256, help="Processes, each with the model in memory.")
    ] = 1,
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads", min=1, max=1024, help="Threads of each worker.  [default: cores / workers]"
        ),
    ] = None,
    deadline_ms: Annotated[
        float,
        typer.Option(
            "--deadline-ms", min=1, max=60_000, help="Answer within this time, at a lower dial if need be."
        ),
    ] = 100.0,
    dial: Annotated[
        bool,
        typer.Option(
            "--dial/--no-dial", help="Lower routes and depth under load, and refuse what would be late."
        ),
    ] = True,
    watch: Annotated[
        bool,
        typer.Option("--watch", help="Take a new version as soon as one is at ARTIFACT; else on SIGHUP."),
    ] = False,
    verify_key: VerifyKey = None,
    token_file: TokenFile = None,
    access_log: Annotated[
        bool,
        typer.Option("--access-log", help="Log every scored request too; never the content of its rows."),
    ] = False,
    max_body_mib: Annotated[
        int, typer.Option("--max-body-mib", min=1, max=1024, help="Largest body, in MiB.")
    ] = 8,
    max_rows: Annotated[
        int, typer.Option("--max-rows", min=1, max=1_000_000, help="Most rows of one request.")
    ] = 10_000,
    quiet: Quiet = False,
) -> None:
    """Serve an artifact over HTTP, in JSON and Arrow, with deadlines, and change versions without losing a request.

    Its log is JSON, one event a line, on standard output.

    Example: recap serve model --port 8000 --deadline-ms 50
    """
    from recap_ctr.serve.token import read_token
    from recap_ctr.storage.places import shown

    try:
        from recap_ctr.serve.config import MEBI, Limits, ServeConfig
        from recap_ctr.serve.supervisor import Supervisor
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("recap_ctr"):
            raise
        raise InputError(f"serving needs {error.name}", fix="pip install 'recap-ctr[serve]'") from None

    config = ServeConfig(
        artifact=shown(artifact),
        host=host,
        port=port,
        hosts=tuple(allow_host or ()),
        origins=tuple(allow_origin or ()),
        workers=workers,
        threads=threads or max(1, num_cores() // workers),
        deadline_ms=deadline_ms,
        dial=dial,
        watch=watch,
        access_log=access_log,
        verify_key=None if verify_key is None else str(verify_key.resolve()),
        limits=Limits(
            body_bytes=max_body_mib * MEBI,
            held_bytes=max(Limits().held_bytes, 2 * max_body_mib * MEBI),
            rows=max_rows,
        ),
    )

    def ready(address: str, model: str) -> None:
        tell(
            quiet,
            f"Version {model} of {config.artifact} answers at {address}:"
            f" a page to try it on, and POST {address}/score.",
        )
        tell(
            quiet,
            f"Next: recap score {address} ROWS.csv --out scores.csv. New version: kill -HUP {os.getpid()};"
            f" back: kill -USR1; stop: Ctrl-C.",
        )

    Supervisor(config, read_token(token_file), ready).run()
