"""MaskNet against loops that follow its formulas."""

import pytest
from torch import nn

from recap_ctr.errors import InputError
from recap_ctr.models.catalogue import parse_model
from recap_ctr.models.masknet import FieldNorm, MaskBlock, MaskNet, MaskNetConfig
from recap_ctr.nn.mlp import DeepHead
from tests.support.naive import (
    INPUTS,
    LAYOUT,
    Vector,
    affine,
    dropped_shapes,
    layer_norm,
    lively,
    mlp,
    relu,
)


def naive_block(block: MaskBlock, v: Vector, e: Vector) -> Vector:
    mask = affine(block.mask[2], relu(affine(block.mask[0], e)))
    out = affine(block.mix, [m * value for m, value in zip(mask, v, strict=True)])
    if isinstance(block.norm, nn.LayerNorm):
        out = layer_norm(block.norm.weight, block.norm.bias, out)
    return relu(out)


def naive_logit(model: MaskNet, e: list[Vector]) -> float:
    plain = [value for vector in e for value in vector]
    v = plain
    if isinstance(model.norm, FieldNorm):
        v = []
        for f, vector in enumerate(e):
            v += layer_norm(model.norm.gain_Fd[f], model.norm.shift_Fd[f], vector)
    blocks = [block for block in model.blocks if isinstance(block, MaskBlock)]
    if isinstance(model.head, DeepHead):
        joined = [value for block in blocks for value in naive_block(block, v, plain)]
        return affine(model.head.head, mlp(model.head.hidden, joined))[0]
    for block in blocks:
        v = naive_block(block, v, plain)
    return affine(model.head, v)[0]


@pytest.mark.parametrize("form", ["parallel", "serial"])
@pytest.mark.parametrize("norms", [(False, False), (True, False), (False, True), (True, True)])
def test_forward_is_the_formula(form: str, norms: tuple[bool, bool]) -> None:
    settings = {
        "dim": 3,
        "form": form,
        "units": (5, 4),
        "num_blocks": 2,
        "block_dim": 3,
        "ratio": 0.5,
        "embedding_norm": norms[0],
        "block_norm": norms[1],
    }
    model = lively(MaskNet(MaskNetConfig.model_validate(settings), LAYOUT))
    assert isinstance(model, MaskNet)

    logit_B = model(INPUTS).logit_B

    for row, e in enumerate(model.embedding(INPUTS).tolist()):
        assert float(logit_B[row]) == pytest.approx(naive_logit(model, e), rel=1e-9)


def test_mask_is_as_wide_as_its_input_and_its_hidden_layer_rounds_down() -> None:
    model = MaskNet(MaskNetConfig(dim=3, form="serial", units=(5, 4), ratio=0.75), LAYOUT)
    shapes = [tuple(weight.shape) for name, weight in model.blocks.named_parameters() if "mask" in name]

    assert shapes == [(6, 9), (6,), (9, 6), (9,), (3, 9), (3,), (5, 3), (5,)]
    assert not [name for name, _ in model.named_parameters() if "mix.bias" in name]


def test_every_block_ends_in_dropout_and_so_do_the_layers_of_the_mlp() -> None:
    config = MaskNetConfig(dim=3, units=(5,), num_blocks=2, block_dim=4)
    assert dropped_shapes(MaskNet(config, LAYOUT)) == [(3, 4), (3, 4), (3, 5)]


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(InputError, match="units"):
        parse_model("masknet", {"form": "serial", "units": []})
