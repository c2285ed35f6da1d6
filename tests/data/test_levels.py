"""Levels of a log over time, from its rows."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from recap_ctr.data.levels import MAX_STRETCHES, levels_of
from recap_ctr.data.shards import PreparedData
from recap_ctr.data.split import Split
from recap_ctr.data.table import open_table
from recap_ctr.evaluation.levels import lasting_share, level


def prepared(out: Path, labels: np.ndarray, split: Split) -> PreparedData:
    """Prepare rows of which each is a minute later than the one before, in another order."""
    times = pl.Series(1_600_000_000 + 60 * np.arange(len(labels)))
    rows = pl.DataFrame({"click": labels, "ad": np.arange(len(labels)) % 7, "ts": times})
    table = open_table(rows.sample(fraction=1.0, shuffle=True, seed=1), label="click")
    return table.prepared(out, split, quiet=True)[0]


def waves(num: int = 10_000) -> np.ndarray:
    """Return labels whose rate rises and falls slowly."""
    rates = 0.3 + 0.2 * np.sin(np.arange(num) / 1_500)
    return (np.random.default_rng(0).random(num) < rates).astype(np.int64)


@pytest.mark.parametrize(("newest", "count"), [(["valid"], 10), (["valid", "test"], 5)])
def test_stretches_are_as_long_as_the_newest_rows(newest: list[str], count: int, tmp_path: Path) -> None:
    labels = waves()
    data = prepared(tmp_path / "data", labels, Split(kind="time"))
    levels = levels_of(data, [getattr(data, name) for name in newest])
    assert levels is not None
    known = labels if "test" in newest else labels[:9_000]
    stretches = np.array(
        [level(part) for part in np.array_split(known, len(known) // (len(labels) // count))]
    )
    assert levels.usual == pytest.approx(level(labels[:8_000]))
    assert levels.lasting == pytest.approx(lasting_share(stretches))
    rarer = levels_of(data, [data.valid], negative_rate=0.1)
    assert rarer is not None and rarer.usual == pytest.approx(levels.usual + np.log(0.1))


def test_there_are_only_so_many_stretches(tmp_path: Path) -> None:
    labels = waves()
    data = prepared(tmp_path / "data", labels, Split(kind="time", ratio=(98, 1, 1)))
    levels = levels_of(data, [data.valid])
    stretches = np.array([level(part) for part in np.array_split(labels[:9_900], MAX_STRETCHES)])
    assert levels is not None and levels.lasting == pytest.approx(lasting_share(stretches))


def test_rows_held_out_at_random_have_no_level_of_their_own(tmp_path: Path) -> None:
    data = prepared(tmp_path / "data", waves(), Split(kind="random"))
    assert levels_of(data, [data.valid]) is None
