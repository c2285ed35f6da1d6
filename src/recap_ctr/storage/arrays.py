"""Arrays on disk: safetensors and npy files, never pickle. Needs no torch."""

import hashlib
import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from recap_ctr.errors import InputError
from recap_ctr.storage.files import CHECKSUM, atomic_file, is_checksum, make_directory, new_file
from recap_ctr.storage.hashes import CHUNK_BYTES

Array = npt.NDArray[Any]
MAX_HEADER_BYTES = 100 << 20  # The library's own limit.
_METADATA = "__metadata__"
_TYPES = {"float32": "F32", "float64": "F64", "int32": "I32", "int64": "I64", "bool": "BOOL", "uint8": "U8"}


class ArrayInParts(Protocol):
    """An array that is never whole in memory: its parts, put together along the first dimension, are its content."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the whole."""
        ...

    @property
    def dtype(self) -> np.dtype[Any]:
        """Return the type of its numbers."""
        ...

    @property
    def size(self) -> int:
        """Return how many numbers it has."""
        ...

    @property
    def nbytes(self) -> int:
        """Return how many bytes they take."""
        ...

    def __iter__(self) -> Iterator[Array]:
        """Yield the parts in order."""
        ...


def save_arrays(
    path: Path,
    arrays: Mapping[str, Array | ArrayInParts],
    metadata: Mapping[str, str] | None = None,
    *,
    checksum: bool = False,
) -> None:
    """Write named arrays to a safetensors file, whose metadata may have a `checksum` of everything in it.

    They are written one by one: the library's own writer keeps a second copy of all, or leaves a stray file.
    """
    has_metadata = metadata is not None or checksum
    header: dict[str, Any] = {_METADATA: dict(metadata or {})} if has_metadata else {}
    end = 0
    for name, array in arrays.items():
        start, end = end, end + array.nbytes
        header[name] = {
            "dtype": _TYPES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [start, end],
        }
    if checksum:
        digest = hashlib.sha256(_header_bytes(header))
        for array in arrays.values():
            for part in _parts(array):
                digest.update(part)
        header[_METADATA][CHECKSUM] = digest.hexdigest()
    text = _header_bytes(header)
    with atomic_file(path) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for array in arrays.values():
            for part in _parts(array):
                file.write(part)


def _parts(array: Array | ArrayInParts) -> Iterator[memoryview]:
    """Yield the bytes of an array, part by part."""
    for part in [array] if isinstance(array, np.ndarray) else array:
        yield np.ascontiguousarray(part).data


def array_names(path: Path) -> list[str]:
    """Return the names of the arrays in a safetensors file, in the order in which they are stored."""
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
    return [name for name in header if name != "__metadata__"]


def _header_bytes(header: dict[str, Any]) -> bytes:
    text = json.dumps(header).encode()
    return text + b" " * (-len(text) % 8)


def check_arrays(path: Path) -> None:
    """Refuse a safetensors file that differs from the checksum in its metadata.

    Files of earlier versions have none, nor have those of an artifact, whose manifest has it.
    """
    damaged = InputError(
        f"{path} is damaged: it differs from its checksum", fix="remove it, and make it again"
    )
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(MAX_HEADER_BYTES, path.stat().st_size):
            raise damaged
        text = file.read(length)
        try:
            header = json.loads(text)
            metadata = header.get(_METADATA, {})
            if not metadata or not is_checksum(next(reversed(metadata))):
                return
            is_canonical = text == _header_bytes(header)
            stored = metadata.pop(CHECKSUM)
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
            raise damaged from None
        digest = hashlib.sha256(_header_bytes(header))
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    if not is_canonical or digest.hexdigest() != stored:
        raise damaged


def load_arrays(path: Path, names: Iterable[str] | None = None) -> dict[str, Array]:
    """Return the arrays of a safetensors file, or only those in `names`."""
    try:
        with safe_open(path, framework="np") as file:
            present = set(file.keys())
            for name in (wanted := list(present if names is None else names)):
                if name not in present:
                    raise InputError(f"{path} holds no {name!r}")
            return {name: file.get_tensor(name) for name in wanted}
    except SafetensorError as error:
        raise InputError(f"{path} is damaged: {error}") from None


class NpyFile:
    """A new `.npy` file inside a directory that is not in its place yet, hashed while it is written.

    It is written by ordinary writes, so that a full disk raises an error; writing to a memory map would crash.
    """

    def __init__(self, path: Path, dtype: npt.DTypeLike, shape: tuple[int, ...]) -> None:
        self.dtype = np.dtype(dtype)
        make_directory(path.parent)
        self._file = new_file(path)
        self._digest, self._bytes = hashlib.sha256(), 0
        self._header = {
            "descr": np.lib.format.dtype_to_descr(self.dtype),
            "fortran_order": False,
            "shape": shape,
        }

    def write_bytes(self, data: Any) -> None:
        """Append bytes as they are."""
        self._file.write(data)
        self._digest.update(data)
        self._bytes += memoryview(data).nbytes

    def write(self, rows: Array) -> None:
        """Append rows of the array."""
        if rows.size:
            self.write_bytes(np.ascontiguousarray(rows, self.dtype).data)

    @property
    def entry(self) -> dict[str, Any]:
        """Return the file's size and hash, as a manifest lists them."""
        return {"bytes": self._bytes, "sha256": self._digest.hexdigest()}

    def __enter__(self) -> Self:
        try:
            np.lib.format.write_array_header_1_0(_HeaderTarget(self), self._header)
        except BaseException:  # a full disk: nobody else would close the file
            self._file.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


class _HeaderTarget:
    """A file as numpy's header function wants it: with `write`."""

    def __init__(self, file: NpyFile) -> None:
        self._file = file

    def write(self, data: bytes) -> None:
        self._file.write_bytes(data)
