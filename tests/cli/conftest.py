"""A directory with raw files to call commands on."""

from pathlib import Path

import polars as pl
import pytest

from recap_ctr.schema import Schema
from tests.support.command_line import RUN_SETTINGS


@pytest.fixture
def raw(click_log: pl.DataFrame, click_schema: Schema, tmp_path: Path) -> Path:
    """A directory with clicks.csv, schema.toml and train.toml in it."""
    click_log.head(600).write_csv(tmp_path / "clicks.csv")
    (tmp_path / "schema.toml").write_text(click_schema.to_toml())
    (tmp_path / "train.toml").write_text(RUN_SETTINGS)
    return tmp_path
