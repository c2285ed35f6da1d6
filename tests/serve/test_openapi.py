"""The OpenAPI document."""

from collections.abc import Iterator
from typing import Any

from tests.support.running_server import Address


def test_the_openapi_document_describes_the_bodies(fake: Address) -> None:
    document = fake.ask("GET", "/openapi.json").json()
    schemas = document["components"]["schemas"]
    assert schemas["Row"]["additionalProperties"] is False
    assert set(schemas["Row"]["properties"]) == {"site", "user id", "price", "age", "tags", "device"}
    assert schemas["ScoreRows"]["required"] == ["rows"]
    assert set(document["paths"]) == {
        "/score",
        "/model",
        "/vocabulary/{field}",
        "/health/live",
        "/health/ready",
        "/metrics",
        "/openapi.json",
        "/",
    }

    def refs(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            yield from ([value["$ref"]] if "$ref" in value else [])
            for inner in value.values():
                yield from refs(inner)
        elif isinstance(value, list):
            for inner in value:
                yield from refs(inner)

    assert {ref.rpartition("/")[2] for ref in refs(document)} <= set(schemas)
