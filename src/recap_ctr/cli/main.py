"""The `recap` command: its subcommands by group, its version, and its exit code.

Every subcommand is thin, and imports what it needs only when it runs, so that help and completion are quick.
"""

import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from recap_ctr.cli import check, data, deploy, explain, fit, pages, research, score, share, train, update
from recap_ctr.cli.errors import BAD_INPUT, INTERRUPTED, end_with
from recap_ctr.cli.options import ARGUMENTS, GLOSSARY, OPTIONS, SECTIONS

GROUPS: dict[str, dict[str, Callable[..., None]]] = {
    "Start here": {
        "demo": fit.demo,
        "fit": fit.fit,
        "predict": score.predict,
        "evaluate": score.evaluate,
        "explain": explain.explain,
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
    "Update": {
        "update": update.update,
        "apply": update.apply,
        "backtest": update.backtest,
    },
    "Deploy": {
        "export": deploy.export,
        "dial": deploy.dial,
        "serve": deploy.serve,
        "sign": share.sign,
        "push": share.push,
        "pull": share.pull,
        "score": score.score,
        "check": check.check,
        "drift": check.drift,
    },
    "Research": {
        "bench": research.bench,
        "diagnose": research.diagnose,
    },
}


class GroupedOptions(TyperCommand):
    """A command whose help lists its options by their `rich_help_panel`, as plain text."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write a section for the arguments, and one for each group of options in order."""
        sections: dict[str, list[tuple[str, str]]] = {title: [] for title in SECTIONS}
        for parameter in self.get_params(ctx):
            is_option = parameter.param_type_name == "option"
            title = (getattr(parameter, "rich_help_panel", None) or OPTIONS) if is_option else ARGUMENTS
            record = parameter.get_help_record(ctx)
            if record is not None:
                sections[title].append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


class GroupedCommands(TyperGroup):
    """A command whose help lists its subcommands by their `rich_help_panel`, as plain text."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write one section for each group."""
        for title in GROUPS:
            commands = [
                (name, command.get_short_help_str(limit=200))
                for name, command in self.commands.items()
                if getattr(command, "rich_help_panel", None) == title
            ]
            with formatter.section(title):
                formatter.write_dl(commands)


app = typer.Typer(
    name="recap",
    cls=GroupedCommands,
    help="Click-through-rate prediction: from a raw click log to one deployable model.",
    epilog=GLOSSARY,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
schema_app = typer.Typer(
    help="Propose which column is what, as a schema to read and change.", rich_markup_mode=None
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"recap {version('recap-ctr')}")
        raise typer.Exit


def _show_help_without_command(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(BAD_INPUT)


@app.callback(invoke_without_command=True)
def _recap(
    context: typer.Context,
    show_version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    _show_help_without_command(context)


@schema_app.callback(invoke_without_command=True)
def _schema(context: typer.Context) -> None:
    _show_help_without_command(context)


schema_app.command("infer", cls=GroupedOptions, epilog=GLOSSARY)(data.infer_schema)
app.add_typer(schema_app, name="schema", rich_help_panel="Data")
for _title, _commands in GROUPS.items():
    for _name, _function in _commands.items():
        app.command(_name, cls=GroupedOptions, epilog=GLOSSARY, rich_help_panel=_title)(_function)


def main() -> None:
    """Run the command and exit: with 2 after bad input, 130 after Ctrl-C, 1 after any other failure."""
    # Threads that spin while they wait make a step ten times slower as soon as another process wants a core.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        code = app(prog_name="recap", standalone_mode=False)
        if code == INTERRUPTED:  # Typer has caught a KeyboardInterrupt.
            raise KeyboardInterrupt
    except (Exception, KeyboardInterrupt) as error:
        end_with(error)
    sys.exit(code if isinstance(code, int) else 0)
