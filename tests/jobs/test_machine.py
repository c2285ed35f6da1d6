"""The machine: its versions and cores, and which of its devices is picked."""

import os

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
