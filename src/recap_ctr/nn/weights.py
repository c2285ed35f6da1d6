"""Tensors on disk: safetensors files, whole or absent, never pickle."""

import json
import struct
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from recap_ctr.errors import InputError
from recap_ctr.storage import atomic_file

_TYPES = {
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.bool: "BOOL",
}


def save_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write the format tensor by tensor: the library's own writer keeps a second copy of them all, or a stray file."""
    header: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with atomic_file(path) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(tensor.detach().cpu().contiguous().numpy().data)


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """All tensors of a file, and the text stored beside them."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except SafetensorError as error:
        raise InputError(f"{path} is damaged: {error}") from None
