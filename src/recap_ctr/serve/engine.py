"""What the server asks of an engine, and where it gets one."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import polars as pl

from recap_ctr.data.encode import Encoded, Encoder
from recap_ctr.inference import scorer as score
from recap_ctr.inference.scorer import Floats as Floats
from recap_ctr.inference.scorer import Scores as Scores
from recap_ctr.inference.scorer import Setting as Setting


class Engine(Protocol):
    """Raw rows to scores, at one of several settings: that of `recap_ctr.inference.scorer`, or one that stands for it."""

    manifest: dict[str, Any]
    encoder: Encoder

    @property
    def settings(self) -> Sequence[Setting]:
        """Most accurate first; the first is the default."""
        ...

    def setting(self, routes: int | None = None, depth: int | None = None) -> Setting:
        """What is meant by so many routes, by default all, at that depth, by default the full one; offered or not."""
        ...

    def encode(self, frame: pl.DataFrame) -> Encoded: ...

    def score(self, encoded: Encoded, setting: Setting | None = None) -> Scores: ...


def load_engine(path: Path, threads: int) -> Engine:
    """Load and check an artifact; raises InputError when anything about it is wrong."""
    return score.Engine.load(path, threads=threads)
