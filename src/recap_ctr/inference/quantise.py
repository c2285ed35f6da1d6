"""Matrix products of a graph in whole numbers of 8 bits, row by row.

Weights are rounded once, with one scale for each of their outputs. A row is rounded when it comes, with a scale of its
own: one scale for the whole batch, as usual, would make a row's score depend on who shares its batch.
Weights keep to 7 bits: sums of two products then fit the 16 bits that processors without VNNI add them in.
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper, shape_inference

from recap_ctr.storage.arrays import Array

SMALLEST = 16  # a product with fewer inputs or outputs than this is not worth rounding
LEVELS = 63  # of weights, on either side of zero
MIDDLE = 128  # what zero becomes in a row


def quantise(graph: bytes) -> bytes:
    """The same graph with its products by constant matrices in int8."""
    model = shape_inference.infer_shapes(_folded(graph))
    rewriting = _Rewriting(model.graph)
    nodes = [made for node in model.graph.node for made in rewriting.replaced(node)]
    used = {name for node in nodes for name in node.input}
    constants = [one for one in (*model.graph.initializer, *rewriting.constants) if one.name in used]
    shown = model.graph
    content: bytes = helper.make_model(
        helper.make_graph(nodes, shown.name, shown.input, shown.output, constants),
        opset_imports=[helper.make_opsetid("", _opset(model))],
        ir_version=model.ir_version,
    ).SerializeToString(deterministic=True)
    return content


def _folded(graph: bytes) -> Any:
    """The graph with all that is constant in it computed, so that weights stand where they are used."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.log_severity_level = 4
    with tempfile.TemporaryDirectory(prefix="recap-") as directory:
        options.optimized_model_filepath = str(Path(directory, "folded.onnx"))
        ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        return onnx.load(options.optimized_model_filepath)


def _opset(model: Any) -> int:
    return next(int(entry.version) for entry in model.opset_import if entry.domain == "")


class _Rewriting:
    """Nodes of a graph to those that take their place."""

    def __init__(self, graph: Any) -> None:
        self._weights = {one.name: one for one in graph.initializer}
        self._shapes = {
            value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim]
            for value in (*graph.input, *graph.value_info, *graph.output)
        }
        self._rounded: set[str] = set()
        self.constants: list[Any] = []

    def replaced(self, node: Any) -> list[Any]:
        weight_DC = self._weight_of(node)
        if weight_DC is None:
            return [node]
        D, C = weight_DC.shape
        row, product, out = node.input[0], f"{node.output[0]}/int8", node.output[0]
        made = self._round(row, D) if row not in self._rounded else []
        scale_C = np.maximum(np.abs(weight_DC).max(axis=0), np.float32(1e-30)) / np.float32(LEVELS)
        weight = self._constant(f"{product}/weight", np.rint(weight_DC / scale_C).astype(np.int8))
        middle = self._constant(f"{product}/middle", np.uint8(MIDDLE))
        made += [
            helper.make_node("MatMulInteger", [f"{row}/rounded", weight, middle], [f"{product}/sum"]),
            helper.make_node("Cast", [f"{product}/sum"], [f"{product}/float"], to=TensorProto.FLOAT),
            helper.make_node("Mul", [f"{product}/float", f"{row}/scale"], [f"{product}/by-row"]),
        ]
        last = [f"{product}/by-row", self._constant(f"{product}/scale", scale_C)]
        bias = node.input[2] if len(node.input) > 2 else ""
        shape = self._shapes[row]
        if bias:
            made.append(helper.make_node("Mul", last, [f"{product}/unbiased"]))
            made.append(helper.make_node("Add", [f"{product}/unbiased", bias], [out]))
        elif len(shape) == 2:
            made.append(helper.make_node("Mul", last, [out]))
        else:
            back = self._constant(f"{product}/shape", np.array([-1, *shape[1:-1], C], np.int64))
            made.append(helper.make_node("Mul", last, [f"{product}/flat"]))
            made.append(helper.make_node("Reshape", [f"{product}/flat", back], [out]))
        return made

    def _weight_of(self, node: Any) -> Array | None:
        """The constant matrix that a node multiplies rows by, if it is one worth rounding."""
        if node.op_type not in ("MatMul", "Gemm") or node.input[1] not in self._weights:
            return None
        shape = self._shapes.get(node.input[0], [])
        if len(shape) < 2 or not all(shape[1:]):  # all but the number of rows must be known
            return None
        settings = {one.name: helper.get_attribute_value(one) for one in node.attribute}
        transposed = settings.pop("transB", 0)
        if any(settings.pop(name, 1.0) != 1.0 for name in ("alpha", "beta")) or any(settings.values()):
            return None
        weight = numpy_helper.to_array(self._weights[node.input[1]])
        if weight.ndim != 2 or min(weight.shape) < SMALLEST or weight.dtype != np.float32:
            return None
        return weight.T if transposed else weight

    def _round(self, row: str, D: int) -> list[Any]:
        """Each row as whole numbers around 128, and its scale."""
        self._rounded.add(row)
        made, flat = [], row
        if len(self._shapes[row]) > 2:
            flat = f"{row}/flat"
            shape = self._constant(f"{row}/shape", np.array([-1, D], np.int64))
            made.append(helper.make_node("Reshape", [row, shape], [flat]))
        last = self._constant(f"{row}/last", np.array([1], np.int64))
        share = self._constant(f"{row}/share", np.float32(1 / 127))
        least = self._constant(f"{row}/least", np.float32(1e-30))
        middle = self._constant(f"{row}/middle", np.uint8(MIDDLE))
        return [
            *made,
            helper.make_node("Abs", [flat], [f"{row}/size"]),
            helper.make_node("ReduceMax", [f"{row}/size", last], [f"{row}/largest"], keepdims=1),
            helper.make_node("Mul", [f"{row}/largest", share], [f"{row}/some-scale"]),
            helper.make_node(
                "Max", [f"{row}/some-scale", least], [f"{row}/scale"]
            ),  # a row of zeros has none
            helper.make_node("Squeeze", [f"{row}/scale", last], [f"{row}/scales"]),
            helper.make_node("Shape", [f"{row}/scales"], [f"{row}/rows"]),
            helper.make_node("Expand", [middle, f"{row}/rows"], [f"{row}/middles"]),
            helper.make_node(
                "QuantizeLinear", [flat, f"{row}/scales", f"{row}/middles"], [f"{row}/rounded"], axis=0
            ),
        ]

    def _constant(self, name: str, value: Any) -> str:
        self.constants.append(numpy_helper.from_array(np.asarray(value), name))
        return name
