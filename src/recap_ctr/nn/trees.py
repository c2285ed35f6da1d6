"""Boosted trees as a layer, made of look-ups that every backend has.

A small tree asks few questions, so all of them are asked at once: the answers are the bits of a code, and a list has
the leaf of each code. That is faster than going down the tree, since no question waits for another.

Shapes: B batch, Q columns that trees look at, T trees, I questions of a tree, C = 2^I codes.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

MAX_LEAVES = 8
QUESTIONS = MAX_LEAVES - 1
LARGEST = float(np.finfo(np.float32).max)  # No number exceeds it.
Node = dict[str, Any]


@dataclass(frozen=True, eq=False)
class PackedTrees:
    """The questions of all trees, whether a column exceeds a threshold, and the leaf of each code of answers."""

    column_IT: npt.NDArray[np.int64]
    threshold_IT: npt.NDArray[np.float32]
    leaf_TC: npt.NDArray[np.float32]


class Forest(nn.Module):
    """The sum of the leaves that a row falls into, one of each tree."""

    column_IT: Tensor
    threshold_IT: Tensor
    leaf_TC: Tensor
    first_T1: Tensor

    def __init__(self, trees: int) -> None:
        super().__init__()
        codes = 2**QUESTIONS
        self.register_buffer("column_IT", torch.zeros(QUESTIONS, trees, dtype=torch.int64))
        self.register_buffer("threshold_IT", torch.zeros(QUESTIONS, trees))
        self.register_buffer("leaf_TC", torch.zeros(trees, codes))
        # By numpy: on the meta device, where parameters are counted, torch would import its compiler for two seconds.
        first_T1 = np.arange(trees, dtype=np.int32)[:, None] * np.int32(codes)
        self.register_buffer("first_T1", torch.from_numpy(first_T1), persistent=False)

    def forward(self, columns_BQ: Tensor) -> Tensor:
        """Return one number per row."""
        columns_QB = columns_BQ.T.contiguous()
        code_TB = self.first_T1
        for question in range(QUESTIONS):
            asked_TB = columns_QB.index_select(0, self.column_IT[question])
            exceeds_TB = asked_TB > self.threshold_IT[question].unsqueeze(1)
            code_TB = torch.add(code_TB, exceeds_TB.int(), alpha=2**question)
        leaves_TB = self.leaf_TC.flatten().index_select(0, code_TB.flatten().long())
        return leaves_TB.reshape(len(self.leaf_TC), -1).sum(0)

    @torch.no_grad()
    def fill(self, packed: PackedTrees) -> None:
        """Take packed trees."""
        for name in ("column_IT", "threshold_IT", "leaf_TC"):
            getattr(self, name).copy_(torch.from_numpy(getattr(packed, name)))


def pack_trees(roots: list[Node]) -> PackedTrees:
    """Return trees of up to `MAX_LEAVES` leaves, which are given as nested nodes as LightGBM dumps them.

    A threshold is rounded down to 32 bits, which changes nothing for numbers of 32 bits.
    """
    columns = np.zeros((QUESTIONS, len(roots)), np.int64)
    thresholds = np.full((QUESTIONS, len(roots)), LARGEST)
    leaves = np.zeros((len(roots), 2**QUESTIONS), np.float32)
    codes = np.arange(2**QUESTIONS)
    for tree, root in enumerate(roots):
        asked = 0
        waiting: list[tuple[Node, npt.NDArray[np.bool_]]] = [(root, np.ones(len(codes), np.bool_))]
        while waiting:
            node, reached_C = waiting.pop()
            if "leaf_value" in node:
                leaves[tree, reached_C] = node["leaf_value"]
                continue
            columns[asked, tree], thresholds[asked, tree] = node["split_feature"], node["threshold"]
            exceeds_C = codes >> asked & 1 == 1
            waiting.append((node["left_child"], reached_C & ~exceeds_C))
            waiting.append((node["right_child"], reached_C & exceeds_C))
            asked += 1
    return PackedTrees(columns, _rounded_down(thresholds), leaves)


def _rounded_down(numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """Return the largest number of 32 bits that is not above each number."""
    near = numbers.astype(np.float32)
    return np.where(near > numbers, np.nextafter(near, np.float32(-np.inf)), near).astype(np.float32)
