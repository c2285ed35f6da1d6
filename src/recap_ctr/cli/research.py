"""Commands for researchers: the paper's tables and figures, and the diagnosis of estimators."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from recap_ctr.cli.fit import merged_settings, open_recipe
from recap_ctr.cli.options import (
    L2,
    Device,
    Engine,
    Json,
    PreparedPath,
    Preset,
    PresetName,
    Quiet,
    RecipeFile,
    Set,
    TrainThreads,
    complete_model,
    drop_unset,
    limit_threads,
    parse_settings,
    require_torch,
    this_command,
)
from recap_ctr.cli.output import print_json, tell


class BenchTable(StrEnum):
    """A table or figure of the paper."""

    table1 = "table1"
    ablation = "ablation"
    fcn_scaling = "fcn-scaling"
    teachers = "teachers"
    sensitivity = "sensitivity"
    overview = "overview"
    variance = "variance"
    capacity = "capacity"
    estimators = "estimators"
    frontier = "frontier"
    routes = "routes"


def bench(
    table: Annotated[
        BenchTable,
        typer.Argument(
            help="table1, ablation (Table 2), fcn-scaling (Table 3), sensitivity (Table 4), teachers, overview,"
            " variance, routes, or with figures: capacity (1a), estimators (1b, 1c), frontier (1d, 4).",
        ),
    ],
    data: Annotated[
        list[str],
        typer.Option("--data", help="A directory that `recap prepare` wrote, or synthetic; repeatable."),
    ],
    out: Annotated[
        Path, typer.Option("--out", help="Directory for all runs; a second call goes on there.")
    ] = Path("bench"),
    reports: Annotated[
        Path | None,
        typer.Option(
            "--reports",
            help="Directory for NAME/.../report.json and tables; NAME/MODEL.toml and NAME/recipe.toml there are"
            " the settings.  [default: OUT/reports]",
        ),
    ] = None,
    models: Annotated[
        str | None,
        typer.Option(
            "--models",
            help="table1: which models, such as lr,fcn,recap; any NAME that has a NAME.toml.  [default: all]",
        ),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            "--seeds",
            min=1,
            help="Runs of each kind.  [default: 3, or 1 for sensitivity and frontier]",
        ),
    ] = None,
    averaged: Annotated[
        bool, typer.Option("--averaged", help="table1: baselines with our averaging of weights.")
    ] = False,
    tuned: Annotated[
        bool,
        typer.Option(
            "--tuned", help="table1: as --averaged, and each baseline tuned by its own probes, as RECAP is."
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what is missing and what it would cost, and train nothing.")
    ] = False,
    config: RecipeFile = None,
    preset: Preset = PresetName.default,
    settings: Set = None,
    threads: TrainThreads = None,
    device: Device = None,
    engine: Engine = "local",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Make the paper's tables in Markdown and LaTeX, with tests over seeds, and do all training that they need.

    `table1` compares models on each data set. `ablation` has the recursive backbone alone, with each axis of
    estimators, and with all of them. `fcn-scaling` has FCN with averaged weights, with distillation, and with both.
    `teachers` has students of no, one and all teachers. Each line has its own regulariser. `overview` compares RECAP
    with the ensembles. `variance` shows how far runs and routes disagree, which explains the effects. `routes` compares
    ways to choose routes.

    The other tables come with figures, and with all numbers as JSON and CSV. `sensitivity` varies one setting of RECAP
    at a time, `capacity` makes FCN deeper and wider, `estimators` shows what averaging gains along each axis, and
    `frontier` shows AUC against size. Nothing that is finished is done again.

    --set takes any key of a recipe (docs/reference/recipe.md), such as teachers=3.

    Example: recap bench table1 --data synthetic --models lr,fm,fcn,recap --seeds 2

    Example: recap bench ablation --data data --out bench --seeds 3

    Example: recap bench sensitivity --data data --out bench
    """
    limit_threads(threads)
    require_torch()
    from recap_ctr.bench.request import Request, fulfil, split_names
    from recap_ctr.bench.table1 import Treatment
    from recap_ctr.jobs.engines import device_for
    from recap_ctr.recipe.fit import MARK
    from recap_ctr.storage.claims import take

    take(out, MARK)
    request = Request(
        table=table.value,
        data=tuple(data),
        out=out,
        reports=reports or out / "reports",
        config=config,
        preset=preset.value,
        settings=parse_settings(settings),
        models=tuple(split_names(models)),
        seeds=seeds,
        treatment=Treatment.TUNED if tuned else Treatment.AVERAGED if averaged else Treatment.AS_PUBLISHED,
        dry_run=dry_run,
        threads=threads,
        device=device_for(engine, device),
        executor=engine,
        quiet=quiet,
        command=this_command(),
    )
    text = fulfil(request)
    if as_json:
        print_json({"table": table.value, "markdown": text})
        return
    typer.echo(text)
    if dry_run:
        tell(quiet, "Next: the same command without --dry-run; finished runs are never done again.")
        return
    tell(quiet, f"Reports, tables and figures are in {request.reports}; pages in {out}/.../pages.")


def diagnose(
    data: PreparedPath,
    out: Annotated[Path, typer.Option("--out", help="Directory for all runs, the figures and the page.")],
    num_runs: Annotated[int, typer.Option("--runs", min=1, help="Runs, which differ in their seed.")] = 5,
    checkpoints: Annotated[
        int,
        typer.Option("--checkpoints", min=1, help="Last epochs of each run, as points of its trajectory."),
    ] = 4,
    routes: Annotated[
        int, typer.Option("--routes", min=1, help="Routes of each, if the model has them.")
    ] = 8,
    model: Annotated[
        str, typer.Option("--model", autocompletion=complete_model, help="Model by name.")
    ] = "recap",
    config: RecipeFile = None,
    preset: Preset = PresetName.default,
    l2: L2 = None,
    settings: Set = None,
    threads: TrainThreads = None,
    device: Device = None,
    engine: Engine = "local",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show how far estimators disagree, and what averaging more runs, checkpoints and routes would gain.

    It trains what is missing, measures on held-out rows, and says what to do next, in words and in figures with
    intervals, on one page. With the --out of `recap fit` or `recap bench`, it uses their probe again.

    Example: recap diagnose data --out diagnosis --runs 5
    """
    recipe = open_recipe(
        data,
        out,
        config=config,
        preset=preset,
        settings=merged_settings(drop_unset({"l2": l2}), settings),
        threads=threads,
        device=device,
        engine=engine,
        quiet=quiet,
    )
    from recap_ctr.recipe.estimator_grid import DIAGNOSIS, PAGES, diagnose_recipe

    diagnosis, sentences = diagnose_recipe(
        recipe,
        runs=num_runs,
        checkpoints=checkpoints,
        routes=routes,
        model=model,
        command=this_command(),
    )
    if as_json:
        print_json({**diagnosis.to_json(), "findings": sentences})
        return
    for sentence in sentences:
        typer.echo(sentence)
    tell(quiet, f"Open {out / PAGES / 'report.html'}; all figures: {out / DIAGNOSIS}")
