"""Options that several commands share, the choices that they offer, and how their values are parsed."""

import os
import shlex
import sys
import tomllib
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from recap_ctr.errors import InputError

GLOSSARY = "Words such as route, teacher and artifact are explained in docs/glossary.md."
ARGUMENTS, OPTIONS = "Arguments", "Options"
RAW_FILES, RECIPE, MACHINE, OUTPUT = "Raw files", "Recipe", "Machine", "Output"
SECTIONS = (ARGUMENTS, OPTIONS, RAW_FILES, RECIPE, MACHINE, OUTPUT)
"""Sections of a command's help, in order; an option that names none belongs to OPTIONS."""


class SplitName(StrEnum):
    """One part of prepared data."""

    train = "train"
    valid = "valid"
    test = "test"


class PresetName(StrEnum):
    """A recipe's settings by name."""

    default = "default"
    paper = "paper"


class ColumnsPer(StrEnum):
    """What gets a column of its own in a logit table."""

    model = "model"
    route = "route"
    checkpoint = "checkpoint"
    grid = "grid"


class TrackerName(StrEnum):
    """Where epochs and results are logged besides the report."""

    mlflow = "mlflow"
    tensorboard = "tensorboard"
    wandb = "wandb"


class ExportFormat(StrEnum):
    """What an artifact can be exported to."""

    onnx = "onnx"


def complete_model(incomplete: str) -> list[str]:
    """Return the models whose names start with `incomplete`, for shell completion."""
    from recap_ctr.models.catalogue import MODELS

    return [name for name in MODELS if name.startswith(incomplete)]


def complete_device(incomplete: str) -> list[str]:
    """Return the kinds of devices whose names start with `incomplete`, for shell completion."""
    return [name for name in ("cpu", "cuda", "mps") if name.startswith(incomplete)]


def complete_engine(incomplete: str) -> list[str]:
    """Return the engines whose names start with `incomplete`, for shell completion."""
    return [name for name in ("local", "ray", "ray://") if name.startswith(incomplete)]


def complete_split(incomplete: str) -> list[str]:
    """Return the rules of a split whose names start with `incomplete`, for shell completion."""
    return [name for name in ("random", "time", "hash:") if name.startswith(incomplete)]


def complete_dataset(incomplete: str) -> list[str]:
    """Return the public data sets whose names start with `incomplete`, for shell completion."""
    from recap_ctr.datasets.catalogue import DATASETS

    return [name for name in DATASETS if name.startswith(incomplete)]


Json = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print the result, or the error, as one JSON object on standard output.",
        rich_help_panel=OUTPUT,
    ),
]
Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="Show no progress and no hints.", rich_help_panel=OUTPUT),
]
Force = Annotated[
    bool,
    typer.Option(
        "--force", help="Replace an output that was made from other inputs.", rich_help_panel=OUTPUT
    ),
]
Seed = Annotated[int, typer.Option("--seed", min=0, max=2**31 - 1, help="Seed of everything random.")]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        min=1,
        max=1024,
        help="Threads to compute with.  [default: all cores]",
        rich_help_panel=MACHINE,
    ),
]
TrainThreads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        min=1,
        max=1024,
        help="Threads of one run; they are part of its record.  [default: one for narrow models, else all cores]",
        rich_help_panel=MACHINE,
    ),
]
TrainSeed = Annotated[
    int | None,
    typer.Option("--seed", min=0, max=2**31 - 1, help="Seed of everything random.  [default: 1]"),
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        autocompletion=complete_device,
        help="cpu, cuda or mps.  [default: the first of cuda, mps and cpu that this machine has]",
        rich_help_panel=MACHINE,
    ),
]
Engine = Annotated[
    str,
    typer.Option(
        "--engine",
        autocompletion=complete_engine,
        help="Where jobs run: local, ray (a cluster, or else this machine), or ray://HOST:PORT.",
        rich_help_panel=MACHINE,
    ),
]
Positive = Annotated[
    str | None,
    typer.Option(
        "--positive",
        metavar="VALUE",
        help="The label's value that means a click; all others mean none.  [default: 1, true, yes, click, ...]",
        rich_help_panel=RAW_FILES,
    ),
]
Separator = Annotated[
    str | None,
    typer.Option(
        "--separator",
        help="Separator of columns in text files; tab for a tab.  [default: found in line 1]",
        rich_help_panel=RAW_FILES,
    ),
]
DropUnlabelled = Annotated[
    bool,
    typer.Option(
        "--drop-unlabelled",
        help="Drop rows without a label, and count them.  [default: an error]",
        rich_help_panel=RAW_FILES,
    ),
]
Ignore = Annotated[
    list[str] | None,
    typer.Option(
        "--ignore",
        metavar="COLUMN",
        help="A column that must teach nothing: one known only after the click, say; repeatable.",
        rich_help_panel=RAW_FILES,
    ),
]
Columns = Annotated[
    list[str] | None,
    typer.Option(
        "--map", metavar="FIELD=COLUMN", help="Read a field from a column of another name; repeatable."
    ),
]
ModelName = Annotated[
    str | None,
    typer.Option(
        "--model", autocompletion=complete_model, help="Model by name; see `recap models`.  [default: fcn]"
    ),
]
RunConfigFile = Annotated[
    Path | None,
    typer.Option("--config", help="TOML file with [model] and [train] settings.", rich_help_panel=RECIPE),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Any other setting, such as train.patience=3; repeatable.",
        rich_help_panel=RECIPE,
    ),
]
Track = Annotated[
    TrackerName | None,
    typer.Option(
        "--track",
        help="Log epochs, figures and the artifact here too (docs/integrations.md).",
        rich_help_panel=OUTPUT,
    ),
]
VerifyKey = Annotated[
    Path | None,
    typer.Option("--verify-key", help="Refuse an artifact that the owner of this public key did not sign."),
]
PreparedPath = Annotated[Path, typer.Argument(help="A directory that `recap prepare` wrote.")]
ArtifactPath = Annotated[Path, typer.Argument(help="An artifact, or the run or fit that holds one.")]
RawRows = Annotated[list[str], typer.Argument(metavar="ROWS...", help="Raw rows; - is standard input.")]
ScoresOut = Annotated[
    Path | None,
    typer.Option(
        "--out",
        help="File to write (.csv, .tsv, .jsonl, .parquet, .arrow).  [default: CSV to standard output]",
    ),
]
UsedRoutes = Annotated[
    int | None,
    typer.Option("--routes", min=1, help="Score on this many of the artifact's routes.  [default: all]"),
]
UsedDepth = Annotated[
    int | None, typer.Option("--depth", min=1, help="Score at this trained depth.  [default: the full one]")
]
TokenFile = Annotated[
    Path | None, typer.Option("--token-file", help="File with the bearer token.  [default: RECAP_TOKEN]")
]
RecipeFile = Annotated[
    Path | None,
    typer.Option(
        "--config", help="TOML file of the recipe; options on the command line win.", rich_help_panel=RECIPE
    ),
]
Preset = Annotated[
    PresetName,
    typer.Option("--preset", help="The default recipe, or the paper's own settings.", rich_help_panel=RECIPE),
]
Teachers = Annotated[
    int | None,
    typer.Option(
        "--teachers",
        min=0,
        help="How many teachers of one model.  [default: a portfolio]",
        rich_help_panel=RECIPE,
    ),
]
TeacherModel = Annotated[
    str | None,
    typer.Option(
        "--teacher-model",
        autocompletion=complete_model,
        help="Model of the teachers.  [default: fcn]",
        rich_help_panel=RECIPE,
    ),
]
L2 = Annotated[
    float | None,
    typer.Option(
        "--l2", help="Strength of the embedding regulariser; skips the probe.", rich_help_panel=RECIPE
    ),
]


def parse_settings(pairs: list[str] | None) -> dict[str, Any]:
    """Return the settings of repeated --set options as nested tables; values are read as in TOML, else as text.

    >>> parse_settings(["train.patience=3", "model.loss=bce", "routes=2"])
    {'train': {'patience': 3}, 'model': {'loss': 'bce'}, 'routes': 2}
    """
    settings: dict[str, Any] = {}
    for pair in pairs or []:
        key, equals, text = pair.partition("=")
        *tables, name = key.strip().split(".")
        if not equals or not name or not all(tables):
            raise InputError(
                f"--set {pair}: expected KEY=VALUE", fix="write, for example, --set train.patience=3"
            )
        target = settings
        for table in tables:
            target = target.setdefault(table, {})
            if not isinstance(target, dict):
                raise InputError(f"--set {pair}: {table} is set to a value above, and can't be a table too")
        target[name] = _parse_value(text.strip())
    return settings


def _parse_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def drop_unset(values: dict[str, Any]) -> dict[str, Any]:
    """Return the options that were set, with tables of them one level deep.

    >>> drop_unset({"l2": None, "seed": 2, "train": {"ema": None}})
    {'seed': 2}
    """
    tables = {key: drop_unset(value) if isinstance(value, dict) else value for key, value in values.items()}
    return {key: value for key, value in tables.items() if value is not None and value != {}}


def parse_map(pairs: list[str] | None) -> dict[str, str]:
    """Return the pairs of repeated --map options."""
    columns = {}
    for pair in pairs or []:
        name, equals, column = pair.partition("=")
        if not equals or not name or not column:
            raise InputError(f"--map {pair}: expected FIELD=COLUMN")
        columns[name] = column
    return columns


def required(value: Path | None, option: str) -> Path:
    """Return the value of an option that this use of the command needs."""
    if value is None:
        raise InputError(f"{option} is missing")
    return value


def limit_threads(threads: int | None) -> None:
    """Limit the threads of polars, which reads this when it is first imported."""
    if threads is not None:
        os.environ["POLARS_MAX_THREADS"] = str(threads)


def require_torch(extra: str = "train") -> None:
    """Refuse to go on without PyTorch, and say how to install it."""
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise InputError("this command needs PyTorch", fix=f"pip install 'recap-ctr[{extra}]'") from None


def this_command() -> str:
    """Return the command as it was typed, to quote on a page."""
    return shlex.join(["recap", *sys.argv[1:]])
