"""Trees as a layer: against going down each tree by hand, and against LightGBM's own scores."""

from typing import Any

import lightgbm
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recap_ctr.nn.trees import MAX_LEAVES, Forest, Node, pack_trees

NUM_COLUMNS = 5


def random_tree(rng: np.random.Generator, leaves: int) -> Node:
    if leaves == 1:
        return {"leaf_value": float(rng.normal())}
    left = int(rng.integers(1, leaves))
    return {
        "split_feature": int(rng.integers(NUM_COLUMNS)),
        "threshold": float(rng.normal()),
        "left_child": random_tree(rng, left),
        "right_child": random_tree(rng, leaves - left),
    }


def go_down(node: Node, row: Any) -> float:
    while "leaf_value" not in node:
        side = "left_child" if row[node["split_feature"]] <= node["threshold"] else "right_child"
        node = node[side]
    return float(node["leaf_value"])


def forest_of(trees: list[Node]) -> Forest:
    forest = Forest(len(trees))
    forest.fill(pack_trees(trees))
    return forest


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10_000), sizes=st.lists(st.integers(1, MAX_LEAVES), min_size=1, max_size=6))
def test_all_questions_at_once_lead_to_the_leaf_that_going_down_reaches(seed: int, sizes: list[int]) -> None:
    rng = np.random.default_rng(seed)
    trees = [random_tree(rng, size) for size in sizes]
    rows = rng.normal(size=(20, NUM_COLUMNS)).astype(np.float32)
    expected = [sum(go_down(tree, row) for tree in trees) for row in rows.astype(np.float64)]
    assert forest_of(trees)(torch.from_numpy(rows)).tolist() == pytest.approx(expected, abs=1e-5)


def test_a_number_at_the_threshold_goes_left_though_the_threshold_has_64_bits() -> None:
    for threshold in (0.1, 1 / 3, 1e-40, -0.1, 16_777_217.0):
        tree = {
            "split_feature": 0,
            "threshold": threshold,
            "left_child": {"leaf_value": 1.0},
            "right_child": {"leaf_value": 2.0},
        }
        near = np.float32(threshold)
        numbers = np.array([[np.nextafter(near, np.float32(s * np.inf))] for s in (-1, 1)] + [[near]])
        expected = [go_down(tree, row) for row in numbers.astype(np.float64)]
        assert forest_of([tree])(torch.from_numpy(numbers.astype(np.float32))).tolist() == expected


def test_it_scores_as_lightgbm_does() -> None:
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(3000, NUM_COLUMNS)).astype(np.float32)
    labels = rows[:, 0] * rows[:, 1] + rng.normal(size=3000) > 1
    parameters = {"objective": "binary", "verbosity": -1, "num_leaves": MAX_LEAVES, "use_missing": False}
    booster = lightgbm.train(parameters, lightgbm.Dataset(rows, labels), 30)
    forest = forest_of([tree["tree_structure"] for tree in booster.dump_model()["tree_info"]])
    expected = booster.predict(rows, raw_score=True)
    np.testing.assert_allclose(forest(torch.from_numpy(rows)).numpy(), expected, atol=1e-5)
