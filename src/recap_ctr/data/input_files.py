"""The files that patterns, directories and URLs name, and what their names say: format, compression, partitions."""

import glob
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

from recap_ctr.data.compression import COMPRESSIONS
from recap_ctr.errors import InputError
from recap_ctr.storage.places import input_files, is_remote

TEXT, JSON, PARQUET, ARROW = "text", "json", "parquet", "arrow"
FORMATS = {
    **dict.fromkeys((".csv", ".tsv", ".txt", ".tab", ".dat"), TEXT),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), JSON),
    **dict.fromkeys((".parquet", ".pq"), PARQUET),
    **dict.fromkeys((".arrow", ".ipc", ".feather"), ARROW),
}
SEPARATORS = {".csv": b",", ".tsv": b"\t", ".tab": b"\t", ".libsvm": b" "}
NO_PARTITION = "__HIVE_DEFAULT_PARTITION__"  # what Hive and Spark write for a missing value


@dataclass(frozen=True)
class InputFile:
    """One file of a source."""

    path: Path
    origin: str
    """What errors call it."""
    partitions: Mapping[str, str | None] = field(default_factory=dict)
    """The columns that its directories add, such as `day` in day=2026-01-31/."""

    @classmethod
    def of(cls, path: Path, root: Path | None = None) -> "InputFile":
        """Return the file at `path`, which was named by itself or is somewhere below the directory `root`."""
        pairs = (part.partition("=") for part in path.parts[:-1])
        partitions = {
            unquote(key): None if value == NO_PARTITION else unquote(value)
            for key, equals, value in pairs
            if key and equals
        }
        origin = "standard input" if str(path) == "-" else path.name
        return cls(path, origin if root is None else path.relative_to(root).as_posix(), partitions)

    @property
    def suffix(self) -> str:
        """Return the ending of the name that tells the format, without that of a compression."""
        *_, suffix, last = ("", "", *(suffix.lower() for suffix in self.path.suffixes))
        return suffix if last in COMPRESSIONS else last

    @property
    def compression(self) -> str | None:
        """Return the ending of the name that tells the compression, if there is one."""
        last = self.path.suffix.lower()
        return last if last in COMPRESSIONS else None

    @property
    def kind(self) -> str:
        """Return the format that the name tells; text if it tells none."""
        return FORMATS.get(self.suffix, TEXT)


def expand(patterns: Sequence[str | Path]) -> list[InputFile]:
    """Return the files that the patterns name, those of one pattern or directory sorted."""
    files: list[InputFile] = []
    for pattern in map(str, patterns):
        if pattern == "-":
            files.append(InputFile.of(Path("-")))
            continue
        if is_remote(pattern):
            files += _files_in_store(pattern)
            continue
        is_pattern = glob.has_magic(pattern) and not Path(pattern).exists()
        names = sorted(glob.glob(pattern, recursive=True)) if is_pattern else [pattern]
        if not names:
            raise InputError(f"no file matches {pattern}")
        for path in map(Path, names):
            if not path.exists():
                raise InputError(f"no file {path}")
            files += _files_below(path) if path.is_dir() else [InputFile.of(path)]
    if not files:
        raise InputError("no source file given")
    return files


def _files_below(directory: Path) -> list[InputFile]:
    """Return all files below a directory that hold rows; refuse files of different formats.

    Hidden files, those whose names start with an underscore (such as _SUCCESS), and those of other formats don't
    hold rows.
    """
    if (directory / "manifest.json").is_file():
        raise InputError(f"{directory} was written by recap, and holds no raw rows", fix="name the raw files")
    paths = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    return _with_rows([InputFile.of(path, directory) for path in paths], str(directory))


def _files_in_store(pattern: str) -> list[InputFile]:
    """Return copies of the objects that a URL, a pattern or a prefix names; of a prefix, those that hold rows."""
    files = [InputFile.of(path, root) for path, root in input_files(pattern)]
    is_prefix = not glob.has_magic(pattern) and not pattern.endswith(files[0].origin)
    return _with_rows(files, pattern) if is_prefix else files


def _with_rows(files: list[InputFile], directory: str) -> list[InputFile]:
    """Return those files of a directory that hold rows; refuse files of different formats."""
    by_kind: dict[str, list[InputFile]] = {}
    for file in files:
        if file.suffix in FORMATS and not any(part[0] in "._" for part in Path(file.origin).parts):
            by_kind.setdefault(file.kind, []).append(file)
    if not by_kind:
        raise InputError(
            f"{directory} is a directory without rows: no file in it ends in {', '.join(FORMATS)}",
            fix="name its files one by one, or by a pattern",
        )
    if len(by_kind) > 1:
        examples = " and ".join(files[0].origin for files in by_kind.values())
        raise InputError(
            f"{directory} holds files of different formats, such as {examples}",
            fix=f"name those that hold rows, such as '{directory}/*{next(iter(by_kind.values()))[0].suffix}'",
        )
    return next(iter(by_kind.values()))
