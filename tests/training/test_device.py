"""Training on a device whose numbers must not be read: nothing waits, and weights are those of the CPU.

There is no GPU in tests. The `meta` device has no numbers at all, so that whatever reads one fails there; and the CPU
is trained in a GPU's way where numbers are compared.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from recap_ctr.config import TrainConfig, parse
from recap_ctr.data.shards import PreparedData
from recap_ctr.errors import InputError
from recap_ctr.models.catalogue import MODELS, parse_model
from recap_ctr.nn import device
from recap_ctr.training import loop
from recap_ctr.training.loop import Trainer, train
from tests.support.golden import SMALL, small_data, small_trainer
from tests.support.plain_rows import plain_rows

CPU = torch.device("cpu")
WAITS = (
    "_local_scalar_dense",
    "item",
    "nonzero",
    "unique",
    "_unique",
    "_unique2",
    "unique_dim",
    "masked_select",
)


class NoReading(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses every operation whose result, or its size, must be known to the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ not in WAITS, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    return small_data(tmp_path_factory.mktemp("device") / "data")


@pytest.fixture
def like_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU count as a device whose numbers are not read."""
    monkeypatch.setattr(device, "HOST", set())


@pytest.mark.usefixtures("like_a_gpu")
@pytest.mark.parametrize("update", ["exact", "fast"])
def test_a_step_reads_nothing(data: PreparedData, update: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # A CPU's masks begin with a seed that is read on the host; a GPU draws its own.
    monkeypatch.setattr("recap_ctr.nn.cross.keep_mask", lambda shape, p, _: torch.rand(shape) >= p)
    trainer = small_trainer(data, update=update, ema=0.9)
    with NoReading():  # type: ignore[no-untyped-call]
        for _ in range(3):
            trainer.step()
    assert trainer.progress.loss_sum == 0.0
    trainer.read_record()
    assert 0.0 < trainer.mean_loss < 2.0
    refuses = pytest.raises(AssertionError, match="waits for the device")
    with refuses, NoReading():  # type: ignore[no-untyped-call]
        torch.ones(2).sum().item()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODELS if name != "rates"])
@pytest.mark.parametrize("update", ["exact", "fast"])
def test_every_model_steps_on_a_device_without_numbers(
    name: str, update: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        torch, "is_autocast_enabled", lambda _: False
    )  # Torch knows no autocast of this device.
    config = parse(TrainConfig, {"batch_size": 64, "update": update, "ema": 0.9}, "test")
    trainer = Trainer(name, parse_model(name, {}), config, plain_rows(300), torch.device("meta"))
    for _ in range(2):
        trainer.step()
    assert (trainer.progress.step, len(trainer.record)) == (2, 2)


@pytest.mark.slow
@pytest.mark.parametrize("clip", [10.0, 0.05])
@pytest.mark.parametrize("update", ["exact", "fast"])
def test_weights_are_those_of_the_cpu(
    data: PreparedData, update: str, clip: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainers = []
    for host in ({"cpu"}, set()):
        monkeypatch.setattr(device, "HOST", host)
        trainer = small_trainer(data, update=update, ema=0.9, clip=clip)
        for _ in range(12):
            trainer.step()
        trainer.read_record()
        trainers.append(trainer)
    one, other = trainers
    assert other.progress.loss_sum == pytest.approx(one.progress.loss_sum, rel=1e-5)
    for name, weight in one.model.state_dict().items():
        torch.testing.assert_close(other.model.state_dict()[name], weight, rtol=1e-3, atol=2e-5, msg=name)
    averages = (trainer.averages[0].settle().state_dict() for trainer in trainers)
    for weight, again in zip(*(list(each.values()) for each in averages), strict=True):
        torch.testing.assert_close(again, weight, rtol=1e-3, atol=2e-5)


@pytest.mark.usefixtures("like_a_gpu")
def test_the_first_step_that_is_not_finite_is_named(
    data: PreparedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it is found later, and no state is saved after it."""
    config, model = (
        parse(TrainConfig, {"batch_size": 256, "max_epochs": 9}, "test"),
        parse_model("fcn", SMALL),
    )
    real = Trainer.step

    def step(trainer: Trainer) -> int:
        if trainer.progress.step == 16:
            with torch.no_grad():
                next(trainer.model.parameters()).fill_(math.nan)
        return real(trainer)

    monkeypatch.setattr(Trainer, "step", step)
    monkeypatch.setattr(loop, "SAVE_SECONDS", 0.0)
    with pytest.raises(InputError, match="the loss became nan at step 17\n"):
        train("fcn", model, config, data, tmp_path, device=CPU, quiet=True)
    monkeypatch.setattr(Trainer, "step", real)
    trainer = Trainer("fcn", model, config, data, CPU)
    trainer.resume(tmp_path)
    assert trainer.progress.step == 16
    assert all(torch.isfinite(weight).all() for weight in trainer.model.parameters())


@pytest.mark.parametrize("name", ["fcn", "recap", "dnn", "deepfm"])
def test_products_in_bfloat16(name: str) -> None:
    """Losses stay near those of 32 bits, weights stay in 32 bits, and the setting is part of the record."""
    losses = []
    for precision in ("float32", "bfloat16"):
        config = parse(TrainConfig, {"batch_size": 64, "update": "fast", "precision": precision}, "test")
        trainer = Trainer(name, parse_model(name, {}), config, plain_rows(300), CPU)
        trainer.step()
        losses.append(trainer.mean_loss)
        trainer.step()
        assert all(weight.dtype == torch.float32 for weight in trainer.model.parameters())
        assert (precision == "float32") == ("precision" not in config.model_dump(mode="json"))
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=0.01)
