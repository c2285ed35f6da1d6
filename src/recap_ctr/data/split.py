"""How rows are divided into train, valid and test.

Split codes are 0 for train, 1 for valid and 2 for test, as in `SPLITS`.
"""

from collections.abc import Callable, Iterator
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
import polars as pl
from pydantic import NonNegativeInt, PositiveInt, model_validator

from recap_ctr.config import Frozen
from recap_ctr.data.shards import SPLITS
from recap_ctr.data.source import Block
from recap_ctr.data.text import as_text
from recap_ctr.errors import InputError

SplitCodes = npt.NDArray[np.uint8]
ReadBlocks = Callable[[], Iterator[npt.NDArray[Any]]]
"""Reads one column of all rows, block by block."""
_TO_GET_BOTH_CLASSES = {
    "random": "give more rows, or another --ratio or --seed to recap prepare",
    "time": "give more rows, or another --ratio to recap prepare",
}


class Split(Frozen):
    """How rows are divided into train, valid and test.

    - `random` and `time` follow the ratio, `time` in the order of the time column.
    - `column` reads train, valid or test from a column; `files` has one source for each.
    - `folds` cuts as many stratified folds as the ratio has parts; test takes the first, valid the next ones.
    """

    kind: Literal["random", "time", "column", "files", "folds"] = "random"
    ratio: tuple[PositiveInt, PositiveInt, NonNegativeInt] = (8, 1, 1)
    seed: NonNegativeInt = 1
    column: str | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.kind == "column") != (self.column is not None):
            raise ValueError("column names the split column of kind = 'column', and only of that kind")
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
            f"{block.origin}: row {block.first_row + bad[0]}, column {name!r}: the split is {text[bad[0]]!r}",
            fix="write train, valid or test",
        )
    return codes.to_numpy()


def assign_splits(
    split: Split, labels: npt.NDArray[np.uint8], read_times: ReadBlocks | None, read_codes: ReadBlocks
) -> SplitCodes:
    """Return the split code of each row, and refuse splits that a model can't be trained or judged on.

    `read_times` reads the time column, if there is one; `read_codes` the codes that a split column or the files gave.
    """
    if split.kind == "random":
        codes = np.repeat(np.arange(3, dtype=np.uint8), split.sizes(len(labels)))
        np.random.default_rng(split.seed).shuffle(codes)
    elif split.kind == "time":
        codes = _split_by_time(split, read_times)
    elif split.kind == "folds":
        train, valid, test = split.ratio
        code_of_fold = np.repeat(np.array([2, 1, 0], np.uint8), [test, valid, train])
        codes = code_of_fold[folds(labels, len(code_of_fold), split.seed)]
    else:
        codes = np.concatenate(list(read_codes()))
    _check_classes(split, labels, codes)
    return codes


def _split_by_time(split: Split, read_times: ReadBlocks | None) -> SplitCodes:
    if read_times is None:
        raise InputError("a split in time order needs a time column", fix='set time = "COLUMN" in the schema')
    times = np.concatenate(list(read_times()))
    times.sort()
    train, valid, _ = split.sizes(len(times))
    # Rows of one moment stay together: a boundary inside it moves to its end.
    bounds = times[[train - 1, train + valid - 1]] if train and valid else times[[0, 0]]
    blocks = (np.searchsorted(bounds, block, side="left").astype(np.uint8) for block in read_times())
    return np.concatenate(list(blocks))


def _check_classes(split: Split, labels: npt.NDArray[np.uint8], codes: SplitCodes) -> None:
    """Refuse a split without rows, or with clicked or unclicked rows only; test may be empty."""
    for code, name in enumerate(SPLITS):
        split_labels = labels[codes == code]
        if len(split_labels) == 0 and name == "test":
            continue
        if len(split_labels) == 0:
            raise InputError(f"no row is left for {name}", fix="give more rows, or another split")
        if split_labels.min() == split_labels.max():
            advice = _TO_GET_BOTH_CLASSES.get(split.kind, "give more rows, or move some there")
            if labels.min() == labels.max():
                advice = "check the label column"
            raise InputError(
                f"all {len(split_labels):,} {name} rows have label {split_labels[0]}: one class only",
                fix=f"a model needs clicked and unclicked rows in every split; {advice}",
            )
