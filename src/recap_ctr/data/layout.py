"""Where each field stands in the table of vectors and in the matrix of ids: all that a model knows of the data."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class FieldLayout:
    """Where a field stands: its rows in the table and its columns in the id matrix."""

    name: str
    offset: int
    """The first of its rows in the table."""
    size: int
    """How many rows it has there: PAD, kept values, OOV."""
    start: int
    """The first of its columns in the id matrix."""
    width: int
    pooling: str | None
    """How the vectors of a multi field are pooled: mean or sum."""
    value_column: int | None
    """Its column in the matrix of numbers, if it is a number."""
    num_added: int = 0
    """How many of its last rows belong to values that an update added, after OOV."""
    is_linear: bool = False
    """Whether its number says how far a row is from its id's vector to the next one, instead of multiplying it."""

    @property
    def num_values(self) -> int:
        """Return how many values it has: all rows but those of PAD and OOV."""
        return self.size - 2

    @property
    def is_factor(self) -> bool:
        """Return whether a row's number multiplies the field's only vector."""
        return self.value_column is not None and not self.is_linear

    @property
    def number_column(self) -> int:
        """Return the column of its number, which it must have."""
        assert self.value_column is not None
        return self.value_column

    @property
    def last(self) -> int:
        """Return the row of the table of its last kept value, after which there is none to go on to."""
        return self.offset + self.size - 2 - self.num_added

    @property
    def oov(self) -> int:
        """Return the id of missing and unseen values, which no update changes."""
        return self.size - 1 - self.num_added

    def numbers(
        self, ids_BW: npt.NDArray[np.int32], values_BN: npt.NDArray[np.float32]
    ) -> npt.NDArray[np.float32]:
        """Return the number of each row, NaN where missing; of a linear field, its place among the edges."""
        ids, numbers = ids_BW[:, self.start] - self.offset, values_BN[:, self.number_column]
        if self.is_linear:
            numbers = numbers + (ids - 1).astype(np.float32)
        return np.where(ids == self.oov, np.float32(np.nan), numbers)


@dataclass(frozen=True)
class Layout:
    """What a model must know of the data: sizes and positions, no values."""

    fields: tuple[FieldLayout, ...]

    @property
    def num_fields(self) -> int:
        """Return the number of fields."""
        return len(self.fields)

    @property
    def num_rows(self) -> int:
        """Return the rows of a table over all fields: the sum of the vocabulary sizes."""
        return sum(field.size for field in self.fields)

    @property
    def num_columns(self) -> int:
        """Return the number of columns of the id matrix; a multi field has several."""
        return sum(field.width for field in self.fields)

    @property
    def num_values(self) -> int:
        """Return the number of columns of the matrix of numbers."""
        return sum(field.value_column is not None for field in self.fields)

    @classmethod
    def of_sizes(cls, sizes: Sequence[int]) -> "Layout":
        """Return the layout of plain categorical fields with these vocabulary sizes, PAD and OOV included."""
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        return cls(
            tuple(
                FieldLayout(f"f{i}", int(offsets[i]), size, i, 1, None, None) for i, size in enumerate(sizes)
            )
        )
