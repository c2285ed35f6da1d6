"""Public data sets with a fixed preparation: how raw files become rows, and which figures must come out."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import polars as pl

from recap_ctr.data.encode import column
from recap_ctr.data.prepare import Preparation, Split, folds
from recap_ctr.data.shards import SPLITS, PreparedData
from recap_ctr.data.source import Block, FileSource, MappedSource, Rows, Source
from recap_ctr.datasets.download import Archive
from recap_ctr.errors import InputError
from recap_ctr.jobs.progress import meter
from recap_ctr.schema import Schema

PACKED = ("", ".gz", ".zst")
FOLDS = Split(kind="folds", seed=2018)  # how Criteo_x4, Avazu_x4 and KKBox_x1 were split


@dataclass(frozen=True)
class Figures:
    """What was published about the prepared data; splits in the order train, valid, test."""

    rows: tuple[int, int, int]
    sizes: Mapping[str, int]
    """Vocabulary sizes, PAD and OOV included."""
    near: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Sizes that depend on a split whose seed nobody knows: the published one, and how far off is still right."""
    positives: tuple[int, int, int] | int | None = None
    """Of each split, or of all together."""
    total: int | None = None
    """The sum of all sizes, where not every one is known."""


@dataclass(frozen=True)
class Published:
    """The splits as train.csv, valid.csv and test.csv, which are read in place of the raw files, too."""

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
    """The rows in the given raw files, under `all` or for each split."""
    split: Split = Split()  # noqa: RUF009, it is frozen
    published: Published | None = None
    features: Rows | None = None
    """From the columns of raw and published files to the fields, where they differ."""
    counted: Mapping[str, Literal["cells", "pieces"]] = field(default_factory=dict)
    """See `Preparation.counted`."""
    inspect: Callable[[Sequence[Path]], None] | None = None
    """Raise if a known figure of the raw files is not what it should be, before any work."""
    archive: Archive | None = None
    """What `recap download` fetches."""

    def describe(self) -> dict[str, Any]:
        """What there is to know before fetching it, as plain JSON values."""
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
        """How to prepare the files in `raw`: the raw ones, or the published splits if valid.csv is there."""
        ready = self._is_ready(raw)
        schema = self.schema.model_copy(update={"columns": None}) if ready else self.schema
        if check and not ready and self.inspect is not None:
            self.inspect(self.raw_files(raw))
        sources = {name: self._mapped(source) for name, source in self._table(raw).items()}
        split = Split(kind="files") if set(sources) == set(SPLITS) else self.split
        return Preparation(schema, sources, split, self.name, self.counted)

    def check(self, data: PreparedData, raw: Path, *, quiet: bool = False) -> None:
        """Raise if a published figure does not come out; either way the data are marked with the answer."""
        try:
            self._compare(data, raw, quiet)
        except InputError:
            data.mark(checked=False)
            raise
        data.mark(checked=True)

    def _compare(self, data: PreparedData, raw: Path, quiet: bool) -> None:
        """Sums over whole files are taken only where rows agree."""
        known, splits = self.figures, data.manifest["splits"]
        rows, positives = (tuple(splits[name][key] for name in SPLITS) for key in ("rows", "positives"))
        self._expect("rows of train, valid and test", rows, known.rows)
        if isinstance(known.positives, int):
            self._expect("positives", sum(positives), known.positives)
        elif known.positives is not None:
            self._expect("positives of train, valid and test", positives, known.positives)
        found = {entry["name"]: entry["size"] for entry in data.manifest["fields"]}
        for name, size in known.sizes.items():
            self._expect(f"vocabulary size of {name}", found[name], size)
        for name, (size, tolerance) in known.near.items():
            if abs(found[name] - size) > tolerance:
                self._expect(f"vocabulary size of {name}", found[name], f"{size:,} ± {tolerance:,}")
        if known.total is not None:
            self._expect("sum of the vocabulary sizes", sum(found.values()), known.total)
        if self.published is not None:
            table = self._table(raw)
            fold = _folds(data, self.split) if "all" in table else None
            md5 = published_md5(table, self.published.columns, fold, data.path.parent, quiet=quiet)
            for split, one, other in zip(SPLITS, md5, self.published.md5, strict=True):
                self._expect(f"MD5 of {split}.csv", one, other)

    def raw_files(self, raw: Path) -> list[Path]:
        return self._find(raw, self.files)

    def _is_ready(self, raw: Path) -> bool:
        return self.published is not None and _packed(raw / "valid.csv") is not None

    def _table(self, raw: Path) -> Mapping[str, Source]:
        if self._is_ready(raw):
            files = self._find(raw, [f"{split}.csv" for split in SPLITS])
            return {split: FileSource([file]) for split, file in zip(SPLITS, files, strict=True)}
        return self.sources(self.raw_files(raw))

    def _mapped(self, source: Source) -> Source:
        features = self.features
        if features is None:
            return source
        assert isinstance(source, FileSource)
        return MappedSource(source, lambda: features)

    def _find(self, raw: Path, names: Sequence[str]) -> list[Path]:
        found = {name: _packed(raw / name) for name in names}
        if missing := [name for name, path in found.items() if path is None]:
            ready = (
                f", or train.csv, valid.csv and test.csv from {self.published.page}" if self.published else ""
            )
            raise InputError(
                f"{raw} lacks {', '.join(missing)} of {self.title}",
                fix=f"get the raw files from {self.homepage}{ready}",
            )
        return [path for path in found.values() if path is not None]

    def _expect(self, what: str, found: object, known: object) -> None:
        expect(f"{self.name}: {what}", found, known)


def expect(what: str, found: object, known: object) -> None:
    if found != known:
        raise InputError(
            f"{what}: found {found}, the published protocol has {known}",
            fix="check the raw files, or pass --no-check if they are not meant to be the published ones",
        )


def published_md5(
    sources: Mapping[str, Source],
    columns: Sequence[str],
    fold: npt.NDArray[np.uint8] | None,
    work: Path,
    *,
    quiet: bool = False,
) -> tuple[str, ...]:
    """MD5 of train.csv, valid.csv and test.csv as pandas wrote them: header, then rows as read, missing cells empty.

    `fold` is each row's fold: test is fold 0, valid fold 1, train folds 2 and up one after the other. What comes
    before its turn waits in a file below `work`.
    """
    header = (",".join(columns) + "\n").encode()
    train, valid, test = digests = [hashlib.md5(header, usedforsecurity=False) for _ in SPLITS]
    total = sum(source.total_bytes for source in sources.values())
    with (
        meter("checking the MD5 of the splits", total, "rows", quiet=quiet) as shown,
        TemporaryDirectory(prefix=".recap-", dir=work) as waiting,
        ExitStack() as stack,
    ):
        later = [
            Path(waiting) / str(number) for number in range(3, 0 if fold is None else int(fold.max()) + 1)
        ]
        sinks: list[Callable[[bytes], object]] = [test.update, valid.update, train.update]
        sinks += [stack.enter_context(path.open("wb")).write for path in later]
        start = 0
        for name, source in sources.items():
            for block, size in source.blocks():
                height = block.frame.height
                cells = pl.DataFrame([column(block, known, "of the published files") for known in columns])
                cells = cells.with_columns(pl.all().replace("", None))
                if fold is None:
                    digests[SPLITS.index(name)].update(cells.write_csv(include_header=False).encode())
                else:
                    part = fold[start : start + height]
                    for number, sink in enumerate(sinks):
                        rows = cells.filter(pl.Series(part == number))
                        sink(rows.write_csv(include_header=False).encode())
                start += height
                shown.advance(height, size)
        stack.close()
        for path in later:
            with path.open("rb") as file:
                while chunk := file.read(1 << 20):
                    train.update(chunk)
    return tuple(digest.hexdigest() for digest in digests)


def _folds(data: PreparedData, split: Split) -> npt.NDArray[np.uint8]:
    """Each source row's fold, from the labels in the shards."""
    shards = (data.train, data.valid, data.test)
    labels = np.empty(sum(map(len, shards)), np.uint8)
    for shard in shards:
        labels[shard.rows] = shard.labels
    return folds(labels, sum(split.ratio), split.seed)


def _packed(path: Path) -> Path | None:
    """The file of that name, plain or compressed."""
    found = (path.with_name(path.name + suffix) for suffix in PACKED)
    return next((file for file in found if file.is_file()), None)


def integers(block: Block, name: str) -> pl.Series:
    """A column that must hold whole numbers; anything else names its row."""
    text = column(block, name, "a whole number")
    numbers = text.cast(pl.Int64, strict=False)
    bad = numbers.is_null().arg_true()
    if len(bad):
        raise InputError(
            f"{block.origin}: row {block.first_row + bad[0]}, column {name!r}: {text[bad[0]]!r} is no whole number",
            fix="use the raw file as it was downloaded",
        )
    return numbers
