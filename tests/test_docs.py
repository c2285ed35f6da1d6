"""The documents are kept true: their blocks run, their commands exist, and every command is documented."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from benchmarks import summary
from recap_ctr.cli.main import app

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def commands() -> dict[str, Any]:
    """All commands by their full name, such as `schema infer`."""
    found: dict[str, Any] = {}

    def walk(command: Any, name: str) -> None:
        if hasattr(command, "commands"):
            for sub, child in command.commands.items():
                walk(child, f"{name} {sub}".strip())
        else:
            found[name] = command

    walk(typer.main.get_command(app), "")
    return found


def test_readme_opens_with_the_two_commands() -> None:
    first_screen = "\n".join(README.splitlines()[:20])
    assert "make demo" in first_screen
    assert "make test" in first_screen


def test_ci_runs_the_readme_test_command() -> None:
    for file in (".ci/run", ".github/workflows/ci.yml"):
        assert "make test" in (ROOT / file).read_text()
    targets = (ROOT / "Makefile").read_text()
    for target in ("demo", "test"):
        assert re.search(rf"^{target}:", targets, re.MULTILINE)


@pytest.mark.parametrize("name", commands())
def test_every_command_is_in_the_readme_with_help_and_example(name: str) -> None:
    assert f"recap {name}" in README
    text = commands()[name].help or ""
    assert f"Example: recap {name}" in text or f"| recap {name}" in text
    for parameter in commands()[name].params:
        assert parameter.help, f"{name}: {parameter.name} has no help"


def test_readme_commands_run(tmp_path: Path) -> None:
    """The tour, line by line, in an empty directory."""
    tour = next(block for block in blocks("console") if "recap synthetic" in block)
    lines = [line.removeprefix("$ ") for line in tour.splitlines() if line.startswith("$ ")]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for line in lines:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", line],
            cwd=tmp_path,
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{line}\n{done.stderr}"
    assert (tmp_path / "scores.csv").read_text().splitlines()[0].endswith("score,logit")


def test_readme_python_runs(tmp_path: Path) -> None:
    for block in blocks("python"):
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", block], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr


def test_readme_tables_are_those_of_the_committed_reports() -> None:
    for name, (file, _) in summary.BLOCKS.items():
        assert summary.block(name) in file.read_text(), "run `python -m benchmarks.summary --write`"


def test_relative_links_lead_somewhere() -> None:
    for file in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", file.read_text()):
            assert (file.parent / target).exists(), f"{file}: {target}"
