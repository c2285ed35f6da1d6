"""The command that turns reports into pages."""

from pathlib import Path
from typing import Annotated

import typer

from recap_ctr.cli.options import Json, Quiet, require_torch
from recap_ctr.cli.output import print_json, tell
from recap_ctr.errors import InputError


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="What `recap fit` or `recap train` wrote.")
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Directory for the page.  [default: DIR; needed for several runs]"),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Make a page to read and to share, with the answer, figures with intervals, charts and settings.

    Several runs on the same data are compared on one page. The page needs no network.

    Example: recap report model

    Example: recap report run-1 run-2 --out comparison
    """
    require_torch()
    from recap_ctr.pages import compare
    from recap_ctr.pages.run import page
    from recap_ctr.recipe.estimator_grid import read_diagnosis
    from recap_ctr.training.report import read_report

    reports = {str(path): read_report(path) for path in runs}
    if len(reports) > 1 and out is None:
        raise InputError("a page of several runs needs a directory of its own", fix="--out DIR")
    first = reports[str(runs[0])]
    if len(reports) > 1:
        shown = compare.page(reports)
    else:
        shown = page(first, diagnosis=read_diagnosis(runs[0], first.data.fingerprint))
    written = shown.write(out or runs[0])
    if as_json:
        print_json({"page": str(written), "lead": shown.lead})
        return
    typer.echo(shown.lead)
    tell(quiet, f"Open {written}; its figures are next to it, as images and as numbers.")
