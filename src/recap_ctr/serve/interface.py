"""What the server needs of an engine, and the function that loads one."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import polars as pl

from recap_ctr.data.encode import Encoded, Encoder
from recap_ctr.data.few_rows import Columns
from recap_ctr.data.profile import Profile
from recap_ctr.inference.engine import Engine, Scores
from recap_ctr.inference.setting import Setting


class RowScorer(Protocol):
    """The part of an engine that the server uses, so that tests can replace the engine."""

    manifest: dict[str, Any]
    encoder: Encoder
    profile: Profile | None
    """What is usual in the training rows; None in artifacts of older versions."""

    @property
    def settings(self) -> Sequence[Setting]:
        """Return the settings on offer, most accurate first; the first is the default."""
        ...

    def setting(self, routes: int | None = None, depth: int | None = None) -> Setting:
        """Return the setting with `routes` (default: all) and `depth` (default: full), on offer or not."""
        ...

    def encode(self, frame: pl.DataFrame) -> Encoded:
        """Encode raw rows."""
        ...

    def encode_few(self, columns: Columns, height: int) -> Encoded | None:
        """Encode few rows that are no data frame yet; None if they must become one, for `encode`."""
        ...

    def score(self, encoded: Encoded, setting: Setting | None = None) -> Scores:
        """Score encoded rows at `setting`, by default the most accurate one."""
        ...


def load_engine(path: Path, threads: int) -> RowScorer:
    """Load and check the artifact in `path`; raise InputError if anything is wrong with it."""
    return Engine.load(path, threads=threads)
