"""Commands about the whole recipe: fit, the forecast before it, and the demo."""

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from recap_ctr.cli.options import (
    L2,
    OUTPUT,
    RAW_FILES,
    RECIPE,
    Device,
    DropUnlabelled,
    Engine,
    Force,
    Ignore,
    Json,
    Positive,
    Preset,
    PresetName,
    Quiet,
    RecipeFile,
    Separator,
    Set,
    TeacherModel,
    Teachers,
    Track,
    TrainThreads,
    complete_model,
    complete_split,
    drop_unset,
    limit_threads,
    parse_settings,
    require_torch,
    required,
    this_command,
)
from recap_ctr.cli.output import print_fit, print_json, print_table, tell

if TYPE_CHECKING:
    from recap_ctr.diagnose.results import Forecast

SHOWN_TEACHERS = (1, 2, 3, 4, 5, 8, 16)


def fit(
    data: Annotated[
        list[str],
        typer.Argument(
            metavar="DATA...", help="Prepared data, or raw files or a directory of them: then add --label."
        ),
    ],
    out: Annotated[
        Path, typer.Option("--out", help="Directory for all stages, the report and the artifact.")
    ],
    label: Annotated[
        str | None,
        typer.Option(
            "--label",
            help="The column that says whether there was a click.",
            rich_help_panel=RAW_FILES,
        ),
    ] = None,
    positive: Positive = None,
    weight: Annotated[
        str | None,
        typer.Option("--weight", metavar="COLUMN", help="The rows' weights.", rich_help_panel=RAW_FILES),
    ] = None,
    group: Annotated[
        str | None,
        typer.Option(
            "--group",
            metavar="COLUMN",
            help="Also report the mean AUC within groups, such as users.",
            rich_help_panel=RAW_FILES,
        ),
    ] = None,
    separator: Separator = None,
    drop_unlabelled: DropUnlabelled = False,
    ignore: Ignore = None,
    scores: Annotated[
        str | None,
        typer.Option(
            "--scores",
            metavar="COLUMN|FILE",
            help="Your own model's scores, to compare with and to learn from.",
            rich_help_panel=RAW_FILES,
        ),
    ] = None,
    schema: Annotated[
        Path | None,
        typer.Option("--schema", help="schema.toml.  [default: inferred]", rich_help_panel=RAW_FILES),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            "--split",
            metavar="RULE",
            autocompletion=complete_split,
            help="8:1:1, by rule: random, time or hash:COLUMN.  [default: time, if there is one]",
            rich_help_panel=RAW_FILES,
        ),
    ] = None,
    config: RecipeFile = None,
    preset: Preset = PresetName.default,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            autocompletion=complete_model,
            help="The student: a model, or auto: RECAP or FCN by validation.  [default: recap]",
            rich_help_panel=RECIPE,
        ),
    ] = None,
    teacher_model: TeacherModel = None,
    teachers: Teachers = None,
    budget: Annotated[
        float | None,
        typer.Option("--budget", min=0.1, help="Minutes to take, from the first row read to the artifact."),
    ] = None,
    settings: Set = None,
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed", min=0, max=999, help="Seed of the student.  [default: 1]", rich_help_panel=RECIPE
        ),
    ] = None,
    keep_state: Annotated[
        bool,
        typer.Option(
            "--keep-state",
            rich_help_panel=OUTPUT,
            help="Keep in the artifact what `recap update` needs besides the model.",
        ),
    ] = False,
    track: Track = None,
    threads: TrainThreads = None,
    device: Device = None,
    engine: Engine = "local",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train one model that does the work of an ensemble, from a click log or from prepared data.

    The references are trained first: logistic regression, and LightGBM where it is installed. Then models of different
    kinds race, those that are best on validation rows teach one student, and the best model of all is shipped. With
    --teachers N, fit follows the paper: a probe finds the settings, and N teachers of one model teach the student. An
    artifact is there after the first stage, and is replaced by better ones; Ctrl-C ships the best so far, and the same
    command goes on. After a change of settings, only the stages that depend on them are done again. --set takes any key
    of a recipe (docs/reference/recipe.md).

    Example: recap fit clicks.parquet --label click --budget 10 --out model

    Example: recap fit logs/ --label event --positive buy --weight importance --drop-unlabelled --out model

    Example: recap fit data --teachers 5 --set routes=4 --set train.patience=5 --out model
    """
    limit_threads(threads)
    require_torch()
    from recap_ctr.pages.race import time_sentences
    from recap_ctr.recipe.fit import fit as fit_recipe
    from recap_ctr.storage.places import is_remote, shown

    options = {
        "model": model,
        "teacher_model": teacher_model,
        "teachers": teachers,
        "seed": seed,
    }
    result = fit_recipe(
        data,
        out=out,
        label=label,
        positive=positive,
        weight=weight,
        group=group,
        separator=separator,
        drop_unlabelled=drop_unlabelled,
        ignore=ignore or (),
        scores=scores,
        schema=schema,
        split=split,
        config=config,
        preset=preset.value,
        settings=merged_settings(drop_unset(options), settings),
        budget=budget,
        threads=threads,
        device=device,
        executor=engine,
        keep_state=keep_state,
        track=None if track is None else track.value,
        command=this_command(),
        quiet=quiet,
    )
    if as_json:
        print_json(result.report.to_json())
        return
    print_fit(result.report)
    for sentence in (result.summary, *time_sentences(result.report), *result.forecast_check):
        typer.echo(sentence)
    tell(quiet, f"Open {result.page} for figures and charts.")
    artifact = shown(out) if is_remote(out) else result.artifact
    tell(quiet, f"Next: recap predict {artifact} rows.csv --out scores.csv")


def merged_settings(options: dict[str, Any], settings: list[str] | None) -> dict[str, Any]:
    """Return the settings of options with those of repeated --set on top of them."""
    from recap_ctr.recipe.config import merge_settings

    return merge_settings(options, parse_settings(settings))


def plan(
    data: Annotated[
        Path | None,
        typer.Argument(help="A directory that `recap prepare` wrote; none with --rows."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Directory for the runs; `recap fit` goes on there.")
    ] = None,
    rows: Annotated[
        float | None,
        typer.Option("--rows", min=10, help="Plan for this many rows, without data, such as 4.3e9."),
    ] = None,
    vocabulary: Annotated[
        float | None,
        typer.Option("--vocabulary", min=3, help="With --rows: distinct values over all fields."),
    ] = None,
    workers: Annotated[
        int, typer.Option("--workers", min=1, help="With --rows: processes that train one model.")
    ] = 1,
    fields: Annotated[int, typer.Option("--fields", min=2, help="With --rows: fields of a row.")] = 39,
    model: Annotated[
        str, typer.Option("--model", autocompletion=complete_model, help="With --rows: model by name.")
    ] = "fcn",
    dim: Annotated[
        int | None,
        typer.Option("--dim", min=1, help="With --rows: size of a value's vector.  [default: the model's]"),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            "--batch-size", min=2, help="With --rows: rows of a step over all workers.  [default: 4096]"
        ),
    ] = None,
    ratio: Annotated[
        str, typer.Option("--ratio", help="With --rows: train:valid:test, as `recap prepare` has it.")
    ] = "8:1:1",
    gigabits: Annotated[
        float, typer.Option("--network", min=0.001, help="With --rows: a worker's network in Gbit/s.")
    ] = 10.0,
    disk_mb: Annotated[
        float, typer.Option("--disk", min=0.001, help="With --rows: a worker's disk in MB/s.")
    ] = 500.0,
    budget: Annotated[
        float | None, typer.Option("--budget", min=0.1, help="Minutes that teachers and student may take.")
    ] = None,
    num_runs: Annotated[
        int,
        typer.Option("--runs", min=2, help="Teachers to train for the forecast; three say more than two."),
    ] = 2,
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
    """Forecast what more teachers, averaged weights and routes would gain and cost, and recommend a recipe.

    It trains the recipe's first teachers, and one student from labels only. The forecast follows from how far these and
    the arms of the probe disagree. `recap fit` with the same --out goes on from there, and says how good the forecast
    was.

    With --rows it trains nothing. It says how much disk, memory, network and time data of that size would take, and
    from where on more workers don't help (docs/cluster.md). --set then takes train.KEY and model.KEY.

    Example: recap plan data --budget 60 --out model

    Example: recap plan --rows 4.3e9 --vocabulary 9e8 --workers 64
    """
    from recap_ctr.cli.scale import print_scale, refuse_mixture, workload

    refuse_mixture(data, rows, out, workers)
    if rows is not None:
        require_torch()
        from recap_ctr.recipe.scale import plan_scale, read_speeds

        work = workload(
            rows=rows,
            vocabulary=vocabulary,
            workers=workers,
            fields=fields,
            model=model,
            dim=dim,
            batch_size=batch_size,
            settings=settings,
            ratio=ratio,
            gigabits=gigabits,
            disk_mb=disk_mb,
        )
        scale = plan_scale(work, read_speeds())
        (print_json if as_json else print_scale)(scale)
        return
    assert data is not None
    out = required(out, "--out")
    from recap_ctr.pages.forecast import forecast_sentences
    from recap_ctr.recipe.forecast import RECOMMENDED, forecast

    recipe = open_recipe(
        data,
        out,
        config=config,
        preset=preset,
        settings=merged_settings(drop_unset({"l2": l2}), settings),
        budget=budget,
        threads=threads,
        device=device,
        engine=engine,
        quiet=quiet,
    )
    result = forecast(recipe, runs=num_runs)
    sentences = forecast_sentences(result)
    command = shlex.join(["recap", "fit", str(data), "--config", str(out / RECOMMENDED), "--out", str(out)])
    if as_json:
        print_json({**asdict(result), "words": sentences, "next": command})
        return
    _print_forecast(result)
    for sentence in sentences:
        typer.echo(sentence)
    tell(quiet, f"Next: {command}")


def open_recipe(
    data: Path,
    out: Path,
    *,
    config: Path | None,
    preset: PresetName,
    settings: dict[str, Any],
    threads: int | None,
    device: str | None,
    engine: str,
    quiet: bool,
    budget: float | None = None,
) -> Any:
    """Return the recipe of prepared data in `out`, which must be empty or hold a recipe."""
    limit_threads(threads)
    require_torch()
    from recap_ctr.config import read_toml
    from recap_ctr.data.shards import PreparedData
    from recap_ctr.jobs.engines import device_for
    from recap_ctr.recipe.config import merge_settings, recipe_config
    from recap_ctr.recipe.fit import MARK
    from recap_ctr.recipe.stages import Recipe
    from recap_ctr.storage.claims import take

    values = merge_settings(read_toml(config) if config is not None else {}, settings)
    checked = recipe_config(preset.value, values, str(config or "recipe"))
    take(out, MARK)
    return Recipe(
        checked,
        PreparedData(data),
        out,
        threads=threads,
        device=device_for(engine, device),
        executor=engine,
        budget=budget,
        quiet=quiet,
    )


def _print_forecast(result: "Forecast") -> None:
    choices = {
        "one teacher" if choice.count == 1 else f"mean of {choice.count} teachers": choice
        for choice in result.teachers
        if choice.count in SHOWN_TEACHERS
    }
    choices["student, last weights"] = result.averaging[0]
    for choice in result.routes:
        routes = "one route" if choice.count == 1 else f"{choice.count} routes"
        choices[f"student averaged, {routes}"] = choice
    print_table(
        ["", "valid AUC", "logloss", "other runs", "minutes", "parameters", "µs a row"],
        [
            [
                name,
                "" if choice.auc is None else f"{100 * choice.auc.value:.3f}",
                f"{choice.loss.value:.5f}",
                ""
                if choice.loss.runs_low is None
                else f"{choice.loss.runs_low:.5f} to {choice.loss.runs_high:.5f}",
                f"{choice.minutes:.0f}",
                f"{choice.parameters:,}",
                f"{choice.microseconds:.2f}",
            ]
            for name, choice in choices.items()
        ],
    )


def demo(
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Directory for everything that the demo writes.  [default: recap-demo or recap-demo-full]",
        ),
    ] = None,
    rows: Annotated[
        int | None,
        typer.Option(
            "--rows", min=5_000, help="How many synthetic rows.  [default: 100000, with --full 150000]"
        ),
    ] = None,
    full: Annotated[
        bool,
        typer.Option("--full", help="Show instead what each part of RECAP adds, in about five minutes."),
    ] = False,
    seed: Annotated[
        int, typer.Option("--seed", min=0, max=999, help="Seed of the rows and of the students.")
    ] = 1,
    threads: TrainThreads = None,
    force: Force = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Try everything on synthetic data in two minutes: draw rows, prepare, fit, compare, and score ten rows.

    The table compares the model with its references and with the best possible model. With --full it compares RECAP
    with its parts: averaged weights, teachers and routes. If it is interrupted, the same command resumes.

    Example: recap demo --rows 50000

    Example: recap demo --full
    """
    limit_threads(threads)
    require_torch()
    from recap_ctr.demo import HEADER, QUICK_HEADER, cells, run_demo, run_full_demo

    out = out or Path("recap-demo-full" if full else "recap-demo")
    rows = rows or (150_000 if full else 100_000)
    if full:
        result = run_full_demo(out, rows=rows, seed=seed, threads=threads or 1, force=force, quiet=quiet)
    else:
        result = run_demo(out, rows=rows, seed=seed, threads=threads, force=force, quiet=quiet)
    if as_json:
        print_json(result)
        return
    if full:
        print_table(HEADER, [cells(row) for row in result["table"]])
    else:
        print_table(QUICK_HEADER, result["table"])
    print_table(result["scored"]["columns"], result["scored"]["rows"])
    typer.echo(result["finding"]["text"])
    tell(
        quiet,
        f"Everything is in {out}: the raw log, the prepared data, every run, report.html and the artifact.",
    )
    tell(quiet, f"Next: recap predict {out}/artifact {out}/ten.csv")
