"""From raw rows to shards, in two passes.

The first pass reads the source once: it checks every row and spools each column as provisional codes. Then all is
known that a split or a vocabulary needs. The second pass reads only the spool, whose codes become ids by one look-up
in an array. Memory holds the distinct values and a byte or two per row.
"""

import hashlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
import polars as pl
from pydantic import NonNegativeInt, PositiveInt, model_validator

from recap_ctr.config import Frozen, parse
from recap_ctr.data.encode import (
    MISSING_CODE,
    PAD_CODE,
    Encoder,
    FittedField,
    Ints,
    as_numbers,
    as_text,
    categories,
    column,
    hash_codes,
    pieces,
    standardise,
)
from recap_ctr.data.shards import FORMAT, MANIFEST, SPLITS, PreparedData, is_prepared, read_manifest
from recap_ctr.data.source import Block, FileSource, Source
from recap_ctr.errors import InputError
from recap_ctr.jobs.progress import meter
from recap_ctr.schema import Field, Schema
from recap_ctr.storage.files import atomic_directory, atomic_file, write_json
from recap_ctr.storage.hashes import fingerprint, sha256

SPOOL_ROWS = 1 << 17
QUANTILE_ROWS = 1 << 20
OTHERWISE = {  # what brings both classes into a split, where the source has them
    "random": "give more rows, or another --ratio or --seed to recap prepare",
    "time": "give more rows, or another --ratio to recap prepare",
}


class Split(Frozen):
    """How rows are divided into train, valid and test.

    `random` and `time` take the ratio; `column` reads train, valid or test from a column; `files` follows the files.
    `folds` cuts as many stratified folds as the ratio has parts: test takes the first, valid the next, train the rest.
    """

    kind: Literal["random", "time", "column", "files", "folds"] = "random"
    ratio: tuple[PositiveInt, PositiveInt, NonNegativeInt] = (8, 1, 1)
    seed: NonNegativeInt = 1
    column: str | None = None

    @model_validator(mode="after")
    def _column_is_named(self) -> Self:
        if (self.kind == "column") != (self.column is not None):
            raise ValueError("column names the split column of kind = 'column', and only of that kind")
        if self.kind == "folds" and sum(self.ratio) > 256:
            raise ValueError("at most 256 folds")
        return self

    def sizes(self, rows: int) -> tuple[int, int, int]:
        total = sum(self.ratio)
        first = rows * self.ratio[0] // total
        second = rows * (self.ratio[0] + self.ratio[1]) // total
        return first, second - first, rows - second


def folds(labels: npt.NDArray[np.uint8], count: int, seed: int) -> npt.NDArray[np.uint8]:
    """Each row's fold by the shuffled StratifiedKFold of scikit-learn 0.19.1; later versions deal otherwise.

    Each class is dealt out on its own, and with the generator started anew: its members are shuffled and cut into
    `count` pieces, the first ones longer by one where it doesn't divide.
    """
    found = np.empty(len(labels), np.uint8)
    for label in (0, 1):
        members = labels == label
        order = np.arange(np.count_nonzero(members), dtype=np.int32)  # the draws don't depend on the type
        np.random.RandomState(seed).shuffle(order)
        dealt = np.empty(len(order), np.uint8)
        for fold, piece in enumerate(np.array_split(order, count)):
            dealt[piece] = fold
        found[members] = dealt
    return found


def parse_ratio(text: str) -> tuple[int, int, int]:
    parts = text.split(":")
    if (
        len(parts) != 3
        or not all(part.isdigit() for part in parts)
        or int(parts[0]) == 0
        or int(parts[1]) == 0
    ):
        raise InputError(f"--ratio {text}: expected train:valid:test as whole numbers, such as 8:1:1")
    return int(parts[0]), int(parts[1]), int(parts[2])


@dataclass(frozen=True)
class Preparation:
    """What there is to prepare, and under which rules."""

    schema: Schema
    sources: Mapping[str, Source]
    """One source under `all`, or one for each split."""
    split: Split = Split()  # noqa: RUF009, it is frozen
    dataset: str | None = None
    """The public data set that this follows the protocol of."""
    counted: Mapping[str, Literal["cells", "pieces"]] = dataclass_field(default_factory=dict)
    """Multi fields whose values are not counted over the pieces that a row takes, as published figures have it:
    over all its pieces, or over whole cells, and then a piece is known only if it often stands alone."""

    def inputs(self) -> dict[str, Any]:
        files = {name: [vars(file) for file in source.files()] for name, source in self.sources.items()}
        inputs = {
            "dataset": self.dataset,
            "schema": self.schema.model_dump(mode="json"),
            "sources": files,
            "split": self.split.model_dump(mode="json"),
        }
        return inputs | ({"counted": dict(self.counted)} if self.counted else {})

    @property
    def fingerprint(self) -> str:
        """Of all that decides the result; where the files lie is no part of it."""
        return fingerprint(_content(self.inputs()))


def _content(inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs without what may change while the content stays: a copied file keeps its data."""
    files = {
        name: [{key: file[key] for key in ("size", "sha256")} for file in listed]
        for name, listed in inputs["sources"].items()
    }
    return {**inputs, "sources": files}


def prepare(
    preparation: Preparation, out: Path, *, force: bool = False, quiet: bool = False
) -> tuple[PreparedData, bool]:
    """Write `out`, and say whether it was already there: the same inputs are never prepared twice."""
    files = [source for source in preparation.sources.values() if isinstance(source, FileSource)]
    before = [source.stamps() for source in files]
    inputs = preparation.inputs()
    if out.exists() and any(out.iterdir()) if out.is_dir() else out.exists():
        if not is_prepared(out):
            raise InputError(f"{out} exists and is not prepared data", fix="choose another --out")
        streams = [s for s in preparation.sources.values() if isinstance(s, FileSource) and s.is_stream]
        if streams and not force:
            raise InputError(
                f"{out} exists; what comes through a pipe can't be compared with what it was made of",
                fix="choose another --out, or replace it with --force",
            )
        if not force:
            old, new = _content(read_manifest(out)["inputs"]), _content(inputs)
            if old == new:
                return PreparedData(out), True
            changed = [key for key in new if new[key] != old.get(key)]
            raise InputError(
                f"{out} was prepared from other inputs (changed: {', '.join(changed)})",
                fix="choose another --out, or replace it with --force",
            )
    with atomic_directory(out) as partial:
        _Preparer(preparation, partial, quiet).run(inputs)
        if [source.stamps() for source in files] != before:
            raise InputError(
                "a source changed while it was read", fix="run the same command again when it stands still"
            )
    return PreparedData(out, verify=False), False


class _Spool:
    """A column of the first pass on disk, in blocks of `SPOOL_ROWS` rows."""

    def __init__(self, path: Path, dtype: npt.DTypeLike, width: int = 1) -> None:
        self.path, self.dtype, self.width = path, np.dtype(dtype), width
        self._file = path.open("wb")

    def append(self, values: npt.NDArray[Any]) -> None:
        self._file.write(np.ascontiguousarray(values, self.dtype).data)

    def close(self) -> None:
        self._file.close()

    def blocks(self) -> Iterator[npt.NDArray[Any]]:
        count = SPOOL_ROWS * self.width
        with self.path.open("rb") as file:
            while len(block := np.fromfile(file, self.dtype, count)):
                yield block if self.width == 1 else block.reshape(-1, self.width)


class _Dictionary:
    """Text values to codes in some order, growing from block to block."""

    def __init__(self) -> None:
        self.dtype = pl.Categorical(pl.Categories.random())
        self.num_values = 0
        self._alive: pl.Series | None = None  # polars forgets categories that no series holds

    def codes(self, encoded: pl.Series) -> Ints:
        self._alive = encoded
        codes = encoded.to_physical().cast(pl.Int32)
        self.num_values = max(self.num_values, int(codes.max() or 0) + 1 if codes.count() else 0)  # type: ignore[arg-type]
        return codes.fill_null(MISSING_CODE).to_numpy()

    def values(self) -> pl.Series:
        codes = pl.Series("value", np.arange(self.num_values, dtype=np.uint32))
        return (
            codes.cat.to(self.dtype).cast(pl.String)
            if self.num_values
            else pl.Series("value", [], dtype=pl.String)
        )


class _Preparer:
    def __init__(self, preparation: Preparation, out: Path, quiet: bool) -> None:
        self.schema, self.sources, self.split = preparation.schema, preparation.sources, preparation.split
        self.counted = preparation.counted
        self.out, self.quiet = out, quiet
        self.spool = out / "spool"
        self.rows = 0
        self.time_kind: str | None = None
        self.columns: dict[str, _Spool] = {}
        self.dictionaries: dict[str, _Dictionary] = {}

    def run(self, inputs: dict[str, Any]) -> None:
        self.spool.mkdir()
        with ExitStack() as stack:
            self._open(stack)
            self._read()
        codes = self._split()
        encoder = Encoder(self.schema, [self._fit(field, codes) for field in self.schema.fields])
        files, splits = self._write(encoder, codes)
        shutil.rmtree(self.spool)
        described = encoder.save(self.out)
        with atomic_file(self.out / "schema.toml") as file:
            file.write(self.schema.to_toml().encode())
        for path in (self.out / "schema.toml", *sorted((self.out / "vocabulary").iterdir())):
            files[path.relative_to(self.out).as_posix()] = {
                "bytes": path.stat().st_size,
                "sha256": sha256(path),
            }
        write_json(
            self.out / MANIFEST,
            {
                "kind": "prepared data",
                "format": FORMAT,
                "fingerprint": fingerprint({name: entry["sha256"] for name, entry in files.items()}),
                "inputs": inputs,
                "fields": described,
                "splits": splits,
                "files": files,
            },
        )

    # First pass: source to spool.

    def _open(self, stack: ExitStack) -> None:
        def add(name: str, dtype: npt.DTypeLike, width: int = 1) -> None:
            self.columns[name] = _Spool(self.spool / f"{len(self.columns):04d}", dtype, width)
            stack.callback(self.columns[name].close)

        for field in self.schema.fields:
            if field.is_value or field.transform == "quantiles":
                add(f"field:{field.name}", np.float64)
            else:
                add(f"field:{field.name}", np.int32, field.width)
                if not field.hash_buckets:
                    self.dictionaries[f"field:{field.name}"] = _Dictionary()
            if field.name in self.counted:
                add(f"counted:{field.name}", np.int32)
                add(f"counted rows:{field.name}", np.int64)
                self.dictionaries[f"counted:{field.name}"] = _Dictionary()
        add("label", np.uint8)
        add("split", np.uint8)
        if self.schema.weight:
            add("weight", np.float32)
        if self.schema.time:
            add("time", np.float64)
        if self.schema.group:
            add("group", np.int32)
            self.dictionaries["group"] = _Dictionary()

    def _read(self) -> None:
        total = sum(source.total_bytes for source in self.sources.values())
        with meter("preparing", total, "rows", quiet=self.quiet) as shown:
            for name, source in self.sources.items():
                for block, size in source.blocks():
                    self._spool_block(block, SPLITS.index(name) if name in SPLITS else 0)
                    self.rows += block.frame.height
                    shown.advance(block.frame.height, size)
        if self.rows == 0:
            raise InputError("the source holds no rows")

    def _spool_block(self, block: Block, split: int) -> None:
        text: list[pl.Series] = []
        targets: list[tuple[str, Any]] = []
        for field in self.schema.fields:
            spool = self.columns[f"field:{field.name}"]
            if spool.dtype == np.float64:
                spool.append(as_numbers(block, field).alias("").fill_null(np.nan).to_numpy())
                continue
            flat = pieces(block, field) if field.kind == "multi" else None
            values = categories(block, field) if flat is None else flat.values
            if field.hash_buckets:
                codes = hash_codes(values, field.hash_buckets)
                spool.append(codes if flat is None else flat.matrix(codes, field.width))
            else:
                text.append(values)
                targets.append((f"field:{field.name}", flat))
            if field.name in self.counted:
                counted, rows = self._counted(block, field)
                text.append(counted)
                targets.append((f"counted:{field.name}", None))
                self.columns[f"counted rows:{field.name}"].append(rows + self.rows)
        if self.schema.group:
            text.append(as_text(column(block, self.schema.group, "group")))
            targets.append(("group", None))
        for (name, flat), codes in zip(
            targets, self._codes(text, [name for name, _ in targets]), strict=True
        ):
            spool = self.columns[name]
            spool.append(codes if flat is None else flat.matrix(codes, spool.width))
        self.columns["label"].append(labels(block, self.schema.label))
        if self.schema.weight:
            self.columns["weight"].append(weights(block, self.schema.weight))
        if self.schema.time:
            kind = time_kind(block, self.schema.time)
            if self.time_kind not in (None, kind):
                raise InputError(
                    f"{block.origin}: from row {block.first_row} on the time {self.schema.time!r} holds {kind},"
                    f" before that {self.time_kind}",
                    fix="write all times in one way",
                )
            self.time_kind = kind
            self.columns["time"].append(times(block, self.schema.time))
        self.columns["split"].append(self._split_codes(block, split))

    def _counted(self, block: Block, field: Field) -> tuple[pl.Series, npt.NDArray[np.int64]]:
        """What the vocabulary of such a field counts, each value with its row in the block."""
        if self.counted[field.name] == "pieces":
            flat = pieces(block, field.model_copy(update={"max_len": 2**31}))
            return flat.values, flat.rows
        cells = as_text(column(block, field.name, "multi field"), field.missing).alias("")
        return cells.drop_nulls(), cells.is_not_null().arg_true().cast(pl.Int64).to_numpy()

    def _codes(self, text: Sequence[pl.Series], names: Sequence[str]) -> Iterator[Ints]:
        """Codes of several columns; polars works on columns of equal length side by side."""
        encoded: dict[str, pl.Series] = {}
        by_length: dict[int, list[int]] = {}
        for i, values in enumerate(text):
            by_length.setdefault(len(values), []).append(i)
        for members in by_length.values():
            frame = pl.DataFrame([text[i].alias(names[i]) for i in members])
            done = frame.select(pl.col(names[i]).cast(self.dictionaries[names[i]].dtype) for i in members)
            encoded |= {names[i]: done[names[i]] for i in members}
        for name in names:
            yield self.dictionaries[name].codes(encoded[name])

    def _split_codes(self, block: Block, split: int) -> npt.NDArray[np.uint8]:
        if self.split.column is None:
            return np.full(block.frame.height, split, np.uint8)
        text = as_text(column(block, self.split.column, "split")).alias("")
        codes = text.replace_strict(list(SPLITS), [0, 1, 2], default=None, return_dtype=pl.UInt8)
        bad = codes.is_null().arg_true()
        if len(bad):
            raise InputError(
                f"{block.origin}: row {block.first_row + bad[0]}, column {self.split.column!r}: {text[bad[0]]!r}"
                " is none of train, valid, test"
            )
        return codes.to_numpy()

    # Between the passes: who is in which split, and what the training rows say.

    def _split(self) -> npt.NDArray[np.uint8]:
        label = np.concatenate(list(self.columns["label"].blocks()))
        if self.split.kind == "random":
            codes = np.repeat(np.arange(3, dtype=np.uint8), self.split.sizes(self.rows))
            np.random.default_rng(self.split.seed).shuffle(codes)
        elif self.split.kind == "time":
            if not self.schema.time:
                raise InputError(
                    "a split in time order needs a time column", fix='set time = "COLUMN" in the schema'
                )
            order = np.concatenate(list(self.columns["time"].blocks()))
            order.sort()
            first, second, _ = self.split.sizes(self.rows)
            # Rows of one moment stay together: a boundary inside it moves to its end.
            bounds = order[[first - 1, first + second - 1]] if first and second else order[[0, 0]]
            codes = np.concatenate(
                [
                    np.searchsorted(bounds, block, side="left").astype(np.uint8)
                    for block in self.columns["time"].blocks()
                ]
            )
        elif self.split.kind == "folds":
            train, valid, test = self.split.ratio
            of_fold = np.repeat(np.array([2, 1, 0], np.uint8), [test, valid, train])
            codes = of_fold[folds(label, len(of_fold), self.split.seed)]
        else:
            codes = np.concatenate(list(self.columns["split"].blocks()))
        for split, name in enumerate(SPLITS):
            chosen = label[codes == split]
            if len(chosen) == 0 and name == "test":
                continue
            if len(chosen) == 0:
                raise InputError(f"no row is left for {name}", fix="give more rows, or another split")
            if chosen.min() == chosen.max():
                advice = OTHERWISE.get(self.split.kind, "give more rows, or move some there")
                if label.min() == label.max():
                    advice = "check the label column"
                raise InputError(
                    f"all {len(chosen):,} {name} rows have label {chosen[0]}: one class only",
                    fix=f"a model needs clicked and unclicked rows in every split; {advice}",
                )
        return codes

    def _fit(self, field: Field, splits: npt.NDArray[np.uint8]) -> FittedField:
        name = f"{'counted' if field.name in self.counted else 'field'}:{field.name}"
        spool = self.columns[name]
        none = pl.Series("value", [], dtype=pl.String)
        if spool.dtype == np.float64:
            return self._fit_numbers(field, spool, splits)
        if field.hash_buckets:
            return FittedField(field, none, np.zeros(0, np.int64))
        dictionary = self.dictionaries[name]
        counts = np.zeros(dictionary.num_values, np.int64)
        training = _training(spool, splits)
        if field.name in self.counted:
            rows = self.columns[f"counted rows:{field.name}"].blocks()
            training = ((codes, splits[of] == 0) for codes, of in zip(spool.blocks(), rows, strict=True))
        for block, chosen in training:
            codes = block[chosen]
            counts += np.bincount(codes[codes >= 0], minlength=len(counts))
        values = dictionary.values()
        frame = pl.DataFrame({"value": values, "count": counts}).filter(pl.col("count") >= field.min_count)
        frame = frame.sort(["count", "value"], descending=[True, False])
        return FittedField(field, frame["value"], frame["count"].to_numpy())

    def _fit_numbers(self, field: Field, spool: _Spool, splits: npt.NDArray[np.uint8]) -> FittedField:
        step = max(self.rows // QUANTILE_ROWS, 1)  # evenly spaced rows are enough for a quantile
        sample, count, total, square = [], 0, 0.0, 0.0
        shift: float | None = None
        for block, chosen in _training(spool, splits):
            numbers = block[chosen]
            numbers = numbers[~np.isnan(numbers)]
            if len(numbers) == 0:
                continue
            shift = float(numbers[0]) if shift is None else shift
            with np.errstate(over="ignore"):
                count, total = count + len(numbers), total + float((numbers - shift).sum())
                square += float(((numbers - shift) ** 2).sum())
            sample.append(numbers[::step])
        none = pl.Series("value", [], dtype=pl.String)
        zero = np.zeros(0, np.int64)
        if field.is_value:
            if count == 0:
                return FittedField(field, none, zero)
            if not np.isfinite(square):
                raise InputError(
                    f"field {field.name!r}: its numbers are too large to standardise",
                    fix='set transform = "quantiles", or repair the values',
                )
            mean = total / count
            spread = float(np.sqrt(max(square / count - mean * mean, 0.0)))
            return FittedField(field, none, zero, mean + (shift or 0.0), spread if spread > 0 else 1.0)
        if count == 0:
            return FittedField(field, none, zero)
        shares = np.arange(1, field.num_buckets) / field.num_buckets
        edges = np.unique(np.quantile(np.concatenate(sample), shares))
        counts = np.zeros(len(edges) + 1, np.int64)
        for block, chosen in _training(spool, splits):
            numbers = block[chosen]
            numbers = numbers[~np.isnan(numbers)]
            counts += np.bincount(np.searchsorted(edges, numbers, side="right"), minlength=len(counts))
        frame = pl.DataFrame({"value": pl.Series(np.arange(len(counts))).cast(pl.String), "count": counts})
        frame = frame.filter(pl.col("count") >= field.min_count).sort(
            ["count", "value"], descending=[True, False]
        )
        return FittedField(field, frame["value"], frame["count"].to_numpy(), edges=tuple(edges.tolist()))

    # Second pass: spool to shards.

    def _write(
        self, encoder: Encoder, splits: npt.NDArray[np.uint8]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        layout = encoder.layout
        kinds: dict[str, tuple[npt.DTypeLike, int | None]] = {
            "ids": (np.int32, layout.num_columns), "labels": (np.uint8, None), "rows": (np.int64, None)
        }  # fmt: skip
        if layout.num_values:
            kinds["values"] = (np.float32, layout.num_values)
        for role, name, dtype in (
            ("weight", "weights", np.float32),
            ("group", "groups", np.int32),
            ("time", "times", np.float64),
        ):
            if role in self.columns:
                kinds[name] = (dtype, None)
        tables = [self._remap(fitted) for fitted in encoder.fields]
        groups = self._group_codes() if "group" in self.columns else None
        counts = np.bincount(splits, minlength=3)
        positives = np.zeros(3, np.int64)
        outside = np.zeros((3, layout.num_fields), np.int64)
        with ExitStack() as stack:
            writers = [
                {
                    name: stack.enter_context(
                        _ShardFile(self.out, f"{split}/{name}.npy", dtype, int(counts[i]), width)
                    )
                    for name, (dtype, width) in kinds.items()
                }
                for i, split in enumerate(SPLITS)
            ]
            streams = {
                name: spool.blocks()
                for name, spool in self.columns.items()
                if not name.startswith("counted")  # these are not one entry a row
            }
            with meter("writing shards", self.rows, "rows", quiet=self.quiet) as shown:
                for start in range(0, self.rows, SPOOL_ROWS):
                    block = {name: next(stream) for name, stream in streams.items()}
                    height = len(block["label"])
                    ids = np.empty((height, layout.num_columns), np.int32)
                    values = np.empty((height, layout.num_values), np.float32)
                    for fitted, at, table in zip(encoder.fields, layout.fields, tables, strict=True):
                        raw = block[f"field:{at.name}"]
                        if at.value_column is not None:
                            local = standardise(
                                np.nan_to_num(raw), np.isnan(raw), fitted, values[:, at.value_column]
                            )
                        elif fitted.edges or fitted.field.transform == "quantiles":
                            codes = np.searchsorted(np.asarray(fitted.edges), raw, side="right").astype(
                                np.int32
                            )
                            local = table[np.where(np.isnan(raw), MISSING_CODE, codes)]
                        elif fitted.field.hash_buckets:
                            local = fitted.ids(raw)
                        else:
                            local = table[raw]
                        ids[:, at.start : at.start + at.width] = (local + at.offset).reshape(height, at.width)
                    arrays = {
                        "ids": ids,
                        "values": values,
                        "labels": block["label"],
                        "rows": np.arange(start, start + height),
                    }
                    arrays |= {f"{role}s": block[role] for role in ("weight", "time") if role in block}
                    if groups is not None:
                        arrays["groups"] = groups[block["group"]]
                    oov = np.array(
                        [at.offset + at.size - 1 for at in layout.fields for _ in range(at.width)], np.int32
                    )
                    unknown = ids == oov
                    for i, writer in enumerate(writers):
                        chosen = splits[start : start + height] == i
                        for name in kinds:
                            writer[name].write(arrays[name][chosen])
                        positives[i] += int(block["label"][chosen].sum())
                        outside[i] += np.add.reduceat(
                            unknown[chosen].sum(axis=0), [at.start for at in layout.fields]
                        )
                    shown.advance(height, height)
        files = {file.name: file.entry for writer in writers for file in writer.values()}
        described = {
            split: {
                "rows": int(counts[i]),
                "positives": int(positives[i]),
                "oov": {at.name: int(outside[i, j]) for j, at in enumerate(layout.fields)},
            }
            for i, split in enumerate(SPLITS)
        }
        return files, described

    def _group_codes(self) -> Ints:
        """Spooled code -> the group's place among all in order of value; the last entry serves -1 (missing).

        polars casts the chunks of a column side by side, so that the spooled codes differ from run to run.
        """
        places = self.dictionaries["group"].values().rank("dense").cast(pl.Int32) - 1
        return np.append(places.fill_null(MISSING_CODE).to_numpy(), np.int32(MISSING_CODE))

    def _remap(self, fitted: FittedField) -> Ints:
        """Spooled code -> id; the last two entries serve the codes -2 (padding) and -1 (missing)."""
        field = fitted.field
        if field.is_value or field.hash_buckets:  # a number needs no table, and a bucket is its own code
            return np.zeros(0, np.int32)
        if field.transform == "quantiles":
            kept = fitted.ids(fitted.codes(pl.Series(np.arange(len(fitted.edges) + 1)).cast(pl.String)))
        else:
            kept = fitted.ids(fitted.codes(self.dictionaries[f"field:{field.name}"].values()))
        return np.concatenate([kept, fitted.ids(np.array([PAD_CODE, MISSING_CODE], np.int32))])


class _ShardFile:
    """A `.npy` file, hashed while it is written; by ordinary writes, so that a full disk is an error and no crash."""

    def __init__(self, out: Path, name: str, dtype: npt.DTypeLike, rows: int, width: int | None) -> None:
        self.name, self._dtype = name, np.dtype(dtype)
        path = out / name
        path.parent.mkdir(exist_ok=True)
        self._file = path.open("wb")
        self._digest, self._bytes = hashlib.sha256(), 0
        shape = (rows,) if width is None else (rows, width)
        self._header = {
            "descr": np.lib.format.dtype_to_descr(self._dtype), "fortran_order": False, "shape": shape
        }  # fmt: skip

    def write_bytes(self, data: Any) -> None:
        self._file.write(data)
        self._digest.update(data)
        self._bytes += memoryview(data).nbytes

    def write(self, rows: npt.NDArray[Any]) -> None:
        if rows.size:
            self.write_bytes(np.ascontiguousarray(rows, self._dtype).data)

    @property
    def entry(self) -> dict[str, Any]:
        return {"bytes": self._bytes, "sha256": self._digest.hexdigest()}

    def __enter__(self) -> "_ShardFile":
        try:
            np.lib.format.write_array_header_1_0(_Hashed(self), self._header)
        except BaseException:  # a full disk: no one else would close the file
            self._file.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


class _Hashed:
    """The writing end that numpy's header function wants."""

    def __init__(self, file: _ShardFile) -> None:
        self._file = file

    def write(self, data: bytes) -> None:
        self._file.write_bytes(data)


def _training(
    spool: _Spool, splits: npt.NDArray[np.uint8]
) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]]:
    start = 0
    for block in spool.blocks():
        yield block, splits[start : start + len(block)] == 0
        start += len(block)


def labels(block: Block, name: str) -> npt.NDArray[np.uint8]:
    """The label column as 0 and 1; anything else names its row."""
    text = as_text(column(block, name, "label")).alias("")
    found = text.replace_strict(
        ["0", "1", "false", "true"], [0, 1, 0, 1], default=None, return_dtype=pl.UInt8
    )
    bad = found.is_null().arg_true()
    if len(bad):
        value = text[bad[0]]
        what = "is missing" if value is None else f"is {value!r}, neither 0 nor 1"
        raise InputError(
            f"{block.origin}: row {block.first_row + bad[0]}: the label {name!r} {what}",
            fix="a label is 1 for a click and 0 for none; drop or repair such rows",
        )
    return found.to_numpy()


def weights(block: Block, name: str) -> npt.NDArray[np.float32]:
    numbers = as_numbers(block, parse(Field, {"name": name, "kind": "numeric"}, "weight")).alias("")
    bad = (~numbers.is_between(0, float(np.finfo(np.float32).max)).fill_null(False)).arg_true()
    if len(bad):
        value = numbers[bad[0]]
        raise InputError(
            f"{block.origin}: row {block.first_row + bad[0]}: the weight {name!r} is"
            f" {'missing' if value is None else value}; it must be 0 or more",
            fix="give every row a weight (1 for an ordinary one), or take weight out of the schema",
        )
    return numbers.cast(pl.Float32).to_numpy()


def time_kind(block: Block, name: str) -> str:
    """Whether a time column holds numbers or dates; the two can't be ordered against each other."""
    raw = column(block, name, "time").alias("")
    text = raw.dtype == pl.String and raw.cast(pl.Float64, strict=False).null_count()
    return "dates" if text or raw.dtype in (pl.Date, pl.Datetime) else "numbers"


def times(block: Block, name: str) -> npt.NDArray[np.float64]:
    """A time column as numbers that order it: numbers as they are, dates as microseconds."""
    raw = column(block, name, "time").alias("")
    fix = "use a number, or a date such as 2026-01-31 23:59:00"
    if raw.dtype in (pl.Date, pl.Datetime):
        numbers = raw.cast(pl.Datetime("us")).cast(pl.Int64).cast(pl.Float64)
    elif raw.dtype in (pl.String, pl.Null) or raw.dtype.is_numeric():
        numbers = raw.cast(pl.Float64, strict=False)
        if raw.dtype == pl.String and numbers.null_count():
            with suppress(pl.exceptions.ComputeError):  # no date format fits: then what is no number is bad
                numbers = raw.str.to_datetime(time_unit="us", strict=False).cast(pl.Int64).cast(pl.Float64)
    else:
        raise InputError(f"{block.origin}: the time {name!r} is of type {raw.dtype}", fix=fix)
    bad = (numbers.is_null() | ~numbers.is_finite().fill_null(False)).arg_true()
    if len(bad):
        raise InputError(
            f"{block.origin}: row {block.first_row + bad[0]}: the time {name!r} is {raw[bad[0]]!r}", fix=fix
        )
    return numbers.to_numpy()
