"""Arrays on disk: safetensors files, whole or absent, never pickle. Needs no torch."""

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from recap_ctr.errors import InputError
from recap_ctr.storage.files import atomic_file

Array = npt.NDArray[Any]
_TYPES = {"float32": "F32", "float64": "F64", "int32": "I32", "int64": "I64", "bool": "BOOL"}


def save_arrays(path: Path, arrays: Mapping[str, Array], metadata: dict[str, str] | None = None) -> None:
    """Write named arrays to a safetensors file.

    They are written one by one: the library's own writer keeps a second copy of all, or leaves a stray file.
    """
    header: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for name, array in arrays.items():
        start, end = end, end + array.nbytes
        header[name] = {
            "dtype": _TYPES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with atomic_file(path) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for array in arrays.values():
            file.write(np.ascontiguousarray(array).data)


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
