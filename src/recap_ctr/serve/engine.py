"""What the server asks of an engine, and where it gets one."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import polars as pl

from recap_ctr.data.encode import Encoded, Encoder

Floats = npt.NDArray[np.float64]


class Setting(Protocol):
    """One position of the dial."""

    @property
    def routes(self) -> int: ...

    @property
    def depth(self) -> int | None: ...


class Scores(Protocol):
    """What an engine says of B rows."""

    @property
    def probability_B(self) -> Floats: ...

    @property
    def logit_B(self) -> Floats: ...

    @property
    def raw_logit_B(self) -> Floats: ...

    @property
    def disagreement_B(self) -> Floats: ...


class Engine(Protocol):
    """Raw rows to scores, at one of several settings."""

    @property
    def manifest(self) -> dict[str, Any]: ...

    @property
    def encoder(self) -> Encoder: ...

    @property
    def settings(self) -> Sequence[Any]:
        """Most accurate first; the first is the default."""
        ...

    def encode(self, frame: pl.DataFrame) -> Encoded: ...

    def score(self, encoded: Encoded, setting: Any = None) -> Scores: ...


def load_engine(path: Path, threads: int) -> Engine:
    """Load and check an artifact; raises InputError when anything about it is wrong."""
    from recap_ctr.serve.adapter import ScorerEngine

    return ScorerEngine.load(path, threads)
