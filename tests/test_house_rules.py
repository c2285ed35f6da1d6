"""Rules of the house that a linter does not have: words, names, the length of functions, and repeated lines."""

import ast
import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = sorted((ROOT / "src").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
TEXTS = [
    *SOURCE,
    *sorted((ROOT / "src").rglob("*.js")),
    *sorted((ROOT / "src").rglob("*.html")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
]
# Words that the vocabulary replaces (docs/glossary.md), and phrases over which a native reader stumbles.
BANNED_WORDS = (
    *("soft labels?", "feature[_ ]maps?", "bundles?", "experts?", "base models?", "experiments?"),
    *("anew", "known are", "leave it away", "leave away", "so many of", "is told by", "stands as made"),
)
VAGUE_NAMES = {"found", "one", "own", "known", "said", "given", "told"}
MAX_LINES = 60
MAX_REPEATED = 12


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.slow
@pytest.mark.parametrize("path", TEXTS, ids=relative)
def test_no_banned_words(path: Path) -> None:
    match = re.search(rf"\b({'|'.join(BANNED_WORDS)})\b", path.read_text(), re.IGNORECASE)
    assert match is None, (
        f"{match[0]!r}: see docs/glossary.md for the word we use, or say it in plain English"
    )


@pytest.mark.slow
@pytest.mark.parametrize("path", SOURCE, ids=relative)
def test_names_say_what_they_hold(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        name = node.arg if isinstance(node, ast.arg) else None
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        assert name not in VAGUE_NAMES, f"line {getattr(node, 'lineno', '?')}: {name} could be anything"


@pytest.mark.parametrize("path", SOURCE, ids=relative)
def test_functions_fit_on_a_screen(path: Path) -> None:
    """Count statements only: the declared options of a command and its help are a table, not logic."""
    for function in functions(path):
        lines = function.body[-1].end_lineno or 0
        body = function.body[1:] if ast.get_docstring(function) and len(function.body) > 1 else function.body
        assert lines - body[0].lineno < MAX_LINES, f"{function.name} has {lines - body[0].lineno + 1} lines"


def test_no_line_escapes_the_formatter() -> None:
    for path in (*SOURCE, *TESTS, *(ROOT / "benchmarks").rglob("*.py")):
        assert f"fmt: {'skip'}" not in path.read_text(), path


@pytest.mark.slow
def test_no_test_imports_another_or_a_private_name() -> None:
    for path in TESTS:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                assert not re.search(r"(^|\.)test_", node.module), f"{path} imports {node.module}"
                if node.module.startswith("recap_ctr"):
                    private = [alias.name for alias in node.names if alias.name.startswith("_")]
                    assert not private, f"{path} imports {private}"


@pytest.mark.slow
def test_no_two_places_share_more_than_twelve_lines() -> None:
    """Compare lines of logic: import lists, blank lines, comments and closing brackets are left out."""
    places: dict[tuple[str, ...], list[tuple[Path, int]]] = {}
    for path in SOURCE:
        lines = _lines_of_logic(path)
        for start in range(len(lines) - MAX_REPEATED):
            window = tuple(text for _, text in lines[start : start + MAX_REPEATED + 1])
            places.setdefault(window, []).append((path, lines[start][0]))
    repeated = [
        f"{relative(first[0])}:{first[1]} and {relative(second[0])}:{second[1]}"
        for sites in places.values()
        for first, second in combinations(sites, 2)
    ]
    assert not repeated


def _lines_of_logic(path: Path) -> list[tuple[int, str]]:
    text = path.read_text()
    imports: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    numbered = ((number, line.strip()) for number, line in enumerate(text.splitlines(), 1))
    return [
        (number, line)
        for number, line in numbered
        if number not in imports and re.search(r"\w", line) and not line.startswith("#")
    ]
