"""Commands that train: one model, a search for its settings, what models there are, and logits for a student."""

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from recap_ctr.cli.options import (
    ArtifactPath,
    ColumnsPer,
    Device,
    Engine,
    Force,
    Json,
    ModelName,
    PreparedPath,
    Quiet,
    RunConfigFile,
    Set,
    SplitName,
    Threads,
    Track,
    TrainSeed,
    TrainThreads,
    drop_unset,
    limit_threads,
    parse_settings,
    require_torch,
    this_command,
)
from recap_ctr.cli.output import print_json, print_report, print_table, tell, tell_up_to_date
from recap_ctr.errors import InputError

if TYPE_CHECKING:
    from recap_ctr.recipe.tune import TuneRecord
    from recap_ctr.training.config import RunConfig

INDENT = " " * 4
TABLES = ("train", "model")
RUN_SETTINGS = ("calibration", "negative_rate", "route_choice", "slices")
"""Settings of a run that are neither the model's nor those of its training."""


def train(
    data: PreparedPath,
    out: Annotated[Path, typer.Option("--out", help="Directory for the run: state, report, artifact.")],
    model: ModelName = None,
    config: RunConfigFile = None,
    l2: Annotated[float | None, typer.Option("--l2", help="Strength of the embedding regulariser.")] = None,
    max_epochs: Annotated[
        int | None, typer.Option("--max-epochs", min=1, help="Most epochs of the run.  [default: 100]")
    ] = None,
    routes: Annotated[
        int, typer.Option("--routes", min=1, help="For recap: routes that the artifact averages.")
    ] = 1,
    teachers: Annotated[
        list[Path] | None,
        typer.Option(
            "--teacher",
            help="A teacher's logit table of the training rows; repeatable: their mean is taught.",
        ),
    ] = None,
    baseline: Annotated[
        bool,
        typer.Option(
            "--baseline/--no-baseline", help="Train logistic regression and LightGBM for comparison."
        ),
    ] = True,
    workers: Annotated[
        int,
        typer.Option(
            "--workers",
            min=1,
            max=1024,
            help="Processes that train the model together, each with its share of the table's rows.",
        ),
    ] = 1,
    window: Annotated[
        int | None,
        typer.Option(
            "--window",
            min=0,
            help="Rows that are shuffled together in memory, for more rows than fit; 0: all."
            "  [default: 0, or 1048576 if rows take over 16 GiB or half of the memory]",
        ),
    ] = None,
    settings: Set = None,
    seed: TrainSeed = None,
    track: Track = None,
    threads: TrainThreads = None,
    device: Device = None,
    engine: Engine = "local",
    force: Force = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a model, calibrate and evaluate it, and pack the artifact. After an interruption, the same command resumes.

    --set takes train.KEY and model.KEY (docs/reference/settings.md has all keys), card.KEY (docs/reference/recipe.md),
    calibration, negative_rate, route_choice and slices. On several machines, start it with torchrun, without --workers.

    Example: recap train data --model fcn --l2 0.01 --out run

    Example: recap train data --model recap --routes 8 --set train.patience=3 --set model.depth=3 --out run
    """
    limit_threads(threads)
    require_torch()
    from recap_ctr.config import parse
    from recap_ctr.data.shards import PreparedData
    from recap_ctr.inference.about import About
    from recap_ctr.recipe.ship import write_about
    from recap_ctr.storage.places import input_directory, is_remote, shown
    from recap_ctr.training.report import record_command
    from recap_ctr.training.tracking import check_tracker, tracked_by
    from recap_ctr.training.workers import checks_data, output, torchrun_member, train_where

    tracker = check_tracker(track)
    prepared, chosen = PreparedData(data, verify=checks_data()), parse_settings(settings)
    about = parse(About, chosen.pop("card", {}), "--set card")
    training = drop_unset({"l2": l2, "max_epochs": max_epochs, "seed": seed, "window_rows": window})
    run_config = _run_config(
        prepared,
        model,
        config,
        training,
        chosen,
        threads=threads,
        device=device,
        engine=engine,
        train_baseline=baseline,
        teachers=tuple(input_directory(teacher) for teacher in teachers or ()),
        routes=routes,
    )
    with (
        torchrun_member(run_config.device) as group,
        output(out, group) as directory,
        tracked_by(tracker if group.is_first else None, directory, quiet=quiet) as log_report,
    ):
        report = train_where(
            run_config, prepared, directory, group, workers, engine, force=force, quiet=quiet
        )
        if not group.is_first:  # The first worker has the whole report.
            return
        report = record_command(directory, report, this_command())
        write_about(directory, about, prepared)
        log_report(report)
    if as_json:
        print_json(report.to_json())
        return
    print_report(report)
    figures = report.metrics.held_out
    if figures.explained < 0:
        tell(
            quiet,
            "These scores are worse than the base rate alone: too few rows to calibrate on, or a wrong setting.",
        )
    tell(
        quiet,
        f"{report.model.name} explains {figures.explained:.1%} of the base rate's logloss on held-out rows"
        f" (epoch {report.best_epoch} was best).",
    )
    tell(
        quiet,
        f"Next: recap predict {shown(out) if is_remote(out) else out / 'artifact'} rows.csv --out scores.csv",
    )


def _run_config(
    prepared: Any,
    model: str | None,
    config: Path | None,
    training: dict[str, Any],
    settings: dict[str, Any],
    *,
    threads: int | None,
    device: str | None,
    engine: str = "local",
    **options: Any,
) -> "RunConfig":
    """Return the run that files, options and --set describe; --set wins over options, options over the file."""
    from recap_ctr.config import TrainConfig, parse
    from recap_ctr.jobs.engines import device_for
    from recap_ctr.models.catalogue import parse_model
    from recap_ctr.recipe.config import RecipeConfig
    from recap_ctr.training.config import RunConfig, default_threads, settings_for

    _check_names(settings)
    base = settings_for(model, config)
    model_config = parse_model(base.model, {**base.model_settings, **settings.get("model", {})})
    train_settings = {**base.train, **training, **settings.get("train", {})}
    # These are settings of a recipe too, which has the rules for their values.
    checked = parse(RecipeConfig, {key: settings[key] for key in RUN_SETTINGS if key in settings}, "--set")
    return RunConfig(
        model=base.model,
        model_config=model_config,
        train=parse(TrainConfig, train_settings, str(config or "train")),
        threads=threads or default_threads(model_config, prepared.layout),
        device=device_for(engine, device),
        **{key: getattr(checked, key) for key in RUN_SETTINGS},
        **options,
    )


def _check_names(settings: dict[str, Any]) -> None:
    """Refuse a --set whose first word is neither a table of a run's settings nor one of `RUN_SETTINGS`."""
    for name, value in settings.items():
        is_table = isinstance(value, dict)
        if name not in (TABLES if is_table else RUN_SETTINGS):
            shown = f"{name}.{next(iter(value))}" if is_table else name
            raise InputError(
                f"--set {shown}: no such setting",
                fix=f"use {', '.join((*(f'{table}.KEY' for table in TABLES), *RUN_SETTINGS))}",
            )


def tune(
    data: PreparedPath,
    out: Annotated[Path, typer.Option("--out", help="Directory for the study; a second call goes on there.")],
    model: ModelName = None,
    space: Annotated[
        str | None,
        typer.Option(
            "--space",
            help="TOML file of what to search, or package.module:SPACE.  [default: the model's published settings]",
        ),
    ] = None,
    config: RunConfigFile = None,
    trials: Annotated[int, typer.Option("--trials", min=1, help="How many trials in all.")] = 30,
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", min=0.01, help="Minutes after which to stop; the same command goes on."),
    ] = None,
    prune_after: Annotated[
        int,
        typer.Option("--prune-after", min=1, help="Epochs after which a trial that lags may be given up."),
    ] = 8,
    settings: Set = None,
    seed: TrainSeed = None,
    threads: TrainThreads = None,
    device: Device = None,
    engine: Engine = "local",
    force: Force = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Search for the settings of a model with the best validation AUC. Test rows are never read.

    The first trial has the settings of --config, or the default ones, and all others are compared with it. After an
    interruption, the same command goes on.

    Example: recap tune data --model dcnv2 --trials 40 --out tuned
    """
    limit_threads(threads)
    require_torch()
    from recap_ctr.data.shards import PreparedData
    from recap_ctr.recipe.spaces import named_space
    from recap_ctr.recipe.study import Search
    from recap_ctr.recipe.tune import tune as search

    prepared = PreparedData(data)
    base = _run_config(
        prepared,
        model,
        config,
        drop_unset({"seed": seed}),
        parse_settings(settings),
        threads=threads,
        device=device,
        engine=engine,
    )
    study = Search(base, named_space(base.model, space), prune_after)
    record = search(
        study,
        prepared,
        out,
        trials=trials,
        minutes=timeout,
        executor=engine,
        force=force,
        quiet=quiet,
    )
    if as_json:
        print_json(record.to_json())
        return
    _print_trials(record)
    tell(quiet, f"Next: recap train {data} --config {out / 'best.toml'} --out run")


def _print_trials(record: "TuneRecord", count: int = 5) -> None:
    from recap_ctr.recipe.tune import in_words

    complete = [trial for trial in record.trials if trial.state == "complete"]
    rows = []
    for trial in sorted(complete, key=lambda trial: -(trial.valid_auc or 0.0))[:count]:
        changed = {key: value for key, value in trial.settings.items() if value != record.started_from[key]}
        rows.append(
            [
                str(trial.number),
                f"{100 * (trial.valid_auc or 0.0):.3f}",
                str(len(trial.valid_aucs)),
                f"{trial.seconds:.0f} s",
                f"{trial.parameters:,}",
                in_words(changed),
            ]
        )
    print_table(["trial", "valid AUC", "epochs", "time", "parameters", "changed"], rows)
    summary = f"{len(record.trials)} trials, {len(record.trials) - len(complete)} of them pruned"
    if record.exhausted:
        summary += ", and hardly any other setting is left to try"
    if record.base is not None and record.best.number == record.base.number:
        typer.echo(f"{summary}: none is better than the settings it began with.")
        return
    auc = 100 * (record.best.valid_auc or 0.0)
    typer.echo(f"{summary}: trial {record.best.number} is best, with a validation AUC of {auc:.3f}.")
    if record.gain is not None:
        error = record.gain.standard_error
        margin = "" if error is None else f" ± {100 * error:.3f}"
        typer.echo(
            f"That is {100 * record.gain.auc:.3f}{margin} points ahead of the settings it began with; validation"
            " chose it, so expect somewhat less on other rows."
        )


def models(as_json: Json = False, quiet: Quiet = False) -> None:
    """List all models: what each is good for, how large it is on MovieLens-1M, and where it comes from.

    Example: recap models --json
    """
    require_torch()
    from recap_ctr.models.catalogue import catalogue

    entries = catalogue()
    if as_json:
        print_json({"models": entries})
        return
    for entry in entries:
        typer.echo(f"{entry['name']}: {entry['parameters']:,} parameters on ML-1M")
        for text in (entry["purpose"], entry["paper"]):
            typer.echo(textwrap.fill(text, 100, initial_indent=INDENT, subsequent_indent=INDENT))
    tell(quiet, f"{len(entries)} models; any of them can be trained, teach, and be taught.")
    tell(quiet, "Next: recap fit DATA --out model, or for one alone: recap train DATA --model NAME --out run")


def logits(
    artifact: ArtifactPath,
    data: Annotated[Path, typer.Argument(help="The prepared data it was trained on.")],
    out: Annotated[Path, typer.Option("--out", help="Directory or URL for the logit table.")],
    split: Annotated[SplitName, typer.Option("--split", help="Which rows.")] = SplitName.train,
    per: Annotated[
        ColumnsPer,
        typer.Option(
            "--per", help="One column for the whole model, each route, each checkpoint, or a grid of both."
        ),
    ] = ColumnsPer.model,
    name: Annotated[
        str | None, typer.Option("--run", help="Name of the run in the table.  [default: model and seed]")
    ] = None,
    threads: Threads = None,
    device: Device = None,
    force: Force = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a model's logits for prepared rows to a logit table, which `recap train --teacher` can learn from.

    Example: recap logits run data --split train --out teacher-1

    Example: recap logits run data --split test --per route --out routes
    """
    require_torch()
    import torch

    from recap_ctr.axes.logits import MANIFEST
    from recap_ctr.axes.predict import write_logits
    from recap_ctr.data.shards import PreparedData
    from recap_ctr.inference.manifest import read_artifact_manifest
    from recap_ctr.jobs.machine import num_cores, pick_device
    from recap_ctr.storage.claims import is_made, is_occupied
    from recap_ctr.storage.hashes import fingerprint
    from recap_ctr.storage.places import output_directory, shown
    from recap_ctr.training.estimators import load_estimators

    prepared, manifest = PreparedData(data), read_artifact_manifest(artifact)
    if manifest["data"]["fingerprint"] != prepared.fingerprint:
        raise InputError(
            f"{artifact} was trained on other data than {data}", fix="name the data it was trained on"
        )
    inputs = {
        "artifact": manifest,
        "data": prepared.fingerprint,
        "split": split.value,
        "run": name,
        "per": per.value,
    }
    with output_directory(out) as directory:
        if is_occupied(directory) and not (directory / MANIFEST).is_file():
            raise InputError(f"{shown(out)} exists and is not a logit table", fix="choose another --out")
        if is_occupied(directory) and is_made(directory, inputs, force=force):
            tell_up_to_date(out, as_json, quiet)
            return
        torch.set_num_threads(threads or num_cores())
        on = torch.device(pick_device(device))
        estimators = load_estimators(artifact, name, per.value)
        columns = {estimator: model.to(on) for estimator, model in estimators.items()}
        write_logits(directory, columns, prepared, split.value, on, inputs=fingerprint(inputs))
    run_name, rows = next(iter(columns)).run, len(getattr(prepared, split.value))
    if as_json:
        print_json(
            {
                "out": shown(out),
                "rows": rows,
                "split": split.value,
                "run": run_name,
                "estimators": len(columns),
            }
        )
        return
    tell(quiet, f"{shown(out)}: {rows:,} {split.value} rows of {run_name}, {len(columns)} columns.")
    is_teacher = split is SplitName.train
    use = (
        f"recap train {shown(data)} --teacher {shown(out)} --out student"
        if is_teacher
        else "recap_ctr.diagnose"
    )
    tell(quiet, f"Next: {use}")
