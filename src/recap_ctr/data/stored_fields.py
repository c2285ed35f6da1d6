"""Fitted fields on disk, for whoever does not encode rows: their layout is known without reading a vocabulary."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recap_ctr.data.encode import Encoder, FittedField, has_vocabulary, lay_out, load_field, vocabulary_file
from recap_ctr.errors import InputError, did_you_mean
from recap_ctr.schema import Schema
from recap_ctr.storage.files import copy_file, make_directory


class StoredFields:
    """The fitted fields that `Encoder.save` wrote to a directory; a vocabulary is read only when it is asked for."""

    def __init__(self, directory: Path, schema: Schema, entries: Sequence[dict[str, Any]]) -> None:
        self.schema, self._directory, self._entries = schema, directory, entries
        self.layout = lay_out(
            schema.fields,
            [entry["size"] for entry in entries],
            [entry.get("added", 0) for entry in entries],
        )

    def field(self, name: str) -> FittedField:
        """Read one field."""
        names = [field.name for field in self.schema.fields]
        if name not in names:
            raise InputError(f"no field {name!r}{did_you_mean(name, names)}")
        return load_field(self._directory, self.schema, self._entries, names.index(name))

    def quantiles(self) -> dict[str, FittedField]:
        """Read the fields of numbers that were cut at quantiles, by name: their values are few, and have an order."""
        return {
            field.name: self.field(field.name)
            for field in self.schema.fields
            if field.kind == "numeric" and field.transform == "quantiles"
        }

    def load(self) -> Encoder:
        """Read all fields."""
        return Encoder.load(self._directory, self.schema, self._entries)

    def save(self, directory: Path) -> list[dict[str, Any]]:
        """Do what `Encoder.save` does, by copying files."""
        make_directory(directory / "vocabulary")
        for number, field in enumerate(self.schema.fields):
            if has_vocabulary(field):
                copy_file(self._directory / vocabulary_file(number), directory / vocabulary_file(number))
        return [dict(entry) for entry in self._entries]
