"""The public names: exactly these, each importable and described; and what importing them costs and needs."""

import inspect
import subprocess
import sys

import pytest

import recap_ctr

CALLS = {"check", "evaluate", "explain", "fit", "load", "predict", "prepare", "run", "update"}


def in_new_process(script: str) -> str:
    """Return what a script prints in a Python of its own, where any warning is an error."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_public_names_are_listed_once_and_resolve() -> None:
    assert len(set(recap_ctr.__all__)) == len(recap_ctr.__all__) == len(dir(recap_ctr))
    for name in recap_ctr.__all__:
        value = getattr(recap_ctr, name)
        assert isinstance(value, dict | str) or value.__doc__, f"{name} has no docstring"


def test_the_calls_are_functions_with_types_even_after_all_modules_are_loaded() -> None:
    """A module of the same name would take a function's place as soon as it is imported."""
    for name in CALLS:
        function = getattr(recap_ctr, name)
        assert inspect.isfunction(function), name
        signature = inspect.signature(function)
        assert signature.return_annotation is not inspect.Signature.empty, name
        for parameter in signature.parameters.values():
            assert parameter.annotation is not inspect.Parameter.empty, f"{name}({parameter.name})"


def test_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(recap_ctr, "nonsense")


def test_version_is_that_of_the_installed_package(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import metadata

    assert recap_ctr.__version__ == metadata.version("recap-ctr")

    def not_installed(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", not_installed)
    assert recap_ctr.__version__ == "0+unknown"


LOADED = (
    "import sys; print(*[name for name in ('torch', 'polars', 'sklearn', 'pydantic') if name in sys.modules])"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("statement", "loaded"),
    [
        ("import recap_ctr; recap_ctr.__version__", ""),
        ("from recap_ctr import predict, evaluate, load, prepare", "polars pydantic"),
        ("from recap_ctr import CTRClassifier", "polars sklearn pydantic"),
    ],
)
def test_importing_costs_no_more_than_it_needs(statement: str, loaded: str) -> None:
    assert in_new_process(f"{statement}\n{LOADED}") == loaded


# Windows has none of these. Other packages know that and are loaded first; our own modules must do without as well.
WITHOUT_POSIX = """
import asyncio.unix_events, builtins, os, pkgutil, signal, sys
from importlib import import_module

import matplotlib.pyplot, onnx, optuna, polars, rich.progress, sklearn.utils, starlette.applications, torch, typer
import uvicorn

modules = {"fcntl", "grp", "pwd", "resource", "termios", "tty", "pty", "uvloop"}
for name in ("SIGKILL", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGCHLD", "SIGQUIT", "SIGPIPE", "SIGALRM"):
    delattr(signal, name)
signal.Signals = [item for item in signal.Signals if hasattr(signal, item.name)]
for name in ("fork", "getuid", "geteuid", "sched_getaffinity", "getloadavg", "mkfifo", "killpg", "nice"):
    delattr(os, name)
original = builtins.__import__

def without_posix(name, importing=None, *more):
    if (importing or {}).get("__name__", "").startswith("recap_ctr") and name.partition(".")[0] in modules:
        raise ModuleNotFoundError(f"no module {name}")
    return original(name, importing, *more)

builtins.__import__ = without_posix
import recap_ctr

names = [info.name for info in pkgutil.walk_packages(recap_ctr.__path__, "recap_ctr.")]
for name in names:
    if not name.endswith("__main__"):
        import_module(name)
print(len(names))
"""


@pytest.mark.slow
def test_every_module_can_be_imported_without_posix() -> None:
    assert int(in_new_process(WITHOUT_POSIX)) > 100
