"""The `recap` command: its groups of subcommands, and what happens when one of them fails.

Every subcommand is thin, and imports what it needs only when it runs, so that help and completion are quick.
"""

import errno
import os
import re
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from recap_ctr.cli import data, deploy, fit, pages, research, score, train
from recap_ctr.cli.options import GLOSSARY
from recap_ctr.cli.output import print_json
from recap_ctr.errors import InputError
from recap_ctr.jobs.local import JobError
from recap_ctr.jobs.progress import say

INTERRUPTED = 130  # What shells expect after Ctrl-C: 128 + SIGINT.
GO_ON = "nothing is half-written, and the same command goes on from what is finished"
PATH_ERRORS = (
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
    errno.ENAMETOOLONG,
    errno.ELOOP,
)
GROUPS: dict[str, dict[str, Callable[..., None]]] = {
    "Start here": {
        "demo": fit.demo,
        "fit": fit.fit,
        "predict": score.predict,
        "evaluate": score.evaluate,
        "report": pages.report,
    },
    "Data": {
        "prepare": data.prepare,
        "datasets": data.datasets,
        "download": data.download,
        "synthetic": data.synthetic,
        "inspect": data.inspect,
    },
    "Train": {
        "train": train.train,
        "tune": train.tune,
        "models": train.models,
        "plan": fit.plan,
        "logits": train.logits,
    },
    "Deploy": {
        "export": deploy.export,
        "dial": deploy.dial,
        "serve": deploy.serve,
        "score": score.score,
    },
    "Research": {
        "bench": research.bench,
        "diagnose": research.diagnose,
    },
}


class GroupedCommands(TyperGroup):
    """A command whose help lists its subcommands by group."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the subcommands in the order of their groups."""
        return list(self.commands)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write one section for each group."""
        groups = {title: list(commands) for title, commands in GROUPS.items()}
        groups["Data"].insert(0, "schema")
        for title, names in groups.items():
            with formatter.section(title):
                formatter.write_dl(
                    [(name, self.commands[name].get_short_help_str(limit=100)) for name in names]
                )


app = typer.Typer(
    name="recap",
    cls=GroupedCommands,
    help="Click-through-rate prediction: from a raw click log to one deployable model.",
    epilog=GLOSSARY,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
schema_app = typer.Typer(
    help="Propose which column is what, as a schema to read and change.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
schema_app.command("infer")(data.infer_schema)


@schema_app.callback()
def _schema() -> None:
    """Propose which column is what, as a schema to read and change."""


app.add_typer(schema_app, name="schema")
for _commands in GROUPS.values():
    for _name, _function in _commands.items():
        app.command(_name)(_function)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"recap {version('recap-ctr')}")
        raise typer.Exit


@app.callback()
def _recap(
    show_version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Click-through-rate prediction: from a raw click log to one deployable model."""


def main() -> None:
    """Run the command. Bad input ends with one message and exit code 2, Ctrl-C with 130, never with a traceback."""
    # Threads that spin while they wait make a step ten times slower as soon as another process wants a core.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        code = app(standalone_mode=False)
        if code == INTERRUPTED:
            raise KeyboardInterrupt
        sys.exit(code if isinstance(code, int) else 0)
    except InputError as error:
        _fail(error.message, error.fix, 2)
    except TyperException as error:
        if "--json" in sys.argv:
            _fail(error.format_message(), None, error.exit_code)
        error.show()  # type: ignore[attr-defined]
        sys.exit(error.exit_code)
    except JobError as error:
        _fail(f"{error}; its messages are above", f"run the same command again: {GO_ON}", 1)
    except KeyboardInterrupt:
        _fail("interrupted", f"run the same command again: {GO_ON}", INTERRUPTED)
    except Exception as error:
        if _system_error(error) == errno.EPIPE:  # A reader that leaves early is not a failure of ours.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # For what is still buffered.
            sys.exit(1)
        reason, fix = _disk_reason(error)
        if reason is None:
            raise
        _fail(reason, fix, 2)


def _fail(message: str, fix: str | None, code: int) -> NoReturn:
    """End with an error: on standard error for people, as JSON on standard output for programs."""
    if "--json" in sys.argv:
        print_json({"error": message, "fix": fix, "code": code})
    else:
        say(f"error: {message}" if fix is None else f"error: {message}\n  fix: {fix}")
    sys.exit(code)


def _system_error(error: Exception) -> int | None:
    """Return the system's error number, which polars and safetensors keep in their text only."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    match = re.search(r"\(os error (\d+)\)", str(error))
    return int(match[1]) if match else None


def _disk_reason(error: Exception) -> tuple[str | None, str | None]:
    """Return what the disk or its permissions forbid, or a path that does not exist, and how to put it right."""
    number = _system_error(error)
    name = error.filename if isinstance(error, OSError) else None
    where = f" ({name})" if name else ""
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"no space left on the disk{where}", "free some, then run the same command again"
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"no permission{where}", "choose a place you may read and write"
    if number in PATH_ERRORS and name:
        return f"{name}: {os.strerror(number).lower()}", None
    return None, None
