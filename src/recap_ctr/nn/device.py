"""Work on a device without waiting for it: reading a number from a GPU waits until its queue of work is done."""

import torch
from torch import Tensor

HOST = {"cpu"}
"""Devices whose numbers can be read at once."""


def is_host(device: torch.device) -> bool:
    """Return whether reading a number from a device costs nothing."""
    return device.type in HOST


def seed(number: int, device: torch.device) -> None:
    """Seed the random numbers of a device and of the host.

    `torch.manual_seed` writes down the call stack once for each kind of GPU, which can take longer than a small step.
    """
    if is_host(device):
        torch.default_generator.manual_seed(number)
    else:
        torch.manual_seed(number)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device; to a GPU through pinned memory, so that the copy runs beside other work."""
    if device.type != "cuda" or tensor.numel() == 0:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
