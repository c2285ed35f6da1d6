"""Install the peer, fuxictr 2.3.10, into an environment of its own.

    python -m benchmarks.speed.peer_install [--peer benchmarks/speed/.peer]

Both sides run on the same torch, which is installed first and pinned while fuxictr's own requirements follow
(pandas, pyarrow, h5py, scikit-learn, Ray). fuxictr does not name torch, and takes any polars, but its CSV reader
uses an argument that polars 2 dropped. An environment that is there already is only completed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import venv
from pathlib import Path

TORCH = "torch==2.13.0"  # a range would let pip take a build with gigabytes of GPU libraries
FUXICTR = "fuxictr==2.3.10"
PEER = Path(__file__).parent / ".peer"


def interpreter(peer: Path) -> Path:
    """The peer's Python; the link is kept, since resolving it would leave the environment."""
    return peer.absolute() / "bin" / "python"


def main() -> None:
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
