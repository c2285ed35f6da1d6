"""The dial between accuracy and cost: what each setting of an artifact costs on this machine, and how good it is."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from recap_ctr.data.encode import random_rows
from recap_ctr.errors import InputError
from recap_ctr.inference.scorer import Engine, Setting
from recap_ctr.jobs.machine import machine
from recap_ctr.pages.charts import Chart, Series
from recap_ctr.pages.page import Page, Section, Table
from recap_ctr.storage.files import write_json

BATCHES = (1, 64, 512)
FILE = "dial.json"
ROUNDS = 5  # at the least: fewer say little on a machine with other work to do


@dataclass(frozen=True)
class CostTable:
    """Seconds for a batch, by setting and number of rows, as measured."""

    sizes: tuple[int, ...]
    measured: Mapping[Setting, tuple[float, ...]]

    def seconds(self, setting: Setting, rows: int) -> float:
        """What some rows should take: between sizes on a straight line, beyond the last in proportion.

        >>> table = CostTable((1, 100), {Setting(1, None): (0.001, 0.010)})
        >>> [round(table.seconds(Setting(1, None), rows), 4) for rows in (1, 45, 100, 1000)]
        [0.001, 0.005, 0.01, 0.1]
        """
        known = self.measured[setting]
        if rows > self.sizes[-1]:
            return known[-1] * rows / self.sizes[-1]
        return float(np.interp(rows, self.sizes, known))


def measure_costs(engine: Engine, batch_sizes: Sequence[int] = BATCHES, seconds: float = 2.0) -> CostTable:
    """Score random rows for about so many seconds, all settings by turns; each gets the lower quartile of its times.

    Other work on the machine only ever adds to a time, so the low ones say what a setting itself takes; for an engine
    of one thread it is left out altogether, by counting CPU time.

    More rows or a better setting never count as cheaper: what the clock says against that is noise.
    """
    sizes = tuple(sorted(set(batch_sizes)))
    if not sizes or sizes[0] < 1:
        raise InputError(f"batches of {', '.join(map(str, batch_sizes)) or 'no'} rows can't be measured")
    rows = {size: random_rows(engine.encoder.layout, size, seed=size) for size in sizes}
    jobs = [(setting, size) for setting in engine.settings for size in sizes]
    taken: dict[tuple[Setting, int], list[float]] = {job: [] for job in jobs}
    for setting, size in jobs:  # the first call makes room
        engine.score(rows[size], setting)
    clock = time.thread_time if engine.threads == 1 else time.perf_counter
    end = time.perf_counter() + seconds
    while min(map(len, taken.values())) < ROUNDS or time.perf_counter() < end:
        for setting, size in jobs:
            start = clock()
            engine.score(rows[size], setting)
            taken[setting, size].append(clock() - start)
    taken_SN = np.array(
        [[np.quantile(taken[setting, size], 0.25) for size in sizes] for setting in engine.settings]
    )
    rising_SN = np.maximum.accumulate(taken_SN, axis=1)
    rising_SN = np.maximum.accumulate(rising_SN[::-1], axis=0)[::-1]
    return CostTable(
        sizes,
        {setting: tuple(line) for setting, line in zip(engine.settings, rising_SN.tolist(), strict=True)},
    )


@dataclass(frozen=True)
class Position:
    """A setting with all that is known of it."""

    setting: Setting
    micros: tuple[float, ...]
    """Per row, in batches of `BATCHES`."""
    auc: float | None
    logloss: float | None

    @property
    def rows_per_millisecond(self) -> float:
        return 1_000 / self.micros[-1]

    def to_dict(self) -> dict[str, Any]:
        return {
            "routes": self.setting.routes,
            "depth": self.setting.depth,
            "microseconds_per_row": {
                str(size): cost for size, cost in zip(BATCHES, self.micros, strict=True)
            },
            "auc": self.auc,
            "logloss": self.logloss,
        }


def positions(engine: Engine, costs: CostTable) -> list[Position]:
    """The dial from top to bottom."""
    known = {Setting(one["routes"], one["depth"]): one for one in engine.manifest.get("dial", [])}
    found = []
    for setting in engine.settings:
        micros = tuple(1e6 * costs.seconds(setting, size) / size for size in BATCHES)
        quality = known.get(setting, {})
        found.append(Position(setting, micros, quality.get("auc"), quality.get("logloss")))
    return found


HEADER = ("setting", "AUC", "logloss", *(f"µs a row by {size}" for size in BATCHES), "rows a millisecond")


def cells(position: Position) -> list[str]:
    """A line of the table."""
    quality = ["" if value is None else f"{value:.5f}" for value in (position.auc, position.logloss)]
    costs = [f"{cost:.1f}" for cost in position.micros]
    return [str(position.setting), *quality, *costs, f"{position.rows_per_millisecond:.1f}"]


def in_words(found: Sequence[Position]) -> str:
    """What a millisecond buys at both ends of the dial."""
    top, bottom = found[0], found[-1]
    said = f"A millisecond scores {top.rows_per_millisecond:.1f} rows with {top.setting}"
    if len(found) == 1:
        return f"{said}; there is nothing to turn."
    said += f", and {bottom.rows_per_millisecond:.1f} with {bottom.setting}"
    if top.auc is None or top.logloss is None or bottom.auc is None or bottom.logloss is None:
        return f"{said}; how good they are is not in the artifact: recap export ARTIFACT --data PREPARED."
    return (
        f"{said}, which on validation rows changes AUC by {100 * (bottom.auc - top.auc):+.3f} points"
        f" and logloss by {bottom.logloss - top.logloss:+.5f}."
    )


def page(name: str, found: Sequence[Position], threads: int) -> Page:
    """The curve to look at."""
    known = [one for one in found if one.auc is not None and one.logloss is not None]
    here = machine()
    where = f"{threads} thread{'s' * (threads > 1)} on {here['processor']}, {BATCHES[-1]} rows at a time"
    charts = tuple(
        Chart(
            f"dial-{figure}",
            f"{label} on validation rows, against cost",
            "µs a row",
            label,
            (
                Series(
                    "dial",
                    tuple(one.micros[-1] for one in known),
                    tuple(float(getattr(one, figure)) for one in known),
                    labels=tuple(str(one.setting) for one in known),
                ),
            ),
            note=f"From right to left the dial is turned down. Measured with {where}.",
            log_x=True,
            digits=5,
        )
        for figure, label in (("auc", "AUC"), ("logloss", "logloss"))
        if known
    )
    table = Table(HEADER, tuple(tuple(cells(one)) for one in found), ours=0, note=f"Cost with {where}.")
    return Page(
        f"The dial of {name}", in_words(found), (Section("Settings", tables=(table,), charts=charts),)
    )


def write(directory: Path, name: str, found: Sequence[Position], threads: int) -> Path:
    """The page, its charts, and all numbers."""
    written = page(name, found, threads).write(directory)
    about = {"kind": "dial", "threads": threads, "machine": machine()}
    write_json(directory / FILE, {**about, "settings": [one.to_dict() for one in found]})
    return written
