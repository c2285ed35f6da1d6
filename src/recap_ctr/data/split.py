"""How rows are divided into train, valid and test.

Split codes are 0 for train, 1 for valid and 2 for test, as in `SPLITS`.
"""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
import polars as pl
from pydantic import NonNegativeInt, PositiveInt, model_validator

from recap_ctr.config import Frozen
from recap_ctr.data.moments import DAY, read_seconds
from recap_ctr.data.shards import SPLITS
from recap_ctr.data.source import Block
from recap_ctr.data.text import as_text
from recap_ctr.errors import InputError, did_you_mean
from recap_ctr.schema import TimeUnit

SplitCodes = npt.NDArray[np.uint8]
ReadBlocks = Callable[[], Iterator[npt.NDArray[Any]]]
"""Reads one column of all rows, block by block."""
SplitKind = Literal["random", "time", "hash", "column", "files", "folds"]
_TO_GET_BOTH_CLASSES = {
    "random": "give more rows, or another --ratio or --seed to recap prepare",
    "time": "give more rows, another --ratio to recap prepare, or --split random",
    "hash": "give more rows, or another --ratio or --seed to recap prepare, or a key with more values",
}


class Split(Frozen):
    """How rows are divided into train, valid and test.

    - `random` and `time` follow the ratio, `time` in the order of the time column.
    - `hash` follows the ratio about: the hash of the text in the key `column` decides, so that rows with the same key
      stay together, also those of a later log, and no row's split depends on other rows.
    - `column` reads train, valid or test from a column; `files` has one source for each.
    - `folds` cuts as many stratified folds as the ratio has parts; test takes the first, valid the next ones.
    """

    kind: SplitKind = "random"
    ratio: tuple[PositiveInt, PositiveInt, NonNegativeInt] = (8, 1, 1)
    seed: NonNegativeInt = 1
    column: str | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.kind in ("column", "hash")) != (self.column is not None):
            raise ValueError("column names the column of kind = 'column' and 'hash', and only of these kinds")
        if self.kind == "folds" and sum(self.ratio) > 256:
            raise ValueError("at most 256 folds")
        return self

    def sizes(self, rows: int) -> tuple[int, int, int]:
        """Return how many of `rows` rows go to train, valid and test by the ratio."""
        total = sum(self.ratio)
        train = rows * self.ratio[0] // total
        train_and_valid = rows * (self.ratio[0] + self.ratio[1]) // total
        return train, train_and_valid - train, rows - train_and_valid


def parse_ratio(text: str) -> tuple[int, int, int]:
    """Parse a ratio such as 8:1:1; train and valid must not be 0."""
    parts = text.split(":")
    if len(parts) == 3 and all(part.isdigit() for part in parts) and int(parts[0]) and int(parts[1]):
        return int(parts[0]), int(parts[1]), int(parts[2])
    raise InputError(f"--ratio {text}: expected train:valid:test as whole numbers, such as 8:1:1")


def parse_rule(text: str) -> tuple[SplitKind, str | None]:
    """Parse the name of a rule that follows a ratio: random, time, or hash:COLUMN with the key's column.

    >>> parse_rule("time"), parse_rule("hash:user")
    (('time', None), ('hash', 'user'))
    """
    kind, _, column = text.partition(":")
    if kind == "hash" and column:
        return "hash", column
    rules: dict[str, SplitKind] = {"random": "random", "time": "time"}
    if text not in rules:
        raise InputError(
            f"--split {text}: no such rule{did_you_mean(text, rules)}",
            fix="choose random, time or hash:COLUMN",
        )
    return rules[text], None


def folds(labels: npt.NDArray[np.uint8], count: int, seed: int) -> npt.NDArray[np.uint8]:
    """Return each row's fold by the shuffled StratifiedKFold of scikit-learn 0.19.1; later versions differ.

    Each class is divided on its own, from the same seed: its rows are shuffled and cut into `count` pieces, of which
    the first ones are longer by one if the class does not divide evenly.
    """
    fold_of_row = np.empty(len(labels), np.uint8)
    for label in (0, 1):
        is_member = labels == label
        order = np.arange(np.count_nonzero(is_member), dtype=np.int32)  # the type does not change the draws
        np.random.RandomState(seed).shuffle(order)
        fold_of_member = np.empty(len(order), np.uint8)
        for fold, piece in enumerate(np.array_split(order, count)):
            fold_of_member[piece] = fold
        fold_of_row[is_member] = fold_of_member
    return fold_of_row


def read_split_column(block: Block, name: str) -> SplitCodes:
    """Return the split codes of a column that holds train, valid or test; another value is an error."""
    text = as_text(block.column(name, "split")).alias("")
    codes = text.replace_strict(list(SPLITS), [0, 1, 2], default=None, return_dtype=pl.UInt8)
    bad = codes.is_null().arg_true()
    if len(bad):
        raise InputError(
            f"{block.origin}: row {block.row(bad[0])}, column {name!r}: the split is {text[bad[0]]!r}",
            fix="write train, valid or test",
        )
    return codes.to_numpy()


def hash_splits(block: Block, split: Split) -> SplitCodes:
    """Return the split codes by the hash of the key column, the same on every machine; a row without a key is an error.

    The seed is part of what is hashed, so that splits of different seeds, and hashed fields, have nothing in common.
    """
    name = split.column or ""
    keys = as_text(block.column(name, "key of the split")).alias("")
    missing = keys.is_null().arg_true()
    if len(missing):
        raise InputError(
            f"{block.origin}: row {block.row(missing[0])}, column {name!r}: the key of the split is missing",
            fix="split by a key that all rows have, or fill it",
        )
    total = sum(split.ratio)
    bounds = [split.ratio[0] * 2**64 // total, (split.ratio[0] + split.ratio[1]) * 2**64 // total]
    distinct = keys.unique()
    codes = []
    for key in distinct:
        digest = hashlib.blake2b(f"{split.seed}\0{key}".encode(), digest_size=8).digest()
        codes.append(sum(int.from_bytes(digest, "little") >= bound for bound in bounds))
    return keys.replace_strict(distinct, pl.Series(codes, dtype=pl.UInt8), return_dtype=pl.UInt8).to_numpy()


def assign_splits(
    split: Split,
    num_rows: int,
    read_labels: ReadBlocks,
    read_times: ReadBlocks | None,
    read_codes: ReadBlocks,
) -> Iterator[SplitCodes]:
    """Yield the split codes of the rows in order.

    The arguments read the labels, the time column, if there is one, and the codes that a split column, a key or the
    files gave.
    """
    if split.kind == "random":
        codes = np.repeat(np.arange(3, dtype=np.uint8), split.sizes(num_rows))
        np.random.default_rng(split.seed).shuffle(codes)
        blocks = iter([codes])
    elif split.kind == "time":
        blocks = iter([_split_by_time(split, read_times)])
    elif split.kind == "folds":
        train, valid, test = split.ratio
        code_of_fold = np.repeat(np.array([2, 1, 0], np.uint8), [test, valid, train])
        labels = np.concatenate(list(read_labels()))
        blocks = iter([code_of_fold[folds(labels, len(code_of_fold), split.seed)]])
    else:
        blocks = read_codes()
    yield from blocks


def _split_by_time(split: Split, read_times: ReadBlocks | None) -> SplitCodes:
    if read_times is None:
        raise InputError("a split in time order needs a time column", fix='set time = "COLUMN" in the schema')
    times = np.concatenate(list(read_times()))
    times.sort()
    bounds = _time_bounds(times, split)
    if bounds is None:  # within a moment, the order of the rows decides
        order = np.argsort(np.concatenate(list(read_times())), kind="stable")
        codes = np.empty(len(times), np.uint8)
        codes[order] = np.repeat(np.arange(3, dtype=np.uint8), split.sizes(len(times)))
        return codes
    blocks = (np.searchsorted(bounds, block, side="left").astype(np.uint8) for block in read_times())
    return np.concatenate(list(blocks))


def _time_bounds(times: npt.NDArray[np.float64], split: Split) -> npt.NDArray[np.float64] | None:
    """Return the last moments of train and valid; None if there are too few moments to keep the rows of each together.

    A boundary inside a moment moves to its end or, if that leaves nothing for a split, to the nearest end of a moment
    that leaves something. Train then keeps at least half of its share.
    """
    train, valid, test = split.sizes(len(times))
    if not train or not valid:
        return None
    bounds = times[[train - 1, train + valid - 1]]
    ends = np.append(np.flatnonzero(np.diff(times)), len(times) - 1)  # the last row of each moment
    if len(ends) < (3 if test else 2):
        return None
    if bounds[0] < bounds[1] and (not test or bounds[1] < times[-1]):
        return bounds
    last_valid = len(ends) - 1
    if test:
        last_valid = 1 + _nearest(ends[1:-1], train + valid - 1)
    last_train = ends[_nearest(ends[:last_valid], train - 1)]
    return times[[last_train, ends[last_valid]]] if 2 * (last_train + 1) >= train else None


def _nearest(ends: npt.NDArray[np.int64], target: int) -> int:
    return int(np.abs(ends - target).argmin())


def describe_split(
    split: Split, codes: SplitCodes, read_times: ReadBlocks | None, unit: TimeUnit | None
) -> str:
    """Return in words how rows were divided; a split by time with the last moment of each part.

    `codes` are the rows' splits. `unit` says how moments are written where the time column holds any; those of dates
    (`iso`) were read as microseconds since 1970.
    """
    ratio = ":".join(map(str, split.ratio))
    if split.kind != "time" or read_times is None:
        return {
            "random": f"at random, {ratio}, seed {split.seed}",
            "folds": f"in {sum(split.ratio)} stratified folds, {ratio}, seed {split.seed}",
            "hash": f"by the hash of {split.column!r}, about {ratio}, seed {split.seed}",
            "column": f"by the column {split.column!r}",
        }.get(split.kind, "as given, a table for each part")
    last = np.full(3, -np.inf)
    start = 0
    for block in read_times():
        np.maximum.at(last, codes[start : start + len(block)], block)
        start += len(block)
    is_used = np.isfinite(last)
    moments, zone = _spell_times(last[is_used], unit)
    names = [name for name, used in zip(SPLITS, is_used, strict=True) if used]
    parts = (f"{name} until {moment}" for name, moment in zip(names, moments, strict=True))
    return f"by time; {', '.join(parts)}{zone}"


def _spell_times(times: npt.NDArray[np.float64], unit: TimeUnit | None) -> tuple[list[str], str]:
    """Return times as dates, or as the numbers that they are, and what to add about the time zone."""
    numbers = pl.Series(times)
    text = as_text(numbers)
    moments = numbers.cast(pl.Int64).cast(pl.Datetime("us")) if unit == "iso" else text
    seconds = None if unit is None else read_seconds(moments, unit)
    if seconds is None or seconds.has_nulls():
        return text.to_list(), ""
    has_clock = bool((seconds % DAY != 0).any())
    spelling = "%Y-%m-%d %H:%M" if has_clock else "%Y-%m-%d"
    return pl.from_epoch(seconds, "s").dt.strftime(spelling).to_list(), " (UTC)" if has_clock else ""


def check_classes(split: Split, codes: SplitCodes, read_labels: ReadBlocks) -> None:
    """Refuse a split without rows, or with clicked or unclicked rows only; test may be empty.

    `codes` are the splits of the rows whose labels `read_labels` reads.
    """
    counts, start = np.zeros((len(SPLITS), 2), np.int64), 0
    for labels in read_labels():
        keys = codes[start : start + len(labels)] * np.uint8(2) + labels
        counts += np.bincount(keys, minlength=counts.size).reshape(counts.shape)
        start += len(labels)
    for name, by_label in zip(SPLITS, counts, strict=True):
        num_rows = int(by_label.sum())
        if num_rows == 0 and name == "test":
            continue
        if num_rows == 0:
            raise InputError(f"no row is left for {name}", fix="give more rows, or another split")
        if not by_label.all():
            advice = _TO_GET_BOTH_CLASSES.get(split.kind, "give more rows, or move some there")
            if not counts.sum(axis=0).all():
                advice = "check the label column"
            raise InputError(
                f"all {num_rows:,} {name} rows have label {by_label.argmax()}: one class only",
                fix=f"a model needs clicked and unclicked rows in every split; {advice}",
            )
