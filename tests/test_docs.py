"""The documents are true: their blocks run, what they name exists, and generated parts are those of today's code."""

import ast
import inspect
import os
import re
import runpy
import shlex
import subprocess
import sys
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from socket import socket
from typing import Any

import pytest

import recap_ctr
from benchmarks import summary
from docs import generate
from recap_ctr.bench.table1 import Treatment
from recap_ctr.bench.table1_text import write_tables
from recap_ctr.cli.main import app
from recap_ctr.pages.page import Page
from recap_ctr.training.report import read_report
from tests.conftest import Recap, in_process
from tests.support.command_line import all_commands

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text()
QUICKSTART = (DOCS / "quickstart.md").read_text()
TEXTS = sorted(
    [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")), *DOCS.rglob("*.md")]
)
MAX_WORDS = 900
FEW_ROWS = 3_000
COMMANDS = all_commands()
FOLDERS = {path.name for path in (*ROOT.iterdir(), *(ROOT / "src" / "recap_ctr").iterdir()) if path.is_dir()}
# Files that a reader of docs/extending.md and CONTRIBUTING.md writes, and those that a benchmark leaves.
EXAMPLES = re.compile(
    r"my_ctr/|my-clicks|/mean\.|/mean_|/hello|test_hello|test_mean|[A-Z]{4}|/\.peer|/\.work|seed-"
)


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def command_lines(text: str) -> list[str]:
    """Return the commands of all console blocks, without their output."""
    lines = "\n".join(blocks(text, "console")).replace("\\\n", " ").splitlines()
    return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]


def run_script(script: str, directory: Path) -> None:
    """Run a bash script with this environment's commands; it must succeed at every line."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euxo", "pipefail", "-c", script],
        cwd=directory,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def run_commands(lines: list[str], recap: Recap) -> None:
    """Run lines of `recap`, each of which must succeed, in this process: importing torch for each takes a minute."""
    for line in lines:
        program, *arguments = shlex.split(line)
        assert program == "recap"
        done = recap(*arguments)
        assert done.code == 0, done.err


def run_python(script: str, file: Path) -> None:
    """Run a script as the main module, in this process."""
    file.write_text(script)
    runpy.run_path(str(file), run_name="__main__")


def test_readme_opens_with_the_two_commands() -> None:
    first_screen = "\n".join(README.splitlines()[:20])
    assert "make demo" in first_screen
    assert "make test" in first_screen


def test_readme_is_short() -> None:
    prose = re.sub(r"^```.*?^```", "", README, flags=re.MULTILINE | re.DOTALL)
    assert len(prose.split()) <= MAX_WORDS


def test_ci_runs_the_readme_test_command() -> None:
    for file in (".ci/run", ".github/workflows/ci.yml"):
        assert "make test" in (ROOT / file).read_text()
    targets = (ROOT / "Makefile").read_text()
    for target in ("demo", "test", "docs", "check-fast"):
        assert re.search(rf"^{target}:", targets, re.MULTILINE)


def test_the_glossary_is_linked_from_readme_help_and_report() -> None:
    assert "docs/glossary.md" in README
    assert "docs/glossary.md" in str(app.info.epilog)
    assert "docs/glossary.md" in Page("title", "lead").to_html()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_documented_with_help_and_example(name: str) -> None:
    assert f"## recap {name}\n" in (DOCS / "reference" / "cli.md").read_text()
    text = COMMANDS[name].help or ""
    assert f"Example: recap {name}" in text or f"| recap {name}" in text
    for parameter in COMMANDS[name].params:
        assert parameter.help, f"{name}: {parameter.name} has no help"


@pytest.mark.slow
@pytest.mark.parametrize("path", generate.PAGES, ids=relative)
def test_generated_pages_are_those_of_the_code(path: Path) -> None:
    assert path.read_text() == generate.page(path), "run `python -m docs.generate --write`"


@pytest.mark.slow
def test_packages_are_described_in_the_order_of_their_imports() -> None:
    graph = generate.imports()
    order = generate.ordered(graph)
    for name, imported in graph.items():
        assert all(order.index(other) < order.index(name) for other in imported), name


def in_seconds(script: str) -> str:
    """Return a script of few rows, whose fits have seconds: that they run is tested, not what minutes reach."""
    script = re.sub(r"--rows \d+0000\b", f"--rows {FEW_ROWS}", script)
    return re.sub(r"(--budget |budget=)[\d.]+", r"\g<1>0.1", script)


@pytest.mark.slow
def test_the_tour_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recap: Recap) -> None:
    """Run the README's commands in an empty directory; what ships is not behind the regression on validation rows."""
    script = "\n".join(command_lines(README))
    assert "--budget" in script
    monkeypatch.chdir(tmp_path)
    with in_process():
        run_commands(in_seconds(script).splitlines(), recap)
    assert (tmp_path / "scores.csv").read_text().splitlines()[0].endswith("score,logit")
    report = read_report(tmp_path / "model")
    assert report.reference is not None
    regression = report.reference["logistic regression"]["valid"]
    assert report.metrics.valid.raw.auc > regression.auc - 0.005


@pytest.mark.slow
@pytest.mark.usefixtures("one_registry")
def test_the_quickstart_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recap: Recap) -> None:
    """Run every line in this process, but for those of the server."""
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = in_seconds("\n".join(command_lines(QUICKSTART)).replace("8000", str(port)))
    before, serve, served = script.partition("recap serve")
    assert str(port) in served
    monkeypatch.chdir(tmp_path)
    with in_process():
        run_commands(before.splitlines(), recap)
        run_script(serve + served, tmp_path)
        for block in blocks(QUICKSTART, "python"):
            run_python(in_seconds(block), tmp_path / "script.py")
    rows = {len((tmp_path / name).read_text().splitlines()) for name in ("scores.csv", "served.csv")}
    assert rows == {FEW_ROWS + 1}


@pytest.mark.slow
def test_plans_in_the_guide_are_those_that_are_printed(recap: Recap) -> None:
    """Lines may be left out, and none may be added."""
    plans = [
        block for block in blocks((ROOT / "docs" / "cluster.md").read_text(), "console") if "plan" in block
    ]
    assert len(plans) == 2
    for plan in plans:
        command, *shown = plan.splitlines()
        printed = recap(*command.removeprefix("$ recap ").split()).out.splitlines()
        assert [line for line in shown if line not in printed] == []


@pytest.mark.slow
def test_readme_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with in_process():
        for block in blocks(README, "python"):
            run_python(in_seconds(block), tmp_path / "script.py")


def test_tables_are_those_of_the_committed_reports() -> None:
    for name, (file, _) in summary.BLOCKS.items():
        assert summary.block(name) in file.read_text(), "run `python -m benchmarks.summary --write`"


@pytest.mark.parametrize(("directory", "treatment"), summary.tables1())
def test_table_1_is_that_of_the_committed_reports(
    directory: Path, treatment: Treatment, tmp_path: Path
) -> None:
    write_tables({directory.name: directory}, tmp_path, treatment)
    for path in tmp_path.iterdir():
        committed = (directory / path.name).read_text()
        assert path.read_text() == committed, "run `python -m benchmarks.summary --write`"


@pytest.mark.parametrize("path", TEXTS, ids=relative)
def test_relative_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", path.read_text()):
        assert (path.parent / target).exists(), target


@pytest.mark.parametrize("path", TEXTS, ids=relative)
def test_names_and_paths_in_documents_exist(path: Path) -> None:
    text = path.read_text()
    for name in set(re.findall(r"\brecap_ctr(?:\.\w+)+(?::\w+(?:\.\w+)*)?", text)):
        assert exists(name), name
    for name in set(re.findall(r"(?<![\w./-])(?:\w[\w-]*/)+[\w.-]*\.(?:py|md|toml|json)\b", text)):
        if name.split("/")[0] in FOLDERS and not EXAMPLES.search(name):
            assert any((base / name).exists() for base in (ROOT, ROOT / "src" / "recap_ctr", path.parent)), (
                name
            )
    for name in set(re.findall(r"(?<![\w./-])(?:src|tests|docs|benchmarks|deploy)/[\w./-]*\w", text)):
        if not EXAMPLES.search(name):
            assert (ROOT / name).exists() or list(ROOT.glob(f"{name}*")), name


@pytest.mark.parametrize("path", TEXTS, ids=relative)
def test_options_in_documents_exist(path: Path) -> None:
    text = path.read_text()
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for line in [*re.findall(r"`(recap [^`]+)`", prose), *command_lines(text)]:
        for command in re.findall(r"\brecap ([a-z].*)", re.sub(r"\s+", " ", line)):
            words = command.split()
            name = " ".join(words[:2]) if words[0] == "schema" else words[0]
            assert name in COMMANDS, command
            parameters = COMMANDS[name].params
            options = {option for each in parameters for option in (*each.opts, *each.secondary_opts)}
            for option in re.findall(r"(?<!\S)--[a-z][\w-]*", command):
                assert option in {*options, "--help"}, f"recap {command}: {option}"


def parse(line: str) -> None:
    """Parse a `recap` line up to a pipe or the like as the command would; nothing is run."""
    words = list(takewhile(lambda word: word not in ("|", "&", ">"), shlex.split(line)))[1:]
    name = " ".join(words[:2]) if words[0] == "schema" else words[0]
    COMMANDS[name].make_context(name, words[len(name.split()) :])


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_of_commands_can_be_parsed(name: str) -> None:
    examples = re.findall(r"Example: (.*?)(?:\n\n|\Z)", COMMANDS[name].help or "", re.DOTALL)
    assert examples
    for example in examples:
        parse(example[example.index("recap ") :])


@pytest.mark.parametrize("path", TEXTS, ids=relative)
def test_commands_in_documents_can_be_parsed(path: Path) -> None:
    for line in command_lines(path.read_text()):
        for command in re.findall(r"\brecap [a-z].*", line):
            parse(command)


@pytest.mark.parametrize("path", TEXTS, ids=relative)
def test_python_in_documents_uses_what_exists(path: Path) -> None:
    """Check imports of ours, and the arguments of the public calls."""
    for block in blocks(path.read_text(), "python"):
        if path.parent.name == "reference":  # These are generated, and not whole.
            continue
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("recap_ctr"):
                assert all(exists(f"{node.module}:{alias.name}") for alias in node.names), node.module
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("recap_ctr."):
                function = getattr(recap_ctr, ast.unparse(node.func).partition(".")[2], None)
                keywords = {str(keyword.arg): None for keyword in node.keywords}
                if inspect.isfunction(function):
                    inspect.signature(function).bind(*node.args, **keywords)


def exists(name: str) -> bool:
    """Return whether a dotted name of the package is a module or something in one."""
    parts = name.replace(":", ".").split(".")
    for count in range(len(parts), 0, -1):
        try:
            value: Any = import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[count:]:
            if not hasattr(value, attribute):
                return False
            value = getattr(value, attribute)
        return True
    return False
