"""A module imports only lower ranks or its own folder; forbidden names and calls stay out."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "recap_ctr"
ORDER = (
    "errors", "config", "schema", "plugins",
    "storage", "jobs", "evaluation", "data", "datasets", "nn", "models", "axes", "diagnose", "inference", "training",
    "pages", "recipe", "serve", "bench", "sklearn", "demo", "cli", "__init__", "__main__",
)  # fmt: skip
RANKS = {name: rank for rank, name in enumerate(ORDER)}
FILES = sorted(SOURCE.rglob("*.py"))


def part(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """Top-level parts of the package that a file imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = (
                [node.module] if node.module != "recap_ctr" else [f"recap_ctr.{a.name}" for a in node.names]
            )
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("recap_ctr.")}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_downward(path: Path) -> None:
    own = part(path)
    for other in imports(path) - {own}:
        assert RANKS[other] < RANKS[own], f"{path.name} imports {other}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_nothing_forbidden(path: Path) -> None:
    assert path.name not in ("utils.py", "common.py", "helpers.py", "misc.py")
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            assert name not in ("eval", "exec", "torch.load", "torch.save", "pickle.loads", "pickle.load"), (
                name
            )
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            assert not {"pickle", "cloudpickle", "joblib", "dill"} & {name.split(".")[0] for name in names}


@pytest.mark.parametrize("path", sorted((SOURCE / "models").glob("*.py")), ids=lambda path: path.name)
def test_models_know_no_device_and_no_training(path: Path) -> None:
    text = path.read_text()
    for word in (".cuda(", ".to(device", "torch.distributed", ".backward(", "optim"):
        assert word not in text


def test_torch_is_needed_only_for_training() -> None:
    """Data, metrics, calibration and scoring work without torch, and the command line imports it lazily."""
    for path in FILES:
        if part(path) in (
            "errors",
            "storage",
            "config",
            "schema",
            "metrics",
            "progress",
            "environment",
            "data",
            "calibrate",
            "evaluate",
            "tensors",
            "artifact",
            "graphs",
            "score",
            "dial",
            "report",
            "cli",
        ):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, (ast.Import, ast.ImportFrom)):
                    names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
                    assert not any(name.split(".")[0] == "torch" for name in names), path
