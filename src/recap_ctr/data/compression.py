"""Files of text, plain or compressed, and errors that say which file is damaged."""

import errno
import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import polars as pl
import zstandard

from recap_ctr.errors import InputError

COMPRESSIONS = (".gz", ".zst")
UNREADABLE = (
    *(pl.exceptions.PolarsError, pl.exceptions.PanicException),
    *(OSError, EOFError, zlib.error, zstandard.ZstdError),
)
"""What reading a damaged file may raise."""
NOT_THE_FILE = (errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""System errors that say nothing about a file's content."""


@contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Say which file can't be read."""
    try:
        yield
    except UNREADABLE as error:
        if isinstance(error, OSError) and error.errno in NOT_THE_FILE:
            raise
        detail = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"{path} can't be read: {detail}", fix="check that the file is complete") from None


@contextmanager
def open_text(path: Path, encoding: str = "utf-8") -> Iterator[TextIO]:
    """Open a text file that is not a table, plain or compressed, with any line ends."""
    compression = path.suffix if path.suffix in COMPRESSIONS else None
    try:
        with path.open("rb") as file, io.TextIOWrapper(unpack(file, compression, path), encoding) as text:
            yield text
    except PermissionError:
        raise
    except (UnicodeDecodeError, *UNREADABLE) as error:
        raise InputError(f"{path} can't be read: {error}", fix="check that the file is complete") from None


def unpack(file: BinaryIO, compression: str | None, path: Path) -> BinaryIO:
    """Return a stream of the bytes inside `file`, which lies at `path`."""
    if compression == ".gz":
        return gzip.GzipFile(fileobj=file)  # type: ignore[return-value]
    if compression == ".zst":
        return io.BufferedReader(_ZstdStream(file))
    return path.open("rb")


class _ZstdStream(io.RawIOBase):
    """A zstd stream, frame after frame; zstandard's own reader does not notice that a file was cut short."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw, self._packed, self._unpacked = raw, b"", b""
        self._frame: zstandard.ZstdDecompressionObj | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._unpacked:
            # Small reads bound memory, for a block of zstd may unpack to 32,000 times its size.
            packed = self._packed or self._raw.read(2048)
            if not packed:
                if self._frame is not None:
                    raise EOFError("Compressed file ended before the end-of-stream marker was reached")
                return 0
            self._frame = self._frame or zstandard.ZstdDecompressor().decompressobj()
            self._unpacked, self._packed = self._frame.decompress(packed), b""
            if self._frame.eof:
                self._packed, self._frame = self._frame.unused_data, None
        size = min(len(buffer), len(self._unpacked))
        buffer[:size], self._unpacked = self._unpacked[:size], self._unpacked[size:]
        return size
