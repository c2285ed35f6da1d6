"""The tensors of a run on disk. Any number of workers can write them, and any other number can read them.

A single worker writes a single file. Of several workers, each writes its rows of the tables to a part of its own. Then
the first worker writes the main file, with all other tensors and the list of parts; as long as that file is missing,
nothing counts as saved. A reader takes the rows that it needs from every part, so no worker ever holds a whole table.
"""

import json
import secrets
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from recap_ctr.errors import InputError
from recap_ctr.nn.group import current_group
from recap_ctr.nn.partition import Partition
from recap_ctr.nn.sharded import CHUNK_ROWS, ShardedTable, give_rows, whole_weights
from recap_ctr.nn.table import Table
from recap_ctr.nn.weights import opened, save_tensors
from recap_ctr.storage.arrays import check_arrays, save_arrays

PARTS = "parts"


class TableRows:
    """Which of a run's tensors have one row for each row of a table: weights, moments, averages, when rows changed."""

    def __init__(self, model: nn.Module) -> None:
        tables = {name: module for name, module in model.named_modules() if isinstance(module, Table)}
        self._names = tuple(tables)
        self.count = max((_num_rows(table) for table in tables.values()), default=1)
        """The rows of a table, which all tables of a model have."""

    def __contains__(self, name: str) -> bool:
        """Return whether the tensor of this name has such rows, because its name ends with the name of a table."""
        owner = name.removesuffix(".weight")
        return any(owner == table or owner.endswith(f".{table}") for table in self._names)


def _num_rows(table: Table) -> int:
    return table.partition.num_rows if isinstance(table, ShardedTable) else table.weight.shape[0]


def save(path: Path, tensors: Mapping[str, Tensor], rows: TableRows, metadata: dict[str, str]) -> None:
    """Write the tensors of a run; all workers of a group must call this together."""
    group = current_group()
    if group.size == 1:
        save_tensors(path, tensors, metadata)
        _remove_parts(path, except_for=())
        return
    token = int(group.sum_(torch.tensor(secrets.randbits(62) if group.is_first else 0)))
    parts = [f"{path.stem}-{token:016x}-{rank}.safetensors" for rank in range(group.size)]
    here = {name: tensor for name, tensor in tensors.items() if name in rows}
    save_tensors(path.with_name(parts[group.rank]), here)
    group.wait()  # The list of parts must not appear before the parts.
    if group.is_first:
        others = {name: tensor for name, tensor in tensors.items() if name not in rows}
        save_tensors(path, others, {**metadata, PARTS: json.dumps(parts)})
        _remove_parts(path, except_for=parts)
    group.wait()  # Nobody may read what was there before.


def save_whole(path: Path, model: nn.Module) -> None:
    """Write a model's weights to one file, tables in their own order; all workers must call this together."""
    weights = whole_weights(model)
    if current_group().is_first:
        save_arrays(path, weights, checksum=True)
    else:
        for _ in ("checksum", "file"):  # The first worker goes through all rows for each of them.
            give_rows(weights)


class Saved(Mapping[str, Tensor]):
    """The tensors that `save` wrote, read when they are asked for. Of tables, only this worker's rows are read."""

    def __init__(self, path: Path, rows: TableRows, prefix: str = "") -> None:
        self._path, self._rows, self._prefix = path, rows, prefix
        if not prefix:
            check_arrays(path)
        with opened(path) as file:
            self.metadata: dict[str, str] = file.metadata() or {}
            self._shared = set(file.keys())
        parts = json.loads(self.metadata.get(PARTS, "[]"))
        self._parts = [path.with_name(part) for part in parts]
        if not all(part.is_file() for part in self._parts):
            raise InputError(f"a part of {path} is missing", fix="restore it, or start over in another --out")
        for part in self._parts if not prefix else ():
            check_arrays(part)
        self._names = {name for name in self._shared if name.startswith(prefix)}
        if self._parts:
            with opened(self._parts[0]) as file:
                self._names |= {name for name in file.keys() if name.startswith(prefix)}  # noqa: SIM118

    def under(self, prefix: str) -> "Saved":
        """Return the tensors whose names begin with `prefix`, under the rest of their names."""
        return Saved(self._path, self._rows, self._prefix + prefix)

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix(self._prefix) for name in self._names)

    def __getitem__(self, name: str) -> Tensor:
        name = self._prefix + name
        if name not in self._names:
            raise KeyError(name)
        if name in self._rows and (self._parts or current_group().size > 1):
            return self._gather(name)
        with opened(self._path) as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor

    def _gather(self, name: str) -> Tensor:
        """Return this worker's rows of a tensor, from wherever they are."""
        group = current_group()
        stored = Partition(self._rows.count, max(len(self._parts), 1))
        needed = Partition(self._rows.count, group.size)
        block = needed.block(group.rank)
        gathered: Tensor | None = None
        for rank, path in enumerate(self._parts or [self._path]):
            source = stored.block(rank)
            with opened(path) as file:
                piece = file.get_slice(name)
                if gathered is None:
                    gathered = piece[:0].new_empty(len(block), *piece.get_shape()[1:])
                if stored.has_order_of(needed):
                    source = range(max(source.start, block.start), min(source.stop, block.stop))
                for start in range(source.start, source.stop, CHUNK_ROWS):
                    stop = min(start + CHUNK_ROWS, source.stop)
                    first = stored.block(rank).start
                    places = needed.places(stored.rows_at(torch.arange(start, stop)))
                    here = (places >= block.start) & (places < block.stop)
                    gathered[places[here] - block.start] = piece[start - first : stop - first][here]
        assert gathered is not None
        return gathered


def _remove_parts(path: Path, *, except_for: Collection[str]) -> None:
    """Remove the parts of earlier states, and what a killed worker left of one."""
    for pattern in (f"{path.stem}-*.safetensors", f".{path.stem}-*.partial"):
        for part in path.parent.glob(pattern):
            if part.name not in except_for:
                part.unlink(missing_ok=True)
