"""What every entry of `MODELS` must satisfy. A new model inherits these checks by being listed."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from recap_ctr.config import Frozen
from recap_ctr.data.layout import FieldLayout, Layout
from recap_ctr.models.catalogue import build, count_parameters, parse_model
from recap_ctr.nn.interface import Inputs, Output
from recap_ctr.nn.losses import LOSSES
from recap_ctr.nn.table import Table
from recap_ctr.nn.weights import load_tensors, save_tensors

# Two plain fields, a multi field of three pieces (mean), a numeric value, a multi field of two pieces (sum), a number
# between the vectors of four edges.
LAYOUT = Layout(
    (
        FieldLayout("plain", 0, 7, 0, 1, None, None),
        FieldLayout("other", 7, 5, 1, 1, None, None),
        FieldLayout("genres", 12, 6, 2, 3, "mean", None),
        FieldLayout("price", 18, 3, 5, 1, None, 0),
        FieldLayout("tags", 21, 4, 6, 2, "sum", None),
        FieldLayout("age", 25, 6, 8, 1, None, 1, is_linear=True),
    )
)


def rows(count: int, seed: int = 0) -> Inputs:
    """Random encoded rows of `LAYOUT`, padding, absent numbers and numbers at an edge among them."""
    rng = np.random.default_rng(seed)
    columns = []
    for field in LAYOUT.fields:
        low = 0 if field.pooling else 1
        columns += [rng.integers(low, field.size, count) + field.offset for _ in range(field.width)]
    price, age = LAYOUT.fields[3], LAYOUT.fields[5]
    prices = np.where(columns[price.start] == price.offset + price.oov, 1.0, rng.normal(size=count))
    shares = np.clip(rng.uniform(-0.3, 1.3, count), 0, 1)
    shares[columns[age.start] == age.offset + age.oov] = 0
    return Inputs(
        torch.from_numpy(np.stack(columns, 1).astype(np.int32)),
        torch.from_numpy(np.stack([prices, shares], 1).astype(np.float32)),
    )


def fresh(name: str, config: Frozen | None = None, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return build(name, config or parse_model(name, {}), LAYOUT)


def check_logit_shape(name: str) -> None:
    """One finite logit a row, in training and in evaluation, for a batch of one too."""
    model = fresh(name)
    for training in (True, False):
        for count in (1, 2, 33):
            output = model.train(training)(rows(count))
            assert isinstance(output, Output)
            assert output.logit_B.shape == (count,)
            assert torch.isfinite(output.logit_B).all()


def check_neighbours_do_not_matter(name: str) -> None:
    """In evaluation a row's logit depends on that row alone, not on who shares its batch."""
    model = fresh(name).train()
    for seed in range(3):  # move normalisation statistics away from their start
        model(rows(64, seed))
    model.eval()
    with torch.no_grad():
        everyone = model(rows(50)).logit_B
        for i in (0, 17, 49):
            alone = model(Inputs(rows(50).ids_BW[i : i + 1], rows(50).values_BN[i : i + 1])).logit_B
            torch.testing.assert_close(alone[0], everyone[i], atol=1e-6, rtol=1e-5)


def check_finite_gradients(name: str) -> None:
    """Every weight gets a finite gradient, tables by rows, and padding none at all."""
    model = fresh(name).train()
    labels = torch.arange(64).remainder(2).float()
    loss = LOSSES[model.config.loss](model(rows(64)), labels, None)  # type: ignore[union-attr,index]
    loss.backward()  # type: ignore[no-untyped-call]
    tables = [module for module in model.modules() if isinstance(module, Table)]
    in_tables = {id(table.weight) for table in tables}
    assert tables
    for parameter_name, parameter in model.named_parameters():
        if id(parameter) in in_tables:
            assert parameter.grad is None
        else:
            assert parameter.grad is not None, parameter_name
            assert torch.isfinite(parameter.grad).all(), parameter_name
    for table in tables:
        assert table.row_gradient is not None
        touched, grad, _ = table.row_gradient
        assert torch.isfinite(grad).all()
        assert grad.abs().sum() > 0
        pads = [field.offset for field in LAYOUT.fields if field.pooling]
        assert grad[torch.isin(touched, torch.tensor(pads))].abs().sum() == 0


def check_padding_is_inert(name: str) -> None:
    """PAD rows start at zero, and how a multi field is padded does not change the logit."""
    model = fresh(name).eval()
    for table in (module for module in model.modules() if isinstance(module, Table)):
        for field in LAYOUT.fields:
            assert table.weight[field.offset].abs().sum() == 0
    inputs = rows(8)
    ids = inputs.ids_BW.clone()
    ids[:, 2:5] = torch.tensor([14, 12, 12])
    moved = ids.clone()
    moved[:, 2:5] = torch.tensor([12, 12, 14])
    with torch.no_grad():
        logit_B, moved_logit_B = (model(Inputs(each, inputs.values_BN)).logit_B for each in (ids, moved))
    torch.testing.assert_close(logit_B, moved_logit_B, atol=1e-6, rtol=1e-6)


def check_save_and_load(name: str, directory: Path) -> None:
    """Weights survive a round trip through a file bit for bit."""
    model = fresh(name, seed=1)
    save_tensors(directory / "weights.safetensors", dict(model.state_dict()))
    other = fresh(name, seed=2)
    other.load_state_dict(load_tensors(directory / "weights.safetensors")[0])
    with torch.no_grad():
        assert torch.equal(model.eval()(rows(20)).logit_B, other.eval()(rows(20)).logit_B)


def check_count(name: str) -> None:
    """The parameter count without allocation equals that of a real model."""
    model = fresh(name)
    config = parse_model(name, {})
    assert count_parameters(name, config, LAYOUT) == sum(
        parameter.numel() for parameter in model.parameters()
    )


def check_learns(name: str) -> None:
    """A few steps on one batch lower its loss."""
    from recap_ctr.config import TrainConfig
    from recap_ctr.training.optimizer import Update

    inputs = rows(128)
    labels = (inputs.ids_BW[:, 0] > 3).float()
    for update in ("exact", "fast"):
        model = fresh(name).train()
        steps = Update(model, TrainConfig(update=update, l2=1e-6))
        losses = []
        for _ in range(60):
            loss = LOSSES["bce"](model(inputs), labels, None)
            loss.backward()  # type: ignore[no-untyped-call]
            steps.step(1e-2)
            losses.append(loss.item())
            if sum(losses[-5:]) / 5 < 0.9 * losses[0]:
                break
        else:
            raise AssertionError(f"{update}: the loss went from {losses[0]} to {losses[-1]}")


def shallow(name: str) -> Frozen:
    """Return the config of a model with one layer of each kind: to trace more of the same takes seconds."""
    changes: dict[str, Any] = {"depth": 2, "train_depths": (2,), "depth_weights": (1.0,), "num_adapters": 4}
    settings = parse_model(name, {}).model_dump()
    for key, value in settings.items():
        if (
            key.endswith("layers") and name != "rfm"
        ):  # One layer of it has logits that 32 bits round too much.
            changes[key] = 1
        elif isinstance(value, tuple) and "units" in key:
            changes[key] = value[:1]
    return parse_model(name, {**settings, **{key: changes[key] for key in changes if key in settings}})


def check_export(name: str) -> None:
    """Its ONNX graph equals torch on rows of every kind and in batches of any size."""
    from recap_ctr.evaluation.calibrate import AffineCalibration
    from recap_ctr.inference.export import TOLERANCE, export_setting
    from recap_ctr.inference.setting import Setting
    from recap_ctr.inference.torch_backend import PackedModel, TorchBackend

    config = shallow(name)
    model = fresh(name, config).train()
    for seed in range(40):  # let the statistics of norms become those of the rows
        model(rows(64, seed))
    encoder: Any = SimpleNamespace(layout=LAYOUT)
    manifest: dict[str, Any] = {"model": {"name": name, "config": {}}}
    packed = PackedModel(
        Path(), encoder, AffineCalibration(1.2, -0.1), {}, -0.5, manifest, config, model.eval()
    )
    exported = export_setting(packed, TorchBackend(packed), Setting(1, None))
    assert 0 < exported.parity <= TOLERANCE


CHECKS = (
    check_logit_shape,
    check_neighbours_do_not_matter,
    check_finite_gradients,
    check_padding_is_inert,
    check_count,
    check_learns,
)
