"""A graph runs only what is on the list, in bounded memory."""

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from recap_ctr.inference.onnx_backend import open_session
from recap_ctr.inference.operators import OPERATORS, check_operators

ROW = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["b", 1])
LOGIT = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["b"])


def graph(*nodes: Any, constants: dict[str, Any] | None = None, **model: Any) -> bytes:
    tensors = [numpy_helper.from_array(np.array(value), name) for name, value in (constants or {}).items()]
    made = helper.make_graph(list(nodes), "g", [ROW], [LOGIT], tensors)
    opset = [helper.make_opsetid("", 20)]
    content: bytes = helper.make_model(made, opset_imports=opset, ir_version=10, **model).SerializeToString()
    return content


def endless() -> Any:
    condition = [helper.make_tensor_value_info(name, TensorProto.BOOL, []) for name in ("c", "d")]
    count = helper.make_tensor_value_info("i", TensorProto.INT64, [])
    body = helper.make_graph(
        [helper.make_node("Identity", ["c"], ["d"])], "b", [count, condition[0]], [condition[1]]
    )
    return helper.make_node("Loop", ["", "true"], [], body=body)


def test_sums_may_run() -> None:
    check_operators(graph(helper.make_node("Squeeze", ["x", "one"], ["y"]), constants={"one": [1]}))
    assert not {"Loop", "If", "Scan", "SequenceMap", "RandomNormal", "ImageDecoder"} & OPERATORS


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (endless(), "holds a graph"),
        (helper.make_node("If", ["x"], ["y"]), "operator 'If' is not on the list"),
        (helper.make_node("RandomNormal", [], ["y"], shape=[1]), "operator 'RandomNormal' is not"),
        (helper.make_node("Gemm", ["x"], ["y"], domain="com.evil"), "operator 'com.evil Gemm' is not"),
    ],
)
def test_what_may_not_run(node: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_session(graph(node, constants={"true": True}), 1)


def test_functions_and_sparse_constants() -> None:
    opset = [helper.make_opsetid("", 20)]
    function = helper.make_function("own", "F", ["x"], ["y"], [helper.make_node("Relu", ["x"], ["y"])], opset)
    with pytest.raises(ValueError, match="functions of its own"):
        check_operators(graph(helper.make_node("Relu", ["x"], ["y"]), functions=[function]))
    model = onnx.load_from_string(graph(helper.make_node("Relu", ["x"], ["y"])))
    values = helper.make_tensor("values", TensorProto.FLOAT, [1], [1.0])
    places = helper.make_tensor("places", TensorProto.INT64, [1], [1])
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, places, [1 << 40]))
    with pytest.raises(ValueError, match="sparse constants"):
        check_operators(model.SerializeToString())


@pytest.mark.parametrize("how", ["constant", "computed"])
def test_memory_is_bounded(how: str) -> None:
    """A graph that wants 4 GiB fails, without getting them."""
    size = {"n": [1 << 30]} if how == "constant" else {"k": [1 << 15]}
    first = [] if how == "constant" else [helper.make_node("Mul", ["k", "k"], ["n"])]
    nodes = [
        *first,
        helper.make_node("ConstantOfShape", ["n"], ["big"]),
        helper.make_node("ReduceSum", ["big"], ["sum"], keepdims=0),
        helper.make_node("Add", ["x", "sum"], ["column"]),
        helper.make_node("Squeeze", ["column", "one"], ["y"]),
    ]
    with pytest.raises(Exception, match="memory"):
        open_session(graph(*nodes, constants={"one": [1], **size}), 1).run(
            None, {"x": np.ones((2, 1), np.float32)}
        )


@pytest.mark.parametrize("raw", [b"\xff" * 64, b"\x0c", b"\x3a\x7f", b"\x07"])
def test_bytes_that_are_no_graph(raw: bytes) -> None:
    with pytest.raises(ValueError, match="not a graph"):
        check_operators(raw)
