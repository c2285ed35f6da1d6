"""The OpenAPI document, generated from the types that check the bodies."""

from typing import Any

import msgspec

from recap_ctr.serve import arrow
from recap_ctr.serve.codec import CONTRIBUTIONS, JSON, MAX_COUNT, SCORES, Codec
from recap_ctr.serve.config import ServeConfig

OPEN_PATHS = ("/", "/health/live", "/health/ready", "/v2/health/live", "/v2/health/ready")
"""They need no token."""
_TENSOR = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1, "maxItems": 2},
        "datatype": {"type": "string"},
        "data": {"type": "array"},
    },
    "required": ["name", "shape", "datatype", "data"],
}
_INFERENCE = {
    "type": "object",
    "properties": {
        "inputs": {"type": "array", "items": _TENSOR},
        "outputs": {"type": "array", "items": {"type": "object"}},
        "id": {"type": "string"},
        "parameters": {"type": "object"},
    },
    "required": ["inputs"],
    "additionalProperties": False,
}
_PROBLEM = {
    "type": "object",
    "properties": {"error": {"type": "string"}, "fix": {"type": "string"}},
    "required": ["error"],
    "additionalProperties": False,
}
_MEANINGS = {
    400: "The request is wrong; the answer says where, and how to fix it.",
    401: "A token is required.",
    404: "No such field, or no such model.",
    408: "The body came too slowly.",
    413: "Too large.",
    415: "The content type is not supported.",
    421: "The Host header names another server.",
    503: "Not ready, or stopping.",
}


def make_document(codec: Codec, config: ServeConfig, *, token: bool) -> dict[str, Any]:
    """Return the document; `token` says whether the server requires one.

    It is exact: a body that fits is scored, unless load or its deadline forbids; any other body gets a 400.
    """
    paths = _paths(codec, config)
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "RECAP", "version": "1", "description": "Click probabilities of raw rows."},
        "paths": paths,
        "components": {"schemas": _schemas(codec)},
    }
    if token:
        document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"token": []}]
    for path, item in paths.items():
        for operation in item.values():
            if not token:
                operation["responses"] |= _problems(421)
            elif path in OPEN_PATHS:
                operation["security"] = []
            else:
                operation["responses"] |= _problems(401)
    return document


def _schemas(codec: Codec) -> dict[str, Any]:
    """Return the schemas of bodies; that of a request is split in two, as it holds either rows or columns."""
    _, schemas = msgspec.json.schema_components(
        [codec.request_type], ref_template="#/components/schemas/{name}"
    )
    properties = schemas.pop("ScoreRequest")["properties"]
    optional = {
        name: properties[name] for name in ("context", "routes", "depth", "deadline_ms", "explain", "keep")
    }
    for name, kind in (("ScoreRows", "rows"), ("ScoreColumns", "columns")):
        data = next(option for option in properties[kind]["anyOf"] if option.get("type") != "null")
        schemas[name] = {
            "type": "object",
            "properties": {kind: data, **optional},
            "required": [kind],
            "additionalProperties": False,
        }
    return {**schemas, "Problem": _PROBLEM, **_answers()}


def _paths(codec: Codec, config: ServeConfig) -> dict[str, Any]:
    anything = {"type": "object"}
    vocabulary = _get("Frequent values of a field.", JSON, anything, 400, 404, 503)
    vocabulary["get"]["parameters"] = [
        {
            "name": "field",
            "in": "path",
            "required": True,
            "schema": {"type": "string", "enum": list(codec.fields)},
        },
        _parameter("prefix", "What the values start with.", {"type": "string", "maxLength": 200}),
    ]
    return {
        "/score": {"post": _score_operation(config)},
        "/model": _get("The model: fields, settings, quality, card.", JSON, anything, 503),
        "/vocabulary/{field}": vocabulary,
        "/health/live": _get("Whether the process answers.", JSON, anything),
        "/health/ready": _get("Whether the server can score.", JSON, anything, 503),
        "/metrics": _get("Counters in Prometheus' text format.", "text/plain", {"type": "string"}, 503),
        "/openapi.json": _get("This document.", JSON, anything, 503),
        "/docs": _get(
            "This document as a page, with requests to copy.", "text/html", {"type": "string"}, 503
        ),
        **_open_inference_paths(config),
        "/": _get("A page to try the model on.", "text/html", {"type": "string"}),
    }


def _open_inference_paths(config: ServeConfig) -> dict[str, Any]:
    """Return the paths of the Open Inference Protocol, whose own document describes the bodies."""
    anything = {"type": "object"}
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    model = _get("The tensors that a request may hold, and those of the answer.", JSON, anything, 404, 503)
    ready = _get("Whether the model can score.", JSON, anything, 404, 503)
    infer = _score_operation(config)
    infer["summary"] = "Score tensors, by the Open Inference Protocol, version 2"
    infer["description"] = (
        "One tensor for each column, of one value a row: BYTES for text, FP64 or INT64 for numbers, in JSON. Columns"
        " that are left out are missing. The answer has one FP64 tensor for each score."
    )
    infer["requestBody"]["content"] = {JSON: {"schema": _INFERENCE}}
    infer["responses"]["200"]["content"] = {JSON: {"schema": anything}}
    infer["responses"] |= _problems(404)
    paths = {
        "/v2/models/{name}": model,
        "/v2/models/{name}/ready": ready,
        "/v2/models/{name}/infer": {"post": infer},
    }
    for item in paths.values():
        for operation in item.values():
            operation["parameters"] = [name, *operation.get("parameters", [])]
    return {
        "/v2": _get("The server, by the Open Inference Protocol.", JSON, anything),
        "/v2/health/live": _get("Whether the process answers.", JSON, anything),
        "/v2/health/ready": _get("Whether the server can score.", JSON, anything, 503),
        **paths,
    }


def _score_operation(config: ServeConfig) -> dict[str, Any]:
    binary = {kind: {"schema": {"type": "string", "format": "binary"}} for kind in (arrow.STREAM, arrow.FILE)}
    count = {"type": "integer", "minimum": 1, "maximum": MAX_COUNT}
    deadline = {"type": "number", "exclusiveMinimum": 0, "maximum": config.limits.deadline_ms}
    precedence = "For Arrow bodies; a value in a JSON body takes precedence."
    return {
        "summary": "Score rows",
        "description": "Missing and null values are scored as missing; the context is added to every row. With"
        " `explain`, every row is scored once more for each field, counts as that many rows, and is answered with its"
        " largest contributions: the logit minus that of the same row without the field's value. They are not causes,"
        " and don't sum to the logit.",
        "parameters": [
            _parameter("routes", precedence, count),
            _parameter("depth", precedence, count),
            _parameter("deadline_ms", precedence, deadline),
            _parameter(
                "keep", "For Arrow bodies: a column to answer as it came; repeatable.", {"type": "string"}
            ),
            _parameter("explain", f"How many contributions to answer for each row. {precedence}", count),
        ],
        "requestBody": {
            "required": True,
            "content": {JSON: {"schema": {"oneOf": [_ref("ScoreRows"), _ref("ScoreColumns")]}}, **binary},
        },
        "responses": {
            "200": {
                "description": "The scores, in the format of the body.",
                "content": {JSON: {"schema": {"oneOf": [_ref("RowScores"), _ref("ColumnScores")]}}, **binary},
            },
            **_problems(400, 408, 413, 415),
            "429": _problem(
                "Too busy to keep the deadline.", {"Retry-After": {"schema": {"type": "integer"}}}
            ),
            **_problems(503),
        },
    }


def _answers() -> dict[str, Any]:
    provenance = {
        "model": {"type": "string"},
        "routes": {"type": "integer"},
        "depth": {"type": ["integer", "null"]},
        "lowered": {"type": "boolean"},
    }
    contribution = {
        "type": "object",
        "properties": {
            "field": {"type": "string"},
            "value": {"type": "string"},
            "contribution": {"type": "number"},
        },
        "required": ["field", "value", "contribution"],
        "additionalProperties": False,
    }
    explained = {"type": "array", "items": contribution}
    score: dict[str, Any] = {name: {"type": "number"} for name in SCORES} | {CONTRIBUTIONS: explained}
    kept = {"type": ["string", "number", "boolean", "null"]}
    row = {"type": "object", "properties": score, "required": list(SCORES), "additionalProperties": kept}
    column: dict[str, Any] = {name: {"type": "array", "items": {"type": "number"}} for name in SCORES}
    column[CONTRIBUTIONS] = {"type": "array", "items": explained}
    columns = {
        "type": "object",
        "properties": column,
        "required": list(SCORES),
        "additionalProperties": {"type": "array", "items": kept},
    }
    kinds = {"RowScores": ("rows", {"type": "array", "items": row}), "ColumnScores": ("columns", columns)}
    return {
        name: {
            "type": "object",
            "properties": {kind: schema, **provenance},
            "required": [kind, *provenance],
            "additionalProperties": False,
        }
        for name, (kind, schema) in kinds.items()
    }


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _parameter(name: str, description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "query", "description": description, "schema": schema}


def _problem(description: str, headers: dict[str, Any] | None = None) -> dict[str, Any]:
    response: dict[str, Any] = {"description": description, "content": {JSON: {"schema": _ref("Problem")}}}
    return response | ({"headers": headers} if headers else {})


def _problems(*codes: int) -> dict[str, Any]:
    return {str(code): _problem(_MEANINGS[code]) for code in codes}


def _get(summary: str, kind: str, schema: dict[str, Any], *problems: int) -> dict[str, Any]:
    answer = {"description": summary, "content": {kind: {"schema": schema}}}
    return {"get": {"summary": summary, "responses": {"200": answer, **_problems(*problems)}}}
