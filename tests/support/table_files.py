"""The same table in every file format that is read."""

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import zstandard

WRITE: dict[str, Callable[[pl.DataFrame, Path], Any]] = {
    ".csv": lambda frame, path: frame.write_csv(path),
    ".tsv": lambda frame, path: frame.write_csv(path, separator="\t"),
    ".csv.gz": lambda frame, path: path.write_bytes(gzip.compress(frame.write_csv().encode())),
    ".csv.zst": lambda frame, path: path.write_bytes(
        zstandard.ZstdCompressor().compress(frame.write_csv().encode())
    ),
    ".parquet": lambda frame, path: frame.write_parquet(path),
    ".arrow": lambda frame, path: frame.write_ipc(path),
}
"""Writers by the ending of the file's name."""
