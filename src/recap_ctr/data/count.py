"""How often each value of a spooled column occurs, in memory that does not depend on how many values there are.

Every part of a column has a dictionary of its own, on disk by rising hash. Its codes are counted, and the counts go to
disk in the same order. Then the parts are merged one range of hashes after the other: a value has the same hash in
every part, so all its counts come together, and memory holds one range at a time.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from recap_ctr.data.split import SplitCodes
from recap_ctr.data.spool import Part, Spool, SpooledRows
from recap_ctr.schema import Field
from recap_ctr.storage.files import append_file, make_directory, new_file

Counts = npt.NDArray[np.int64]


class CountedValues:
    """The values of a column of values, with their counts in the training rows and in all rows.

    `directory` is for files that are needed meanwhile, and for those that `write_seen` leaves.
    """

    def __init__(self, rows: SpooledRows, name: str, splits: SplitCodes, directory: Path) -> None:
        self._column, self._directory = rows.columns[name], directory
        make_directory(directory)
        num_codes = sum(part.num_values for part in self._column.parts)
        self._num_ranges = max(-(-num_codes // rows.max_values), 1)
        row_numbers = None
        if name.startswith("counted:"):  # Its entries say their rows.
            row_numbers = rows.columns[name.replace("counted:", "counted rows:", 1)]
        starts = self._column.starts()
        for number, part in enumerate(self._column.parts):
            self._count(number, part, slice(starts[number], starts[number + 1]), splits, row_numbers)

    def _count(
        self, number: int, part: Part, place: slice, splits: SplitCodes, row_numbers: Spool | None
    ) -> None:
        """Write the counts of one part's values, by rising hash; its entries are at `place` in the column."""
        counts_V2 = np.zeros((part.num_values, 2), np.int64)
        start = place.start
        rows_of_entries = None if row_numbers is None else row_numbers.blocks(place.start, place.stop)
        for codes in self._column.blocks(place.start, place.stop):
            if rows_of_entries is None:
                is_training = splits[start : start + len(codes)] == 0
            else:
                is_training = splits[next(rows_of_entries)] == 0
            for i, chosen in enumerate((codes[is_training], codes)):
                counts_V2[:, i] += np.bincount(chosen[chosen >= 0], minlength=part.num_values)
            start += len(codes)
        order = pl.read_ipc(part.dictionary, columns=["code"])["code"].to_numpy()
        with new_file(self._counts_file(number)) as file:
            file.write(counts_V2[order].data)

    def _counts_file(self, number: int) -> Path:
        return self._directory / f"counts-{number:04d}"

    def _slices(self) -> Iterator[list[pl.DataFrame]]:
        """Yield for each range of hashes the values of every part, columns `value`, `train` and `total`."""
        parts = self._column.parts
        bounds = np.linspace(0, 2.0**64, self._num_ranges + 1)[1:-1].astype(np.uint64)
        cuts = [_cuts(part, bounds) for part in parts]
        for at in range(self._num_ranges if parts else 0):
            yield [
                self._slice(number, part, cut[at], cut[at + 1])
                for number, (part, cut) in enumerate(zip(parts, cuts, strict=True))
            ]

    def _slice(self, number: int, part: Part, start: int, stop: int) -> pl.DataFrame:
        counts = np.zeros((0, 2), np.int64)
        if stop > start:
            with self._counts_file(number).open("rb") as file:
                file.seek(start * counts.itemsize * 2)
                counts = np.fromfile(file, np.int64, (stop - start) * 2).reshape(-1, 2)
        values = pl.scan_ipc(part.dictionary, glob=False).slice(start, stop - start).select("value").collect()
        return values.with_columns(train=pl.Series(counts[:, 0]), total=pl.Series(counts[:, 1]))

    def ranges(self) -> Iterator[pl.DataFrame]:
        """Yield all values, columns `value`, `train` and `total`, each of them once; some at a time."""
        for slices in self._slices():
            if len(slices) == 1:
                yield slices[0]
            else:
                yield pl.concat(slices).group_by("value").agg(pl.col("train", "total").sum())

    def write_seen(self) -> None:
        """Write for the values of each part, by rising hash, whether a training row has them."""
        for slices in self._slices():
            table = pl.concat(slices)
            is_seen = table["train"].to_numpy() > 0
            if len(slices) > 1:  # What no training row of one part has, those of another may have.
                elsewhere = table["value"].filter(~is_seen).is_in(table["value"].filter(is_seen).implode())
                is_seen[~is_seen] = elsewhere.to_numpy()
            ends = np.cumsum([part.height for part in slices])
            for number, part in enumerate(np.split(is_seen, ends[:-1])):
                with append_file(seen_file(self._directory, number)) as file:
                    file.write(np.ascontiguousarray(part, np.uint8).data)


def _cuts(part: Part, bounds: npt.NDArray[np.uint64]) -> list[int]:
    """Return the places in a part's dictionary at which ranges of hashes begin, and its end."""
    if not len(bounds):
        return [0, part.num_values]
    hashes: npt.NDArray[Any] = pl.read_ipc(part.dictionary, columns=["hash"])["hash"].to_numpy()
    return [0, *np.searchsorted(hashes, bounds).tolist(), part.num_values]


def may_lack_values(rows: SpooledRows, field: Field) -> bool:
    """Return whether a field's vocabulary may lack values that training rows have."""
    return field.min_count > 1 or field.name in rows.counted


def seen_file(directory: Path, number: int) -> Path:
    """Return where `write_seen` writes the values of part `number`."""
    return directory / f"seen-{number:04d}"


def field_directory(directory: Path, number: int) -> Path:
    """Return where the counts of the schema's field `number` are, below `directory`."""
    return directory / f"field-{number:04d}"
