"""Try an offered artifact in a process of its own, with limits of time and memory, before any worker loads it.

python -m recap_ctr.serve.check    (only by the supervisor, which passes the configuration on standard input)

Whatever a graph or a file does to this process, the workers go on. The costs that it measures are theirs, too.
"""

import os
import sys
from pathlib import Path

import msgspec

from recap_ctr.errors import InputError
from recap_ctr.serve.config import MEBI, ServeConfig
from recap_ctr.serve.snapshots import complete

SHADOW_SECONDS = 0.2  # To measure an engine while another one serves.
_NICENESS = 10
_TIMES_ARTIFACT = 8  # Bytes in memory for each byte on disk, at most.


class Check(msgspec.Struct, frozen=True):
    """What to try."""

    config: ServeConfig
    state: str
    """The directory that the processes of the server share."""
    snapshot: str
    serving: str
    """The snapshot that serves now, which a delta is applied to."""


class Verdict(msgspec.Struct, frozen=True):
    """What became of it: the name of the version, or why it can't serve."""

    model: str = ""
    reason: str = ""


def check(wanted: Check) -> Verdict:
    """Load and measure the artifact, within the limits."""
    from recap_ctr.serve.versions import load_version  # The supervisor, which knows no model, stays small.

    path, serving = Path(wanted.snapshot), Path(wanted.serving)
    try:
        places = [path] if path.is_dir() else [serving, *path.parent.glob(f"{path.name}-*")]
        _limit(wanted.config, sum(file.stat().st_size for place in places for file in place.rglob("*")))
        complete(path, serving)
        version = load_version(path, wanted.config, Path(wanted.state), SHADOW_SECONDS)
    except InputError as error:
        return Verdict(reason=str(error))
    except MemoryError:
        return Verdict(reason="it takes too much memory to load")
    except Exception as error:  # Whatever is wrong with it, the serving version goes on.
        return Verdict(reason=f"{type(error).__name__}: {error}")
    return Verdict(model=version.name)


def _limit(config: ServeConfig, artifact_bytes: int) -> None:
    """Bound processor time and memory of this process, and let the workers go first."""
    import resource  # Windows has none, and no server either.

    os.nice(_NICENESS)
    seconds = max(1, int(config.offer_seconds))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    size = config.offer_mib * MEBI + _TIMES_ARTIFACT * artifact_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (size, size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> None:
    """Answer the supervisor that started this process."""
    verdict = check(msgspec.json.decode(sys.stdin.buffer.read(), type=Check))
    sys.stdout.buffer.write(msgspec.json.encode(verdict))


if __name__ == "__main__":
    main()
