"""The OpenAPI document, made of the same types that check the bodies."""

from typing import Any

import msgspec

from recap_ctr.serve import arrow
from recap_ctr.serve.codec import JSON, MAX_COUNT, SCORES, Codec
from recap_ctr.serve.config import ServeConfig

_PROBLEM = {
    "type": "object",
    "properties": {"error": {"type": "string"}, "fix": {"type": "string"}},
    "required": ["error"],
    "additionalProperties": False,
}


def document(codec: Codec, config: ServeConfig, *, token: bool) -> dict[str, Any]:
    """Precise: a body that fits is scored, unless load or its deadline forbids; one that doesn't is a 400."""
    (schema,), components = msgspec.json.schema_components(
        [codec.request_type], ref_template="#/components/schemas/{name}"
    )
    asked = components["ScoreRequest"]
    settings = {name: asked["properties"][name] for name in ("context", "routes", "depth", "deadline_ms")}
    given = {}
    for kind in ("rows", "columns"):
        whole = next(option for option in asked["properties"][kind]["anyOf"] if option.get("type") != "null")
        given[kind] = {
            "type": "object",
            "properties": {kind: whole, **settings},
            "required": [kind],
            "additionalProperties": False,
        }
    del schema, components["ScoreRequest"]
    components |= {"ScoreRows": given["rows"], "ScoreColumns": given["columns"], "Problem": _PROBLEM}
    components |= _answers()
    binary = {kind: {"schema": {"type": "string", "format": "binary"}} for kind in (arrow.STREAM, arrow.FILE)}
    number = {"type": "integer", "minimum": 1, "maximum": MAX_COUNT}
    paths: dict[str, Any] = {
        "/score": {
            "post": {
                "summary": "Score rows",
                "description": "Missing and null are scored as unknown; the context is added to every row.",
                "parameters": [
                    _parameter(
                        "routes", "For Arrow; a JSON body can say it, too, and takes precedence.", number
                    ),
                    _parameter(
                        "depth", "For Arrow; a JSON body can say it, too, and takes precedence.", number
                    ),
                    _parameter(
                        "deadline_ms",
                        "For Arrow; a JSON body can say it, too, and takes precedence.",
                        {"type": "number", "exclusiveMinimum": 0, "maximum": config.limits.deadline_ms},
                    ),
                ],
                "requestBody": {
                    "required": True,
                    "content": {
                        JSON: {"schema": {"oneOf": [_ref("ScoreRows"), _ref("ScoreColumns")]}},
                        **binary,
                    },
                },
                "responses": {
                    "200": {
                        "description": "The scores, in the format of the body.",
                        "content": {
                            JSON: {"schema": {"oneOf": [_ref("RowScores"), _ref("ColumnScores")]}},
                            **binary,
                        },
                    },
                    **_problems(400, 408, 413, 415),
                    "429": _problem(
                        "Too busy to keep the deadline.", {"Retry-After": {"schema": {"type": "integer"}}}
                    ),
                    **_problems(503),
                },
            }
        },
        "/model": _get("The model: fields, settings, quality, card.", JSON, {"type": "object"}, 503),
        "/vocabulary/{field}": _get("Frequent values of a field.", JSON, {"type": "object"}, 400, 404, 503),
        "/health/live": _get("Whether the process answers.", JSON, {"type": "object"}),
        "/health/ready": _get("Whether it scores.", JSON, {"type": "object"}, 503),
        "/metrics": _get("Counters in Prometheus' text format.", "text/plain", {"type": "string"}, 503),
        "/openapi.json": _get("This document.", JSON, {"type": "object"}, 503),
        "/": _get("A page to try the model on.", "text/html", {"type": "string"}),
    }
    paths["/vocabulary/{field}"]["get"]["parameters"] = [
        {
            "name": "field",
            "in": "path",
            "required": True,
            "schema": {"type": "string", "enum": list(codec.fields)},
        },
        _parameter("prefix", "What the values begin with.", {"type": "string", "maxLength": 200}),
    ]
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "RECAP", "version": "1", "description": "Click probabilities of raw rows."},
        "paths": paths,
        "components": {"schemas": components},
    }
    if not token:
        for item in paths.values():
            for operation in item.values():
                operation["responses"] |= _problems(421)
    if token:
        found["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"token": []}]
        for path, item in paths.items():
            for operation in item.values():
                if path in ("/", "/health/live", "/health/ready"):
                    operation["security"] = []
                else:
                    operation["responses"] |= _problems(401)
    return found


def _answers() -> dict[str, Any]:
    used = {
        "model": {"type": "string"},
        "routes": {"type": "integer"},
        "depth": {"type": ["integer", "null"]},
        "lowered": {"type": "boolean"},
    }
    score = {name: {"type": "number"} for name in SCORES}
    row = {"type": "object", "properties": score, "required": list(SCORES), "additionalProperties": False}
    column = {name: {"type": "array", "items": {"type": "number"}} for name in SCORES}
    columns = {
        "type": "object",
        "properties": column,
        "required": list(SCORES),
        "additionalProperties": False,
    }
    kinds = {"RowScores": ("rows", {"type": "array", "items": row}), "ColumnScores": ("columns", columns)}
    return {
        name: {
            "type": "object",
            "properties": {kind: schema, **used},
            "required": [kind, *used],
            "additionalProperties": False,
        }
        for name, (kind, schema) in kinds.items()
    }


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _parameter(name: str, description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "query", "description": description, "schema": schema}


def _problem(description: str, headers: dict[str, Any] | None = None) -> dict[str, Any]:
    said: dict[str, Any] = {"description": description, "content": {JSON: {"schema": _ref("Problem")}}}
    return said | ({"headers": headers} if headers else {})


def _problems(*codes: int) -> dict[str, Any]:
    meanings = {
        400: "The request is wrong; the answer says where, and how to put it right.",
        401: "A token is wanted.",
        404: "No such field.",
        408: "The body came too slowly.",
        413: "Too large.",
        415: "No codec for this content type.",
        421: "The server is not called that.",
        503: "Not ready, or stopping.",
    }
    return {str(code): _problem(meanings[code]) for code in codes}


def _get(summary: str, kind: str, schema: dict[str, Any], *problems: int) -> dict[str, Any]:
    answer = {"description": summary, "content": {kind: {"schema": schema}}}
    return {"get": {"summary": summary, "responses": {"200": answer, **_problems(*problems)}}}
