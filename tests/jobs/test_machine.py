"""The machine: its versions, cores and memory, and which of its devices is picked."""

import os
from pathlib import Path

import pytest
import torch

from recap_ctr.errors import InputError
from recap_ctr.jobs import machine


@pytest.mark.parametrize(
    ("cuda", "mps", "device"),
    [(True, True, "cuda"), (True, False, "cuda"), (False, True, "mps"), (False, False, "cpu")],
)
def test_the_fastest_device_is_the_default(
    cuda: bool, mps: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    assert machine.pick_device() == device


def test_a_named_device_is_picked_even_if_another_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert machine.pick_device("cpu") == "cpu"


def test_a_device_must_exist_and_work() -> None:
    with pytest.raises(InputError, match=r"no device 'meta'\n  fix: choose cpu, cuda or mps"):
        machine.pick_device("meta")
    for name, is_available in (("cuda", torch.cuda.is_available), ("mps", torch.backends.mps.is_available)):
        if not is_available():
            with pytest.raises(InputError, match=f"device '{name}' does not work here"):
                machine.pick_device(name)


def test_processes_side_by_side_share_cores_but_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "num_cores", lambda: 8)
    assert [machine.side_by_side(threads, "cpu") for threads in (1, 3, 8, 16)] == [8, 2, 1, 1]
    assert [machine.side_by_side(1, device) for device in ("cuda", "mps")] == [1, 1]


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("0::/\n", {}, None),
        ("0::/\n", {"memory.max": "max\n"}, None),
        ("0::/\n", {"memory.max": "1048576\n"}, 1 << 20),
        ("0::/a/b\n", {"a/memory.max": "2097152\n", "a/b/memory.max": "4194304\n"}, 2 << 20),
        ("4:memory:/docker/1f\n0::/\n", {"memory/memory.limit_in_bytes": "1048576\n"}, 1 << 20),
        ("4:memory:/a\n", {"memory/a/memory.limit_in_bytes": f"{2**63 - 4096}\n"}, None),
        ("5:cpu:/a\n", {"memory/memory.limit_in_bytes": "1048576\n"}, None),
        (None, {"memory.max": "1048576\n"}, None),
    ],
)
def test_a_container_has_the_memory_that_its_groups_allow(
    groups: str | None,
    limits: dict[str, str],
    expected: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """None: all that the machine has."""
    for name, text in limits.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(text)
    if groups is not None:
        (tmp_path / "process").write_text(groups)
    monkeypatch.setattr(machine, "GROUPS", tmp_path / "groups")
    monkeypatch.setattr(machine, "GROUPS_OF_PROCESS", tmp_path / "process")
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert machine.memory_bytes() == (expected or whole)


def test_versions_and_machine_name_no_host() -> None:
    assert machine.versions().keys() >= {"python", "recap-ctr", "torch", "numpy", "polars"}
    assert machine.machine().keys() == {"processor", "cores", "system"}


def test_a_gpu_is_asked_to_add_in_the_same_order_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[bool, bool]] = []
    monkeypatch.setattr(
        torch, "use_deterministic_algorithms", lambda mode, *, warn_only: asked.append((mode, warn_only))
    )
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    machine.compute_reproducibly("cpu")
    assert asked == [] and "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    machine.compute_reproducibly("cuda")
    assert asked == [(True, True)] and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
