"""Faults injected into clean windows of synthetic logs: how many `recap check` catches, and its false alarms.

    python -m benchmarks.reliability.faults [--logs 3] [--windows 100] [--out results/faults.json]

A log has two weeks of training rows with all that real ones have: a daily and a weekly cycle, users and items that come
and go, campaigns of a few days, missing shares and click rates that vary from day to day. A window is a stretch of rows
in the week after. Every window is checked clean, and then with one fault at a time.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl

from recap_ctr.data.encode import Encoder
from recap_ctr.data.prepare import Preparation, write_prepared_data
from recap_ctr.data.profile import Profile
from recap_ctr.data.source import Block, FrameSource
from recap_ctr.data.split import Split
from recap_ctr.inference.check import Finding, Inspection, known_labels
from recap_ctr.inference.raw_rows import RawRows
from recap_ctr.jobs.progress import say
from recap_ctr.schema import Field, Schema
from recap_ctr.storage.files import write_json

TRAIN_DAYS, LATER_DAYS, ROWS_A_DAY = 14, 7, 12_000
WINDOW_ROWS = (1_000, 5_000, 20_000)
NEW_A_DAY = ((400, 60), (60, 12), (150, 0))  # Users of 8,000 and items of 1,500, in turns by log.
CAUGHT, FALSE_ALARMS = 0.95, 0.01
START = datetime(2026, 3, 2, tzinfo=UTC)
SCHEMA = Schema(
    label="click",
    time="ts",
    fields=(
        Field(name="user", kind="categorical", min_count=2),
        Field(name="item", kind="categorical"),
        Field(name="site", kind="categorical"),
        Field(name="zip", kind="categorical"),
        Field(name="device", kind="categorical"),
        Field(name="campaign", kind="categorical"),
        Field(name="account", kind="categorical"),
        Field(name="referrer", kind="categorical", hash_buckets=1_000),
        Field(name="tags", kind="multi", max_len=4),
        Field(name="price", kind="numeric"),
        Field(name="age", kind="numeric", transform="quantiles"),
        Field(name="hour", kind="categorical", derive="hour", source="ts"),
    ),
)
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
TEXT = ("user", "item", "site", "zip", "device", "campaign", "account")


class Log:
    """Days of a synthetic log; the same seed gives the same days."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        rng = np.random.default_rng((seed, 0))
        self._site_rank = rng.permutation(300)
        self._accounts = rng.integers(10**17, 9 * 10**17, 2_000)
        self._prone = rng.normal(0.0, 0.6, 300)
        days = TRAIN_DAYS + LATER_DAYS
        # Some leave, and as many others come, in their places.
        self._new_users, self._new_items = NEW_A_DAY[seed % len(NEW_A_DAY)]
        self._users = rng.permutation(np.arange(1.0, 8_000 + self._new_users * days) ** -1.0)
        self._items = rng.permutation(np.arange(1.0, 1_500 + self._new_items * days) ** -0.9)
        self._daily = rng.uniform(0.02, 0.15)

    def day(self, number: int) -> pl.DataFrame:
        rng = np.random.default_rng((self._seed, number + 1))
        weekend = (START + timedelta(days=number)).weekday() >= 5
        rows = int(ROWS_A_DAY * (0.8 if weekend else 1.0) * rng.uniform(0.9, 1.1))
        cycle = 1.0 - 0.7 * np.cos((np.arange(86_400) - 10_800) / 86_400 * 2 * np.pi)
        seconds = np.sort(rng.choice(86_400, rows, p=cycle / cycle.sum()))
        night = (seconds < 21_600).astype(float)
        left_users, left_items = self._new_users * number, self._new_items * number
        user = _draw(rng, rows, self._users[left_users:][:8_000]) + left_users
        item = _draw(rng, rows, self._items[left_items:][:1_500]) + left_items
        site = self._site_rank[_zipf(rng, rows, 300, 1.1)]
        device = _zipf(rng, rows, 12, 1.0 + 0.1 * weekend)
        campaign = number // 3 + _zipf(rng, rows, 8, 0.5)
        rate = 0.12 * np.exp(self._daily * rng.normal() + 0.1 * weekend)
        logit = np.log(rate / (1 - rate)) + self._prone[site] + 0.2 * night
        price = np.round(np.exp(rng.normal(3.0, 1.0, rows)), 2)
        no_price = rng.random(rows) < 0.08 * np.exp(0.2 * rng.normal()) + 0.03 * night
        no_site = rng.random(rows) < 0.002
        age = np.round(rng.normal(38, 12, rows).clip(16, 90))
        tags = [" ".join(f"t{tag}" for tag in row) for row in _zipf(rng, 3 * rows, 80, 1.0).reshape(rows, 3)]
        epoch = int((START + timedelta(days=number)).timestamp())
        return pl.DataFrame(
            {
                "ts": pl.from_epoch(pl.Series(epoch + seconds), "s"),
                "click": (rng.random(rows) < 1 / (1 + np.exp(-logit))).astype(np.int8),
                "user": [f"u{value}" for value in user],
                "item": [f"{value}" for value in 1_000 + item],
                "site": pl.Series([f"Site{value}.example" for value in site]).set(pl.Series(no_site), None),
                "zip": [f"{value:05d}" for value in 37 * _zipf(rng, rows, 900, 0.7)],
                "device": [
                    ("iPhone", "Android", "Desktop", "TV")[value % 4] + f" {value}" for value in device
                ],
                "campaign": [f"spring-{value}" for value in campaign],
                "account": [str(value) for value in self._accounts[_zipf(rng, rows, 2_000, 0.8)]],
                "referrer": [f"ref{value}" for value in _zipf(rng, rows, 5_000, 1.1)],
                "tags": tags,
                "price": pl.Series(price).set(pl.Series(no_price), None),
                "age": age,
            }
        )


def _zipf(rng: np.random.Generator, rows: int, size: int, exponent: float) -> Ints:
    return _draw(rng, rows, np.arange(1.0, size + 1) ** -exponent)


def _draw(rng: np.random.Generator, rows: int, mass: Floats) -> Ints:
    return np.searchsorted(np.cumsum(mass / mass.sum())[:-1], rng.random(rows), side="right").astype(np.int64)


@dataclass(frozen=True)
class Fault:
    """A fault, the fields it can befall, and the share of the rows that it befalls."""

    kind: str
    fields: tuple[str, ...]
    share: float
    inject: Callable[[pl.DataFrame, str, pl.Series, np.random.Generator], pl.DataFrame]


def _text(change: Callable[[pl.Expr], pl.Expr]) -> Callable[..., pl.DataFrame]:
    def inject(frame: pl.DataFrame, field: str, chosen: pl.Series, _: np.random.Generator) -> pl.DataFrame:
        column = pl.col(field)
        return frame.with_columns(
            pl.when(chosen).then(change(column.cast(pl.String))).otherwise(column).alias(field)
        )

    return inject


def _blank(frame: pl.DataFrame, field: str, chosen: pl.Series, _: np.random.Generator) -> pl.DataFrame:
    return frame.with_columns(pl.when(chosen).then(None).otherwise(pl.col(field)).alias(field))


def _default(frame: pl.DataFrame, field: str, chosen: pl.Series, _: np.random.Generator) -> pl.DataFrame:
    common = frame[field].drop_nulls().mode().sort()[0]
    return frame.with_columns(pl.when(chosen).then(pl.lit(common)).otherwise(pl.col(field)).alias(field))


def _filled(frame: pl.DataFrame, field: str, chosen: pl.Series, _: np.random.Generator) -> pl.DataFrame:
    return frame.with_columns(pl.col(field).fill_null(0))


def _scaled(frame: pl.DataFrame, field: str, chosen: pl.Series, _: np.random.Generator) -> pl.DataFrame:
    return frame.with_columns(pl.when(chosen).then(pl.col(field) * 100).otherwise(pl.col(field)).alias(field))


def other_column(field: str) -> str:
    """The column that a field is swapped with."""
    return "site" if field != "site" else "device"


def _swapped(frame: pl.DataFrame, field: str, chosen: pl.Series, _: np.random.Generator) -> pl.DataFrame:
    other = other_column(field)
    return frame.with_columns(pl.col(other).alias(field), pl.col(field).alias(other))


def _dropped(frame: pl.DataFrame, field: str, chosen: pl.Series, _: np.random.Generator) -> pl.DataFrame:
    return frame.drop(field)


def _lost_clicks(frame: pl.DataFrame, _: str, chosen: pl.Series, rng: np.random.Generator) -> pl.DataFrame:
    return frame.with_columns(
        pl.when(chosen).then(pl.lit(0, pl.Int8)).otherwise(pl.col("click")).alias("click")
    )


def _lost_views(frame: pl.DataFrame, _: str, chosen: pl.Series, rng: np.random.Generator) -> pl.DataFrame:
    return frame.filter((pl.col("click") == 1) | ~chosen)


def _repeated(frame: pl.DataFrame, _: str, chosen: pl.Series, rng: np.random.Generator) -> pl.DataFrame:
    return pl.concat([frame, frame.filter(chosen)])


def faults() -> Iterator[Fault]:
    """Every kind of fault, befalling all rows and some of them."""
    for share in (1.0, 0.3, 0.1):
        yield Fault(
            "case", ("site", "device", "campaign"), share, _text(lambda text: text.str.to_uppercase())
        )
        yield Fault("zero padding", ("item", "zip"), share, _text(lambda text: pl.lit("00") + text))
        yield Fault("floats", ("account",), share, _text(lambda text: text.cast(pl.Float64).cast(pl.String)))
        yield Fault("blanks", TEXT, share, _text(lambda text: text + " "))
        yield Fault("word for missing", TEXT, share, _text(lambda text: pl.lit("NULL")))
        yield Fault("missing", (*TEXT, "referrer", "tags", "price", "age"), share, _blank)
        yield Fault("other ids", TEXT, share, _text(lambda text: pl.lit("x-") + text.hash(7).cast(pl.String)))
    for share in (1.0, 0.5):
        yield Fault("default value", (*TEXT, "referrer", "price", "age"), share, _default)
        yield Fault("other unit", ("price", "age"), share, _scaled)
    yield Fault("missing filled", ("price",), 1.0, _filled)
    yield Fault("columns swapped", ("user", "zip", "campaign"), 1.0, _swapped)
    yield Fault("column dropped", (*TEXT, "referrer", "tags", "price", "age"), 1.0, _dropped)
    yield Fault("labels lost", ("click",), 0.7, _lost_clicks)
    yield Fault("negatives lost", ("click",), 0.7, _lost_views)
    for share in (1.0, 0.3, 0.1):
        yield Fault("rows repeated", ("",), share, _repeated)


def check(encoder: Encoder, profile: Profile, frame: pl.DataFrame) -> list[Finding]:
    """As `recap check` does, without an artifact around the profile."""
    inspection, raw_rows = Inspection(encoder, profile), RawRows(encoder.schema)
    block = Block(frame, 1, "window")
    inspection.add_absent(raw_rows.absent(block))
    renamed = raw_rows.renamed(block, fill=True)
    inspection.add(renamed, encoder.encode(renamed), known_labels(renamed, encoder.schema))
    return inspection.result().findings


class Tally:
    """How often a kind of fault was injected and caught."""

    def __init__(self) -> None:
        self.injected = self.caught = 0

    def add(self, is_caught: bool) -> None:
        self.injected += 1
        self.caught += is_caught

    def to_dict(self) -> dict[str, float]:
        return {
            "injected": self.injected,
            "caught": self.caught,
            "share": round(self.caught / self.injected, 4),
        }


def measure(seed: int, windows: int, tallies: dict[str, Tally], clean: dict[int, list[list[str]]]) -> None:
    log = Log(seed)
    with tempfile.TemporaryDirectory() as directory:
        table = pl.concat(log.day(number) for number in range(TRAIN_DAYS))
        preparation = Preparation(SCHEMA, {"all": FrameSource(table)}, Split(kind="time"))
        data = write_prepared_data(preparation, Path(directory) / "data", quiet=True)[0]
        encoder, profile = data.encoder, data.profile
    assert profile is not None
    later = pl.concat(log.day(TRAIN_DAYS + number) for number in range(LATER_DAYS))
    rng = np.random.default_rng((seed, 999))
    kinds = list(faults())
    for number in range(windows):
        for size in WINDOW_ROWS:
            start = int(rng.integers(0, later.height - size))
            window = later.slice(start, size)
            findings = check(encoder, profile, window)
            clean[size].append([finding.sentence for finding in findings])
            fault = kinds[(number * len(WINDOW_ROWS) + WINDOW_ROWS.index(size)) % len(kinds)]
            for field in fault.fields:
                chosen = pl.Series(rng.random(size) < fault.share)
                spoilt = fault.inject(window, field, chosen, rng)
                caught = {finding.field or "" for finding in check(encoder, profile, spoilt)}
                if fault.kind == "columns swapped" and other_column(field) in caught:
                    caught.add(field)
                tallies.setdefault(f"{fault.kind}, {fault.share:.0%} of rows", Tally()).add(field in caught)
                if field not in caught:
                    say(f"missed among {size} rows: {fault.kind} of {field or 'rows'}, {fault.share:.0%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--logs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1, help="of the first log")
    parser.add_argument("--windows", type=int, default=100, help="of each size, in each log")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    tallies: dict[str, Tally] = {}
    clean: dict[int, list[list[str]]] = {size: [] for size in WINDOW_ROWS}
    for number in range(args.logs):
        measure(args.seed + number, args.windows, tallies, clean)
        say(f"log {number + 1} of {args.logs} is done")
    alarms = [sentences for windows in clean.values() for sentences in windows if sentences]
    for sentences in alarms[:20]:
        say(f"false alarm: {'; '.join(sentences)}")
    total = Tally()
    total.injected = sum(tally.injected for tally in tallies.values())
    total.caught = sum(tally.caught for tally in tallies.values())
    num_clean = sum(map(len, clean.values()))
    result = {
        "caught": total.to_dict(),
        "clean_windows": num_clean,
        "false_alarms": len(alarms),
        "false_alarm_share": round(len(alarms) / num_clean, 4),
        "false_alarms_by_rows": {size: sum(map(bool, windows)) for size, windows in clean.items()},
        "by_fault": {name: tallies[name].to_dict() for name in sorted(tallies)},
    }
    if args.out is not None:
        write_json(args.out, result)
    print(json.dumps(result))
    if total.caught < CAUGHT * total.injected or len(alarms) > FALSE_ALARMS * num_clean:
        raise SystemExit("not as promised")


if __name__ == "__main__":
    main()
