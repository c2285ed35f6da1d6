"""What a graph may hold: only operators on a closed list, which compute; no loops, no branches and no functions.

A graph comes with an artifact, and an artifact may come from anywhere. ONNX Runtime would run a loop without end, so
the graph is read before it gets there. It is a message of protocol buffers, of which a few fields are enough.
"""

from collections.abc import Iterator

# Fields of the messages in onnx.proto, by their numbers.
_GRAPH, _TRAINING, _FUNCTIONS = 7, 20, 25  # of ModelProto
_NODE, _SPARSE = 1, 15  # of GraphProto
_OPERATOR, _ATTRIBUTE, _DOMAIN = 4, 5, 7  # of NodeProto
_NESTED = {6, 11, 22, 23}  # of AttributeProto: a graph, graphs, a sparse tensor, sparse tensors
_VARINT, _FIXED_64, _BYTES, _FIXED_32 = 0, 1, 2, 5  # how a field is stored
_BY_NUMBER = """
Abs Acos Acosh Add And Asin Asinh Atan Atanh Cast CastLike Ceil Celu Clip Cos Cosh Div Elu Equal Erf
Exp Floor Gelu Greater GreaterOrEqual HardSigmoid HardSwish Identity IsInf IsNaN LeakyRelu Less
LessOrEqual Log Max Mean Min Mish Mod Mul Neg Not Or PRelu Pow Reciprocal Relu Round Selu Sigmoid
Sign Sin Sinh Softplus Softsign Sqrt Sub Sum Tan Tanh ThresholdedRelu Where Xor
"""
_SUMS = """
ArgMax ArgMin BatchNormalization CumSum Einsum Gemm GroupNormalization InstanceNormalization
LayerNormalization LogSoftmax LpNormalization MatMul MatMulInteger ReduceL1 ReduceL2 ReduceLogSum
ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Softmax TopK
"""
_SHAPES = """
Concat Constant ConstantOfShape Expand Flatten Gather GatherElements GatherND OneHot Pad Range
Reshape ScatterElements ScatterND Shape Size Slice Split Squeeze Tile Transpose Trilu Unsqueeze
"""
_WHOLE_NUMBERS = """
DequantizeLinear DynamicQuantizeLinear QuantizeLinear
"""
OPERATORS = frozenset(f"{_BY_NUMBER} {_SUMS} {_SHAPES} {_WHOLE_NUMBERS}".split())


def check_operators(graph: bytes) -> None:
    """Raise a ValueError for a graph with an operator that is not on the list, or with a graph inside it."""
    for number, value in _fields(memoryview(graph)):
        if number in (_TRAINING, _FUNCTIONS):
            raise ValueError("a graph defines functions of its own")
        if number == _GRAPH:
            for part, content in _fields(value):
                if part == _SPARSE:
                    raise ValueError("a graph holds sparse constants, which may unpack to any size")
                if part == _NODE:
                    _check_node(content)


def _check_node(node: memoryview) -> None:
    operator = domain = ""
    for number, value in _fields(node):
        if number == _OPERATOR:
            operator = bytes(value).decode(errors="replace")
        elif number == _DOMAIN:
            domain = bytes(value).decode(errors="replace")
        elif number == _ATTRIBUTE and not _NESTED.isdisjoint(part for part, _ in _fields(value)):
            raise ValueError("an operator of the graph holds a graph or sparse constants")
    if operator not in OPERATORS or domain not in ("", "ai.onnx"):
        raise ValueError(
            f"the operator {f'{domain} {operator}'.strip()[:80]!r} is not on the list of those that may run"
        )


def _fields(message: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield the number and, for text and messages, the bytes of each field."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, kind = key >> 3, key & 7
        size = 0
        if kind == _VARINT:
            _, at = _varint(message, at)
        elif kind == _BYTES:
            size, at = _varint(message, at)
        elif kind in (_FIXED_64, _FIXED_32):
            at += 8 if kind == _FIXED_64 else 4
        else:
            raise ValueError("these bytes are not a graph")
        if at + size > len(message):
            raise ValueError("these bytes are not a graph")
        yield number, message[at : at + size]
        at += size


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """Return a number of seven bits a byte, and the place after it."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(message):
            break
        byte = message[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError("these bytes are not a graph")
