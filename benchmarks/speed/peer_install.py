"""Install the peer, fuxictr 2.3.10, into its own environment.

    python -m benchmarks.speed.peer_install [--peer benchmarks/speed/.peer]

Both sides run on the same torch, which is installed first and stays pinned while fuxictr's requirements follow (pandas,
pyarrow, h5py, scikit-learn, Ray). fuxictr does not require torch, and allows any polars, but its CSV reader uses an
argument that polars 2 dropped. If the environment exists, only what is missing is installed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import venv
from pathlib import Path

TORCH = "torch==2.13.0"  # A range would let pip choose a build with gigabytes of GPU libraries.
FUXICTR = "fuxictr==2.3.10"
PEER = Path(__file__).parent / ".peer"


def interpreter(peer: Path) -> Path:
    """Return the peer's Python. It is a link that must not be resolved: its target is outside the environment."""
    return peer.absolute() / "bin" / "python"


def main() -> None:
    """Install, and print the versions as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--peer", type=Path, default=PEER)
    args = parser.parse_args()
    python = interpreter(args.peer)
    if not python.exists():
        venv.create(args.peer, with_pip=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, TORCH], check=True)
    subprocess.run([*pip, TORCH, FUXICTR, "polars<2"], check=True)
    code = (
        "import importlib.metadata as m, json;"
        "print(json.dumps({n: m.version(n) for n in ('fuxictr', 'torch', 'polars', 'ray', 'numpy')}))"
    )
    versions = subprocess.run([str(python), "-c", code], check=True, stdout=subprocess.PIPE, text=True).stdout
    print(json.dumps({"peer": str(args.peer), **json.loads(versions)}))


if __name__ == "__main__":
    main()
