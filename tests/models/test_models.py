"""Every model keeps the contract of tests/support/checks.py, and its shared parts do what its config says."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from recap_ctr.errors import InputError
from recap_ctr.models.catalogue import MODELS, build, parse_model
from recap_ctr.nn.norms import BatchNorm
from tests.support import checks
from tests.support.tiny import INPUTS, LAYOUT, tiny


@pytest.mark.slow
@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", MODELS)
def test_model(name: str, check: Callable[[str], None]) -> None:
    check(name)


@pytest.mark.parametrize("name", MODELS)
def test_save_and_load(name: str, tmp_path: Path) -> None:
    checks.check_save_and_load(name, tmp_path)


@pytest.mark.parametrize("name", ["fm", "deepfm"])
def test_linear_parts_start_with_a_zero_bias(name: str) -> None:
    assert build(name, parse_model(name, {}), LAYOUT).get_parameter("wide.bias").item() == 0.0


@pytest.mark.parametrize("name", ["pnn", "wide-deep", "deepfm"])
def test_mlp_settings_reach_the_mlp(name: str) -> None:
    model = tiny(name, units=[3], batch_norm=False, dropout=0.5)
    assert not any(isinstance(module, BatchNorm) for module in model.modules())

    model.train()

    assert not torch.equal(model(INPUTS).logit_B, model(INPUTS).logit_B)


@pytest.mark.parametrize("name", ["pnn", "wide-deep", "deepfm"])
def test_an_mlp_needs_a_layer(name: str) -> None:
    with pytest.raises(InputError, match="units"):
        parse_model(name, {"units": []})
