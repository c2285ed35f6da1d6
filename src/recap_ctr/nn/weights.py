"""Tensors on disk: safetensors files, whole or absent, never pickle."""

import os
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from recap_ctr.errors import InputError
from recap_ctr.storage import sync_directory


def save_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    partial = path.with_name(f".{path.name}.partial")
    try:
        save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, partial, metadata)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
        sync_directory(path.parent)
    except SafetensorError as error:
        # The writer hides the system's reason in its text; a full disk must still be told apart.
        raise OSError(str(error)) from None
    finally:
        partial.unlink(missing_ok=True)


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except SafetensorError as error:
        raise InputError(f"{path} is damaged: {error}") from None
