"""Layers number by number on one row, for tests that follow a model's formula in plain loops."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from recap_ctr.data.layout import Layout
from recap_ctr.nn.dropout import Dropout
from recap_ctr.nn.interface import Inputs
from recap_ctr.nn.mlp import MLP
from recap_ctr.nn.norms import BatchNorm

Vector = list[float]
LAYOUT = Layout.of_sizes([5, 4, 6])
INPUTS = Inputs(torch.tensor([[1, 6, 10], [3, 7, 12], [4, 8, 14]], dtype=torch.int32), torch.empty(3, 0))


def lively(model: nn.Module, seed: int = 0) -> nn.Module:
    """The model with every weight at random, in float64 and evaluation mode, its statistics off their start."""
    torch.manual_seed(seed)
    model.double().requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(std=0.7)
    model.train()
    for _ in range(3):
        model(INPUTS)
    return model.eval()


def dropped_shapes(model: nn.Module) -> list[tuple[int, ...]]:
    """The shapes of what goes through dropout in a training step, in order."""
    seen: list[tuple[int, ...]] = []
    for module in model.modules():
        if isinstance(module, Dropout):
            module.register_forward_hook(lambda _, args, __: seen.append(tuple(args[0].shape)))
    model.train()(INPUTS)
    return seen


def dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def affine(layer: nn.Module, x: Vector) -> Vector:
    assert isinstance(layer, nn.Linear)
    out = [dot(row, x) for row in layer.weight.tolist()]
    return out if layer.bias is None else [y + b for y, b in zip(out, layer.bias.tolist(), strict=True)]


def relu(x: Vector) -> Vector:
    return [max(0.0, value) for value in x]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def batch_norm(norm: nn.Module, x: Vector) -> Vector:
    assert isinstance(norm, BatchNorm)
    means: Tensor | None = norm.running_mean
    variances: Tensor | None = norm.running_var
    assert means is not None
    assert variances is not None
    return [
        (value - float(means[i])) / math.sqrt(float(variances[i]) + 1e-5) * float(norm.weight[i])
        + float(norm.bias[i])
        for i, value in enumerate(x)
    ]


def layer_norm(gain: Tensor, shift: Tensor, x: Vector) -> Vector:
    mean = sum(x) / len(x)
    spread = math.sqrt(sum((value - mean) ** 2 for value in x) / len(x) + 1e-5)
    return [(value - mean) / spread * float(gain[i]) + float(shift[i]) for i, value in enumerate(x)]


def mlp(hidden: MLP, x: Vector) -> Vector:
    for layer in hidden.layers:
        if isinstance(layer, nn.Linear):
            x = affine(layer, x)
        elif isinstance(layer, BatchNorm):
            x = batch_norm(layer, x)
        elif isinstance(layer, nn.ReLU):
            x = relu(x)
    return x
