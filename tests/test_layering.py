"""A package imports only packages before it; what must not exist does not."""

import ast
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "recap_ctr"
ORDER = (
    *("errors", "config", "schema", "plugins"),
    *("storage", "jobs", "evaluation", "data", "datasets"),
    *("nn", "models", "axes", "diagnose", "inference", "training", "pages", "recipe"),
    *("serve", "bench", "sklearn", "demo", "cli", "__init__", "__main__"),
)
RANKS = {name: rank for rank, name in enumerate(ORDER)}
FILES = sorted(SOURCE.rglob("*.py"))
FORBIDDEN_CALLS = {"eval", "exec", "torch.load", "torch.save", "pickle.load", "pickle.loads"}
FORBIDDEN_MODULES = {"pickle", "cloudpickle", "joblib", "dill"}
WITHOUT_TORCH = {
    "errors",
    "config",
    "schema",
    "plugins",
    "storage",
    "jobs",
    "evaluation",
    "data",
    "pages",
    "serve",
    "cli",
}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def package(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_modules(tree: ast.AST) -> set[str]:
    """Return the full names of all modules that a file imports, wherever in the file."""
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            is_package = node.module == "recap_ctr"
            modules |= {f"recap_ctr.{alias.name}" for alias in node.names} if is_package else {node.module}
        elif isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
    return modules


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_downward(path: Path) -> None:
    importer = package(path)
    imported = {
        name.split(".")[1] for name in imported_modules(tree_of(path)) if name.startswith("recap_ctr.")
    }
    for other in imported - {importer}:
        assert RANKS[other] < RANKS[importer], f"{path.name} imports {other}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_nothing_forbidden(path: Path) -> None:
    assert path.name not in ("utils.py", "common.py", "helpers.py", "misc.py")
    tree = tree_of(path)
    calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert not calls & FORBIDDEN_CALLS
    assert not {name.split(".")[0] for name in imported_modules(tree)} & FORBIDDEN_MODULES


@pytest.mark.parametrize("path", sorted((SOURCE / "models").glob("*.py")), ids=lambda path: path.name)
def test_models_know_no_device_and_no_training(path: Path) -> None:
    text = path.read_text()
    for word in (".cuda(", ".to(device", "torch.distributed", ".backward(", "optim"):
        assert word not in text


@pytest.mark.slow
def test_torch_is_needed_only_for_training() -> None:
    """Data, metrics, calibration, pages and the server work without torch; the command line imports it lazily."""
    for path in FILES:
        if package(path) in WITHOUT_TORCH:
            modules = imported_modules(ast.Module(_top_level_imports(path), []))
            assert not any(name.split(".")[0] == "torch" for name in modules), path


def _top_level_imports(path: Path) -> list[ast.stmt]:
    return [node for node in tree_of(path).body if isinstance(node, ast.Import | ast.ImportFrom)]
