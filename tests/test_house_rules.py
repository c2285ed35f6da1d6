"""Rules of the house that a linter does not have: words, names, the length of functions, and repeated lines."""

import ast
import re
from collections.abc import Iterator
from functools import cache
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


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree_of(path)):
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
    for node in ast.walk(tree_of(path)):
        match node:
            case (
                ast.arg(arg=name)
                | ast.Name(id=name, ctx=ast.Store())
                | ast.Attribute(attr=name, ctx=ast.Store())
            ):
                assert name.strip("_") not in VAGUE_NAMES, f"line {node.lineno}: {name} could be anything"
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                assert name.strip("_") not in VAGUE_NAMES, f"line {node.lineno}: {name} could be anything"


@pytest.mark.slow
def test_docstrings_of_properties_say_what_they_return() -> None:
    """Check what ruff's D401 leaves out: properties, too, have imperative docstrings."""
    for path in SOURCE:
        for function in functions(path):
            text = ast.get_docstring(function)
            if text and any("property" in ast.unparse(each) for each in function.decorator_list):
                assert text.startswith(("Return ", "Yield ")), f"{path}:{function.lineno}: {text}"


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


# Calls that write a file or make a directory by themselves. Those of `storage` are whole, exclusive and follow no link.
WRITERS = {
    *(
        "write_text",
        "write_bytes",
        "mkdir",
        "touch",
        "symlink_to",
        "hardlink_to",
        "rename",
        "replace",
        "tofile",
    ),
    *(
        "write_parquet",
        "write_ipc",
        "write_ndjson",
        "sink_parquet",
        "sink_ipc",
        "sink_csv",
        "open_memmap",
        "memmap",
    ),
    *(
        "copyfile",
        "copy2",
        "copy",
        "move",
        "save_file",
        "save",
        "savez",
        "savetxt",
        "mkstemp",
        "NamedTemporaryFile",
    ),
}
MODULES = {"shutil", "np", "numpy", "os", "tempfile", "torch", "onnx", "safetensors"}
PRIVATE_DIRECTORY = {"counters.py", "snapshots.py", "versions.py"}
"""Files of `serve` that write to a directory which only one server has, and which is gone when that ends."""


def _writes(node: ast.Call) -> str | None:
    """Return the name of a call that writes a file by itself; None for any other call."""
    function = node.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    owner = function.value if isinstance(function, ast.Attribute) else None
    is_module = isinstance(owner, ast.Name) and owner.id in MODULES
    if name == "open":
        modes = [*node.args, *(keyword.value for keyword in node.keywords)]
        texts = [
            mode.value for mode in modes if isinstance(mode, ast.Constant) and isinstance(mode.value, str)
        ]
        return name if any(re.fullmatch(r"[rbt+]*[wax+][rbt+]*", text) for text in texts) else None
    if name == "memmap" and any(isinstance(mode, ast.Constant) and mode.value == "r" for mode in node.args):
        return None
    if name in ("replace", "rename", "copy", "save", "move"):  # Of text, tables and models, too.
        return name if is_module or (name in ("replace", "rename") and _is_path(node)) else None
    takes_file = (
        name.startswith(("write_", "sink_")) and node.args and not isinstance(node.args[0], ast.BinOp)
    )
    return (
        name if name in WRITERS and not (takes_file and name not in ("write_text", "write_bytes")) else None
    )


def _is_path(node: ast.Call) -> bool:
    """Return whether a call of `replace` or `rename` looks like that of a path: one argument, which is no mapping."""
    return len(node.args) == 1 and not node.keywords and not isinstance(node.args[0], ast.Dict | ast.Call)


@pytest.mark.parametrize("path", SOURCE, ids=relative)
def test_files_are_written_by_storage_alone(path: Path) -> None:
    package = path.relative_to(ROOT / "src" / "recap_ctr").parts[0]
    if package == "storage" or (package == "serve" and path.name in PRIVATE_DIRECTORY):
        return
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Call):
            name = _writes(node)
            assert name is None, f"line {node.lineno}: {name}: write files through recap_ctr.storage"


@pytest.mark.parametrize(
    "line",
    [
        'path.open("wb")',
        'open(path, mode="a")',
        'path.write_text("x")',
        "np.save(path, x)",
        "save_file(x, path)",
        "frame.write_parquet(directory / name)",
        "path.mkdir(exist_ok=True)",
        "partial.replace(path)",
        "os.rename(a, b)",
        "shutil.copyfile(a, b)",
    ],
)
def test_a_writer_of_its_own_is_noticed(line: str) -> None:
    (node,) = (node for node in ast.walk(ast.parse(line)) if isinstance(node, ast.Call))
    assert _writes(node)


@pytest.mark.slow
def test_no_test_imports_another_or_a_private_name() -> None:
    for path in TESTS:
        for node in ast.walk(tree_of(path)):
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
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    numbered = ((number, line.strip()) for number, line in enumerate(text.splitlines(), 1))
    return [
        (number, line)
        for number, line in numbered
        if number not in imports and re.search(r"\w", line) and not line.startswith("#")
    ]
