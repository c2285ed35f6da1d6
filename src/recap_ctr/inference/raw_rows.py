"""Raw rows under the names of an artifact's schema: the files that hold them, and their columns."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import polars as pl

from recap_ctr.data.csv import ColumnNames
from recap_ctr.data.source import Block, FileSource, Source
from recap_ctr.data.table import RawTable, open_source
from recap_ctr.errors import InputError
from recap_ctr.schema import Schema


class RawRows:
    """Reads rows of a schema; `columns` maps columns of the schema to those with another name in the rows."""

    def __init__(self, schema: Schema, columns: Mapping[str, str] | None = None) -> None:
        self._schema, self._columns = schema, dict(columns or {})
        for name in self._columns:
            if name not in {*schema.input_columns, *schema.roles.values()}:
                raise InputError(
                    f"the artifact has no field {name!r}, which --map names",
                    fix=f"--map FIELD=COLUMN; the fields are {', '.join(schema.input_columns)}",
                )

    def open(self, rows: RawTable) -> Source:
        """Return files or a data frame as a source of rows."""
        if isinstance(rows, str | Path):
            return self.files([rows])
        return self.files(rows) if isinstance(rows, Sequence) else open_source(rows)

    def files(self, patterns: Sequence[str | Path]) -> FileSource:
        """Return files as a source of rows.

        Where the schema is for files without a header line, they may have one nevertheless, or lack the label.
        """
        schema = self._schema
        if schema.columns is None:
            return FileSource(patterns, separator=schema.separator)
        fields = frozenset(self._columns.get(name, name) for name in schema.input_columns)
        names = ColumnNames(schema.columns, fields, schema.label)
        return FileSource(patterns, names, schema.separator)

    def absent(self, block: Block) -> list[str]:
        """Return the columns of fields that the rows don't have."""
        present = {*block.frame.columns, *self._columns}
        return [name for name in self._schema.input_columns if name not in present]

    def renamed(self, block: Block, *, fill: bool = False) -> Block:
        """Return the block with each mapped field under its own name.

        All are renamed at once, so that two fields can be swapped. Fields without a column are an error, unless `fill`
        has them stand for missing values.
        """
        for column in self._columns.values():
            if column not in block.frame.columns:
                raise InputError(f"{block.origin} has no column {column!r}, which --map names")
        absent = self.absent(block)
        if absent and not fill:
            raise self._absent_error(block, absent[0])
        columns = [block.frame[column].alias(name) for name, column in self._columns.items()]
        columns += [
            pl.Series(name, [None], pl.String).new_from_index(0, block.frame.height) for name in absent
        ]
        return Block(block.frame.with_columns(columns), block.first_row, block.origin)

    def _absent_error(self, block: Block, name: str) -> InputError:
        """Return the error for a field without a column; it lists columns that could be meant."""
        schema = self._schema
        number = next(i for i, field in enumerate(schema.fields, start=1) if field.column == name)
        used = {*schema.input_columns, *schema.roles.values(), *self._columns.values()}
        unused = [column for column in block.frame.columns if column not in used][:12]
        return InputError(
            f"{block.origin} has no column {name!r} (field {number} of {len(schema.fields)} in the artifact's"
            f" schema)\n  columns present but unused: {', '.join(map(repr, unused)) or 'none'}",
            fix=f"rename the column, or pass --map {name}={unused[0] if unused else 'COLUMN'}",
        )
