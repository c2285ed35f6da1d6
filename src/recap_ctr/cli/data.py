"""Commands about data: infer a schema, prepare rows, public data sets, synthetic clicks, and what a directory is."""

from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from recap_ctr.cli.options import (
    DropUnlabelled,
    Engine,
    Force,
    Ignore,
    Json,
    Positive,
    Quiet,
    Seed,
    Separator,
    Threads,
    complete_dataset,
    complete_split,
    drop_unset,
    limit_threads,
    required,
)
from recap_ctr.cli.output import print_figures, print_json, print_table, tell, tell_up_to_date
from recap_ctr.errors import InputError
from recap_ctr.jobs.machine import num_cores

if TYPE_CHECKING:
    from recap_ctr.data.additive import AdditiveData
    from recap_ctr.data.drifting import DriftingData
    from recap_ctr.data.prepare import Preparation
    from recap_ctr.data.shards import PreparedData
    from recap_ctr.data.source import FileSource
    from recap_ctr.data.synthetic import SyntheticData


def infer_schema(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE...",
            help="CSV, TSV, JSON lines, Parquet or Arrow, or a directory of them; .gz and .zst too.",
        ),
    ],
    label: Annotated[
        str,
        typer.Option("--label", help="The column that says whether there was a click (0/1, yes/no, ...)."),
    ],
    out: Annotated[Path, typer.Option("--out", help="Where to write the schema.")],
    rows: Annotated[int, typer.Option("--rows", min=1, help="How many rows to look at.")] = 1_000_000,
    columns: Annotated[
        str | None, typer.Option("--columns", help="Names, comma-separated, for files without a header line.")
    ] = None,
    positive: Positive = None,
    separator: Separator = None,
    drop_unlabelled: DropUnlabelled = False,
    ignore: Ignore = None,
    threads: Threads = None,
    force: Force = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Propose a schema for a raw table, with the reason for every choice.

    Example: recap schema infer clicks.csv --label click --out schema.toml

    Example: recap schema infer logs/ --label event --positive buy --out schema.toml
    """
    limit_threads(threads)
    from recap_ctr.data.infer import infer
    from recap_ctr.data.source import FileSource
    from recap_ctr.storage.claims import is_made, output_file
    from recap_ctr.storage.files import make_directory

    source = FileSource(files, columns.split(",") if columns else None, separator)
    inputs = output_inputs(
        source,
        label=label,
        rows=rows,
        columns=columns,
        **drop_unset({"positive": positive, "separator": separator, "ignore": ignore}),
    )
    if is_made(out, inputs, force=force):
        tell_up_to_date(out, as_json, quiet)
        return
    inferred = infer(
        source,
        label,
        positive=positive,
        drop_unlabelled=drop_unlabelled,
        ignore=ignore or (),
        max_rows=rows,
    )
    make_directory(out.parent)
    with output_file(out, inputs, force=force) as file:
        file.write(inferred.to_toml().encode())
    findings = [vars(finding) for finding in inferred.findings]
    if as_json:
        print_json({"out": str(out), "columns": findings})
        return
    print_table(["column", "verdict", "reason"], [list(map(str, finding.values())) for finding in findings])
    fields = len(inferred.schema.fields)
    for note in (*inferred.notes, *source.notes):
        tell(quiet, note)
    tell(
        quiet,
        f"{out}: {fields} fields. Read it, change what you know better, then: recap prepare ... --schema {out}",
    )


def output_inputs(source: "FileSource", **settings: Any) -> dict[str, Any] | None:
    """Return what an output is made from: the files' content and the settings; None for a pipe, which is read once."""
    return None if source.is_stream else {"files": [file.sha256 for file in source.files()], **settings}


def prepare(
    sources: Annotated[
        list[str] | None,
        typer.Argument(metavar="SOURCE...", help="Raw files, by name, pattern or directory."),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Directory for the prepared data.")] = None,
    schema: Annotated[Path | None, typer.Option("--schema", help="The schema, as a TOML file.")] = None,
    label: Annotated[
        str | None,
        typer.Option("--label", help="Without a schema: the label column; the schema is inferred."),
    ] = None,
    positive: Positive = None,
    separator: Separator = None,
    drop_unlabelled: DropUnlabelled = False,
    ignore: Ignore = None,
    valid: Annotated[
        list[str] | None, typer.Option("--valid", help="Validation files, if they are separate.")
    ] = None,
    test: Annotated[
        list[str] | None, typer.Option("--test", help="Test files, if they are separate.")
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            "--split",
            metavar="RULE",
            autocompletion=complete_split,
            help="random, time (the schema's time column), or hash:COLUMN (rows with the same value stay together)."
            "  [default: time, if the schema has it]",
        ),
    ] = None,
    ratio: Annotated[
        str | None,
        typer.Option("--ratio", help="train:valid:test for --split.  [default: 8:1:1]"),
    ] = None,
    split_column: Annotated[
        str | None, typer.Option("--split-column", help="A column that says train, valid or test.")
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(
            "--dataset",
            autocompletion=complete_dataset,
            help="A public data set by its protocol, such as ml-1m, or package.module:PROTOCOL.",
        ),
    ] = None,
    raw: Annotated[
        Path | None, typer.Option("--raw", help="Directory with that data set's raw files.")
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check/--no-check",
            help="Compare a --dataset with its published figures; --no-check for a part of it or generated rows.",
        ),
    ] = True,
    max_values: Annotated[
        int,
        typer.Option(
            "--max-values",
            min=1000,
            help="Distinct values of a field to hold in memory; more are counted on disk, with the same result.",
        ),
    ] = 2_000_000,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            min=1,
            max=1024,
            help="Processes that prepare side by side, with the same result.  [default: 1]",
        ),
    ] = None,
    engine: Engine = "local",
    seed: Seed = 1,
    threads: Threads = None,
    force: Force = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Encode a raw table as shards to train on. Every row is checked, and memory is bounded.

    Example: recap prepare clicks.csv --schema schema.toml --out data

    Example: recap prepare --dataset ml-1m --raw ml-1m/ --out data/ml-1m
    """
    limit_threads(threads or (max(num_cores() // workers, 1) if workers else None))
    from recap_ctr.data.prepare import write_prepared_data
    from recap_ctr.data.split import parse_ratio
    from recap_ctr.data.table import open_table, split_table
    from recap_ctr.datasets.catalogue import find_protocol
    from recap_ctr.jobs.engines import workers_for
    from recap_ctr.storage.places import output_directory, shown

    target, executor = required(out, "--out"), workers_for(engine, workers, threads)
    tables = valid or test
    ways = {"--split": split, "--split-column": split_column, "--valid/--test": tables, "--dataset": dataset}
    _check_ways_to_split(ways, ratio)
    _check_for_dataset({"--raw": raw, "--no-check": not check}, dataset)
    public, notes = None, []
    if dataset is not None:
        _refuse_own_files(sources, schema, label, positive, separator, drop_unlabelled, ignore)
        public = find_protocol(dataset)
        preparation: Preparation = public.preparation(required(raw, "--raw"), check=check)
    else:
        if not sources:
            raise InputError(
                "no source file is named", fix="recap prepare clicks.csv --schema schema.toml --out data"
            )
        table = open_table(
            sources,
            label=label,
            schema=schema,
            positive=positive,
            separator=separator,
            drop_unlabelled=drop_unlabelled,
            ignore=ignore or (),
        )
        notes = list(table.inferred.notes) if table.inferred else []
        preparation = split_table(
            table,
            split=split,
            ratio=parse_ratio(ratio) if ratio else None,
            valid=valid or None,
            test=test or None,
            split_column=split_column,
            seed=seed,
        )
    preparation = replace(preparation, max_values=max_values)
    with output_directory(target) as directory:
        data, up_to_date = write_prepared_data(
            preparation, directory, force=force, quiet=quiet, executor=executor
        )
        if public is not None and raw is not None and check:
            public.check(data, raw, quiet=quiet)
    if as_json:
        print_json({"out": shown(target), "done_before": up_to_date, **_summary(data)})
        return
    notes += [note for source in preparation.sources.values() for note in source.notes]
    _print_prepared(data, shown(target), up_to_date, notes, quiet)
    if public is not None and data.name != public.name:
        tell(quiet, f"Not checked against the published rows: reports call them {data.name}.")
    tell(quiet, f"Next: recap fit {shown(target)} --out model")


def _refuse_own_files(*options: object) -> None:
    """Refuse options that name files or say how they are to be read."""
    if any(options):
        raise InputError(
            "--dataset has its own files and schema",
            fix="remove SOURCE, --schema, --label, --positive, --separator, --ignore and --drop-unlabelled",
        )


def _summary(data: "PreparedData") -> dict[str, Any]:
    from recap_ctr.data.quality import repeated_rows

    splits = data.manifest["splits"]
    return {
        "name": data.name,
        "fingerprint": data.fingerprint,
        "split": data.split,
        **({} if data.split_note is None else {"split_note": data.split_note}),
        "vocabulary": {field["name"]: field["size"] for field in data.manifest["fields"]},
        "splits": {
            name: {key: entry[key] for key in ("rows", "positives")} for name, entry in splits.items()
        },
        "unlabelled": data.manifest.get("unlabelled", 0),
        "repeated": repeated_rows(data),
    }


def _largest_vocabularies(data: "PreparedData", count: int = 3) -> list[tuple[str, int]]:
    sizes = [(field["name"], field["size"]) for field in data.manifest["fields"]]
    return sorted(sizes, key=lambda size: -size[1])[:count]


def _print_prepared(data: "PreparedData", out: str, up_to_date: bool, notes: list[str], quiet: bool) -> None:
    """Print the splits of prepared data, what a user should know of them, and how large they are."""
    from recap_ctr.data.quality import quality_notes

    print_table(
        ["split", "rows", "clicked"],
        [
            [name, f"{entry['rows']:,}", f"{entry['positives'] / max(entry['rows'], 1):.2%}"]
            for name, entry in data.manifest["splits"].items()
        ],
    )
    if data.split is not None:
        tell(quiet, f"split: {data.split}")
    for note in (*notes, *quality_notes(data)):
        tell(quiet, note)
    largest = ", ".join(f"{name} {size:,}" for name, size in _largest_vocabularies(data))
    tell(
        quiet,
        f"{out} is {'up to date' if up_to_date else 'ready'}. {data.layout.num_fields} fields,"
        f" {data.layout.num_rows:,} table rows (largest: {largest}).",
    )


def _check_ways_to_split(ways: dict[str, Any], ratio: str | None) -> None:
    """Refuse two ways to split the rows at once, and a ratio where another rule decides."""
    used = [option for option, value in ways.items() if value]
    if len(used) > 1:
        raise InputError(f"{' and '.join(used)} each say how to split", fix="use one of them")
    if ratio and used not in ([], ["--split"]):
        raise InputError(f"--ratio does not go with {used[0]}", fix="remove it")


def _check_for_dataset(options: dict[str, Any], dataset: str | None) -> None:
    """Refuse options that only a public data set has."""
    for option, is_used in options.items():
        if is_used and not dataset:
            raise InputError(f"{option} is for --dataset", fix=f"add --dataset NAME, or remove {option}")


def datasets(as_json: Json = False, quiet: Quiet = False) -> None:
    """List the public data sets that `recap prepare --dataset` prepares, and where their raw files come from.

    Example: recap datasets --json
    """
    from recap_ctr.datasets.catalogue import DATASETS, find_protocol

    entries = [find_protocol(name).describe() for name in DATASETS]
    if as_json:
        print_json({"datasets": entries})
        return
    print_table(
        ["name", "title", "rows", "fields", "recap download"],
        [
            [
                entry["name"],
                entry["title"],
                f"{entry['rows']:,}",
                str(entry["fields"]),
                "yes" if entry["download"] else "no",
            ]
            for entry in entries
        ],
    )
    print_table(["name", "raw files"], [[entry["name"], ", ".join(entry["files"])] for entry in entries])
    print_table(
        ["name", "licence", "from"],
        [[entry["name"], entry["licence"], entry["homepage"]] for entry in entries],
    )
    ready = [entry["name"] for entry in entries if entry["download"]]
    tell(
        quiet,
        f"{len(entries)} data sets; recap download fetches {', '.join(ready)}, the others must be fetched by hand.",
    )
    tell(quiet, "Next: recap prepare --dataset NAME --raw DIR --out data")


def download(
    name: Annotated[
        str,
        typer.Argument(
            autocompletion=complete_dataset, help="A data set that `recap datasets` can download."
        ),
    ],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to put its raw files.")],
    force: Annotated[bool, typer.Option("--force", help="Fetch even files that are already there.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Fetch a public data set's raw files from their publisher and check them. An interrupted download can be resumed.

    Example: recap download ml-1m raw/ml-1m
    """
    from recap_ctr.datasets.catalogue import DATASETS, find_protocol
    from recap_ctr.datasets.download import download as fetch

    public = find_protocol(name)
    if public.archive is None:
        free = [other for other in DATASETS if find_protocol(other).archive]
        raise InputError(
            f"{public.title} can't be downloaded; {', '.join(free)} can",
            fix=f"get {', '.join(public.files)} from {public.homepage}",
        )
    up_to_date = fetch(public.archive, public.files, directory, force=force, quiet=quiet)
    if as_json:
        print_json({"out": str(directory), "files": list(public.files), "done_before": up_to_date})
        return
    state = "are up to date" if up_to_date else "are there, as published"
    tell(quiet, f"{directory}: {', '.join(public.files)} {state}. Licence: {public.licence}.")
    tell(quiet, f"Next: recap prepare --dataset {name} --raw {directory} --out data/{name}")


class Order(StrEnum):
    """The highest order of the effects planted in synthetic clicks."""

    additive = "1"
    interactions = "3"


def synthetic(
    out: Annotated[Path, typer.Option("--out", help="File to write (.csv, .tsv, .parquet, .arrow).")],
    rows: Annotated[int, typer.Option("--rows", min=2, help="How many rows.")] = 150_000,
    order: Annotated[
        Order,
        typer.Option(
            "--order",
            help="3: interactions of up to three fields. 1: mostly additive effects of user, ad, site, price and an"
            " hour hidden in a timestamp, 6% clicks, in time order.",
        ),
    ] = Order.interactions,
    fields: Annotated[
        int | None, typer.Option("--fields", min=3, help="How many fields, with --order 3.  [default: 7]")
    ] = None,
    days: Annotated[
        int | None,
        typer.Option("--days", min=1, help="Spread the rows over days, with a column ts, with --order 3."),
    ] = None,
    drift: Annotated[
        float | None,
        typer.Option(
            "--drift",
            min=0.0,
            max=0.99,
            help="With --days: the share of values that is exchanged, and of the effects that changes, in four days.",
        ),
    ] = None,
    bayes: Annotated[
        bool, typer.Option("--bayes", help="Keep each row's true logit, as column bayes_logit.")
    ] = False,
    seed: Seed = 1,
    force: Force = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Draw synthetic clicks with planted effects, whose best possible logloss and AUC are known.

    Example: recap synthetic --rows 1000000 --out clicks.csv

    Example: recap synthetic --order 1 --out clicks.csv

    Example: recap synthetic --days 14 --drift 0.2 --out log.csv
    """
    from recap_ctr.data.sink import open_sink
    from recap_ctr.storage.claims import is_made

    drawn, inputs = _plant(order, rows, fields, seed, days, drift)
    inputs["bayes"] = bayes
    if is_made(out, inputs, force=force):
        tell_up_to_date(out, as_json, quiet)
        return
    with open_sink(out, inputs, force=force) as sink:
        for block in drawn.blocks():
            sink.write(block if bayes else block.drop("bayes_logit"))
    best = asdict(drawn.bayes())
    if as_json:
        print_json({"out": str(out), "rows": rows, "bayes": best})
        return
    tell(quiet, f"{out}: {rows:,} rows, {best['base_rate']:.1%} clicked.")
    tell(
        quiet,
        f"The best possible model scores AUC {best['auc']:.4f} and logloss {best['logloss']:.4f};"
        f" the base rate {best['base_logloss']:.4f}.",
    )
    tell(quiet, f"Next: recap fit {out} --label click --out model")


def _plant(
    order: Order, rows: int, fields: int | None, seed: int, days: int | None, drift: float | None
) -> "tuple[SyntheticData | AdditiveData | DriftingData, dict[str, Any]]":
    """Return the clicks to draw, and everything that decides them."""
    from recap_ctr.data import additive, drifting
    from recap_ctr.data import synthetic as planted

    if drift is not None and days is None:
        raise InputError("--drift is a change from day to day", fix="add --days 14")
    if order == Order.interactions:
        config = planted.SyntheticConfig(rows=rows, num_fields=fields or 7, seed=seed)
        if days is not None:
            moving = drifting.DriftConfig(config, days, 0.2 if drift is None else drift)
            return drifting.DriftingData(moving), {**asdict(moving), "format": drifting.FORMAT}
        return planted.SyntheticData(config), {**asdict(config), "format": planted.FORMAT}
    if days is not None:
        raise InputError("--days does not go with --order 1, which has its own", fix="remove it")
    if fields is not None:
        raise InputError("--fields does not go with --order 1, which has its own fields", fix="remove it")
    additive_config = additive.AdditiveConfig(rows=rows, seed=seed)
    inputs = {**asdict(additive_config), "format": additive.FORMAT, "order": int(order)}
    return additive.AdditiveData(additive_config), inputs


def inspect(
    path: Annotated[Path, typer.Argument(help="An artifact, a run, or prepared data.")],
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Say what a directory is, and show what is in it.

    Example: recap inspect run/artifact
    """
    from recap_ctr.storage.files import read_json

    manifest_file = path / "manifest.json"
    manifest = read_json(manifest_file) if manifest_file.is_file() else None
    if isinstance(manifest, dict) and manifest.get("kind") == "prepared data":
        _inspect_data(path, as_json, quiet)
    else:
        _inspect_artifact(path, as_json, quiet)


def _inspect_data(path: Path, as_json: bool, quiet: bool) -> None:
    from recap_ctr.data.shards import read_manifest

    manifest = read_manifest(path)
    if as_json:
        print_json(manifest)
        return
    typer.echo(f"prepared data {path}, fingerprint {manifest['fingerprint']}")
    print_table(
        ["split", "rows", "clicked"],
        [
            [name, f"{entry['rows']:,}", f"{entry['positives']:,}"]
            for name, entry in manifest["splits"].items()
        ],
    )
    print_table(
        ["field", "vocabulary"], [[field["name"], f"{field['size']:,}"] for field in manifest["fields"]]
    )
    tell(quiet, f"Next: recap fit {path} --out model")


def _inspect_artifact(path: Path, as_json: bool, quiet: bool) -> None:
    from recap_ctr.inference.artifact import read_artifact

    artifact = read_artifact(path)
    manifest = artifact.manifest
    if as_json:
        print_json(manifest)
        return
    data = manifest["data"]
    typer.echo(
        f"artifact {path}: {artifact.name}, {manifest['parameters']:,} parameters; every file has its checksum"
    )
    typer.echo(f"trained on {data['rows']:,} rows of {data['name']} (fingerprint {data['fingerprint']})")
    print_figures(artifact.metrics.items())
    fields = zip(artifact.encoder.fields, artifact.encoder.layout.fields, strict=True)
    print_table(
        ["field", "kind", "values"],
        [[layout.name, fitted.field.kind, f"{fitted.num_kept:,}"] for fitted, layout in fields],
    )
    tell(quiet, f"It is whole and can score. Next: recap predict {path} rows.csv --out scores.csv")
