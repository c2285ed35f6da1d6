"""Reading and writing a model's torch tensors; the file format is that of `recap_ctr.storage.arrays`."""

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from recap_ctr.errors import InputError
from recap_ctr.storage.arrays import Array, save_arrays


def to_arrays(tensors: Mapping[str, Tensor]) -> dict[str, Array]:
    """Return the tensors as numpy arrays; tensors on the CPU are not copied."""
    return {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write named tensors, and texts in `metadata`, to a safetensors file."""
    save_arrays(path, to_arrays(tensors), metadata)


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return all tensors of a file and the metadata stored with them."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except SafetensorError as error:
        raise InputError(f"{path} is damaged: {error}") from None
