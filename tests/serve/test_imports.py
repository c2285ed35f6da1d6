"""What can be imported where: the client without the server's packages, and modules without POSIX."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import recap_ctr.serve

PACKAGE = Path(recap_ctr.serve.__file__).parent
# The supervisor and its workers need signals and inherited sockets, so only they may ask for POSIX.
PORTABLE = sorted(path for path in PACKAGE.glob("*.py") if path.stem not in ("supervisor", "worker"))
POSIX_ONLY = {"fcntl", "grp", "posix", "pwd", "resource", "termios"}


@pytest.mark.slow
@pytest.mark.parametrize("module", ["client", "token"])
def test_client_and_token_need_no_extra(module: str) -> None:
    code = (
        "import sys\n"
        "for name in ('starlette', 'uvicorn', 'msgspec', 'httptools', 'torch', 'onnxruntime'):\n"
        "    sys.modules[name] = None\n"
        f"import recap_ctr.serve.{module}\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", PORTABLE, ids=lambda path: path.stem)
def test_modules_can_be_imported_without_posix(path: Path) -> None:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {alias.name for alias in node.names} | {getattr(node, "module", None) or ""}
            assert not names & POSIX_ONLY, path.name
