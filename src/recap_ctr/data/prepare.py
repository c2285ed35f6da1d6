"""From raw rows to shards, in two passes.

The first pass reads the source once, checks every row and spools each column as provisional codes (`spool`). After it
everything is known that a split (`split`) or a vocabulary (`fit`) needs. The second pass (`shard_writer`) reads only
the spool, whose codes become ids by one look-up in an array. Both passes can be divided among processes (`passes`).
"""

import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from recap_ctr.data.count import field_directory
from recap_ctr.data.grow import Base
from recap_ctr.data.moments import find_unit
from recap_ctr.data.passes import (
    Clock,
    Learnt,
    Reading,
    Spooled,
    learn_fields,
    new_directory,
    read_rows,
    write_shards,
)
from recap_ctr.data.profile import PROFILE
from recap_ctr.data.profiling import build_profile
from recap_ctr.data.rare import save_rare
from recap_ctr.data.shards import (
    FORMAT,
    MANIFEST,
    SPLITS,
    PreparedData,
    Shard,
    files_fingerprint,
    is_prepared,
    open_shard,
    read_manifest,
)
from recap_ctr.data.source import FileSource, Source
from recap_ctr.data.split import ReadBlocks, Split, SplitCodes, describe_split
from recap_ctr.data.spool import MAX_VALUES, Counted, SpooledRows
from recap_ctr.data.text import as_text
from recap_ctr.errors import InputError
from recap_ctr.jobs.executor import Executor
from recap_ctr.jobs.machine import versions
from recap_ctr.jobs.progress import overall, say
from recap_ctr.jobs.resumable import ResumableJobs
from recap_ctr.schema import Schema, TimeUnit
from recap_ctr.storage.claims import is_occupied, unfinished_work
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

    split_note: str | None = None
    """What a user should know of how the rows are divided; it changes nothing but what reports say."""

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
        """Return a hash of everything that decides the result; names and places of the files are not part of it."""
        return fingerprint(_content(self.inputs()))


def _content(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs without what may change while the content stays, such as the name of a file."""
    files = {
        name: [{key: file[key] for key in ("size", "sha256")} for file in source_files]
        for name, source_files in inputs["sources"].items()
    }
    return {**inputs, "sources": files}


def write_prepared_data(
    preparation: Preparation,
    out: Path,
    *,
    force: bool = False,
    quiet: bool = False,
    executor: Executor | None = None,
) -> tuple[PreparedData, bool]:
    """Write prepared data to `out`; return it, and whether it was there already from the same inputs.

    `force` replaces prepared data from other inputs. The result does not depend on the `executor`, which runs the work
    as jobs that all see `out` under the same path; by default this process does it. With an executor, an interrupted
    call leaves what is done beside `out`, and the same call goes on with the rest.
    """
    file_sources = [source for source in preparation.sources.values() if isinstance(source, FileSource)]
    stamps = [source.stamps() for source in file_sources]
    inputs = preparation.inputs()
    if is_occupied(out):
        if not is_prepared(out):
            raise InputError(f"{out} exists and is not prepared data", fix="choose another --out")
        if not force:
            has_stream = any(source.is_stream for source in file_sources)
            _check_up_to_date(out, inputs, has_stream)
            return PreparedData(out), True
    with atomic_directory(out) as partial:
        with _scratch(preparation, inputs, out, partial, executor) as (directory, jobs):
            _write(preparation, partial, inputs, directory, jobs, quiet)
        if [source.stamps() for source in file_sources] != stamps:
            raise InputError(
                "a source changed while it was read",
                fix="run the same command again when it no longer changes",
            )
    return PreparedData(out, verify=False), False


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


@contextmanager
def _scratch(
    preparation: Preparation, inputs: dict[str, Any], out: Path, partial: Path, executor: Executor | None
) -> Iterator[tuple[Path, ResumableJobs | None]]:
    """Yield a directory for what is needed meanwhile, and with an executor also the jobs, which can be resumed."""
    if executor is None:
        make_directory(partial / "spool")
        yield partial / "spool", None
        shutil.rmtree(partial / "spool")
        return
    sources = [source for source in preparation.sources.values() if isinstance(source, FileSource)]
    record = {
        **inputs,
        "paths": [str(path.absolute()) for source in sources for path in source.paths],
        "max_values": preparation.max_values,
        "versions": versions(),
        # What came through a pipe never comes again.
        "stream": secrets.token_hex(8) if any(source.is_stream for source in sources) else None,
    }
    with unfinished_work(out, record) as work:
        jobs = ResumableJobs(executor, work / "results")
        jobs.remove_abandoned(work)
        with overall("prepare", Clock(jobs).seconds):
            yield work, jobs


def _write(
    preparation: Preparation,
    out: Path,
    inputs: dict[str, Any],
    directory: Path,
    jobs: ResumableJobs | None,
    quiet: bool,
) -> None:
    """Fill the empty directory `out`; the manifest comes last."""
    schema = preparation.schema
    reading = Reading(
        schema, preparation.split, preparation.counted, preparation.max_values, preparation.drop_unlabelled
    )
    records = read_rows(reading, preparation.sources, directory, jobs, quiet=quiet)
    spooled = Spooled.save(reading, records, directory)
    rows, splits = spooled.rows, spooled.splits
    for name in () if quiet else rows.spilled_fields():
        say(
            f"field {name!r} has more than {preparation.max_values:,} values, which are counted on disk: the result is"
            " the same, and takes longer"
        )
    unit = _time_unit(schema, rows)
    if preparation.base is None:
        learnt = learn_fields(spooled, out, jobs, quiet=quiet)
    else:
        counted = new_directory(directory, "grown")
        encoder, rare = preparation.base.grown(rows, unit, splits, counted)
        save_rare(rare, out)
        counts = (field_directory(counted, number) for number in range(len(schema.fields)))
        learnt = Learnt(encoder, tuple(counts))
    files, split_entries, field_entries = write_shards(spooled, learnt, out, jobs, quiet=quiet)
    description = describe_split(preparation.split, splits, _time_blocks(rows), unit)
    shards = [open_shard(out, name, entry["rows"], files) for name, entry in split_entries.items()]
    profiled, among = (shards[0], splits) if preparation.base is None else _all_rows(shards, splits)
    build_profile(rows, learnt.encoder, among, profiled, unit, preparation.base).write(out / PROFILE)
    with atomic_file(out / "schema.toml") as file:
        file.write(schema.to_toml().encode())
    # No model depends on the last ones, so they are no part of what identifies the data.
    paths = [out / "schema.toml", *sorted((out / "vocabulary").iterdir())]
    for path in (*paths, *sorted((out / "rare").iterdir()), out / PROFILE):
        files[path.relative_to(out).as_posix()] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
    manifest = {
        "kind": "prepared data",
        "format": FORMAT,
        "fingerprint": files_fingerprint(files),
        "inputs": inputs,
        "fields": field_entries,
        "split": description,
        **({} if preparation.split_note is None else {"split_note": preparation.split_note}),
        "time_unit": unit,
        "splits": split_entries,
        "unlabelled": rows.num_unlabelled,
        "files": files,
    }
    write_json(out / MANIFEST, manifest)


def _all_rows(shards: list[Shard], splits: SplitCodes) -> tuple[Shard, SplitCodes]:
    """Return the rows of all splits in their order, as if all were training rows.

    An update's newest rows only judge it, but without them the evening of every day would be missing in the profile.
    """
    order = np.argsort(np.concatenate([np.flatnonzero(splits == code) for code in range(len(SPLITS))]))
    ids, values, labels, numbers = (
        np.concatenate([getattr(shard, column) for shard in shards])[order]
        for column in ("ids", "values", "labels", "rows")
    )
    return Shard(ids, values, labels, numbers, None, None, None), np.zeros_like(splits)


def _time_blocks(rows: SpooledRows) -> ReadBlocks | None:
    """Return what reads the time column, if there is one."""
    return rows.columns["time"].blocks if "time" in rows.columns else None


def _time_unit(schema: Schema, rows: SpooledRows) -> TimeUnit | None:
    """Return how the time column writes moments; None if there is none, or if it holds other numbers."""
    if rows.time_kind != "numbers":
        return None if rows.time_kind is None else "iso"
    derived = (field.unit for field in schema.fields if field.source == schema.time)
    return next(derived, None) or find_unit(as_text(pl.Series(next(rows.columns["time"].blocks())).unique()))
