"""The dial between accuracy and cost: what each setting of an artifact costs on this machine, and how good it is."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from recap_ctr.data.encode import random_rows
from recap_ctr.errors import InputError
from recap_ctr.inference.engine import Engine
from recap_ctr.inference.setting import Setting
from recap_ctr.inference.stopwatch import interleaved_seconds

BATCH_SIZES = (1, 64, 512)
ROUNDS = 5  # At least: fewer say little on a machine with other work to do.


@dataclass(frozen=True)
class CostTable:
    """Measured seconds to score a batch, by setting and number of rows."""

    sizes: tuple[int, ...]
    seconds_by_setting: Mapping[Setting, tuple[float, ...]]

    def seconds(self, setting: Setting, rows: int) -> float:
        """Return what `rows` rows should take: linear between the sizes, in proportion beyond the last one.

        >>> table = CostTable((1, 100), {Setting(1, None): (0.001, 0.010)})
        >>> [round(table.seconds(Setting(1, None), rows), 4) for rows in (1, 45, 100, 1000)]
        [0.001, 0.005, 0.01, 0.1]
        """
        measured = self.seconds_by_setting[setting]
        if rows > self.sizes[-1]:
            return measured[-1] * rows / self.sizes[-1]
        return float(np.interp(rows, self.sizes, measured))


def measure_costs(
    engine: Engine, batch_sizes: Sequence[int] = BATCH_SIZES, seconds: float = 2.0
) -> CostTable:
    """Score random rows at every setting for about `seconds`, and return the lower quartile of each setting's times.

    Other work on the machine can only add to a time, so the low times show what a setting itself takes. With an
    engine of one thread, CPU time leaves other work out altogether.

    A larger batch or a more accurate setting never counts as cheaper: where the clock says so, that is noise.
    """
    sizes = tuple(sorted(set(batch_sizes)))
    if not sizes or sizes[0] < 1:
        raise InputError(f"batches of {', '.join(map(str, batch_sizes)) or 'no'} rows can't be measured")
    rows = {size: random_rows(engine.encoder.layout, size, seed=size) for size in sizes}
    calls = {
        (setting, size): partial(engine.score, rows[size], setting)
        for setting in engine.settings
        for size in sizes
    }
    clock = time.thread_time if engine.threads == 1 else time.perf_counter
    times = interleaved_seconds(calls, rounds=ROUNDS, seconds=seconds, clock=clock)
    seconds_SN = np.array(
        [[np.quantile(times[setting, size], 0.25) for size in sizes] for setting in engine.settings]
    )
    rising_SN = np.maximum.accumulate(seconds_SN, axis=1)
    rising_SN = np.maximum.accumulate(rising_SN[::-1], axis=0)[::-1]
    return CostTable(sizes, dict(zip(engine.settings, map(tuple, rising_SN.tolist()), strict=True)))


@dataclass(frozen=True)
class Position:
    """One setting of the dial with its cost and its quality."""

    setting: Setting
    microseconds: tuple[float, ...]
    """Per row, in batches of `BATCH_SIZES`."""
    auc: float | None
    """On validation rows; None, like the logloss, where the artifact does not say."""
    logloss: float | None

    @property
    def rows_per_millisecond(self) -> float:
        """Return how many rows a millisecond scores in the largest batches."""
        return 1_000 / self.microseconds[-1]

    def to_dict(self) -> dict[str, Any]:
        """Return the position as plain JSON values."""
        return {
            "routes": self.setting.routes,
            "depth": self.setting.depth,
            "microseconds_per_row": {
                str(size): cost for size, cost in zip(BATCH_SIZES, self.microseconds, strict=True)
            },
            "auc": self.auc,
            "logloss": self.logloss,
        }


def positions(engine: Engine, costs: CostTable) -> list[Position]:
    """Return every setting of the engine with its cost and quality, most accurate first."""
    qualities = {Setting.from_dict(entry): entry for entry in engine.manifest.get("dial", [])}
    dial = []
    for setting in engine.settings:
        microseconds = tuple(1e6 * costs.seconds(setting, size) / size for size in BATCH_SIZES)
        quality = qualities.get(setting, {})
        dial.append(Position(setting, microseconds, quality.get("auc"), quality.get("logloss")))
    return dial
