"""Every model can be exported, and the error for one that can't says why."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from recap_ctr.errors import InputError
from recap_ctr.evaluation.calibrate import AffineCalibration, Calibration, IsotonicCalibration
from recap_ctr.inference.export import Graph, export_setting
from recap_ctr.inference.setting import Setting
from recap_ctr.inference.torch_backend import PackedModel, TorchBackend
from recap_ctr.models.catalogue import MODELS, parse_model
from recap_ctr.nn.embedding import Embedding
from recap_ctr.nn.interface import Inputs, Output
from tests.support.checks import LAYOUT, check_export, fresh, rows

pytestmark = pytest.mark.usefixtures("one_registry")


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_model_exports(name: str) -> None:
    check_export(name)


class FixedRows(nn.Module):
    """A model that treats the number of rows as a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = Embedding(LAYOUT, 2)

    def forward(self, inputs: Inputs) -> Output:
        return Output(self.embedding(inputs).view(len(inputs.ids_BW), -1).sum(1), {})


def packed(model: nn.Module, calibration: Calibration) -> PackedModel:
    encoder: Any = SimpleNamespace(layout=LAYOUT)
    manifest: dict[str, Any] = {"model": {"name": "mine", "config": {}}}
    return PackedModel(Path(), encoder, calibration, {}, 0.0, manifest, parse_model("lr", {}), model.eval())


@pytest.mark.slow
def test_a_model_for_one_size_of_batch_is_refused() -> None:
    model = packed(FixedRows(), AffineCalibration(1.0, 0.0))
    with pytest.raises(InputError, match=r"batches of one size only\n.*write x\.shape\[0\]"):
        export_setting(model, TorchBackend(model), Setting(1, None))


def test_an_isotonic_calibration_stays_outside() -> None:
    """On the steep steps of such a calibration the rounding of 32 bits would show."""
    cases: list[tuple[Calibration, int]] = [
        (AffineCalibration(2.0, 1.0), 3),
        (IsotonicCalibration((0.0, 1e-9), (-1.0, 1.0)), 2),
    ]
    for calibration, outputs in cases:
        graph = Graph(packed(fresh("lr"), calibration), Setting(1, None))
        inputs = rows(5)
        with torch.no_grad():
            tables = [graph.get_parameter(f"model.{path}") for path in graph.paths]
            arrays = graph(*inputs, tables)
        assert len(arrays) == len(graph.outputs) == outputs
