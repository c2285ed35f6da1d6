"""A graph whose matrix products work on whole numbers of 8 bits.

Weights are rounded once, with one scale per output column. Rows are rounded when they are scored, with one scale per
row: the usual scale per batch would make a row's score depend on the other rows of its batch.
Weights use 7 bits only, so that the sum of two products fits the 16 bits in which processors without VNNI add them.
Shapes: D inputs of a product, C outputs.
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper, shape_inference

from recap_ctr.storage.arrays import Array

SMALLEST = 16  # A product with fewer inputs or outputs than this is not worth rounding.
LEVELS = 63  # The largest absolute value of a rounded weight.
MIDDLE = 128  # What zero becomes in a rounded row.


def quantise(graph: bytes) -> bytes:
    """Return the same graph with its products by constant matrices in int8."""
    model = shape_inference.infer_shapes(_fold_constants(graph))
    rewriter = _Rewriter(model.graph)
    nodes = [new for node in model.graph.node for new in rewriter.rewrite(node)]
    used = {name for node in nodes for name in node.input}
    constants = [
        constant for constant in (*model.graph.initializer, *rewriter.constants) if constant.name in used
    ]
    content: bytes = helper.make_model(
        helper.make_graph(nodes, model.graph.name, model.graph.input, model.graph.output, constants),
        opset_imports=[helper.make_opsetid("", _opset(model))],
        ir_version=model.ir_version,
    ).SerializeToString(deterministic=True)
    return content


def _fold_constants(graph: bytes) -> Any:
    """Return the graph with its constant parts computed, so that products have their weights as direct inputs."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.log_severity_level = 4
    with tempfile.TemporaryDirectory(prefix="recap-") as directory:
        options.optimized_model_filepath = str(Path(directory, "folded.onnx"))
        ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        return onnx.load(options.optimized_model_filepath)


def _opset(model: Any) -> int:
    return next(int(entry.version) for entry in model.opset_import if entry.domain == "")


class _Rewriter:
    """Replaces the products of a graph; `constants` collects the constants that the new nodes need."""

    def __init__(self, graph: Any) -> None:
        self._weights = {constant.name: constant for constant in graph.initializer}
        self._shapes = {
            value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim]
            for value in (*graph.input, *graph.value_info, *graph.output)
        }
        self._rounded_rows: set[str] = set()
        self.constants: list[Any] = []

    def rewrite(self, node: Any) -> list[Any]:
        """Return the nodes that take the place of `node`: itself, unless it is a product worth rounding."""
        weight_DC = self._weight_of(node)
        if weight_DC is None:
            return [node]
        D, C = weight_DC.shape
        row, product = node.input[0], f"{node.output[0]}/int8"
        nodes = self._round_rows(row, D) if row not in self._rounded_rows else []
        scale_C = np.maximum(np.abs(weight_DC).max(axis=0), np.float32(1e-30)) / np.float32(LEVELS)
        weight = self._constant(f"{product}/weight", np.rint(weight_DC / scale_C).astype(np.int8))
        middle = self._constant(f"{product}/middle", np.uint8(MIDDLE))
        nodes += [
            helper.make_node("MatMulInteger", [f"{row}/rounded", weight, middle], [f"{product}/sum"]),
            helper.make_node("Cast", [f"{product}/sum"], [f"{product}/float"], to=TensorProto.FLOAT),
            helper.make_node("Mul", [f"{product}/float", f"{row}/scale"], [f"{product}/by-row"]),
        ]
        scaled = [f"{product}/by-row", self._constant(f"{product}/scale", scale_C)]
        bias = node.input[2] if len(node.input) > 2 else ""
        shape = [-1, *self._shapes[row][1:-1], C]
        return nodes + self._finish(product, scaled, bias, shape, node.output[0])

    def _finish(self, product: str, scaled: list[str], bias: str, shape: list[int], out: str) -> list[Any]:
        """Return the nodes that scale the sums, and add the bias or restore the shape, if need be."""
        if bias:
            return [
                helper.make_node("Mul", scaled, [f"{product}/unbiased"]),
                helper.make_node("Add", [f"{product}/unbiased", bias], [out]),
            ]
        if len(shape) == 2:
            return [helper.make_node("Mul", scaled, [out])]
        full_shape = self._constant(f"{product}/shape", np.array(shape, np.int64))
        return [
            helper.make_node("Mul", scaled, [f"{product}/flat"]),
            helper.make_node("Reshape", [f"{product}/flat", full_shape], [out]),
        ]

    def _weight_of(self, node: Any) -> Array | None:
        """Return the constant matrix that a node multiplies rows by; None if there is none worth rounding."""
        if node.op_type not in ("MatMul", "Gemm") or node.input[1] not in self._weights:
            return None
        shape = self._shapes.get(node.input[0], [])
        if len(shape) < 2 or not all(shape[1:]):  # All but the number of rows must be known.
            return None
        attributes = {entry.name: helper.get_attribute_value(entry) for entry in node.attribute}
        is_transposed = attributes.pop("transB", 0)
        if any(attributes.pop(name, 1.0) != 1.0 for name in ("alpha", "beta")) or any(attributes.values()):
            return None
        weight = numpy_helper.to_array(self._weights[node.input[1]])
        if weight.ndim != 2 or min(weight.shape) < SMALLEST or weight.dtype != np.float32:
            return None
        return weight.T if is_transposed else weight

    def _round_rows(self, row: str, D: int) -> list[Any]:
        """Return the nodes that give each row as whole numbers around 128, and its scale."""
        self._rounded_rows.add(row)
        reshape, flat = [], row
        if len(self._shapes[row]) > 2:
            flat = f"{row}/flat"
            shape = self._constant(f"{row}/shape", np.array([-1, D], np.int64))
            reshape.append(helper.make_node("Reshape", [row, shape], [flat]))
        last = self._constant(f"{row}/last", np.array([1], np.int64))
        share = self._constant(f"{row}/share", np.float32(1 / 127))
        least = self._constant(f"{row}/least", np.float32(1e-30))
        middle = self._constant(f"{row}/middle", np.uint8(MIDDLE))
        return [
            *reshape,
            helper.make_node("Abs", [flat], [f"{row}/size"]),
            helper.make_node("ReduceMax", [f"{row}/size", last], [f"{row}/largest"], keepdims=1),
            helper.make_node("Mul", [f"{row}/largest", share], [f"{row}/some-scale"]),
            # A row of zeros would have the scale 0, by which nothing can be divided.
            helper.make_node("Max", [f"{row}/some-scale", least], [f"{row}/scale"]),
            helper.make_node("Squeeze", [f"{row}/scale", last], [f"{row}/scales"]),
            helper.make_node("Shape", [f"{row}/scales"], [f"{row}/rows"]),
            helper.make_node("Expand", [middle, f"{row}/rows"], [f"{row}/middles"]),
            helper.make_node(
                "QuantizeLinear", [flat, f"{row}/scales", f"{row}/middles"], [f"{row}/rounded"], axis=0
            ),
        ]

    def _constant(self, name: str, value: Any) -> str:
        """Add a constant to the graph; return its name."""
        self.constants.append(numpy_helper.from_array(np.asarray(value), name))
        return name
