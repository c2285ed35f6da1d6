"""Models small enough for loops to follow: three fields, three rows, every number large enough to matter."""

import math
from collections.abc import Sequence

import torch
from torch import nn

from recap_ctr.data.layout import Layout
from recap_ctr.models.catalogue import build, parse_model
from recap_ctr.nn.embedding import Embedding
from recap_ctr.nn.interface import Inputs
from recap_ctr.nn.mlp import MLP, DeepHead
from recap_ctr.nn.norms import BatchNorm

LAYOUT = Layout.of_sizes([5, 4, 6])
IDS = [[1, 6, 10], [3, 7, 12], [4, 8, 13]]
INPUTS = Inputs(torch.tensor(IDS, dtype=torch.int32), torch.empty(len(IDS), 0))


def tiny(name: str, **settings: object) -> nn.Module:
    """In evaluation mode and double precision, with random weights, biases and statistics."""
    torch.manual_seed(0)
    model = build(name, parse_model(name, {"dim": 2, **settings}), LAYOUT).double().eval()
    model.requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(std=0.7)
    for module in model.modules():
        if isinstance(module, BatchNorm):
            module.get_buffer("running_mean").normal_()
            module.get_buffer("running_var").uniform_(0.5, 2.0)
    return model


def vectors(embedding: nn.Module, row: int) -> list[list[float]]:
    """A row's vectors, field by field."""
    assert isinstance(embedding, Embedding)
    return [embedding.table.weight[i].tolist() for i in IDS[row]]


def flat(e: list[list[float]]) -> list[float]:
    return [number for vector in e for number in vector]


def dot(x: Sequence[float], y: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(x, y, strict=True))


def inner_products(e: list[list[float]]) -> list[float]:
    """Return those of all pairs of fields, in reading order: (0, 1), (0, 2), (1, 2)."""
    return [dot(e[i], e[j]) for i in range(len(e)) for j in range(i + 1, len(e))]


def affine(layer: nn.Module, x: Sequence[float]) -> list[float]:
    assert isinstance(layer, nn.Linear)
    bias = [0.0] * layer.out_features if layer.bias is None else layer.bias.tolist()
    return [dot(w, x) + b for w, b in zip(layer.weight.tolist(), bias, strict=True)]


def normed(norm: nn.Module, channel: int, x: float) -> float:
    """One number through BatchNorm in evaluation mode."""
    assert isinstance(norm, BatchNorm)
    mean, var = (float(norm.get_buffer(name)[channel]) for name in ("running_mean", "running_var"))
    return (x - mean) / math.sqrt(var + 1e-5) * float(norm.weight[channel]) + float(norm.bias[channel])


def hidden(mlp: nn.Module, x: Sequence[float]) -> list[float]:
    assert isinstance(mlp, MLP)
    out = list(x)
    for layer in mlp.layers:
        if isinstance(layer, nn.Linear):
            out = affine(layer, out)
        elif isinstance(layer, BatchNorm):
            out = [normed(layer, channel, number) for channel, number in enumerate(out)]
        elif isinstance(layer, nn.ReLU):
            out = [max(0.0, number) for number in out]
    return out


def deep(head: nn.Module, x: Sequence[float]) -> float:
    assert isinstance(head, DeepHead)
    return affine(head.head, hidden(head.hidden, x))[0]


def wide(part: nn.Module, row: int) -> float:
    """The wide part's sum of weights, without its bias."""
    return sum(flat(vectors(part.get_submodule("embedding"), row)))
