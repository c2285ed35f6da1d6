"""The Open Inference Protocol: Triton's client gets what /score answers, and bad tensors are named."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton

from tests.support.fake_engine import FakeEngine
from tests.support.running_server import JSON, SMALL_SERVER, Address, serve_in_thread

INFER = "/v2/models/fake/infer"


@pytest.fixture(scope="module")
def address() -> Iterator[Address]:
    with serve_in_thread(FakeEngine({"model": {"name": "fake"}}), SMALL_SERVER) as running:
        yield running


@pytest.fixture
def client(address: Address) -> Iterator[Any]:
    made = triton.InferenceServerClient(f"127.0.0.1:{address.port}")
    yield made
    made.close()


def tensor(name: str, values: Any, datatype: str) -> Any:
    array = np.array(values, object if datatype == "BYTES" else np.float64)
    made = triton.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array, binary_data=False)
    return made


class TestTritonClient:
    def test_health_and_metadata(self, client: Any, address: Address) -> None:
        assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("fake")
        assert client.get_server_metadata()["name"] == "recap_ctr"
        metadata = client.get_model_metadata("fake")
        assert metadata["versions"] == [address.ask("GET", "/model").json()["model"]]
        kinds = {entry["name"]: entry["datatype"] for entry in metadata["inputs"]}
        assert kinds["site"] == kinds["tags"] == "BYTES" and kinds["price"] == "FP64"
        assert metadata["outputs"][0]["name"] == "probability"

    def test_scores_are_those_of_score(self, client: Any, address: Address) -> None:
        inputs = [
            tensor("site", ["a", "new"], "BYTES"),
            tensor("price", [6.5, 7.0], "FP64"),
            tensor("tags", [["x", "new"], ["y", "z"]], "BYTES"),
        ]
        rows = [
            {"site": "a", "price": 6.5, "tags": ["x", "new"]},
            {"site": "new", "price": 7.0, "tags": "y|z"},
        ]
        scored = address.score({"rows": rows}).json()["rows"]
        result = client.infer("fake", inputs, request_id="42")
        assert result.get_response()["id"] == "42"
        for name in ("probability", "logit"):
            assert result.as_numpy(name).tolist() == [row[name] for row in scored]
        wanted = [triton.InferRequestedOutput("probability", binary_data=False)]
        only = client.infer("fake", inputs, outputs=wanted).get_response()
        assert [output["name"] for output in only["outputs"]] == ["probability"]

    def test_binary_tensors_are_refused_with_a_way_out(self, client: Any) -> None:
        made = triton.InferInput("site", [1], "BYTES")
        made.set_data_from_numpy(np.array(["a"], object))
        with pytest.raises(triton.InferenceServerException, match="not in binary"):
            client.infer("fake", [made])

    def test_another_model_or_version_is_not_found(self, client: Any, address: Address) -> None:
        with pytest.raises(triton.InferenceServerException, match="no model 'other'"):
            client.get_model_metadata("other")
        assert address.ask("GET", "/v2/models/fake/versions/0").status == 404
        serving = address.ask("GET", "/model").json()["model"]
        assert address.ask("GET", f"/v2/models/fake/versions/{serving}/ready").status == 200


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"datatype": "STRING"}, "datatype 'STRING' is unknown"),
        ({"shape": [3]}, "2 values don't fill the shape"),
        ({"shape": [2, 1, 1]}, "no inference request"),
        ({"data": [1, "b"]}, "'1' is not a value of datatype BYTES"),
        ({"data": [["a", "b"], ["c", "d"]], "shape": [2, 2]}, "the field takes one"),
        ({"data": [["a", "b"], []], "shape": [2, 0]}, "2 values don't fill the shape"),
        ({"name": "tags", "data": [], "shape": [2, 0]}, "0 values don't fill the shape"),
        ({"data": [{}, "b"]}, "a dict is not a value of datatype BYTES"),
        ({"data": None}, "has no data in JSON"),
        ({"name": "nothing"}, "no field 'nothing'"),
        ({"name": "price"}, "must hold numbers"),
    ],
)
def test_bad_tensors_are_named(address: Address, change: dict[str, Any], message: str) -> None:
    good = {"name": "site", "shape": [2], "datatype": "BYTES", "data": ["a", "b"]}
    assert address.ask("POST", INFER, json.dumps({"inputs": [good]}), JSON).status == 200
    answer = address.ask("POST", INFER, json.dumps({"inputs": [good | change]}), JSON)
    assert answer.status == 400 and message in answer.json()["error"]


def test_a_tensor_that_is_there_twice_and_an_unknown_output_are_refused(address: Address) -> None:
    good = {"name": "site", "shape": [1], "datatype": "BYTES", "data": ["a"]}
    twice = address.ask("POST", INFER, json.dumps({"inputs": [good, good]}), JSON)
    assert twice.status == 400 and "twice" in twice.json()["error"]
    outputs = [{"name": "logit"}, {"name": "logit"}]
    again = address.ask("POST", INFER, json.dumps({"inputs": [good], "outputs": outputs}), JSON)
    assert again.status == 400 and "an output is there twice" in again.json()["error"]
    unknown = address.ask("POST", INFER, json.dumps({"inputs": [good], "outputs": [{"name": "x"}]}), JSON)
    assert unknown.status == 400 and "probability" in unknown.json()["fix"]
    assert (
        address.ask("POST", INFER, json.dumps({"inputs": [good]}), {"content-type": "text/plain"}).status
        == 415
    )


TENSOR = '{"name": "site", "shape": [1], "datatype": "BYTES", "data": ["a"]%s}'


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('{"inputs": [], "inputs": [%s]}' % (TENSOR % ""), "'inputs' twice"),
        ('{"inputs": [%s]}' % (TENSOR % ', "data": ["b"]'), "'data' twice"),
        ('{"inputs": [%s], "id": ":", "id": "2"}' % (TENSOR % ""), "'id' twice"),
        ('{"inputs": [], "parameters": {"a": {"b": 1, "b": 2}}}', "'b' twice"),
        ('{"inputs": [], "parameters": {"a": %s' % ("[" * 1_900), "no inference request"),
        (
            '{"inputs": [{"name": "site", "shape": [1], "datatype": "BYTES", "data": %s' % ("[" * 1_900),
            "no inf",
        ),
    ],
)
def test_keys_that_are_there_twice_and_deep_values_are_refused(
    address: Address, body: str, message: str
) -> None:
    answer = address.ask("POST", INFER, body, JSON)
    assert answer.status == 400 and message in answer.json()["error"]


def test_parameters_are_ignored(address: Address) -> None:
    parameters = {"priority": 0, "nested": {"binary_data_size": 3}}
    asked = {"inputs": [json.loads(TENSOR % "") | {"parameters": parameters}], "parameters": parameters}
    assert address.ask("POST", INFER, json.dumps(asked), JSON).status == 200
