"""The Open Inference Protocol, version 2, over JSON, which clients of KServe, Triton and their like speak.

A request names tensors, one for each column of the model: BYTES for text, numbers of any kind for numeric fields. A
tensor has one value a row (shape [rows] or [rows, 1]). That of a multi field may have several ([rows, values]), or text
joined by the field's separator. Columns that are left out are missing. The answer has an FP64 tensor per score.
"""

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from recap_ctr.inference.engine import Floats
from recap_ctr.schema import Field
from recap_ctr.serve.codec import SCORES, Codec, ScoreRequest, refuse_duplicates
from recap_ctr.serve.problem import Problem
from recap_ctr.serve.versions import Version

PREFIX = "/v2"
PLATFORM = "recap_ctr"
_MAX_TENSORS = 10_000
_WHOLE = ("INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64")
_KINDS = {
    **dict.fromkeys(_WHOLE, int),
    **dict.fromkeys(("FP16", "FP32", "FP64"), float),
    "BOOL": bool,
    "BYTES": str,
}


class _Tensor(msgspec.Struct, gc=False):
    name: str
    shape: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=1, max_length=2)]
    datatype: str
    data: list[Any] | UnsetType | None = UNSET
    parameters: dict[str, Any] | UnsetType | None = UNSET


class _Wanted(msgspec.Struct, gc=False):
    name: str
    parameters: dict[str, Any] | UnsetType | None = UNSET


class _Inference(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    inputs: Annotated[list[_Tensor], Meta(max_length=_MAX_TENSORS)]
    outputs: Annotated[list[_Wanted], Meta(max_length=_MAX_TENSORS)] | UnsetType | None = UNSET
    id: Annotated[str, Meta(max_length=1_000)] | UnsetType | None = UNSET
    parameters: dict[str, Any] | UnsetType | None = UNSET


_decode = msgspec.json.Decoder(_Inference).decode


class Inference(msgspec.Struct, frozen=True):
    """A decoded request."""

    asked: ScoreRequest
    outputs: tuple[str, ...]
    """The scores to answer."""
    request_id: str | None


def model_name(version: Version) -> str:
    """Return the name that addresses give the model: its kind, such as `recap`."""
    return str(version.engine.manifest.get("model", {}).get("name") or "model")


def server_metadata(package_version: str) -> dict[str, Any]:
    """Return the answer to `GET /v2`."""
    return {"name": PLATFORM, "version": package_version, "extensions": []}


def model_metadata(version: Version) -> dict[str, Any]:
    """Return the answer to `GET /v2/models/NAME`: all tensors that a request may hold, and those of the answer."""
    inputs = [_describe(name, field) for name, field in version.codec.columns.items()]
    outputs = [{"name": name, "datatype": "FP64", "shape": [-1]} for name in SCORES]
    return {
        "name": model_name(version),
        "versions": [version.name],
        "platform": PLATFORM,
        "inputs": inputs,
        "outputs": outputs,
    }


def _describe(name: str, field: Field) -> dict[str, Any]:
    return {"name": name, "datatype": "FP64" if field.kind == "numeric" else "BYTES", "shape": [-1]}


def read_inference(body: bytes, codec: Codec) -> Inference:
    """Decode a request; raise Problem 400 with the tensor at fault if it does not fit."""
    try:
        request = _decode(body)
        outputs = request.outputs or ()
        refuse_duplicates(
            body, [msgspec.structs.astuple(part) for part in (request, *request.inputs, *outputs)]
        )
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Problem(400, f"the body is no inference request: {error}", fix="see /openapi.json") from None
    wanted = tuple(output.name for output in outputs) or tuple(SCORES)
    for names, what in (([tensor.name for tensor in request.inputs], "a tensor"), (wanted, "an output")):
        if len(set(names)) < len(names):
            raise Problem(400, f"{what} is there twice", fix="send each once")
    columns = {tensor.name: _values(tensor, codec.columns.get(tensor.name)) for tensor in request.inputs}
    unknown = [name for name in wanted if name not in SCORES]
    if unknown:
        raise Problem(400, f"there is no output {unknown[0][:200]!r}", fix=f"outputs are {', '.join(SCORES)}")
    return Inference(codec.from_columns(columns), wanted, request.id or None)


def _values(tensor: _Tensor, field: Field | None) -> list[Any]:
    """Return the values of a tensor, one entry a row; refuse data that its shape or datatype does not describe."""
    where = f"tensor {tensor.name[:200]!r}"
    if not isinstance(tensor.data, list):
        raise Problem(
            400, f"{where} has no data in JSON", fix="send it in JSON: binary_data=False in Triton's client"
        )
    kind = _KINDS.get(tensor.datatype)
    if kind is None:
        raise Problem(
            400, f"{where}: datatype {tensor.datatype[:50]!r} is unknown", fix=f"use {', '.join(_KINDS)}"
        )
    if field is not None and field.kind == "numeric" and kind is str:
        raise Problem(400, f"{where} must hold numbers: the field is numeric", fix="send FP64")
    flat = _flatten(tensor.data)
    rows, width = tensor.shape[0], tensor.shape[1] if len(tensor.shape) > 1 else 1
    if len(flat) != rows * width or not width:
        raise Problem(400, f"{where}: {len(flat):,} values don't fill the shape {tensor.shape}")
    allowed = (int, float) if kind is float else (kind,)
    wrong = next((value for value in flat if value is not None and type(value) not in allowed), None)
    if wrong is not None:
        shown = f"a {type(wrong).__name__}" if isinstance(wrong, list | dict) else repr(str(wrong)[:100])
        raise Problem(400, f"{where}: {shown} is not a value of datatype {tensor.datatype}")
    if width == 1:
        return flat
    if field is None or field.kind != "multi":
        raise Problem(
            400, f"{where} has {width} values a row, and the field takes one", fix="send the shape [rows]"
        )
    return [flat[start : start + width] for start in range(0, len(flat), width)]


def _flatten(data: Sequence[Any]) -> list[Any]:
    """Return the values of data that may be nested as its shape is."""
    if any(type(part) is list for part in data):
        return [value for part in data for value in (part if type(part) is list else [part])]
    return list(data)


def write_inference(inference: Inference, scores: dict[str, Floats], version: Version) -> bytes:
    """Return the answer: the scores that were asked for."""
    outputs = [
        {"name": name, "datatype": "FP64", "shape": [len(scores[name])], "data": scores[name].tolist()}
        for name in inference.outputs
    ]
    answer = {"model_name": model_name(version), "model_version": version.name, "outputs": outputs}
    return msgspec.json.encode(answer | ({"id": inference.request_id} if inference.request_id else {}))
