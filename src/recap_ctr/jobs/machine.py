"""The machine that a result was made on: versions, cores, devices, and how to use its memory well."""

import ctypes
import os
import platform
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath

from recap_ctr.errors import InputError, did_you_mean

DEVICES = ("cpu", "cuda", "mps")
GROUPS, GROUPS_OF_PROCESS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
JOBS_PER_GPU = "RECAP_JOBS_PER_GPU"
GET_ADDRESS = 0x8915  # SIOCGIFADDR, of Linux.
PACKAGES = ("recap-ctr", "numpy", "onnxruntime", "polars", "scikit-learn", "torch")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide results, as far as they are installed."""
    installed = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            continue
    return installed


def num_cores() -> int:
    """Return how many cores this process may use; inside a container they can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def visible_gpus() -> tuple[str, ...]:
    """Return the GPUs that this process may use, by the names that CUDA_VISIBLE_DEVICES has for them."""
    import torch

    count = torch.cuda.device_count()
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    return tuple(names.split(",")[:count] if names else map(str, range(count)))


def interface_of(address: str) -> str | None:
    """Return the network interface of this machine that has an address; None where the system doesn't tell.

    >>> interface_of("127.0.0.1")
    'lo'
    """
    with suppress(ImportError, OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        import fcntl

        for _, name in socket.if_nameindex():
            with suppress(OSError):  # This one has no address.
                answer = fcntl.ioctl(probe.fileno(), GET_ADDRESS, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


def memory_bytes() -> int | None:
    """Return how much memory this process may use: that of the machine, or less inside a container.

    It is None where the system doesn't tell.
    """
    try:
        whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None
    return min([whole, *_limits_of_container()])


def _limits_of_container() -> Iterator[int]:
    """Yield the limits of memory of this process's control groups (of Linux, versions 1 and 2), if they have any.

    Inside a container the groups may have the names that they have outside, while the files are those of the
    container; so the groups above count, too, as they do for the system.
    """
    with suppress(OSError):
        for line in GROUPS_OF_PROCESS.read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if controllers == "":
                top, file = GROUPS, "memory.max"
            elif controllers == "memory":
                top, file = GROUPS / "memory", "memory.limit_in_bytes"
            else:
                continue
            parts = PurePosixPath(name).parts[1:]
            for depth in range(len(parts) + 1):
                with suppress(OSError, ValueError):  # There is no such group here, or it says "max".
                    yield int(top.joinpath(*parts[:depth], file).read_text())


def jobs_per_gpu() -> int:
    """Return how many jobs share a GPU: one, or as many as the environment says.

    A small model's steps end before the next one is launched, so one job leaves most of a GPU idle.
    """
    text = os.environ.get(JOBS_PER_GPU, "1")
    if not text.isdecimal() or int(text) == 0:
        raise InputError(f"{JOBS_PER_GPU} is {text!r}", fix="set it to a whole number from 1, or unset it")
    return int(text)


def side_by_side(threads: int, device: str) -> int:
    """Return how many processes to run at a time: as the cores allow, or as GPUs and `jobs_per_gpu` do."""
    if device == "cpu":
        return max(num_cores() // threads, 1)
    return max(len(visible_gpus()) * jobs_per_gpu(), 1) if device == "cuda" else 1


def pick_device(name: str | None = None) -> str:
    """Return the device to compute on: the named one, if it works here; by default the first of cuda, mps and cpu."""
    import torch

    if name is None:
        if torch.cuda.is_available():
            return "cuda"
        return "mps" if torch.backends.mps.is_available() else "cpu"
    if name.partition(":")[0] not in DEVICES:
        raise InputError(f"no device {name!r}{did_you_mean(name, DEVICES)}", fix="choose cpu, cuda or mps")
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device {name!r} does not work here: {str(error).splitlines()[0]}") from None
    return name


def machine() -> dict[str, str | int]:
    """Return the processor, its cores and the system; nothing that names the host or its user."""
    processor = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                processor = line.partition(":")[2].strip()
                break
    return {"processor": processor, "cores": num_cores(), "system": platform.system()}


def compute_reproducibly(device: str) -> None:
    """Make a GPU add in the same order each time, where torch knows how; a CPU does so anyway."""
    if device == "cuda":
        import torch

        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # Without it, cuBLAS refuses to.
        torch.use_deterministic_algorithms(True, warn_only=True)


def keep_freed_memory() -> None:
    """Let the C library keep what a training step frees for the next one, instead of returning it to the system.

    A batch's tensors are megabytes each; mapped again at each step, their pages cost a tenth of its time.
    """
    mmap_threshold, trim_threshold = -3, -1  # The parameters' names in mallopt, which only glibc has.
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(mmap_threshold, 1 << 30)
    mallopt(trim_threshold, (1 << 31) - 1)
