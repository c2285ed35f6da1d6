"""What a result was made with: versions and the machine."""

import ctypes
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("recap-ctr", "numpy", "onnxruntime", "polars", "scikit-learn", "torch")


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def num_cores() -> int:
    """Cores this process may use, which inside a container can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def side_by_side(threads: int, device: str) -> int:
    """Processes at a time: as many as there are cores for their threads, but one where they would share a GPU."""
    return max(num_cores() // threads, 1) if device == "cpu" else 1


def machine() -> dict[str, str | int]:
    """The processor, its cores and the system; nothing that names the host or its user."""
    processor = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                processor = line.partition(":")[2].strip()
                break
    return {"processor": processor, "cores": num_cores(), "system": platform.system()}


def keep_freed_memory() -> None:
    """Let the C library keep what a training step frees for the next one, instead of returning it to the system.

    A batch's tensors are megabytes each; mapped anew at each step, their pages cost a tenth of its time.
    """
    mmap_threshold, trim_threshold = -3, -1  # mallopt's names for them; glibc only
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(mmap_threshold, 1 << 30)
    mallopt(trim_threshold, (1 << 31) - 1)
