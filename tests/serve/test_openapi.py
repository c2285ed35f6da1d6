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
        "/docs",
        "/",
        *("/v2", "/v2/health/live", "/v2/health/ready"),
        *("/v2/models/{name}", "/v2/models/{name}/ready", "/v2/models/{name}/infer"),
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


def test_the_page_of_the_document_has_every_address_and_needs_no_network(fake: Address) -> None:
    answer = fake.ask("GET", "/docs")
    text = answer.body.decode()
    assert answer.status == 200 and "script-src" not in answer.headers["content-security-policy"]
    for path in fake.ask("GET", "/openapi.json").json()["paths"]:
        assert f" {path}</code>" in text
    assert "<script" not in text and '<link rel="stylesheet' not in text
    assert "curl http://127.0.0.1" in text and "tritonclient" in text and "Client(" in text
