"""The `recap` command. Each subcommand is thin, and imports what it needs only when it runs."""

import errno
import json
import math
import os
import re
import shlex
import sys
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from recap_ctr.errors import InputError
from recap_ctr.jobs.local import JobError
from recap_ctr.jobs.machine import num_cores
from recap_ctr.jobs.progress import say

if TYPE_CHECKING:
    from recap_ctr.data.source import FileSource

SHOWN_TEACHERS = (1, 2, 3, 4, 5, 8, 16)
RECIPE = "recipe.json"  # the mark of a directory that holds a recipe's stages
INDENT = " " * 4
FEWEST_OF_A_CLASS = 10  # rows, for an AUC's error to mean something
INTERRUPTED = 130  # typer's exit code for Ctrl-C
PATH_ERRORS = (
    errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP
)  # fmt: skip

app = typer.Typer(
    name="recap",
    help="Click-through-rate prediction: from a raw click log to one deployable model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
schema_app = typer.Typer(
    help="The contract that says which column is what.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(schema_app, name="schema")

Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object on standard output.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing while working.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an output that was made from other inputs.")]
Seed = Annotated[int, typer.Option("--seed", min=0, max=2**31 - 1, help="Seed of everything random.")]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        min=1,
        max=1024,
        help="Threads to compute with.  [default: all cores]",
    ),
]
TrainThreads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        min=1,
        max=1024,
        help="Threads to train with; part of a run's record.  [default: one for narrow models, else all cores]",
    ),
]
Device = Annotated[
    str | None, typer.Option("--device", help="cpu, cuda or mps.  [default: the fastest there is]")
]
Columns = Annotated[
    list[str] | None,
    typer.Option("--map", metavar="FIELD=COLUMN", help="A field stands in another column; repeatable."),
]

RawRows = Annotated[list[str], typer.Argument(metavar="ROWS...", help="Raw rows; - is standard input.")]
ScoresOut = Annotated[
    Path | None,
    typer.Option(
        "--out", help="File to write (.csv, .tsv, .parquet, .arrow).  [default: CSV to standard output]"
    ),
]
UsedRoutes = Annotated[
    int | None,
    typer.Option("--routes", min=1, help="Score on so many of the artifact's routes.  [default: all]"),
]
UsedDepth = Annotated[
    int | None, typer.Option("--depth", min=1, help="Score at this trained depth.  [default: the full one]")
]


@schema_app.command("infer")
def schema_infer(
    files: Annotated[
        list[str], typer.Argument(metavar="FILE...", help="CSV, TSV, Parquet or Arrow; .gz and .zst too.")
    ],
    label: Annotated[
        str, typer.Option("--label", help="The column that says whether there was a click (0/1).")
    ],
    out: Annotated[Path, typer.Option("--out", help="Where to write the schema.")],
    rows: Annotated[int, typer.Option("--rows", min=1, help="How many rows to look at.")] = 1_000_000,
    columns: Annotated[
        str | None, typer.Option("--columns", help="Names, comma-separated, for files without a header line.")
    ] = None,
    threads: Threads = None,
    force: Force = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Propose a schema for a raw table, with the reason for every choice.

    Example: recap schema infer clicks.csv --label click --out schema.toml
    """
    _limit_threads(threads)
    from recap_ctr.data.infer import infer
    from recap_ctr.data.source import FileSource
    from recap_ctr.storage.claims import is_made, record
    from recap_ctr.storage.files import atomic_file

    source = FileSource(files, columns.split(",") if columns else None)
    inputs = _inputs(source, label=label, rows=rows, columns=columns)
    if is_made(out, inputs, force=force):
        _report_made(out, as_json, quiet)
        return
    inferred = infer(source, label, max_rows=rows)
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(out) as file:
        file.write(inferred.to_toml().encode())
    record(out, inputs)
    findings = [vars(finding) for finding in inferred.findings]
    if as_json:
        _print_json({"out": str(out), "columns": findings})
        return
    _table(["column", "verdict", "reason"], [list(map(str, finding.values())) for finding in findings])
    fields = len(inferred.schema.fields)
    _tell(
        quiet,
        f"{out}: {fields} fields. Read it, change what you know better, then: recap prepare ... --schema {out}",
    )


@app.command()
def prepare(
    sources: Annotated[
        list[str] | None, typer.Argument(metavar="SOURCE...", help="Raw files; globs are taken.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Directory for the prepared data.")] = None,
    schema: Annotated[Path | None, typer.Option("--schema", help="schema.toml")] = None,
    valid: Annotated[
        list[str] | None, typer.Option("--valid", help="Validation files, if they are separate.")
    ] = None,
    test: Annotated[
        list[str] | None, typer.Option("--test", help="Test files, if they are separate.")
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            "--split", help="random or time (order of the schema's time column).  [default: random]"
        ),
    ] = None,
    ratio: Annotated[
        str | None, typer.Option("--ratio", help="train:valid:test for random and time.  [default: 8:1:1]")
    ] = None,
    split_column: Annotated[
        str | None, typer.Option("--split-column", help="A column that says train, valid or test.")
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option("--dataset", help="A data set by its protocol: ml-1m, or package.module:PROTOCOL."),
    ] = None,
    raw: Annotated[
        Path | None, typer.Option("--raw", help="Directory with that data set's raw files.")
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check/--no-check",
            help="Compare a --dataset with its published figures; not for a part of it, or generated rows.",
        ),
    ] = True,
    seed: Seed = 1,
    threads: Threads = None,
    force: Force = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Encode a raw table into memory-mapped shards: streaming, in bounded memory, checked row by row.

    Example: recap prepare clicks.csv --schema schema.toml --out data

    Example: recap prepare --dataset ml-1m --raw ml-1m/ --out data/ml-1m
    """
    _limit_threads(threads)
    from recap_ctr.data.prepare import Preparation, Split, parse_ratio
    from recap_ctr.data.prepare import prepare as prepare_data
    from recap_ctr.data.source import FileSource, Source
    from recap_ctr.datasets.catalogue import protocol
    from recap_ctr.schema import read_schema

    target = _required(out, "--out")
    ways = {
        "--split": split,
        "--split-column": split_column,
        "--valid/--test": valid or test,
        "--dataset": dataset,
    }
    given = [option for option, value in ways.items() if value]
    if len(given) > 1:
        raise InputError(f"{' and '.join(given)} each say how to split", fix="give one of them")
    if ratio and given not in ([], ["--split"]):
        raise InputError(f"--ratio does not go with {given[0]}", fix="leave it away")
    if raw and not dataset:
        raise InputError("--raw goes with --dataset", fix="add --dataset NAME")
    if not check and not dataset:
        raise InputError("--no-check goes with --dataset", fix="add --dataset NAME, or leave it away")
    public = None
    if dataset is not None:
        if sources or schema:
            raise InputError(
                "--dataset brings its own files and schema", fix="leave SOURCE and --schema away"
            )
        public = protocol(dataset)
        preparation = public.preparation(_required(raw, "--raw"), check=check)
    else:
        if not sources:
            raise InputError(
                "no source file given", fix="recap prepare clicks.csv --schema schema.toml --out data"
            )
        fields = read_schema(_required(schema, "--schema"))
        kind = split or "random"
        if kind not in ("random", "time"):
            raise InputError(f"--split {kind}: known are random and time")
        rule = Split(kind=kind, ratio=parse_ratio(ratio or "8:1:1"), seed=seed)
        tables: dict[str, Source] = {"all": FileSource(sources, fields.columns)}
        if valid or test:
            if not valid:
                raise InputError(
                    "--test without --valid", fix="give validation files too, or let --ratio split"
                )
            rule = Split(kind="files")
            tables = {"train": tables["all"], "valid": FileSource(valid, fields.columns)}
            if test:
                tables["test"] = FileSource(test, fields.columns)
        elif split_column:
            rule = Split(kind="column", column=split_column)
        preparation = Preparation(fields, tables, rule)
    data, done = prepare_data(preparation, target, force=force, quiet=quiet)
    if public is not None and raw is not None and check:
        public.check(data, raw, quiet=quiet)
    splits = data.manifest["splits"]
    result: dict[str, Any] = {
        "out": str(target),
        "name": data.name,
        "done_before": done,
        "fingerprint": data.fingerprint,
        "vocabulary": {field["name"]: field["size"] for field in data.manifest["fields"]},
        "splits": {
            name: {key: split[key] for key in ("rows", "positives")} for name, split in splits.items()
        },
    }
    if as_json:
        _print_json(result)
        return
    rows = [
        [name, f"{s['rows']:,}", f"{s['positives'] / max(s['rows'], 1):.2%}"] for name, s in splits.items()
    ]
    _table(["split", "rows", "clicked"], rows)
    sizes = sorted(result["vocabulary"].items(), key=lambda item: -item[1])
    largest = ", ".join(f"{name} {size:,}" for name, size in sizes[:3])
    said = f"{target} stands as prepared before." if done else f"{target} is ready."
    _tell(
        quiet,
        f"{said} {data.layout.num_fields} fields, {data.layout.num_rows:,} table rows (largest: {largest}).",
    )
    if public is not None and data.name != public.name:
        _tell(quiet, f"Not seen to be the published rows: reports call them {data.name}.")
    _tell(quiet, f"Next: recap train {target} --model fcn --out run")


@app.command()
def datasets(as_json: Json = False, quiet: Quiet = False) -> None:
    """List the public data sets that `recap prepare --dataset` knows, and where their raw files come from.

    Example: recap datasets --json
    """
    from recap_ctr.datasets.catalogue import DATASETS, protocol

    described = [protocol(name).describe() for name in DATASETS]
    if as_json:
        _print_json({"datasets": described})
        return
    _table(
        ["name", "title", "rows", "fields", "recap download"],
        [
            [d["name"], d["title"], f"{d['rows']:,}", str(d["fields"]), "yes" if d["download"] else "no"]
            for d in described
        ],
    )
    _table(["name", "raw files"], [[d["name"], ", ".join(d["files"])] for d in described])
    _table(["name", "licence", "from"], [[d["name"], d["licence"], d["homepage"]] for d in described])
    ready = [d["name"] for d in described if d["download"]]
    _tell(
        quiet,
        f"{len(described)} data sets; recap download fetches {', '.join(ready)}, the others come by hand.",
    )
    _tell(quiet, "Next: recap prepare --dataset NAME --raw DIR --out data")


@app.command()
def download(
    name: Annotated[str, typer.Argument(help="A data set that `recap datasets` says can be downloaded.")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to put its raw files.")],
    force: Annotated[bool, typer.Option("--force", help="Fetch files anew that are there.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Fetch a public data set's raw files from their publisher and check them. Interrupted, the same command resumes.

    Example: recap download ml-1m raw/ml-1m
    """
    from recap_ctr.datasets.catalogue import DATASETS, protocol
    from recap_ctr.datasets.download import download as fetch

    public = protocol(name)
    if public.archive is None:
        free = [other for other in DATASETS if protocol(other).archive]
        raise InputError(
            f"no download of {public.title}; there is one of {', '.join(free)}",
            fix=f"get {', '.join(public.files)} from {public.homepage}",
        )
    done = fetch(public.archive, public.files, directory, force=force, quiet=quiet)
    if as_json:
        _print_json({"out": str(directory), "files": list(public.files), "done_before": done})
        return
    said = "stand there already" if done else "are there, as published"
    _tell(quiet, f"{directory}: {', '.join(public.files)} {said}. Licence: {public.licence}.")
    _tell(quiet, f"Next: recap prepare --dataset {name} --raw {directory} --out data/{name}")


@app.command()
def train(
    data: Annotated[Path, typer.Argument(help="A directory that `recap prepare` wrote.")],
    out: Annotated[Path, typer.Option("--out", help="Directory for the run: state, report, artifact.")],
    model: Annotated[str | None, typer.Option("--model", help="Model by name.  [default: fcn]")] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="TOML with [model] and [train] settings.")
    ] = None,
    l2: Annotated[float | None, typer.Option("--l2", help="Strength of the embedding regulariser.")] = None,
    learning_rate: Annotated[
        float | None, typer.Option("--learning-rate", help="Adam's step size.  [default: 0.001]")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", help="Rows a step.  [default: 4096]")
    ] = None,
    max_epochs: Annotated[
        int | None, typer.Option("--max-epochs", help="Stop here at the latest.  [default: 100]")
    ] = None,
    patience: Annotated[
        int | None, typer.Option("--patience", help="Epochs without gain before stopping.")
    ] = None,
    update: Annotated[
        str | None, typer.Option("--update", help="exact (published protocol) or fast (row-sparse).")
    ] = None,
    schedule: Annotated[str | None, typer.Option("--schedule", help="plateau, cosine or constant.")] = None,
    ema: Annotated[
        float | None, typer.Option("--ema", help="Average the weights with this beta, such as 0.998.")
    ] = None,
    ema_epochs: Annotated[
        str | None,
        typer.Option(
            "--ema-epochs", help="Horizons of such averages in epochs, such as 2,4: the best is taken."
        ),
    ] = None,
    checkpoints: Annotated[
        int | None, typer.Option("--checkpoints", help="Keep the raw weights of so many last epochs.")
    ] = None,
    routes: Annotated[
        int, typer.Option("--routes", min=1, help="For recap: routes that the artifact averages.")
    ] = 1,
    route_choice: Annotated[
        str, typer.Option("--route-choice", help="late, random, or greedy (on validation).")
    ] = "late",
    teachers: Annotated[
        list[Path] | None,
        typer.Option(
            "--teacher",
            help="A teacher's logit table of the training rows; repeatable: their mean is taught.",
        ),
    ] = None,
    kd_weight: Annotated[
        float | None, typer.Option("--kd-weight", help="Weight of the distillation loss.  [default: 1]")
    ] = None,
    calibration: Annotated[str, typer.Option("--calibration", help="affine or isotonic.")] = "affine",
    negative_rate: Annotated[
        float, typer.Option("--negative-rate", help="Share of negatives kept in the log.")
    ] = 1.0,
    reference: Annotated[
        bool, typer.Option("--reference/--no-reference", help="Train a logistic regression beside it.")
    ] = True,
    seed: Annotated[
        int | None,
        typer.Option("--seed", min=0, max=2**31 - 1, help="Seed of everything random.  [default: 1]"),
    ] = None,
    threads: TrainThreads = None,
    device: Device = None,
    force: Force = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a model, calibrate and evaluate it, and pack the artifact. Interrupted, the same command resumes.

    Example: recap train data --model fcn --l2 0.01 --out run
    """
    _limit_threads(threads)
    from recap_ctr.data.shards import PreparedData

    given = {
        "l2": l2, "learning_rate": learning_rate, "batch_size": batch_size, "max_epochs": max_epochs,
        "patience": patience, "update": update, "schedule": schedule, "ema": ema, "seed": seed, "kd_weight": kd_weight,
        "ema_epochs": _numbers(ema_epochs, "--ema-epochs"), "checkpoints": checkpoints,
    }  # fmt: skip
    prepared = PreparedData(data)
    runs = _training()
    from recap_ctr.config import TrainConfig, parse
    from recap_ctr.models.catalogue import parse_model

    settings = runs.settings_for(model, config)
    name, model_settings = settings.model, settings.model_settings
    train_settings = {
        **settings.train,
        **{key: value for key, value in given.items() if value is not None},
    }
    if calibration not in ("affine", "isotonic"):
        raise InputError(f"--calibration {calibration}: known are affine and isotonic")
    if route_choice not in ("late", "random", "greedy"):
        raise InputError(f"--route-choice {route_choice}: known are late, random and greedy")
    model_config = parse_model(name, model_settings)
    report = runs.run(
        runs.RunConfig(
            model=name,
            model_config=model_config,
            train=parse(TrainConfig, train_settings, str(config or "train")),
            calibration=calibration,
            negative_rate=negative_rate,
            reference=reference,
            threads=threads or runs.default_threads(model_config, prepared.layout),
            device=_device(device),
            teachers=tuple(teachers or ()),
            routes=routes,
            route_choice=route_choice,
        ),
        prepared,
        out,
        force=force,
        quiet=quiet,
    )
    if as_json:
        _print_json(report)
        return
    _print_report(report)
    last = report["metrics"].get("test") or report["metrics"]["valid"]
    gain = 1 - last["calibrated"]["logloss"] / last["base_rate_logloss"]
    if gain < 0:
        _tell(
            quiet,
            "These scores are worse than the base rate alone: too few rows to calibrate on, or a wrong setting.",
        )
    _tell(
        quiet,
        f"{name} explains {gain:.1%} of the base rate's logloss on held-out rows"
        f" (epoch {report['best_epoch']} was best).",
    )
    _tell(quiet, f"Next: recap predict {out}/artifact rows.csv --out scores.csv")


@app.command()
def tune(
    data: Annotated[Path, typer.Argument(help="A directory that `recap prepare` wrote.")],
    out: Annotated[Path, typer.Option("--out", help="Directory for the study; a second call goes on there.")],
    model: Annotated[str | None, typer.Option("--model", help="Model by name.  [default: fcn]")] = None,
    space: Annotated[
        str | None,
        typer.Option(
            "--space",
            help="TOML of what to search, or package.module:SPACE.  [default: what is published of the model]",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", help="TOML of [model] and [train]: the first trial, and what is not searched."
        ),
    ] = None,
    trials: Annotated[int, typer.Option("--trials", min=1, help="How many there shall be in all.")] = 30,
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", min=0.01, help="Minutes after which to stop; the same command goes on."),
    ] = None,
    prune_after: Annotated[
        int, typer.Option("--prune-after", min=1, help="Epochs before a trial that lags may be given up.")
    ] = 8,
    seed: Annotated[
        int | None,
        typer.Option("--seed", min=0, max=2**31 - 1, help="Seed of everything random.  [default: 1]"),
    ] = None,
    threads: TrainThreads = None,
    device: Device = None,
    force: Force = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Search for a model's settings by validation AUC; test rows are not looked at. Interrupted, it goes on.

    The first trial has the settings of --config, or the default ones; all others are compared with it.

    Example: recap tune data --model dcnv2 --trials 40 --out tuned
    """
    _limit_threads(threads)
    from recap_ctr.data.shards import PreparedData

    prepared = PreparedData(data)
    runs = _training()
    from recap_ctr.config import TrainConfig, parse
    from recap_ctr.models.catalogue import parse_model
    from recap_ctr.recipe.spaces import named_space
    from recap_ctr.recipe.tune import Search
    from recap_ctr.recipe.tune import tune as search

    settings = runs.settings_for(model, config)
    model_config = parse_model(settings.model, settings.model_settings)
    training = {**settings.train, **({} if seed is None else {"seed": seed})}
    base = runs.RunConfig(
        model=settings.model,
        model_config=model_config,
        train=parse(TrainConfig, training, str(config or "train")),
        threads=threads or runs.default_threads(model_config, prepared.layout),
        device=_device(device),
    )
    wanted = Search(base, named_space(settings.model, space), prune_after)
    record = search(wanted, prepared, out, trials=trials, minutes=timeout, force=force, quiet=quiet)
    if as_json:
        _print_json(record)
        return
    _print_trials(record)
    _tell(quiet, f"Next: recap train {data} --config {out / 'best.toml'} --out run")


def _print_trials(record: dict[str, Any], count: int = 5) -> None:
    from recap_ctr.recipe.tune import in_words

    trials, best, began = record["trials"], record["best"], record["started_from"]
    complete = [trial for trial in trials if trial["state"] == "complete"]
    rows = [
        [
            str(trial["number"]),
            f"{100 * trial['valid_auc']:.3f}",
            str(len(trial["valid_aucs"])),
            f"{trial['seconds']:.0f} s",
            f"{trial['parameters']:,}",
            in_words({key: value for key, value in trial["settings"].items() if value != began[key]}),
        ]
        for trial in sorted(complete, key=lambda trial: -trial["valid_auc"])[:count]
    ]
    _table(["trial", "valid AUC", "epochs", "time", "parameters", "changed"], rows)
    ended = f"{len(trials)} trials, {len(trials) - len(complete)} of them pruned"
    if record["exhausted"]:
        ended += ", and there is hardly anything else to try"
    if record["base"] and best["number"] == record["base"]["number"]:
        typer.echo(f"{ended}: none is better than the settings it began with.")
        return
    typer.echo(
        f"{ended}: trial {best['number']} is best, with a validation AUC of {100 * best['valid_auc']:.3f}."
    )
    if (gain := record["gain"]) is not None:
        error = "" if gain["standard_error"] is None else f" ± {100 * gain['standard_error']:.3f}"
        typer.echo(
            f"That is {100 * gain['auc']:.3f}{error} points ahead of the settings it began with; validation chose it,"
            " so expect somewhat less on other rows."
        )


@app.command("models")
def list_models(as_json: Json = False, quiet: Quiet = False) -> None:
    """All models: size on MovieLens-1M, what each is good for, and where it comes from.

    Example: recap models --json
    """
    _training()
    from recap_ctr.models.catalogue import catalogue

    found = catalogue()
    if as_json:
        _print_json({"models": found})
        return
    for entry in found:
        typer.echo(f"{entry['name']}: {entry['parameters']:,} parameters on ML-1M")
        for text in (entry["purpose"], entry["paper"]):
            typer.echo(textwrap.fill(text, 100, initial_indent=INDENT, subsequent_indent=INDENT))
    _tell(quiet, f"{len(found)} models; any of them can be trained, teach, and be taught.")
    _tell(
        quiet, "Next: recap fit DATA --out model, or for one alone: recap train DATA --model NAME --out run"
    )


Recipe = Annotated[
    Path | None, typer.Option("--config", help="TOML of the recipe; options given here go before it.")
]
Preset = Annotated[str, typer.Option("--preset", help="default, or paper: the paper's own settings.")]
Teachers = Annotated[int | None, typer.Option("--teachers", min=0, help="How many teachers.  [default: 5]")]
TeacherModel = Annotated[
    str | None, typer.Option("--teacher-model", help="Model of the teachers.  [default: fcn]")
]
L2 = Annotated[
    float | None, typer.Option("--l2", help="Strength of the embedding regulariser; skips the probe.")
]


@app.command()
def fit(
    data: Annotated[
        list[str], typer.Argument(metavar="DATA...", help="Prepared data, or raw files: then give --label.")
    ],
    out: Annotated[
        Path, typer.Option("--out", help="Directory for all stages, the report and the artifact.")
    ],
    label: Annotated[
        str | None,
        typer.Option("--label", help="For raw files: the column that says whether there was a click."),
    ] = None,
    schema: Annotated[
        Path | None, typer.Option("--schema", help="For raw files: schema.toml.  [default: inferred]")
    ] = None,
    split: Annotated[
        str | None, typer.Option("--split", help="For raw files: random or time, 8:1:1.  [default: random]")
    ] = None,
    config: Recipe = None,
    preset: Preset = "default",
    model: Annotated[
        str | None,
        typer.Option(
            "--model", help="The student: a model, or auto: RECAP or FCN by validation.  [default: recap]"
        ),
    ] = None,
    teacher_model: TeacherModel = None,
    teachers: Teachers = None,
    routes: Annotated[
        int | None, typer.Option("--routes", min=1, help="Routes that the artifact averages.  [default: 8]")
    ] = None,
    route_choice: Annotated[
        str | None, typer.Option("--route-choice", help="late, random or greedy.  [default: late]")
    ] = None,
    adapters: Annotated[
        int | None, typer.Option("--adapters", min=1, help="RECAP: adapters per tower.  [default: 8]")
    ] = None,
    rank: Annotated[
        int | None, typer.Option("--rank", min=1, help="RECAP: rank of an adapter.  [default: by FCN's size]")
    ] = None,
    l2: L2 = None,
    learning_rate: Annotated[
        float | None, typer.Option("--learning-rate", help="Adam's step size.  [default: probed]")
    ] = None,
    ema: Annotated[
        float | None,
        typer.Option("--ema", help="Beta of the weights' average.  [default: 4 epochs' horizon]"),
    ] = None,
    kd_weight: Annotated[
        float | None, typer.Option("--kd-weight", help="Weight of the distillation loss.  [default: 1]")
    ] = None,
    max_epochs: Annotated[
        int | None, typer.Option("--max-epochs", min=1, help="Epochs of a run at most.  [default: 60]")
    ] = None,
    budget: Annotated[
        float | None, typer.Option("--budget", min=0.1, help="Minutes: fits teachers and epochs to it.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", min=0, max=999, help="Seed of the student.  [default: 1]")
    ] = None,
    threads: TrainThreads = None,
    device: Device = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """From a click log, or prepared data, to one model that stands for an ensemble: probe, teachers, student, artifact.

    Interrupted anywhere, the same command goes on. With other settings, only the stages that they touch are redone.

    Example: recap fit clicks.parquet --label click --out model
    """
    _limit_threads(threads)
    from recap_ctr.storage.claims import take

    _training()
    from recap_ctr.pages.run import page
    from recap_ctr.recipe.estimator_grid import read_diagnosis
    from recap_ctr.recipe.forecast import check
    from recap_ctr.recipe.stages import Recipe as Cooking
    from recap_ctr.recipe.stages import recipe_config

    given: dict[str, Any] = {
        "model": model, "teacher_model": teacher_model, "teachers": teachers, "routes": routes,
        "route_choice": route_choice, "l2": l2, "learning_rate": learning_rate, "seed": seed,
        "model_settings": {"num_adapters": adapters, "lora_rank": rank},
        "train": {"ema": ema, "kd_weight": kd_weight, "max_epochs": max_epochs},
    }  # fmt: skip
    if max_epochs is not None:  # of every run, whatever a preset says of teachers
        given["teacher_train"] = {"max_epochs": max_epochs}
    settings = recipe_config(preset, _merged(config, given), str(config or "fit"))
    _refuse_streams(data)
    take(out, RECIPE)
    prepared = _prepared(data, label, schema, split, out, quiet)
    cooking = Cooking(
        settings, prepared, out, threads=threads, device=_device(device), budget=budget, quiet=quiet
    )
    report = cooking.run()
    shown = page(
        report, shlex.join(["recap", *sys.argv[1:]]), read_diagnosis(out, report["data"]["fingerprint"])
    )
    written = shown.write(out)
    if as_json:
        _print_json(report)
        return
    _print_recipe(report)
    typer.echo(shown.lead)
    for sentence in check(out, report):
        typer.echo(sentence)
    _tell(quiet, f"To look at: {written}")
    _tell(quiet, f"Next: recap predict {out}/artifact rows.csv --out scores.csv")


def _refuse_streams(data: list[str]) -> None:
    """A pipe is read once; a schema and a fingerprint are wanted before the rows are."""
    for name in data:
        if name == "-" or (Path(name).exists() and not Path(name).is_file() and not Path(name).is_dir()):
            raise InputError(
                f"{'standard input' if name == '-' else name} can be read only once, and fit reads its rows twice",
                fix="save them to a file first, or `recap prepare -` them and fit what that wrote",
            )


def _prepared(
    data: list[str], label: str | None, schema: Path | None, split: str | None, out: Path, quiet: bool
) -> Any:
    """Prepared data as they are; raw files by way of a schema, into `out`."""
    from recap_ctr.data.shards import PreparedData, is_prepared

    if len(data) == 1 and Path(data[0]).is_dir() and is_prepared(Path(data[0])):
        if label is not None or schema is not None or split is not None:
            raise InputError("--label, --schema and --split go with raw files", fix="leave them away")
        return PreparedData(Path(data[0]))
    from recap_ctr.data.infer import infer
    from recap_ctr.data.prepare import Preparation, Split
    from recap_ctr.data.prepare import prepare as prepare_data
    from recap_ctr.data.source import FileSource
    from recap_ctr.schema import read_schema
    from recap_ctr.storage.files import atomic_file

    kind = split or "random"
    if kind not in ("random", "time"):
        raise InputError(f"--split {kind}: known are random and time")
    if schema is not None:
        fields = read_schema(schema)
        source = FileSource(data, fields.columns)
    else:
        if label is None:
            raise InputError(
                "raw files need a label or a schema", fix="--label COLUMN, or --schema schema.toml"
            )
        source = FileSource(data)
        inferred = infer(source, label)
        fields = inferred.schema
        out.mkdir(parents=True, exist_ok=True)
        with atomic_file(out / "schema.toml") as file:
            file.write(inferred.to_toml().encode())
        _tell(quiet, f"schema: {len(fields.fields)} fields, inferred; see {out / 'schema.toml'}")
    preparation = Preparation(fields, {"all": source}, Split(kind=kind))
    # Like all stages, it is named after what it is made of; the table's own name is what reports show.
    name = re.sub(r"\W+", "-", Path(data[0]).name.partition(".")[0]).strip("-") or "data"
    prepared, done = prepare_data(preparation, out / f"{name}-{preparation.fingerprint[:10]}", quiet=quiet)
    rows = {name: split["rows"] for name, split in prepared.manifest["splits"].items()}
    _tell(
        quiet,
        ("data: as prepared before; " if done else "data: prepared; ")
        + ", ".join(f"{count:,} {name}" for name, count in rows.items()),
    )
    return prepared


def _merged(config: Path | None, given: dict[str, Any]) -> dict[str, Any]:
    """A recipe's file with the options on top; what was not given is left away."""
    from recap_ctr.config import read_toml

    merged = read_toml(config) if config is not None else {}
    for key, value in given.items():
        if isinstance(value, dict):
            known = {name: part for name, part in value.items() if part is not None}
            if known:
                merged[key] = {**merged.get(key, {}), **known}
        elif value is not None:
            merged[key] = value
    return merged


def _print_recipe(report: dict[str, Any]) -> None:
    split = "test" if "test" in report["metrics"] else "valid"

    def line(name: str, parameters: int, found: dict[str, Any]) -> list[str]:
        figures = found[split]
        raw, calibrated = figures["raw"], figures["calibrated"]
        return [
            name,
            f"{parameters:,}",
            f"{100 * raw['auc']:.3f}",
            f"{raw['logloss']:.5f}",
            f"{calibrated['logloss']:.5f}",
        ]

    rows = [
        line(path.rpartition("/")[2], one["parameters"], one["metrics"])
        for path, one in report["teacher_runs"].items()
    ]
    if len(rows) > 1:
        size = sum(one["parameters"] for one in report["teacher_runs"].values())
        rows.append(line(f"their ensemble, {len(rows)}", size, report["ensembles"][-1]["metrics"]))
    rows.append(line(f"student: {report['model']['name']}", report["parameters"], report["metrics"]))
    _table(["model", "parameters", f"{split} AUC", "logloss", "calibrated"], rows)


@app.command()
def bench(
    table: Annotated[
        str,
        typer.Argument(
            help="table1, ablation (Table 2), fcn-scaling (Table 3), sensitivity (Table 4), overview, variance,"
            " or with figures: capacity (1a), estimators (1b, 1c), frontier (1d, 4).",
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
            help="table1: which, such as lr,fcn,recap; any NAME that has a NAME.toml.  [default: all]",
        ),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            "--seeds",
            min=1,
            help="Runs of each kind.  [default: 3, or 1 for sensitivity, capacity, estimators, frontier]",
        ),
    ] = None,
    averaged: Annotated[
        bool, typer.Option("--averaged", help="table1: baselines with our averaging of weights.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what is missing and what it would cost; train nothing.")
    ] = False,
    config: Recipe = None,
    preset: Preset = "default",
    teacher_model: TeacherModel = None,
    teachers: Teachers = None,
    l2: L2 = None,
    threads: TrainThreads = None,
    device: Device = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """The paper's tables, from training to Markdown and LaTeX, with tests over seeds; resumable, nothing done twice.

    `table1` sets models side by side on each data set; `ablation` is the recursive backbone alone, with each axis of
    estimators, and with all; `fcn-scaling` is FCN with averaged weights, with distillation, and with both; `overview`
    sets both beside the ensembles; `variance` shows how far runs and routes disagree, which explains the effects.

    With figures, and all numbers as JSON and CSV: `sensitivity` varies one setting of RECAP at a time; `capacity` grows
    FCN in depth and breadth; `estimators` is what averaging gains along each axis; `frontier` is AUC against size.

    Example: recap bench table1 --data synthetic --models lr,fm,fcn,recap --seeds 2

    Example: recap bench ablation --data data --out bench --seeds 3

    Example: recap bench sensitivity --data data --out bench
    """
    _limit_threads(threads)
    _training()
    from recap_ctr.bench.request import Request, fulfil, split_names
    from recap_ctr.storage.claims import take

    take(out, RECIPE)
    request = Request(
        table=table, data=tuple(data), out=out, reports=reports or out / "reports", config=config, preset=preset,
        given={"teacher_model": teacher_model, "teachers": teachers, "l2": l2}, models=tuple(split_names(models)),
        seeds=seeds, averaged=averaged, dry_run=dry_run, threads=threads, device=_device(device), quiet=quiet,
        command=shlex.join(["recap", *sys.argv[1:]]),
    )  # fmt: skip
    text = fulfil(request)
    if as_json:
        _print_json({"table": table, "markdown": text})
        return
    typer.echo(text)
    if dry_run:
        _tell(quiet, "Next: the same command without --dry-run; what is finished is never done again.")
        return
    _tell(
        quiet, f"Reports, tables and figures are in {request.reports}; pages to look at in {out}/.../pages."
    )


@app.command()
def diagnose(
    data: Annotated[Path, typer.Argument(help="A directory that `recap prepare` wrote.")],
    out: Annotated[Path, typer.Option("--out", help="Directory for all runs, the figures and the page.")],
    num_runs: Annotated[int, typer.Option("--runs", min=1, help="Runs, which differ in their seed.")] = 5,
    checkpoints: Annotated[
        int,
        typer.Option("--checkpoints", min=1, help="Last epochs of each run, as points of its trajectory."),
    ] = 4,
    routes: Annotated[
        int, typer.Option("--routes", min=1, help="Routes of each, if the model has them.")
    ] = 8,
    model: Annotated[str, typer.Option("--model", help="Model by name.")] = "recap",
    config: Recipe = None,
    preset: Preset = "default",
    l2: L2 = None,
    threads: TrainThreads = None,
    device: Device = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Where estimators disagree, and what averaging more of them would bring: runs, checkpoints and routes.

    Trains what is missing (in the same --out as `recap fit` or `recap bench` it finds their probe again), measures on
    held-out rows, and says what to do next, in words, figures with intervals, and one page.

    Example: recap diagnose data --out diagnosis --runs 5
    """
    _limit_threads(threads)
    _training()
    from recap_ctr.data.shards import PreparedData
    from recap_ctr.recipe.estimator_grid import DIAGNOSIS, PAGES, examine
    from recap_ctr.recipe.stages import Recipe as Cooking
    from recap_ctr.recipe.stages import recipe_config
    from recap_ctr.storage.claims import take

    settings = recipe_config(preset, _merged(config, {"l2": l2}), str(config or "diagnose"))
    take(out, RECIPE)
    cooking = Cooking(settings, PreparedData(data), out, threads=threads, device=_device(device), quiet=quiet)
    found, said = examine(
        cooking, runs=num_runs, checkpoints=checkpoints, routes=routes, model=model,
        command=shlex.join(["recap", *sys.argv[1:]]),
    )  # fmt: skip
    if as_json:
        _print_json({**found.to_json(), "findings": said})
        return
    for sentence in said:
        typer.echo(sentence)
    _tell(quiet, f"To look at: {out / PAGES / 'report.html'}; all figures: {out / DIAGNOSIS}")


@app.command()
def plan(
    data: Annotated[Path, typer.Argument(help="A directory that `recap prepare` wrote.")],
    out: Annotated[Path, typer.Option("--out", help="Directory for the runs; give it to `recap fit`, too.")],
    budget: Annotated[
        float | None, typer.Option("--budget", min=0.1, help="Minutes that teachers and student may take.")
    ] = None,
    num_runs: Annotated[
        int,
        typer.Option("--runs", min=2, help="Teachers to train for the forecast; three tell more than two."),
    ] = 2,
    config: Recipe = None,
    preset: Preset = "default",
    l2: L2 = None,
    threads: TrainThreads = None,
    device: Device = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Forecast what more teachers, averaged weights and routes would bring and cost, and recommend a recipe.

    Trains the recipe's first teachers and one student from labels, and tells the rest from their disagreement; the
    probe's arms are counted beside them. `recap fit` in the same --out goes on from there, and says afterwards how
    good the forecast was.

    Example: recap plan data --budget 60 --out model
    """
    _limit_threads(threads)
    _training()
    from recap_ctr.data.shards import PreparedData
    from recap_ctr.recipe.forecast import RECOMMENDED, forecast, words
    from recap_ctr.recipe.stages import Recipe as Cooking
    from recap_ctr.recipe.stages import recipe_config
    from recap_ctr.storage.claims import take

    settings = recipe_config(preset, _merged(config, {"l2": l2}), str(config or "plan"))
    take(out, RECIPE)
    cooking = Cooking(
        settings, PreparedData(data), out, threads=threads, device=_device(device), budget=budget, quiet=quiet
    )
    found = forecast(cooking, runs=num_runs)
    command = shlex.join(["recap", "fit", str(data), "--config", str(out / RECOMMENDED), "--out", str(out)])
    if as_json:
        _print_json({**asdict(found), "words": words(found), "next": command})
        return
    shown = {
        **{
            "one teacher" if one.count == 1 else f"mean of {one.count} teachers": one
            for one in found.teachers
            if one.count in SHOWN_TEACHERS
        },
        "student, last weights": found.averaging[0],
        **{
            f"student averaged, {'one route' if one.count == 1 else f'{one.count} routes'}": one
            for one in found.routes
        },
    }
    _table(
        ["", "valid AUC", "logloss", "other runs", "minutes", "parameters", "µs a row"],
        [
            [
                name, "" if one.auc is None else f"{100 * one.auc.value:.3f}", f"{one.loss.value:.5f}",
                "" if one.loss.runs_low is None else f"{one.loss.runs_low:.5f} to {one.loss.runs_high:.5f}",
                f"{one.minutes:.0f}", f"{one.parameters:,}", f"{one.microseconds:.2f}",
            ]
            for name, one in shown.items()
        ],
    )  # fmt: skip
    for sentence in words(found):
        typer.echo(sentence)
    _tell(quiet, f"Next: {command}")


@app.command()
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
    """One page to look at and to show: the answer, figures with intervals, charts, settings. Needs no network.

    Several runs on the same data are compared on one page.

    Example: recap report model

    Example: recap report run-1 run-2 --out comparison
    """
    _training()
    from recap_ctr.pages import compare
    from recap_ctr.pages.run import page
    from recap_ctr.recipe.estimator_grid import read_diagnosis
    from recap_ctr.training.run import read_report

    reports = {str(path): read_report(path) for path in runs}
    if len(reports) > 1 and out is None:
        raise InputError("a page of several runs needs a place of its own", fix="--out DIR")
    one = reports[str(runs[0])]
    shown = (
        compare.page(reports)
        if len(reports) > 1
        else page(one, diagnosis=read_diagnosis(runs[0], one["data"]["fingerprint"]))
    )
    written = shown.write(out or runs[0])
    if as_json:
        _print_json({"page": str(written), "lead": shown.lead})
        return
    typer.echo(shown.lead)
    _tell(quiet, f"Open {written}; its figures are beside it, as images and as numbers.")


@app.command()
def logits(
    artifact: Annotated[Path, typer.Argument(help="An artifact, or the run that holds one.")],
    data: Annotated[Path, typer.Argument(help="The prepared data it was trained on.")],
    out: Annotated[Path, typer.Option("--out", help="Directory for the logit table.")],
    split: Annotated[str, typer.Option("--split", help="train, valid or test.")] = "train",
    per: Annotated[
        str,
        typer.Option(
            "--per", help="A column for the whole model, each route, each checkpoint, or all of a grid."
        ),
    ] = "model",
    name: Annotated[
        str | None, typer.Option("--run", help="Name of the run in the table.  [default: its seed]")
    ] = None,
    threads: Threads = None,
    device: Device = None,
    force: Force = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a model's logits over prepared rows as a logit table, such as a student's `--teacher`.

    Example: recap logits run data --split train --out teacher-1

    Example: recap logits run data --split test --per route --out routes
    """
    from recap_ctr.data.shards import SPLITS, PreparedData

    if split not in SPLITS:
        raise InputError(f"--split {split}: known are {', '.join(SPLITS)}")
    if per not in ("model", "route", "checkpoint", "grid"):
        raise InputError(f"--per {per}: known are model, route, checkpoint and grid")
    runs = _training()
    import torch

    from recap_ctr.axes.logits import MANIFEST
    from recap_ctr.axes.predict import write_logits
    from recap_ctr.inference.artifact import read_artifact_manifest
    from recap_ctr.storage.claims import is_made, record

    if out.exists() and not (out / MANIFEST).is_file():
        raise InputError(f"{out} exists and is not a logit table", fix="choose another --out")
    prepared, manifest = PreparedData(data), read_artifact_manifest(artifact)
    if manifest["data"]["fingerprint"] != prepared.fingerprint:
        raise InputError(
            f"{artifact} was trained on other data than {data}", fix="give the data it was trained on"
        )
    inputs = {"artifact": manifest, "data": prepared.fingerprint, "split": split, "run": name, "per": per}
    if is_made(out, inputs, force=force):
        _report_made(out, as_json, quiet)
        return
    torch.set_num_threads(threads or num_cores())
    where = torch.device(_device(device))
    columns = {
        estimator: model.to(where) for estimator, model in runs.estimators(artifact, name, per).items()
    }
    write_logits(out, columns, prepared, split, where)
    record(out, inputs)
    run_name, rows = next(iter(columns)).run, len(getattr(prepared, split))
    if as_json:
        result = {"out": str(out), "rows": rows, "split": split, "run": run_name, "estimators": len(columns)}
        _print_json(result)
        return
    _tell(quiet, f"{out}: {rows:,} {split} rows of {run_name}, columns: {len(columns)}.")
    use = f"recap train {data} --teacher {out} --out student" if split == "train" else "recap_ctr.diagnose"
    _tell(quiet, f"Next: {use}")


@app.command()
def evaluate(
    artifact: Annotated[Path, typer.Argument(help="An artifact, or the run that holds one.")],
    rows: Annotated[
        list[str], typer.Argument(metavar="ROWS...", help="Raw labelled rows; - is standard input.")
    ],
    columns: Columns = None,
    routes: UsedRoutes = None,
    depth: UsedDepth = None,
    negative_rate: Annotated[
        float, typer.Option("--negative-rate", help="Share of negatives kept in these rows.")
    ] = 1.0,
    threads: Threads = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure an artifact on raw labelled rows.

    Example: recap evaluate run/artifact fresh.parquet
    """
    _limit_threads(threads)
    from recap_ctr.evaluation.sampling import negative_rate_shift

    negative_rate_shift(negative_rate)  # checks the range
    from recap_ctr.inference.scorer import Scorer, evaluate_rows

    scorer = Scorer.load(artifact, _parse_map(columns), routes=routes, depth=depth, threads=threads)
    source = scorer.source(rows)
    result = evaluate_rows(scorer, source, negative_rate=negative_rate, quiet=quiet)
    if as_json:
        _print_json(result)
        return
    _figures_table({"these rows": result}, None)
    _summarise_values(quiet, result["values"])
    for sentence in _against_training(result, scorer.engine.manifest["metrics"]):
        _tell(quiet, sentence)


@app.command()
def predict(
    artifact: Annotated[Path, typer.Argument(help="An artifact, or the run that holds one.")],
    rows: RawRows,
    out: ScoresOut = None,
    columns: Columns = None,
    routes: UsedRoutes = None,
    depth: UsedDepth = None,
    threads: Threads = None,
    force: Force = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Score raw rows: every column is kept, `score` (calibrated probability) and `logit` are added.

    Example: recap predict run/artifact rows.csv --out scores.csv

    Example: cat rows.csv | recap predict run/artifact - > scores.csv
    """
    _limit_threads(threads)
    from recap_ctr.data.sink import open_sink

    if as_json and out is None:
        raise InputError(
            "--json needs --out: both would write to standard output", fix="add --out scores.csv"
        )
    from recap_ctr.inference.scorer import Scorer, score
    from recap_ctr.storage.claims import is_made, record

    scorer = Scorer.load(artifact, _parse_map(columns), routes=routes, depth=depth, threads=threads)
    source = scorer.source(rows)
    inputs = None
    if out is not None:
        inputs = _inputs(source, artifact=scorer.engine.manifest, map=columns, routes=routes, depth=depth)
    if out is not None and is_made(out, inputs, force=force):
        _report_made(out, as_json, quiet)
        return
    with open_sink(out) as sink:
        tally = score(scorer, source, sink, quiet=quiet)
    if out is not None:
        record(out, inputs)
    if as_json:
        _print_json({"out": str(out), **tally.to_dict()})
    _summarise_values(quiet, tally.to_dict())
    if out is not None:
        _tell(quiet, f"{out}: score is the calibrated probability of a click, logit its logit.")
        _tell(quiet, f"Next, once their clicks are known: recap evaluate {artifact} {out}")


@app.command()
def export(
    artifact: Annotated[Path, typer.Argument(help="An artifact, or the run that holds one.")],
    format_: Annotated[str, typer.Option("--format", help="onnx: what ONNX Runtime runs.")] = "onnx",
    routes: Annotated[
        int | None,
        typer.Option("--routes", min=1, help="Add a graph for so many routes.  [default: the dial]"),
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
    """Put graphs into an artifact, one for each setting of its dial: it is then scored and served without PyTorch.

    Example: recap export run/artifact --data data

    Example: recap export run/artifact --int8 --data data
    """
    _limit_threads(threads)
    if format_ != "onnx":
        raise InputError(f"--format {format_}: known is onnx")
    _training("export")
    import torch

    try:
        from recap_ctr.inference.export import export as export_graphs
    except ModuleNotFoundError as error:
        if error.name not in ("onnx", "onnxscript"):
            raise
        raise InputError(f"this needs {error.name}", fix="pip install 'recap-ctr[export]'") from None
    from recap_ctr.data.shards import PreparedData

    torch.set_num_threads(threads or num_cores())
    prepared = None if data is None else PreparedData(data)
    lines = export_graphs(artifact, routes=routes, depth=depth, int8=int8, data=prepared, quiet=quiet)
    if as_json:
        _print_json({"artifact": str(artifact), "graphs": [line.to_dict() for line in lines]})
        return
    rows = []
    for line in lines:
        about = line.exported
        quality = [f"{line.quality[key]:.5f}" for key in ("auc", "logloss")] if line.quality else ["", ""]
        size = f"{len(about.graph):,}"
        rows.append([str(line.setting), about.precision, size, f"{about.parity:.1e}", *quality])
    _table(["setting", "precision", "bytes", "from torch", "AUC", "logloss"], rows)
    for line in lines:
        if line.rounding is not None:
            typer.echo(f"int8, {line.setting}: {line.rounding}")
    _tell(quiet, f"Next: recap dial {artifact}")


@app.command()
def dial(
    artifact: Annotated[Path, typer.Argument(help="An artifact, or the run that holds one.")],
    seconds: Annotated[float, typer.Option("--seconds", min=0.0, help="How long to measure.")] = 3.0,
    out: Annotated[
        Path | None, typer.Option("--out", help="Directory for a page with the curve, and its numbers.")
    ] = None,
    threads: Threads = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """What each setting of a model costs here, how good it is, and what a millisecond buys.

    Example: recap dial run/artifact --threads 1 --out dial
    """
    _limit_threads(threads)
    from recap_ctr.inference.dial import HEADER, cells, in_words, measure_costs, positions, write
    from recap_ctr.inference.scorer import Engine

    engine = Engine.load(artifact, threads=threads)
    found = positions(engine, measure_costs(engine, seconds=seconds))
    written = None
    if out is not None:
        written = write(out, engine.manifest["model"]["name"], found, threads or num_cores())
    if as_json:
        _print_json({"settings": [one.to_dict() for one in found], "words": in_words(found)})
        return
    _table(list(HEADER), [cells(one) for one in found])
    typer.echo(in_words(found))
    if written is not None:
        _tell(quiet, f"Open {written}; its figures are beside it.")


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="An artifact, a run, or prepared data.")],
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Say what a directory of ours is and what is in it.

    Example: recap inspect run/artifact
    """
    from recap_ctr.data.shards import read_manifest
    from recap_ctr.storage.files import read_json

    manifest_file = path / "manifest.json"
    found = read_json(manifest_file) if manifest_file.is_file() else None
    if isinstance(found, dict) and found.get("kind") == "prepared data":
        manifest = read_manifest(path)
        if as_json:
            _print_json(manifest)
            return
        typer.echo(f"prepared data {path}, fingerprint {manifest['fingerprint']}")
        _table(
            ["split", "rows", "clicked"],
            [[k, f"{s['rows']:,}", f"{s['positives']:,}"] for k, s in manifest["splits"].items()],
        )
        _table(["field", "vocabulary"], [[f["name"], f"{f['size']:,}"] for f in manifest["fields"]])
        _tell(quiet, f"Next: recap fit {path} --out model")
        return
    from recap_ctr.inference.artifact import read_artifact

    artifact = read_artifact(path)
    manifest = artifact.manifest
    if as_json:
        _print_json(manifest)
        return
    about = manifest["data"]
    typer.echo(
        f"artifact {path}: {artifact.name}, {manifest['parameters']:,} parameters, every file as its checksum says"
    )
    typer.echo(f"trained on {about['rows']:,} rows of {about['name']} (fingerprint {about['fingerprint']})")
    _figures_table(manifest["metrics"], None)
    fields = zip(artifact.encoder.fields, artifact.encoder.layout.fields, strict=True)
    _table(
        ["field", "kind", "values"],
        [[at.name, fitted.field.kind, f"{fitted.num_kept:,}"] for fitted, at in fields],
    )
    _tell(quiet, f"It is whole and can score. Next: recap predict {path} rows.csv --out scores.csv")


@app.command()
def synthetic(
    out: Annotated[Path, typer.Option("--out", help="File to write (.csv, .tsv, .parquet, .arrow).")],
    rows: Annotated[int, typer.Option("--rows", min=2, help="How many rows.")] = 150_000,
    fields: Annotated[int, typer.Option("--fields", min=3, help="How many fields.")] = 7,
    bayes: Annotated[
        bool, typer.Option("--bayes", help="Keep each row's true logit, as column bayes_logit.")
    ] = False,
    seed: Seed = 1,
    force: Force = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Draw synthetic clicks with planted interactions, whose best possible logloss and AUC are known.

    Example: recap synthetic --rows 1000000 --out clicks.csv
    """
    from dataclasses import asdict

    from recap_ctr.data.sink import open_sink
    from recap_ctr.data.synthetic import FORMAT, SyntheticConfig, SyntheticData
    from recap_ctr.storage.claims import is_made, record

    drawn = SyntheticData(SyntheticConfig(rows=rows, num_fields=fields, seed=seed))
    inputs = {**asdict(drawn.config), "format": FORMAT, "bayes": bayes}
    if is_made(out, inputs, force=force):
        _report_made(out, as_json, quiet)
        return
    with open_sink(out) as sink:
        for block in drawn.blocks():
            sink.write(block if bayes else block.drop("bayes_logit"))
    record(out, inputs)
    best = asdict(drawn.bayes())
    if as_json:
        _print_json({"out": str(out), "rows": rows, "bayes": best})
        return
    _tell(quiet, f"{out}: {rows:,} rows, {best['base_rate']:.1%} clicked.")
    _tell(
        quiet,
        f"The best possible model scores AUC {best['auc']:.4f} and logloss {best['logloss']:.4f};"
        f" the base rate {best['base_logloss']:.4f}.",
    )
    _tell(quiet, f"Next: recap fit {out} --label click --out model")


@app.command()
def serve(
    artifact: Annotated[
        Path, typer.Argument(help="An artifact, the run that holds one, or a link to either.")
    ],
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; others than loopback need a token.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Port to listen on; 0 takes a free one.")
    ] = 8000,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-host", help="Without a token: one more name to answer to, such as a proxy's. Repeatable."
        ),
    ] = None,
    workers: Annotated[
        int, typer.Option("--workers", min=1, max=256, help="Processes, each with the model in memory.")
    ] = 1,
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads", min=1, max=1024, help="Threads of each worker.  [default: cores over workers]"
        ),
    ] = None,
    deadline_ms: Annotated[
        float,
        typer.Option(
            "--deadline-ms", min=1, max=60_000, help="Answer within so long, at a lower dial if need be."
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
        typer.Option("--watch", help="Take a new version as soon as one stands at ARTIFACT; else on SIGHUP."),
    ] = False,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help="File with the bearer token.  [default: RECAP_TOKEN]")
    ] = None,
    access_log: Annotated[
        bool, typer.Option("--access-log", help="Log every scored request, too; never what is in its rows.")
    ] = False,
    max_body_mib: Annotated[
        int, typer.Option("--max-body-mib", min=1, max=1024, help="Largest body, in MiB.")
    ] = 8,
    max_rows: Annotated[
        int, typer.Option("--max-rows", min=1, max=1_000_000, help="Most rows of one request.")
    ] = 10_000,
    quiet: Quiet = False,
) -> None:
    """Serve an artifact over HTTP: JSON and Arrow, a bounded latency, new versions without a lost request.

    Its log is JSON, a line an event, on standard output.

    Example: recap serve model --port 8000 --deadline-ms 50
    """
    from recap_ctr.serve.token import read_token

    try:
        from recap_ctr.serve.config import MEBI, Limits, ServeConfig
        from recap_ctr.serve.supervisor import Supervisor
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("recap_ctr"):
            raise
        raise InputError(f"serving needs {error.name}", fix="pip install 'recap-ctr[serve]'") from None

    config = ServeConfig(
        artifact=str(artifact),
        host=host,
        port=port,
        hosts=tuple(allow_host or ()),
        workers=workers,
        threads=threads or max(1, num_cores() // workers),
        deadline_ms=deadline_ms,
        dial=dial,
        watch=watch,
        access_log=access_log,
        limits=Limits(
            body_bytes=max_body_mib * MEBI,
            held_bytes=max(Limits().held_bytes, 2 * max_body_mib * MEBI),
            rows=max_rows,
        ),
    )

    def ready(address: str, model: str) -> None:
        _tell(
            quiet,
            f"Version {model} of {artifact} answers at {address}: a page to try it on, and POST {address}/score.",
        )
        _tell(
            quiet,
            f"Next: recap score {address} ROWS.csv --out scores.csv. New version: kill -HUP {os.getpid()};"
            f" back: kill -USR1; stop: Ctrl-C.",
        )

    Supervisor(config, read_token(token_file), ready).run()


@app.command()
def score(
    url: Annotated[str, typer.Argument(metavar="URL", help="A server, such as http://127.0.0.1:8000.")],
    rows: RawRows,
    out: ScoresOut = None,
    routes: UsedRoutes = None,
    depth: UsedDepth = None,
    deadline_ms: Annotated[
        float, typer.Option("--deadline-ms", min=1, max=60_000, help="What each request asks of the server.")
    ] = 10_000.0,
    timeout: Annotated[
        float, typer.Option("--timeout", min=0.1, help="Seconds for one request, retries included.")
    ] = 60.0,
    chunk_rows: Annotated[
        int, typer.Option("--chunk-rows", min=1, max=1_000_000, help="Rows of one request.")
    ] = 1000,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help="File with the bearer token.  [default: RECAP_TOKEN]")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Score raw rows on a server: every column is kept; probability, logit, raw_logit and disagreement are added.

    Example: recap score http://127.0.0.1:8000 rows.csv --out scores.csv
    """
    from dataclasses import asdict

    from recap_ctr.data.sink import open_sink
    from recap_ctr.data.source import FileSource
    from recap_ctr.serve.client import Client, ServerError, score_rows
    from recap_ctr.serve.token import read_token

    if as_json and out is None:
        raise InputError(
            "--json needs --out: both would write to standard output", fix="add --out scores.csv"
        )
    if out is not None and out.exists() and not force:
        raise InputError(f"{out} exists", fix="choose another --out, or replace it with --force")
    asked: dict[str, Any] = {"routes": routes, "depth": depth, "deadline_ms": deadline_ms, "timeout": timeout}
    with Client(url, token=read_token(token_file), chunk_rows=chunk_rows, **asked) as client:
        try:
            with open_sink(out) as sink:
                unused, absent = score_rows(client, FileSource(rows), sink, quiet=quiet)
        except ServerError as error:
            say(f"error: {error}\n  fix: see whether the server runs, then run the same command again")
            sys.exit(1)
        seen = client.summary
    if as_json:
        _print_json({"out": str(out), **asdict(seen), "unused": unused, "absent": absent})
        return
    _tell(quiet, f"{seen.rows:,} rows in {seen.requests:,} requests, {seen.retries:,} of them sent again.")
    for names, meaning in (
        (unused, "Columns that are no fields of the model, and stayed here"),
        (absent, "Fields without a column, scored as missing"),
    ):
        if names:
            _tell(quiet, f"{meaning}: {', '.join(names)}.")
    if seen.lowered:
        _tell(
            quiet,
            f"{seen.lowered:,} requests were answered at a lowered dial: the server is busy. For the best scores"
            " give --routes and --depth, or come back later.",
        )
    if len(seen.models) > 1:
        _tell(
            quiet,
            f"The server changed its model on the way: {', '.join(seen.models)}. Score again for one version.",
        )


@app.command()
def demo(
    out: Annotated[Path, typer.Option("--out", help="Directory for everything the demo makes.")] = Path(
        "recap-demo"
    ),
    rows: Annotated[int, typer.Option("--rows", min=5_000, help="How many synthetic rows.")] = 150_000,
    seed: Annotated[
        int, typer.Option("--seed", min=0, max=999, help="Seed of the rows and of the students.")
    ] = 1,
    threads: TrainThreads = None,
    force: Force = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """The whole recipe on synthetic data: draw, prepare, probe, teachers, students, one artifact, ten scored rows.

    The table sets RECAP beside what it is made of and beside the best possible model. Interrupted, it resumes.

    Example: recap demo --rows 50000
    """
    _limit_threads(threads)
    _training()
    from recap_ctr.demo import HEADER, cells, run_demo

    result = run_demo(out, rows=rows, seed=seed, threads=threads or 1, force=force, quiet=quiet)
    if as_json:
        _print_json(result)
        return
    _table(HEADER, [cells(line) for line in result["table"]])
    _table(result["scored"]["columns"], result["scored"]["rows"])
    typer.echo(result["finding"]["text"])
    _tell(
        quiet,
        f"Everything is in {out}: the raw log, the prepared data, every run, report.html and the artifact.",
    )
    _tell(quiet, f"Next: recap predict {out}/artifact {out}/ten.csv")


def main() -> None:
    """Run the command; bad input ends with one message and exit code 2, never with a traceback."""
    # Threads that spin while they wait make a step ten times slower as soon as another process wants a core.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        app()
    except InputError as error:
        _fail(str(error))
    except JobError as error:
        say(
            f"error: {error}; what it had to say stands above, and the same command goes on from what is finished"
        )
        sys.exit(1)
    except SystemExit as end:
        if end.code == INTERRUPTED:
            say("interrupted; nothing is half-written, and the same command goes on from what is finished")
            sys.exit(1)
        raise
    except Exception as error:
        if _system_error(error) == errno.EPIPE:  # a reader that leaves early is no failure of ours
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still buffered
            sys.exit(1)
        if reason := _disk_reason(error):
            _fail(reason)
        raise


def _system_error(error: Exception) -> int | None:
    """The system's error number, which polars and safetensors keep in their text only."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    found = re.search(r"\(os error (\d+)\)", str(error))
    return int(found[1]) if found else None


def _disk_reason(error: Exception) -> str | None:
    """What the disk or its rights forbid, or a path that isn't there: the user's to change."""
    number = _system_error(error)
    name = error.filename if isinstance(error, OSError) else None
    where = f" ({name})" if name else ""
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"no space left on the disk{where}\n  fix: free some, then run the same command again"
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"no permission{where}\n  fix: choose a place you may read and write"
    if number in PATH_ERRORS and name:
        return f"{name}: {os.strerror(number).lower()}"
    return None


def _fail(message: str) -> NoReturn:
    say(f"error: {message}")
    sys.exit(2)


def _training(extra: str = "train") -> Any:
    """The module of runs, or a clear word that torch is missing."""
    try:
        from recap_ctr.training import run as runs
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise InputError("this needs PyTorch", fix=f"pip install 'recap-ctr[{extra}]'") from None
    return runs


def _limit_threads(threads: int | None) -> None:
    """For polars, which reads this when it is imported."""
    if threads is not None:
        os.environ["POLARS_MAX_THREADS"] = str(threads)


def _device(name: str | None) -> str:
    import torch

    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.partition(":")[0] not in ("cpu", "cuda", "mps"):
        raise InputError(f"--device {name}: known are cpu, cuda and mps")
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"--device {name}: {str(error).splitlines()[0]}") from None
    return name


def _numbers(text: str | None, option: str) -> list[float] | None:
    if text is None:
        return None
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"{option} {text}: expected numbers, comma-separated") from None


def _required(value: Path | None, option: str) -> Path:
    if value is None:
        raise InputError(f"{option} is missing")
    return value


def _inputs(source: "FileSource", **settings: Any) -> dict[str, Any] | None:
    """What an output follows from: the files' content and the settings; of a pipe nobody can tell."""
    return None if source.is_stream else {"files": [file.sha256 for file in source.files()], **settings}


def _report_made(out: Path, as_json: bool, quiet: bool) -> None:
    if as_json:
        _print_json({"out": str(out), "done_before": True})
    _tell(quiet, f"{out} stands as made before from the same inputs.")


def _parse_map(pairs: list[str] | None) -> dict[str, str]:
    columns = {}
    for pair in pairs or []:
        name, found, column = pair.partition("=")
        if not found or not name or not column:
            raise InputError(f"--map {pair}: expected FIELD=COLUMN")
        columns[name] = column
    return columns


def _print_json(value: object) -> None:
    typer.echo(json.dumps(value, ensure_ascii=False, allow_nan=False))


def _tell(quiet: bool, text: str) -> None:
    if not quiet:
        say(text)


def _table(header: list[str], rows: list[list[str]]) -> None:
    """Columns under a header, aligned; plain text, so that it reads well in a file too."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    for row in (header, ["-" * width for width in widths], *rows):
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    typer.echo()


def _figures_table(splits: dict[str, Any], reference: dict[str, Any] | None) -> None:
    rows = []
    for split, found in splits.items():
        rows.append([split, "base rate", "0.50000", f"{found['base_rate_logloss']:.5f}", "", ""])
        for name, figures in (reference or {}).items():
            rows.append(
                [split, name, f"{figures[split]['auc']:.5f}", f"{figures[split]['logloss']:.5f}", "", ""]
            )
        for name in ("raw", "calibrated"):
            figures = found[name]
            per_group = figures.get("group_auc")
            grouped = f"{per_group['auc']:.5f}" if per_group else ""
            error = f"{figures['calibration_error']:.5f}"
            rows.append([split, name, f"{figures['auc']:.5f}", f"{figures['logloss']:.5f}", error, grouped])
    _table(["rows", "scores", "AUC", "logloss", "calibration error", "AUC per group"], rows)


def _print_report(report: dict[str, Any]) -> None:
    typer.echo(
        f"{report['model']['name']}: {report['parameters']:,} parameters, seed {report['train']['seed']}"
    )
    _figures_table(report["metrics"], report["reference"])


def _auc_error(found: dict[str, Any]) -> float:
    """The error of an AUC, or 0 where none can be told: weighted rows, a handful of a class, or classes fully apart."""
    rate = found.get("base_rate", 0.0)
    enough = found["rows"] * min(rate, 1 - rate) >= FEWEST_OF_A_CLASS
    return float(found["raw"].get("auc_error") or 0.0) if enough else 0.0


def _against_training(found: dict[str, Any], known: dict[str, Any]) -> list[str]:
    """What figures on fresh rows mean beside those that the artifact came with."""
    then, now = (known.get("test") or known["valid"]), found
    gain = 1 - now["calibrated"]["logloss"] / now["base_rate_logloss"]
    change = now["raw"]["auc"] - then["raw"]["auc"]
    errors = [_auc_error(figures) for figures in (now, then)]
    noise = 1.96 * math.hypot(*errors) if all(errors) else 0.0  # of which nothing is said
    said = [
        f"Here it explains {gain:.1%} of the base rate's logloss; AUC is {100 * now['raw']['auc']:.2f},"
        f" when it was packed {100 * then['raw']['auc']:.2f} on held-out rows."
    ]
    if noise and abs(change) > noise:
        said.append(
            f"A change of {100 * change:+.2f} points is more than chance ({100 * noise:.2f}): "
            + (
                "these rows are others; look at unseen values, and train anew."
                if change < 0
                else "these rows are easier."
            )
        )
    elif noise:
        said.append(f"The change of {100 * change:+.2f} points is within chance ({100 * noise:.2f}).")
    if gain < 0:
        said.append("It is worse than the base rate: don't serve it; train anew on recent rows.")
    return said


def _summarise_values(quiet: bool, tally: dict[str, Any]) -> None:
    _tell(quiet, f"{tally['rows']:,} rows.")
    for kind, meaning in (("unseen", "were not in the training rows"), ("missing", "are missing")):
        counts = {name: count for name, count in tally[kind].items() if count}
        if counts:
            listed = ", ".join(
                f"{name} {count:,}" for name, count in sorted(counts.items(), key=lambda item: -item[1])
            )
            _tell(quiet, f"Values that {meaning}: {listed}.")
