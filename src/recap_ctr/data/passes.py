"""The passes of preparation as jobs: read pieces of the source, learn fields, encode rows; by one process or by many.

Each job writes to a directory that nobody else has, and its result says which: a worker that was taken for lost may
still write while the one in its place does the same work. What the jobs wrote is joined in the order of the rows, so
the result does not depend on who did what. Results of jobs are kept until all is done, so that an interrupted
preparation goes on with those that are missing.
"""

import math
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from recap_ctr.config import parse
from recap_ctr.data.count import field_directory
from recap_ctr.data.encode import Encoder
from recap_ctr.data.fit import fit_field
from recap_ctr.data.pieces import FilePiece, Piece, divide
from recap_ctr.data.rare import rare_file, save_rare
from recap_ctr.data.shard_writer import (
    RowEncoder,
    append_raw,
    count_splits,
    open_shards,
    rank_groups,
    raw_files,
    shard_file,
)
from recap_ctr.data.shards import SPLITS
from recap_ctr.data.source import Source
from recap_ctr.data.split import Split, SplitCodes, assign_splits, check_classes
from recap_ctr.data.spool import Counted, SpooledRows, Spooler, SpoolRecord
from recap_ctr.jobs.executor import Job
from recap_ctr.jobs.progress import meter
from recap_ctr.jobs.resumable import ResumableJobs
from recap_ctr.schema import Field, Schema
from recap_ctr.storage.files import (
    copy_file,
    make_directory,
    new_file,
    read_object,
    remove_directory,
    sync_tree,
    write_json,
)

READING, COUNTING, WRITING = "reading rows", "counting values", "writing shards"
SHARES = {READING: 0.5, COUNTING: 0.15, WRITING: 0.15}
"""About how the time divides among the passes, and what comes after them; it only forecasts the time left."""


class Clock:
    """How long a preparation takes, from the jobs that are done and the usual share of each pass."""

    def __init__(self, jobs: ResumableJobs) -> None:
        self._jobs, self._start = jobs, time.monotonic()

    def seconds(self) -> tuple[float, float]:
        """Return the seconds that have passed, and how many there will be; infinite as long as no job is done."""
        elapsed = time.monotonic() - self._start
        done, before = (
            sum(weight * shares.get(title, 0.0) for title, weight in SHARES.items())
            for shares in (self._jobs.shares, self._jobs.shares_before)
        )
        return elapsed, elapsed * (1 - before) / (done - before) if done > before else math.inf


@dataclass(frozen=True)
class Reading:
    """How the first pass reads rows."""

    schema: Schema
    split: Split
    counted: Counted
    max_values: int
    labelled_only: bool

    def spool(self, sources: Mapping[str, Source], directory: Path, *, quiet: bool) -> SpoolRecord:
        """Read all rows of some sources, and spool them in a directory."""
        spooler = Spooler(self.schema, self.split, self.counted, directory, self.max_values)
        return spooler.read(sources, labelled_only=self.labelled_only, quiet=quiet)

    def as_json(self) -> dict[str, Any]:
        """Return these settings as plain JSON values."""
        # A schema refuses options that don't apply to a field, even with their default.
        schema = self.schema.model_dump(mode="json", exclude_defaults=True)
        split = self.split.model_dump(mode="json")
        return {**vars(self), "schema": schema, "split": split, "counted": dict(self.counted)}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Reading":
        """Return what `as_json` returned, in this or in another process."""
        schema, split = parse(Schema, values["schema"], "schema"), parse(Split, values["split"], "split")
        return cls(**{**values, "schema": schema, "split": split})


def read_rows(
    reading: Reading,
    sources: Mapping[str, Source],
    directory: Path,
    jobs: ResumableJobs | None,
    *,
    quiet: bool,
) -> list[SpoolRecord]:
    """Spool the rows of all sources in `directory`; return the records in the order of the rows."""
    if jobs is None:
        return [reading.spool(sources, directory, quiet=quiet)]
    pieces = jobs.once("pieces", lambda: _as_json(divide(sources, jobs.workers, directory)))
    if pieces is None:
        whole = jobs.once("whole", lambda: _read_whole(reading, sources, directory, quiet))
        return [parse(SpoolRecord, whole, "spool")]
    shared = {"reading": reading.as_json(), "directory": str(directory)}
    calls = [Job(f"piece {i + 1}", read_piece, {"piece": piece, **shared}) for i, piece in enumerate(pieces)]
    results = jobs.run(calls, title=READING, quiet=quiet)
    for piece, result in zip(pieces, results, strict=True):
        notes = sources[piece["split"]].notes
        notes += result["notes"] if not notes else []
    return [parse(SpoolRecord, result["record"], "spool") for result in results]


def _as_json(pieces: Sequence[Piece] | None) -> list[dict[str, Any]] | None:
    """Return pieces as plain JSON values; None if the sources can't be divided."""
    return None if pieces is None else [piece.model_dump(mode="json") for piece in pieces]


def _read_whole(
    reading: Reading, sources: Mapping[str, Source], directory: Path, quiet: bool
) -> dict[str, Any]:
    """Spool all rows by this process, which alone can read them; return their record."""
    target = new_directory(directory, "whole")
    record = reading.spool(sources, target, quiet=quiet)
    sync_tree(target)
    return record.model_dump(mode="json")


def read_piece(piece: dict[str, Any], reading: dict[str, Any], directory: str) -> dict[str, Any]:
    """Spool the rows of a piece; return their record, and what was noticed."""
    rows = parse(Piece, piece, "piece")
    source, target = FilePiece(rows), new_directory(directory, "piece")
    record = Reading.of(reading).spool({rows.split: source}, target, quiet=False)
    sync_tree(target)
    return {"record": record.model_dump(mode="json"), "notes": source.notes}


def new_directory(parent: str | Path, name: str) -> Path:
    """Return a new directory that no other job has."""
    directory = Path(parent) / f"{name}-{secrets.token_hex(8)}"
    make_directory(directory)
    return directory


@dataclass(frozen=True)
class Spooled:
    """The rows after the first pass, in a directory from which every process can open them."""

    directory: Path

    @classmethod
    def save(cls, reading: Reading, records: Sequence[SpoolRecord], directory: Path) -> "Spooled":
        """Write down below `directory` what was spooled, and the split of each row."""
        spooled = cls(new_directory(directory, "spool"))
        plain = [record.model_dump(mode="json") for record in records]
        write_json(spooled._record, {"reading": reading.as_json(), "records": plain})
        rows = spooled.rows
        read_times = rows.columns["time"].blocks if "time" in rows.columns else None
        read_labels, read_codes = rows.columns["label"].blocks, rows.columns["split"].blocks
        with new_file(spooled._splits) as file:
            for codes in assign_splits(reading.split, rows.num_rows, read_labels, read_times, read_codes):
                file.write(np.ascontiguousarray(codes, np.uint8).data)
        check_classes(reading.split, spooled.splits, read_labels)
        return spooled

    @property
    def scratch(self) -> Path:
        """Return the directory for what jobs make of the rows."""
        return self.directory.parent

    @property
    def _record(self) -> Path:
        return self.directory / "spool.json"

    @property
    def _splits(self) -> Path:
        return self.directory / "splits"

    @cached_property
    def rows(self) -> SpooledRows:
        """Return the rows of all pieces, one after the other."""
        plain = read_object(self._record, "a spool")
        reading = Reading.of(plain["reading"])
        records = [parse(SpoolRecord, record, "spool") for record in plain["records"]]
        return SpooledRows.join(reading.schema, reading.counted, records, reading.max_values)

    @cached_property
    def splits(self) -> SplitCodes:
        """Return the split code of each row, memory-mapped."""
        return np.memmap(self._splits, np.uint8, "r")


@lru_cache(maxsize=1)
def open_spooled(directory: str) -> Spooled:
    """Return the rows in a directory; a process that does several jobs opens them once."""
    return Spooled(Path(directory))


@dataclass(frozen=True, eq=False)
class Learnt:
    """The fields after they were fitted, and for each the directory with the counts of its values."""

    encoder: Encoder
    counts: tuple[Path, ...]

    def save(self, out: Path, entries: list[dict[str, Any]], directory: Path) -> None:
        """Write down in `directory` where to find the same: the encoder is in `out`, under its manifest's `entries`."""
        counts = [str(path) for path in self.counts]
        write_json(directory / "learnt.json", {"encoder": str(out), "entries": entries, "counts": counts})


@lru_cache(maxsize=1)
def open_learnt(spool: str, directory: str) -> Learnt:
    """Return what was written down in a directory; a process that does several jobs opens it once."""
    plain = read_object(Path(directory) / "learnt.json", "what was learnt")
    encoder = Encoder.load(Path(plain["encoder"]), open_spooled(spool).rows.schema, plain["entries"])
    return Learnt(encoder, tuple(map(Path, plain["counts"])))


def learn_fields(spooled: Spooled, out: Path, jobs: ResumableJobs | None, *, quiet: bool) -> Learnt:
    """Fit all fields; write the counts of values that their vocabularies lack to `out`."""
    schema = spooled.rows.schema
    if jobs is None:
        fields, counts = [], []
        for number, field in enumerate(schema.fields):
            counts.append(field_directory(spooled.scratch, number))
            fit = fit_field(spooled.rows, field, spooled.splits, counts[-1])
            save_rare({} if fit.rare is None else {number: fit.rare}, out)
            fields.append(fit.fitted)
        return Learnt(Encoder(schema, fields), tuple(counts))
    calls = [
        Job(f"field {field.name}", learn_field, {"directory": str(spooled.directory), "number": number})
        for number, field in enumerate(schema.fields)
    ]
    results = jobs.run(calls, title=COUNTING, quiet=quiet)
    fields, counts = [], []
    make_directory(out / "rare")
    for number, (field, result) in enumerate(zip(schema.fields, results, strict=True)):
        directory = Path(result["directory"])
        fields += Encoder.load(directory, _schema_of(schema, field), result["entries"]).fields
        if (directory / rare_file(0)).is_file():
            copy_file(directory / rare_file(0), out / rare_file(number))
        counts.append(directory)
    return Learnt(Encoder(schema, fields), tuple(counts))


def learn_field(directory: str, number: int) -> dict[str, Any]:
    """Fit one field; return where its vocabulary and its counts are, and the rest of what was learnt."""
    spooled = open_spooled(directory)
    target = new_directory(spooled.scratch, "field")
    schema = spooled.rows.schema
    field = schema.fields[number]
    fit = fit_field(spooled.rows, field, spooled.splits, target)
    save_rare({} if fit.rare is None else {0: fit.rare}, target)
    entries = Encoder(_schema_of(schema, field), [fit.fitted]).save(target)
    sync_tree(target)
    return {"directory": str(target), "entries": entries}


def _schema_of(schema: Schema, field: Field) -> Schema:
    """Return the schema with one field only."""
    return schema.model_copy(update={"fields": (field,)})


def write_shards(
    spooled: Spooled, learnt: Learnt, out: Path, jobs: ResumableJobs | None, *, quiet: bool
) -> tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]:
    """Write encoder and shards to `out`; return the manifest's entries of the shards' files, splits and fields."""
    rows, shared = spooled.rows, new_directory(spooled.scratch, "learnt")
    if "group" in rows.columns:
        rank_groups(rows, shared)
    entries = learnt.encoder.save(out)
    learnt.save(out, entries, shared)
    encoder = RowEncoder(rows, learnt.encoder, spooled.splits, learnt.counts, shared)
    with ExitStack() as stack:
        shards = open_shards(stack, encoder, count_splits(spooled.splits), out)
        if jobs is None:
            with meter(WRITING, rows.num_rows, "rows", quiet=quiet) as shown:
                for height in encoder.write(0, rows.num_rows, shards):
                    shown.advance(height, height)
        else:
            for result in _encode_chunks(jobs, spooled, shared, quiet):
                append_raw(shards, Path(result["directory"]))
                encoder.tally.add(result["tally"])
    files = {
        shard_file(split, name): file.entry
        for split, shard in zip(SPLITS, shards, strict=True)
        for name, file in shard.items()
    }
    return files, encoder.tally.entries([field.name for field in rows.schema.fields]), entries


def _encode_chunks(
    jobs: ResumableJobs, spooled: Spooled, learnt: Path, quiet: bool
) -> Iterator[dict[str, Any]]:
    """Yield the results of `encode_rows` in the order of the rows; what they name is removed afterwards."""
    chunks = jobs.once("chunks", lambda: _chunks(spooled.rows.starts, jobs.workers))
    calls = [
        Job(
            f"rows from {start + 1}",
            encode_rows,
            {"spool": str(spooled.directory), "learnt": str(learnt), "start": start, "stop": stop},
        )
        for start, stop in pairwise(chunks)
    ]
    for index, result in enumerate(jobs.run(calls, title=WRITING, quiet=quiet)):
        yield result
        jobs.forget(WRITING, index)
        remove_directory(Path(result["directory"]))


def _chunks(starts: Sequence[int], num_workers: int) -> list[int]:
    """Return where chunks of rows begin and where the last one ends; `starts` are those of what was read together.

    Where there are enough of them, chunks begin there too: a part of a column that two chunks share is looked up twice.
    """
    if len(starts) > num_workers:
        return list(starts)
    step = -(-starts[-1] // num_workers)
    return [*range(0, starts[-1], step), starts[-1]]


def encode_rows(spool: str, learnt: str, start: int, stop: int) -> dict[str, Any]:
    """Encode the rows from `start` to `stop`; return where they are, and what was counted."""
    spooled, fitted = open_spooled(spool), open_learnt(spool, learnt)
    target = new_directory(spooled.scratch, "rows")
    encoder = RowEncoder(spooled.rows, fitted.encoder, spooled.splits, fitted.counts, Path(learnt))
    with meter(WRITING, stop - start, "rows", quiet=False) as shown:
        for height in encoder.write(start, stop, raw_files(encoder, target)):
            shown.advance(height, height)
    sync_tree(target)
    return {"directory": str(target), "tally": encoder.tally.as_json()}
