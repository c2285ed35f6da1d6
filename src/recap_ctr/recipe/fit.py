"""The main call: from a click log, or from prepared data, to one model that does the work of an ensemble."""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recap_ctr.axes.own_scores import write_own_scores
from recap_ctr.config import read_toml
from recap_ctr.data.quality import quality_notes
from recap_ctr.data.shards import PreparedData, is_prepared
from recap_ctr.data.split import parse_rule
from recap_ctr.data.table import RawTable, Table, open_table
from recap_ctr.errors import InputError
from recap_ctr.inference.scorer import Scorer
from recap_ctr.jobs.engines import LOCAL, device_for
from recap_ctr.jobs.executor import Executor
from recap_ctr.jobs.progress import say
from recap_ctr.pages.run import page
from recap_ctr.recipe.config import RecipeConfig, merge_settings, recipe_config
from recap_ctr.recipe.estimator_grid import read_diagnosis
from recap_ctr.recipe.forecast import check_forecast
from recap_ctr.recipe.portfolio import Portfolio
from recap_ctr.recipe.refit import RawRows
from recap_ctr.recipe.ship import write_about
from recap_ctr.recipe.stages import Recipe
from recap_ctr.recipe.state import state_bytes, write_fit_state
from recap_ctr.recipe.work import Work
from recap_ctr.schema import Schema
from recap_ctr.storage.claims import take
from recap_ctr.storage.files import atomic_file
from recap_ctr.storage.places import has_directory, output_directory
from recap_ctr.training.breakdown import check_slices
from recap_ctr.training.config import ARTIFACT
from recap_ctr.training.report import REPORT, FitReport, read_report, record_command
from recap_ctr.training.trackers import Tracker
from recap_ctr.training.tracking import check_tracker, tracked_by

MARK = "recipe.json"  # The file that says that a directory holds a recipe's stages.


@dataclass(frozen=True)
class FitResult:
    """A finished fit: where everything is, and what came out."""

    out: Path
    data: PreparedData
    report: FitReport
    page: Path
    """The report as an HTML page."""
    summary: str
    """The answer in one sentence, with its numbers."""
    forecast_check: list[str]
    """How good an earlier forecast of `recap plan` was, in words; empty if there was none."""

    @property
    def artifact(self) -> Path:
        """Return the directory of the deployable model."""
        return self.out / ARTIFACT

    def load(self) -> Scorer:
        """Return the model, ready to score raw rows."""
        return Scorer.load(self.artifact)


def fit(
    data: RawTable | PreparedData,
    *,
    out: str | Path,
    label: str | None = None,
    positive: str | None = None,
    weight: str | None = None,
    group: str | None = None,
    separator: str | None = None,
    drop_unlabelled: bool = False,
    ignore: Sequence[str] = (),
    scores: str | Path | None = None,
    schema: Schema | str | Path | None = None,
    split: str | None = None,
    config: RecipeConfig | str | Path | None = None,
    preset: str = "default",
    settings: Mapping[str, Any] | None = None,
    budget: float | None = None,
    threads: int | None = None,
    device: str | None = None,
    executor: Executor | str = LOCAL,
    keep_state: bool = False,
    track: Tracker | None = None,
    command: str = "",
    quiet: bool = True,
) -> FitResult:
    """Train one model that does the work of an ensemble, and return it with its report.

    `data` is prepared data or their directory, raw files or a directory of them, or a data frame. Raw rows need a
    `label` column or a `schema`. If the schema is inferred, `positive` is the label's value that means a click,
    `weight` is the column of row weights, `group` is the column within whose values AUC is averaged, and `separator`
    separates the columns of text files. Rows without a label are an error unless `drop_unlabelled` leaves them out.
    `ignore` names columns that the model must not learn from, such as those that are known only after the click.
    `scores` are the scores of a model that you already have: a column, or a file with one column that names the rows
    and one of probabilities or logits. They are compared with the result, and may teach the student. The rows are split
    8:1:1: by time if there is a time column, else at random, unless `split` says otherwise.

    The recipe is a `preset` with the file `config` and then `settings` on top of it, such as {"teachers": 3, "train":
    {"max_epochs": 20}}; docs/reference/recipe.md has all keys. By default a portfolio of models races, and those whose
    mean is best teach the student; with a number of `teachers`, the fit follows the paper. `budget` is in minutes, from
    the first row read to the artifact. All stages, the report, a page and the artifact are in the directory `out`.
    After an interruption, the best model so far is there with its page, and the same call goes on. After a change of
    settings, only the stages that depend on them are done again.

    `threads` is the number of threads of one run. `device` is cpu, cuda or mps; the default is the first of cuda, mps
    and cpu that the machine has. `executor` runs the jobs. It is the name of an engine (local for processes of this
    machine, ray for a Ray cluster, or ray://HOST:PORT for the cluster at that address), or an object of your own.
    `keep_state` keeps what `update` needs besides the model, in a directory inside the artifact. `track` logs epochs as
    they end, then settings, figures and artifact, to mlflow, tensorboard or wandb (docs/integrations.md). The page
    quotes `command` as the way to make the model again.
    """
    started, raw = time.time(), None
    recipe = _recipe_config(config, preset, settings or {})
    tracker = check_tracker(track)
    _refuse_streams(data)
    prepared = _as_prepared(data)
    if prepared is not None:
        _refuse_raw_options(
            label, positive, weight, group, separator, drop_unlabelled, ignore or None, scores, schema, split
        )
    elif split is not None:
        parse_rule(split)  # A mistyped rule is refused before anything is read or written.
    if scores is not None and recipe.teachers is not None:
        raise InputError("scores of your own are one of many teachers", fix="remove --scores or --teachers")
    with (
        output_directory(out) as directory,
        tracked_by(tracker, directory, quiet=quiet) as log_report,
    ):
        own_scores = None
        take(directory, MARK)
        if prepared is None:
            assert not isinstance(data, PreparedData)  # Those are prepared.
            table = open_table(
                data,
                label=label,
                schema=schema,
                positive=positive,
                weight=weight,
                group=group,
                separator=separator,
                drop_unlabelled=drop_unlabelled,
                ignore=ignore,
                scores=None if scores is None or Path(scores).is_file() else str(scores),
            )
            prepared, raw = _prepare_table(table, directory, _table_name(data), split, recipe, quiet)
            if scores is not None:
                own_scores = write_own_scores(str(scores), table, prepared, directory)
        options: dict[str, Any] = {
            "threads": threads,
            "device": device_for(executor, device),
            "executor": executor,
            "budget": budget,
            "started": started,
            "quiet": quiet,
        }
        try:
            report = _train(recipe, prepared, directory, raw, own_scores, options)
        except KeyboardInterrupt:
            _show_interrupted(recipe, prepared, directory, command, quiet=quiet)
            raise
        report = record_command(directory, report, command)
        write_about(directory, recipe.card, prepared)
        if keep_state:
            _keep_state(directory, report, prepared, quiet=quiet)
        shown = page(report, command, read_diagnosis(directory, prepared.fingerprint))
        written, checked = shown.write(directory), check_forecast(directory, report)
        log_report(report)
        return FitResult(directory, prepared, report, written, shown.lead, checked)


def _show_interrupted(
    recipe: RecipeConfig, data: PreparedData, out: Path, command: str, *, quiet: bool
) -> None:
    """Write the page of what an interrupted fit of these data has shipped, if it has shipped anything."""
    report = read_report(out) if (out / REPORT).is_file() else None
    if not isinstance(report, FitReport) or report.data.fingerprint != data.fingerprint:
        return
    if not report.interrupted:  # That of the last fit that was finished stays, and so does its page.
        return
    report = record_command(out, report, command)
    write_about(out, recipe.card, data)
    written = page(report, command, read_diagnosis(out, data.fingerprint)).write(out)
    if not quiet:
        say(f"{written} tells how good it is")


def _train(
    recipe: RecipeConfig,
    data: PreparedData,
    out: Path,
    raw: RawRows | None,
    own_scores: Path | None,
    options: dict[str, Any],
) -> FitReport:
    """Do the stages of the recipe, by a portfolio or as the paper does."""
    if recipe.teachers is None:
        return Portfolio(Work(recipe, data, out, own_scores=own_scores, **options), raw).run()
    return Recipe(recipe, data, out, **options).run()


def _keep_state(directory: Path, report: FitReport, prepared: PreparedData, *, quiet: bool) -> None:
    """Put what updates need into the artifact, and say how large it is."""
    kept = write_fit_state(directory, report, prepared)
    if not quiet:
        say(f"kept for updates: {state_bytes(kept) / 1e6:,.1f} MB in {kept}")


def _recipe_config(
    config: RecipeConfig | str | Path | None, preset: str, settings: Mapping[str, Any]
) -> RecipeConfig:
    if isinstance(config, RecipeConfig):
        if settings or preset != "default":
            raise InputError(
                "a RecipeConfig is whole: it does not go with settings or a preset",
                fix="pass settings alone, or RecipeConfig(...) alone",
            )
        return config
    values = merge_settings(read_toml(Path(config)) if config is not None else {}, settings)
    return recipe_config(preset, values, str(config or "fit"))


def _refuse_streams(data: RawTable | PreparedData) -> None:
    """Refuse a pipe, which can be read only once: schema and fingerprint are needed before the rows."""
    names = [data] if isinstance(data, str | Path) else data if isinstance(data, list | tuple) else []
    for name in map(str, names):
        path = Path(name)
        if name == "-" or (path.exists() and not path.is_file() and not path.is_dir()):
            raise InputError(
                f"{'standard input' if name == '-' else name} can be read only once, and fit reads its rows twice",
                fix="save them to a file first, or `recap prepare -` them and fit what that wrote",
            )


def _refuse_raw_options(*options: object) -> None:
    """Refuse options that say how raw rows are to be read, if some are set."""
    if any(option not in (None, False) for option in options):
        raise InputError(
            "--label, --schema and --split are for raw files, as are --positive, --weight, --group, --separator,"
            " --ignore, --scores and --drop-unlabelled",
            fix="remove them",
        )


def _prepare_table(
    table: Table, out: Path, name: str, split: str | None, recipe: RecipeConfig, quiet: bool
) -> tuple[PreparedData, RawRows]:
    """Prepare raw rows in a stage of their own in `out`; return them, and the table to prepare once more."""
    started = time.time()
    check_slices(recipe.slices, table.schema)  # What follows may take long.
    messages: list[str] = []
    if table.inferred is not None:
        with atomic_file(out / "schema.toml") as file:
            file.write(table.inferred.to_toml().encode())
        messages = [
            f"schema: {len(table.schema.fields)} fields, inferred; see {out / 'schema.toml'}",
            *table.inferred.notes,
            table.inferred.describe_left_out(),
        ]
    for message in filter(None, messages):
        if not quiet:
            say(message)
    rule = table.split_rule(split)
    # Like all stages, it is named after what it is made from; reports show the table's own name.
    stage = f"{name}-{table.preparation(rule).fingerprint[:10]}"
    prepared, up_to_date = table.prepared(out / stage, rule, quiet=quiet)
    if not quiet:
        rows = {split: entry["rows"] for split, entry in prepared.manifest["splits"].items()}
        listed = ", ".join(f"{count:,} {split}" for split, count in rows.items())
        say(f"data: {'up to date' if up_to_date else 'prepared'}; rows: {listed}")
        if prepared.split is not None:
            say(f"split: {prepared.split}")
        for message in (*table.source.notes, *quality_notes(prepared)):
            say(message)
    return prepared, RawRows(table, rule, time.time() - started)


def _as_prepared(data: RawTable | PreparedData) -> PreparedData | None:
    """Return prepared data or those in a directory; None if `data` are raw rows."""
    if isinstance(data, PreparedData):
        return data
    if isinstance(data, list | tuple) and len(data) == 1:
        data = data[0]
    if isinstance(data, str | Path) and (has_directory(data) or is_prepared(Path(data))):
        return PreparedData(Path(data))
    return None


def _table_name(data: RawTable) -> str:
    """Return a short name for a raw table: that of its first file."""
    first = data[0] if isinstance(data, list | tuple) else data
    if not isinstance(first, str | Path):
        return "frame"
    return re.sub(r"\W+", "-", Path(first).name.partition(".")[0]).strip("-") or "data"
