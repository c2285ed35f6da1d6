"""From raw rows to shards, in two passes.

The first pass reads the source once, checks every row and spools each column as provisional codes (`spool`). After it
everything is known that a split (`split`) or a vocabulary (`fit`) needs. The second pass reads only the spool, whose
codes become ids by one look-up in an array. Memory holds the distinct values and a byte or two per row.
"""

import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from recap_ctr.data.encode import MISSING_CODE, PAD_CODE, Encoder, FittedField, Ints, standardise
from recap_ctr.data.fit import fit_field
from recap_ctr.data.grow import Base, save_rare, unkept
from recap_ctr.data.layout import FieldLayout
from recap_ctr.data.moments import find_unit
from recap_ctr.data.profile import PROFILE
from recap_ctr.data.profiling import build_profile
from recap_ctr.data.quality import UnknownValues
from recap_ctr.data.shards import (
    FORMAT,
    MANIFEST,
    SPLITS,
    PreparedData,
    files_fingerprint,
    is_prepared,
    open_shard,
    read_manifest,
)
from recap_ctr.data.source import FileSource, Source
from recap_ctr.data.split import ReadBlocks, Split, SplitCodes, assign_splits, describe_split
from recap_ctr.data.spool import MAX_VALUES, Counted, SpooledRows
from recap_ctr.data.text import as_text
from recap_ctr.errors import InputError
from recap_ctr.jobs.progress import meter, say
from recap_ctr.schema import Schema, TimeUnit
from recap_ctr.storage.arrays import NpyFile
from recap_ctr.storage.files import atomic_directory, atomic_file, make_directory, write_json
from recap_ctr.storage.hashes import fingerprint, sha256


@dataclass(frozen=True)
class Preparation:
    """What to prepare, and under which rules."""

    schema: Schema
    sources: Mapping[str, Source]
    """One source under `all`, or one for each split."""
    split: Split = Split()  # noqa: RUF009, it is frozen
    dataset: str | None = None
    """The public data set whose protocol this follows."""
    counted: Counted = dataclass_field(default_factory=dict)
    """Multi fields whose vocabulary is counted as published figures require, not over the values that a row keeps.

    `pieces` counts all values of a cell, also those beyond `max_len`. `cells` counts whole cells, so that a value is
    kept only if it stands alone often enough.
    """

    drop_unlabelled: bool = False
    """Leave out rows without a label, which are refused otherwise; where there are none, it changes nothing."""
    base: Base | None = None
    """The vocabularies of an earlier model, which grow; by default the training rows decide on new ones."""

    max_values: int = MAX_VALUES
    """Distinct values of a field that memory holds meanwhile; it changes nothing but memory and time."""

    def inputs(self) -> dict[str, Any]:
        """Return everything that decides the result as plain JSON values, as the manifest records it."""
        files = {name: [vars(file) for file in source.files()] for name, source in self.sources.items()}
        inputs: dict[str, Any] = {
            "dataset": self.dataset,
            "schema": self.schema.model_dump(mode="json"),
            "sources": files,
            "split": self.split.model_dump(mode="json"),
        }
        if self.base is not None:
            inputs["base"] = self.base.name
        return inputs | ({"counted": dict(self.counted)} if self.counted else {})

    @property
    def fingerprint(self) -> str:
        """A hash of everything that decides the result; names and places of the files are not part of it."""
        return fingerprint(_content(self.inputs()))


def _content(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs without what may change while the content stays, such as the name of a file."""
    files = {
        name: [{key: file[key] for key in ("size", "sha256")} for file in source_files]
        for name, source_files in inputs["sources"].items()
    }
    return {**inputs, "sources": files}


def write_prepared_data(
    preparation: Preparation, out: Path, *, force: bool = False, quiet: bool = False
) -> tuple[PreparedData, bool]:
    """Write prepared data to `out`; return it, and whether it was there already from the same inputs.

    `force` replaces prepared data from other inputs.
    """
    file_sources = [source for source in preparation.sources.values() if isinstance(source, FileSource)]
    stamps = [source.stamps() for source in file_sources]
    inputs = preparation.inputs()
    if _is_occupied(out):
        if not is_prepared(out):
            raise InputError(f"{out} exists and is not prepared data", fix="choose another --out")
        if not force:
            has_stream = any(source.is_stream for source in file_sources)
            _check_up_to_date(out, inputs, has_stream)
            return PreparedData(out), True
    with atomic_directory(out) as partial:
        _write(preparation, partial, inputs, quiet)
        if [source.stamps() for source in file_sources] != stamps:
            raise InputError(
                "a source changed while it was read",
                fix="run the same command again when it no longer changes",
            )
    return PreparedData(out, verify=False), False


def _is_occupied(path: Path) -> bool:
    """Return whether `path` is a file or a directory that is not empty."""
    return any(path.iterdir()) if path.is_dir() else path.exists()


def _check_up_to_date(out: Path, inputs: dict[str, Any], has_stream: bool) -> None:
    """Refuse to go on unless the prepared data in `out` come from the same inputs."""
    if has_stream:
        raise InputError(
            f"{out} exists, and rows that come through a pipe can't be compared with those it was made from",
            fix="choose another --out, or replace it with --force",
        )
    old, new = _content(read_manifest(out)["inputs"]), _content(inputs)
    if old != new:
        changed = [key for key in new if new[key] != old.get(key)]
        raise InputError(
            f"{out} was prepared from other inputs (changed: {', '.join(changed)})",
            fix="choose another --out, or replace it with --force",
        )


def _write(preparation: Preparation, out: Path, inputs: dict[str, Any], quiet: bool) -> None:
    """Fill the empty directory `out`; the manifest comes last."""
    directory = out / "spool"
    make_directory(directory)
    schema = preparation.schema
    rows = SpooledRows(schema, preparation.split, preparation.counted, directory, preparation.max_values)
    rows.read(preparation.sources, labelled_only=preparation.drop_unlabelled, quiet=quiet)
    for name in () if quiet else rows.spilled_fields():
        say(
            f"field {name!r} has more than {preparation.max_values:,} values, which are counted on disk: the result is"
            " the same, and takes longer"
        )
    splits = _assign_splits(preparation.split, rows)
    unit = _time_unit(schema, rows)
    if preparation.base is None:
        encoder = Encoder(schema, [fit_field(rows, field, splits) for field in schema.fields])
        rare = unkept(rows, encoder)
    else:
        encoder, rare = preparation.base.grown(rows, unit)
    files, split_entries = _ShardWriter(rows, encoder, splits, out).write(quiet)
    description = describe_split(preparation.split, splits, _time_blocks(rows), unit)
    train = open_shard(out, "train", split_entries["train"]["rows"], files)
    build_profile(rows, encoder, splits, train, unit).write(out / PROFILE)
    shutil.rmtree(directory)
    field_entries = encoder.save(out)
    with atomic_file(out / "schema.toml") as file:
        file.write(schema.to_toml().encode())
    for path in (out / "schema.toml", *sorted((out / "vocabulary").iterdir())):
        entry = {"bytes": path.stat().st_size, "sha256": sha256(path)}
        files[path.relative_to(out).as_posix()] = entry
    # No model depends on these, so they are no part of what identifies the data.
    for path in (*save_rare(rare, out), out / PROFILE):
        files[path.relative_to(out).as_posix()] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
    manifest = {
        "kind": "prepared data",
        "format": FORMAT,
        "fingerprint": files_fingerprint(files),
        "inputs": inputs,
        "fields": field_entries,
        "split": description,
        "time_unit": unit,
        "splits": split_entries,
        "unlabelled": rows.num_unlabelled,
        "files": files,
    }
    write_json(out / MANIFEST, manifest)


def _assign_splits(split: Split, rows: SpooledRows) -> SplitCodes:
    labels = np.concatenate(list(rows.columns["label"].blocks()))
    return assign_splits(split, labels, _time_blocks(rows), rows.columns["split"].blocks)


def _time_blocks(rows: SpooledRows) -> ReadBlocks | None:
    """Return what reads the time column, if there is one."""
    return rows.columns["time"].blocks if "time" in rows.columns else None


def _time_unit(schema: Schema, rows: SpooledRows) -> TimeUnit | None:
    """Return how the time column writes moments; None if there is none, or if it holds other numbers."""
    if rows.time_kind != "numbers":
        return None if rows.time_kind is None else "iso"
    derived = (field.unit for field in schema.fields if field.source == schema.time)
    return next(derived, None) or find_unit(as_text(pl.Series(next(rows.columns["time"].blocks())).unique()))


def _shard_file(code: int, array: str) -> str:
    """Return where an array of one split is stored, relative to the prepared data."""
    return f"{SPLITS[code]}/{array}.npy"


class _ShardWriter:
    """The second pass: from the spool to one shard per split."""

    def __init__(self, rows: SpooledRows, encoder: Encoder, splits: SplitCodes, out: Path) -> None:
        self._rows, self._encoder, self._splits, self._out = rows, encoder, splits, out
        self._layout = encoder.layout
        self._id_tables = [self._id_table(fitted) for fitted in encoder.fields]
        self._group_table = self._order_groups() if "group" in rows.columns else None
        oov = [field.offset + field.oov for field in self._layout.fields for _ in range(field.width)]
        self._oov_W = np.array(oov, np.int32)
        self._counts = np.bincount(splits, minlength=3)
        self._positives = np.zeros(3, np.int64)
        self._num_oov = np.zeros((3, self._layout.num_fields), np.int64)
        self._unknown = UnknownValues(rows, encoder, splits)

    def write(self, quiet: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        """Write all shards; return the manifest's entries of their files and of the splits."""
        num_rows = self._rows.num_rows
        streams = {
            name: spool.blocks()
            for name, spool in self._rows.columns.items()
            if not name.startswith("counted")  # these do not have one entry a row
        }
        with ExitStack() as stack, meter("writing shards", num_rows, "rows", quiet=quiet) as shown:
            shards = [self._open(stack, code) for code in range(len(SPLITS))]
            start = 0
            for columns in zip(*streams.values(), strict=True):
                arrays = self._encode(dict(zip(streams, columns, strict=True)), start)
                height = len(arrays["labels"])
                for code, shard in enumerate(shards):
                    self._append(arrays, self._splits[start : start + height] == code, shard, code)
                start += height
                shown.advance(height, height)
        files = {
            _shard_file(code, name): file.entry
            for code, shard in enumerate(shards)
            for name, file in shard.items()
        }
        return files, self._describe_splits()

    def _open(self, stack: ExitStack, code: int) -> dict[str, NpyFile]:
        """Open the files of one shard by the name of their array."""
        kinds: dict[str, tuple[npt.DTypeLike, tuple[int, ...]]] = {
            "ids": (np.int32, (self._layout.num_columns,)),
            "labels": (np.uint8, ()),
            "rows": (np.int64, ()),
        }
        if self._layout.num_values:
            kinds["values"] = (np.float32, (self._layout.num_values,))
        for role, dtype in (("weight", np.float32), ("group", np.int32), ("time", np.float64)):
            if role in self._rows.columns:
                kinds[f"{role}s"] = (dtype, ())
        return {
            name: stack.enter_context(
                NpyFile(self._out / _shard_file(code, name), dtype, (int(self._counts[code]), *width))
            )
            for name, (dtype, width) in kinds.items()
        }

    def _encode(self, block: dict[str, npt.NDArray[Any]], start: int) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays of a shard for a block of spooled rows, of which the first has number `start`."""
        height = len(block["label"])
        ids_BW = np.empty((height, self._layout.num_columns), np.int32)
        values_BN = np.empty((height, self._layout.num_values), np.float32)
        for i, place in enumerate(self._layout.fields):
            ids = self._field_ids(i, place, block[f"field:{place.name}"], values_BN)
            self._unknown.add(i, block[f"field:{place.name}"], ids, start)
            ids_BW[:, place.start : place.start + place.width] = (ids + place.offset).reshape(
                height, place.width
            )
        arrays: dict[str, npt.NDArray[Any]] = {
            "ids": ids_BW,
            "values": values_BN,
            "labels": block["label"],
            "rows": np.arange(start, start + height),
        }
        arrays |= {f"{role}s": block[role] for role in ("weight", "time") if role in block}
        if self._group_table is not None:
            arrays["groups"] = self._group_table[block["group"]]
        return arrays

    def _field_ids(
        self, index: int, place: FieldLayout, column: npt.NDArray[Any], values_BN: npt.NDArray[np.float32]
    ) -> Ints:
        """Return the ids of one field's spooled column; write its numbers, if it has any, to `values_BN`."""
        fitted, id_table = self._encoder.fields[index], self._id_tables[index]
        if place.value_column is not None:
            out = values_BN[:, place.value_column]
            return standardise(np.nan_to_num(column), np.isnan(column), fitted, out)
        if fitted.field.transform == "quantiles":
            buckets = np.searchsorted(np.asarray(fitted.edges), column, side="right").astype(np.int32)
            return id_table[np.where(np.isnan(column), MISSING_CODE, buckets)]
        if fitted.field.hash_buckets:
            return fitted.ids(column)
        return np.asarray(id_table[column])

    def _append(
        self,
        arrays: dict[str, npt.NDArray[Any]],
        chosen: npt.NDArray[np.bool_],
        shard: dict[str, NpyFile],
        code: int,
    ) -> None:
        """Write the chosen rows to the shard of one split, and count its positives and OOV values."""
        for name, file in shard.items():
            file.write(arrays[name][chosen])
        self._positives[code] += int(arrays["labels"][chosen].sum())
        num_oov_W = (arrays["ids"][chosen] == self._oov_W).sum(axis=0)
        self._num_oov[code] += np.add.reduceat(num_oov_W, [field.start for field in self._layout.fields])

    def _describe_splits(self) -> dict[str, Any]:
        return {
            name: {
                "rows": int(self._counts[code]),
                "positives": int(self._positives[code]),
                **{
                    kind: {field.name: int(counts[code, i]) for i, field in enumerate(self._layout.fields)}
                    for kind, counts in (
                        ("oov", self._num_oov),
                        ("missing", self._unknown.missing),
                        ("rare", self._unknown.rare),
                    )
                },
            }
            for code, name in enumerate(SPLITS)
        }

    def _order_groups(self) -> Ints:
        """Return the place of each spooled group among all in order of value; the last entry serves -1 (missing).

        polars casts the chunks of a column in parallel, so the spooled codes differ from run to run.
        """
        places = self._rows.dictionaries["group"].values().rank("dense").cast(pl.Int32) - 1
        return np.append(places.fill_null(MISSING_CODE).to_numpy(), np.int32(MISSING_CODE))

    def _id_table(self, fitted: FittedField) -> Ints:
        """Return the id of each spooled code; the last two entries serve the codes -2 (padding) and -1 (missing)."""
        field = fitted.field
        if field.is_value or field.hash_buckets:  # a number needs no table, and a bucket is its own code
            return np.zeros(0, np.int32)
        last = fitted.ids(np.array([PAD_CODE, MISSING_CODE], np.int32))
        if field.transform == "quantiles":
            values = pl.Series(np.arange(len(fitted.edges) + 1)).cast(pl.String)
            return np.concatenate([fitted.ids(fitted.codes(values)), last])
        dictionary = self._rows.dictionaries[f"field:{field.name}"]
        ids = np.empty(dictionary.num_values + 2, np.int32)
        for part in dictionary.parts():
            ids[part["code"].to_numpy()] = fitted.ids(fitted.codes(part["value"]))
        ids[-2:] = last
        return ids
