"""Counts of values that are too rare for a vocabulary: an update adds them once they have become frequent."""

from collections.abc import Mapping
from pathlib import Path

import polars as pl

from recap_ctr.data.encode import Encoder
from recap_ctr.storage.files import make_directory, new_file

MAX_RARE = 1_000_000  # The counts of the most frequent values of each field are kept, up to this number.
Rare = Mapping[int, pl.DataFrame]
"""Values that a field's vocabulary lacks, with their counts, by the number of the field."""
NO_VALUES = pl.DataFrame(schema={"value": pl.String, "count": pl.Int64})


def most_frequent(rare: pl.DataFrame) -> pl.DataFrame:
    """Return the values to keep the counts of, the most frequent first."""
    return rare.sort(["count", "value"], descending=[True, False]).head(MAX_RARE)


def rare_file(number: int) -> str:
    """Return where the counts of the schema's field `number` are stored, from 0."""
    return f"rare/{number:04d}.parquet"


def save_rare(rare: Rare, directory: Path) -> list[Path]:
    """Write the counts of values that the vocabularies lack below `directory`, and return the files."""
    make_directory(directory / "rare")
    files = []
    for number, frame in rare.items():
        files.append(directory / rare_file(number))
        with new_file(files[-1]) as file:
            frame.write_parquet(file, statistics=False)
    return files


def load_rare(directory: Path, encoder: Encoder) -> Rare:
    """Return what `save_rare` wrote, of the fields that have a file."""
    files = {number: directory / rare_file(number) for number in range(len(encoder.fields))}
    return {number: pl.read_parquet(file, glob=False) for number, file in files.items() if file.is_file()}
