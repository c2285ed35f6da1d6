"""Data sets that AFN distributes as three libsvm files: a label, then one `index:1` per field, over all fields."""

from collections.abc import Callable, Sequence
from pathlib import Path

import polars as pl

from recap_ctr.data.shards import SPLITS
from recap_ctr.data.source import Block, FileSource, MappedSource, Source
from recap_ctr.errors import InputError

HOMEPAGE = "https://github.com/WeiyuCheng/AFN-AAAI-20"
FILES = tuple(f"{split}.libsvm" for split in SPLITS)


def indices(block: Block) -> pl.DataFrame:
    """Reduce each `index:1` to its index, as in the published CSV files."""
    label, *fields = block.frame.columns
    for name in fields:
        bad = (~block.frame[name].str.contains("^[0-9]+:1$").fill_null(False)).arg_true()
        if len(bad):
            raise InputError(
                f"{block.origin}: row {block.first_row + bad[0]}, field {name!r}:"
                f" {block.frame[name][bad[0]]!r} is not index:1",
                fix="use the raw file as it was downloaded",
            )
    return block.frame.select(label, pl.col(fields).str.strip_suffix(":1"))


def sources(columns: Sequence[str]) -> Callable[[Sequence[Path]], dict[str, Source]]:
    """Return a function from the three files to the rows of each split."""

    def of_files(files: Sequence[Path]) -> dict[str, Source]:
        return {
            split: MappedSource(FileSource([file], columns), lambda: indices)
            for split, file in zip(SPLITS, files, strict=True)
        }

    return of_files
