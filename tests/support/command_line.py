"""What tests of the command share: its list of commands, its JSON, and the form of its refusals."""

import json
from typing import Any

import pytest
import typer

from recap_ctr.cli.main import app
from tests.conftest import Done

RUN_SETTINGS = """
[model]
name = "fcn"
dim = 4
num_exponential_layers = 1
num_linear_layers = 1
[train]
batch_size = 256
learning_rate = 0.01
l2 = 1e-4
max_epochs = 2
"""
"""The settings of the run that the fixture `finished` holds."""


def all_commands() -> dict[str, Any]:
    """Return all commands by their full name, such as `schema infer`."""
    commands: dict[str, Any] = {}

    def walk(command: Any, name: str) -> None:
        below = getattr(command, "commands", None)
        if below is None:
            commands[name] = command
        for sub, child in (below or {}).items():
            walk(child, f"{name} {sub}".strip())

    walk(typer.main.get_command(app), "")
    return commands


def only_json(text: str) -> dict[str, Any]:
    """Return the one JSON object of a text of one line; NaN is not JSON."""
    assert text.count("\n") == 1, text
    value: dict[str, Any] = json.loads(text, parse_constant=pytest.fail)
    assert isinstance(value, dict)
    return value


def assert_refused(done: Done, *words: str) -> None:
    """Check that bad input got one message on standard error that has all words, and nothing else was printed."""
    assert done.code == 2, done
    assert done.out == ""
    assert done.err.startswith("error: ")
    assert "Traceback" not in done.err
    assert sum(line.startswith("error: ") for line in done.err.splitlines()) == 1
    assert len(done.err.splitlines()) <= 4
    for word in words:
        assert word in done.err
