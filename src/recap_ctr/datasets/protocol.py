"""Public data sets with a fixed preparation: how raw files become rows, and which figures must come out."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from recap_ctr.data.compression import COMPRESSIONS
from recap_ctr.data.prepare import Preparation
from recap_ctr.data.shards import SPLITS, PreparedData
from recap_ctr.data.source import Block, FileSource, MappedSource, RowFunction, Source
from recap_ctr.data.split import Split, folds
from recap_ctr.data.spool import Counted
from recap_ctr.datasets.download import Archive
from recap_ctr.errors import InputError
from recap_ctr.jobs.progress import meter
from recap_ctr.schema import Schema
from recap_ctr.storage.files import new_file, scratch_directory
from recap_ctr.storage.locks import held

FOLDS = Split(kind="folds", seed=2018)  # how Criteo_x4, Avazu_x4 and KKBox_x1 were split


@dataclass(frozen=True)
class Figures:
    """What was published about the prepared data; splits in the order train, valid, test."""

    rows: tuple[int, int, int]
    sizes: Mapping[str, int]
    """Vocabulary sizes, PAD and OOV included."""
    near: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Sizes that depend on a split whose seed was not published: the published size, and the tolerance."""
    positives: tuple[int, int, int] | int | None = None
    """Clicked rows of each split, or of all together."""
    total: int | None = None
    """The sum of all vocabulary sizes, for data sets that do not publish each."""


@dataclass(frozen=True)
class Published:
    """The splits as train.csv, valid.csv and test.csv, which can be read in place of the raw files."""

    page: str
    columns: tuple[str, ...]
    md5: tuple[str, str, str]


@dataclass(frozen=True)
class Protocol:
    """A public data set with a fixed preparation."""

    name: str
    title: str
    files: tuple[str, ...]
    """The raw files, by the names under which they are distributed; compressed ones are found too."""
    homepage: str
    licence: str
    schema: Schema
    figures: Figures
    sources: Callable[[Sequence[Path]], Mapping[str, Source]]
    """From the paths of the raw files to their rows, under `all` or for each split."""
    split: Split = Split()  # noqa: RUF009, it is frozen
    published: Published | None = None
    features: RowFunction | None = None
    """From the columns of raw and published files to the fields, if they differ."""
    counted: Counted = field(default_factory=dict)
    """See `Preparation.counted`."""
    inspect: Callable[[Sequence[Path]], None] | None = None
    """Raises an error if the raw files are not the published ones, before any work."""
    archive: Archive | None = None
    """What `recap download` fetches."""

    def describe(self) -> dict[str, Any]:
        """Return what a user wants to know before fetching the data, as plain JSON values."""
        return {
            "name": self.name,
            "title": self.title,
            "rows": sum(self.figures.rows),
            "fields": len(self.schema.fields),
            "files": list(self.files),
            "homepage": self.homepage,
            "published_splits": self.published.page if self.published else None,
            "licence": self.licence,
            "download": self.archive is not None,
        }

    def preparation(self, raw: Path, *, check: bool = True) -> Preparation:
        """Return how to prepare the files in `raw`: the published splits if valid.csv is there, else the raw files."""
        has_splits = self._has_published_splits(raw)
        schema = self.schema.model_copy(update={"columns": None}) if has_splits else self.schema
        if check and not has_splits and self.inspect is not None:
            self.inspect(self.raw_files(raw))
        sources = {name: self._with_features(source) for name, source in self._read(raw).items()}
        split = Split(kind="files") if set(sources) == set(SPLITS) else self.split
        return Preparation(schema, sources, split, self.name, self.counted)

    def check(self, data: PreparedData, raw: Path, *, quiet: bool = False) -> None:
        """Raise an error if the data do not match a published figure, and mark them with the result either way."""
        try:
            self._compare(data, raw, quiet)
        except InputError:
            data.mark(checked=False)
            raise
        data.mark(checked=True)

    def raw_files(self, raw: Path) -> list[Path]:
        """Return the paths of the raw files in the directory `raw`; refuse if one is missing."""
        return self._find(raw, self.files)

    def _compare(self, data: PreparedData, raw: Path, quiet: bool) -> None:
        """Compare all figures; the MD5 of whole files comes last, because it takes long."""
        figures, splits = self.figures, data.manifest["splits"]
        rows, positives = (tuple(splits[name][key] for name in SPLITS) for key in ("rows", "positives"))
        self._expect("rows of train, valid and test", rows, figures.rows)
        if isinstance(figures.positives, int):
            self._expect("positives", sum(positives), figures.positives)
        elif figures.positives is not None:
            self._expect("positives of train, valid and test", positives, figures.positives)
        sizes = {entry["name"]: entry["size"] for entry in data.manifest["fields"]}
        for name, size in figures.sizes.items():
            self._expect(f"vocabulary size of {name}", sizes[name], size)
        for name, (size, tolerance) in figures.near.items():
            if abs(sizes[name] - size) > tolerance:
                self._expect(f"vocabulary size of {name}", sizes[name], f"{size:,} ± {tolerance:,}")
        if figures.total is not None:
            self._expect("sum of the vocabulary sizes", sum(sizes.values()), figures.total)
        if self.published is not None:
            sources = self._read(raw)
            row_folds = _folds(data, self.split) if "all" in sources else None
            digests = published_md5(sources, self.published.columns, row_folds, data.path, quiet=quiet)
            for split, digest, md5 in zip(SPLITS, digests, self.published.md5, strict=True):
                self._expect(f"MD5 of {split}.csv", digest, md5)

    def _has_published_splits(self, raw: Path) -> bool:
        return self.published is not None and _find_file(raw / "valid.csv") is not None

    def _read(self, raw: Path) -> Mapping[str, Source]:
        """Return the rows in `raw`, with the columns of the published files."""
        if self._has_published_splits(raw):
            files = self._find(raw, [f"{split}.csv" for split in SPLITS])
            return {split: FileSource([file]) for split, file in zip(SPLITS, files, strict=True)}
        return self.sources(self.raw_files(raw))

    def _with_features(self, source: Source) -> Source:
        features = self.features
        if features is None:
            return source
        assert isinstance(source, FileSource)
        return MappedSource(source, lambda: features)

    def _find(self, raw: Path, names: Sequence[str]) -> list[Path]:
        paths = {name: _find_file(raw / name) for name in names}
        if missing := [name for name, path in paths.items() if path is None]:
            fix = f"get the raw files from {self.homepage}"
            if self.published:
                fix += f", or train.csv, valid.csv and test.csv from {self.published.page}"
            raise InputError(f"{raw} lacks {', '.join(missing)} of {self.title}", fix=fix)
        return [path for path in paths.values() if path is not None]

    def _expect(self, what: str, value: object, published: object) -> None:
        expect(f"{self.name}: {what}", value, published)


def expect(what: str, value: object, published: object) -> None:
    """Refuse a figure that is not the published one."""
    if value != published:
        raise InputError(
            f"{what}: found {value}, the published protocol has {published}",
            fix="check the raw files, or pass --no-check if they are not meant to be the published ones",
        )


def published_md5(
    sources: Mapping[str, Source],
    columns: Sequence[str],
    row_folds: npt.NDArray[np.uint8] | None,
    path: Path,
    *,
    quiet: bool = False,
) -> tuple[str, ...]:
    """Return the MD5 of train.csv, valid.csv and test.csv as pandas wrote them.

    They hold a header and the rows as they were read, missing cells empty. Sources named after splits are these files.
    Rows of a source `all` are divided by `row_folds`, each row's fold: test is fold 0, valid fold 1, and train has
    folds 2 and up one after the other. Rows that come before their turn wait in a file beside `path`.
    """
    header = (",".join(columns) + "\n").encode()
    train, valid, test = digests = [hashlib.md5(header, usedforsecurity=False) for _ in SPLITS]
    total = sum(source.total_bytes for source in sources.values())
    num_folds = 0 if row_folds is None else int(row_folds.max()) + 1
    with (
        meter("checking the MD5 of the splits", total, "rows", quiet=quiet) as shown,
        held(path.resolve()),
        scratch_directory(path) as directory,
        ExitStack() as stack,
    ):
        waiting = [directory / str(fold) for fold in range(3, num_folds)]
        fold_sinks: list[Callable[[bytes], object]] = [test.update, valid.update, train.update]
        fold_sinks += [stack.enter_context(new_file(file)).write for file in waiting]
        start = 0
        for name, source in sources.items():
            for block, size in source.blocks():
                cells = _published_cells(block, columns)
                if row_folds is None:
                    digests[SPLITS.index(name)].update(cells.write_csv(include_header=False).encode())
                else:
                    block_folds = pl.Series(row_folds[start : start + cells.height])
                    for fold, sink in enumerate(fold_sinks):
                        sink(cells.filter(block_folds == fold).write_csv(include_header=False).encode())
                start += cells.height
                shown.advance(cells.height, size)
        stack.close()
        for waiting_file in waiting:
            with waiting_file.open("rb") as file:
                while chunk := file.read(1 << 20):
                    train.update(chunk)
    return tuple(digest.hexdigest() for digest in digests)


def _published_cells(block: Block, columns: Sequence[str]) -> pl.DataFrame:
    cells = pl.DataFrame([block.column(name, "of the published files") for name in columns])
    return cells.with_columns(pl.all().replace("", None))


def _folds(data: PreparedData, split: Split) -> npt.NDArray[np.uint8]:
    """Return each source row's fold, from the labels in the shards."""
    shards = (data.train, data.valid, data.test)
    labels = np.empty(sum(map(len, shards)), np.uint8)
    for shard in shards:
        labels[shard.rows] = shard.labels
    return folds(labels, sum(split.ratio), split.seed)


def _find_file(path: Path) -> Path | None:
    """Return the file at `path`, plain or compressed, if there is one."""
    candidates = (path.with_name(path.name + suffix) for suffix in ("", *COMPRESSIONS))
    return next((file for file in candidates if file.is_file()), None)


def integers(block: Block, name: str) -> pl.Series:
    """Return a column of whole numbers; any other value is an error that names its row."""
    text = block.column(name, "a whole number")
    numbers = text.cast(pl.Int64, strict=False)
    bad = numbers.is_null().arg_true()
    if len(bad):
        raise InputError(
            f"{block.origin}: row {block.first_row + bad[0]}, column {name!r}: {text[bad[0]]!r} is not a whole"
            " number",
            fix="use the raw file as it was downloaded",
        )
    return numbers
