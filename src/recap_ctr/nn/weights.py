"""Reading and writing a model's torch tensors; the file format is that of `recap_ctr.storage.arrays`."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from recap_ctr.errors import InputError
from recap_ctr.storage.arrays import Array, check_arrays, save_arrays


def to_arrays(tensors: Mapping[str, Tensor]) -> dict[str, Array]:
    """Return the tensors as numpy arrays; tensors on the CPU are not copied."""
    return {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write named tensors, texts in `metadata`, and the checksum of all that to a safetensors file."""
    save_arrays(path, to_arrays(tensors), metadata, checksum=True)


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file to read torch tensors, or slices of them; refuse one that can't be read."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise InputError(f"{path} is damaged: {error}") from None


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return all tensors of a file and the metadata stored with them; refuse a file that differs from its checksum."""
    check_arrays(path)
    with opened(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
