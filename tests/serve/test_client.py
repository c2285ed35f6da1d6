"""The client: which requests it sends again, and that rows come back in order."""

import io
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import polars as pl
import pytest

from recap_ctr.errors import InputError
from recap_ctr.serve.client import Client, ServerError
from tests.conftest import Recap
from tests.support.fake_engine import FakeEngine
from tests.support.running_server import Address, serve_in_thread

TOKEN = "a-token-of-some-length"
FRAME = pl.DataFrame(
    {"row": range(25), "site": ["a", "b", "new", None, "7"] * 5, "price": ["1", "2.5", "", "3", "4"] * 5}
)


class Stub(BaseHTTPRequestHandler):
    """A server that gives the answers of `plan`, one after the other, and scores once the plan is used up."""

    plan: ClassVar[list[tuple[int, dict[str, str], bytes]]] = []
    paths: ClassVar[list[str]] = []
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.paths.append(self.path)
        status, headers, answer = self.plan.pop(0) if self.plan else (200, {}, b"")
        if status == 0:  # close the connection without an answer
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        if status == 200:
            rows = pl.read_ipc_stream(io.BytesIO(body)).height
            out = io.BytesIO()
            pl.DataFrame({"probability": [0.5] * rows}).write_ipc_stream(out)
            answer = out.getvalue()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def do_GET(self) -> None:
        answer = json.dumps({"fields": [{"name": "site"}]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def stub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Stub)
    server.daemon_threads = True
    Stub.plan.clear()
    Stub.paths.clear()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def sleeps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replace the client's sleeps by a list of their seconds."""
    seconds: list[float] = []
    monkeypatch.setattr("recap_ctr.serve.client.time.sleep", seconds.append)
    return seconds


BUSY = (429, {"retry-after": "3"}, b'{"error": "busy"}')


def test_busy_and_broken_servers_are_asked_again(stub: str, sleeps: list[float]) -> None:
    Stub.plan += [BUSY, (503, {}, b"{}"), (0, {}, b""), (408, {}, b"not JSON")]
    with Client(stub) as client:
        assert client.score(FRAME)["probability"].to_list() == [0.5] * 25
        assert client.summary.retries == 4 and client.summary.requests == 1
    assert sleeps[0] >= 3, "it waits as long as Retry-After says"
    assert len(Stub.paths) == 5


def test_the_timeout_limits_retries(stub: str, sleeps: list[float]) -> None:
    Stub.plan += [(429, {"retry-after": "100"}, b'{"error": "busy for long"}')]
    with Client(stub, timeout=5) as client, pytest.raises(ServerError, match="busy for long"):
        client.score(FRAME)
    assert not sleeps, "it does not wait beyond its timeout"
    with (
        Client("http://127.0.0.1:9", timeout=0.5) as client,
        pytest.raises(ServerError, match="no answer from"),
    ):
        client.model()


@pytest.mark.parametrize("status", [400, 413, 415])
def test_wrong_requests_are_not_sent_again(stub: str, status: int) -> None:
    Stub.plan += [(status, {}, b'{"error": "row 2, field \'site\': no", "fix": "correct it"}')]
    with Client(stub) as client, pytest.raises(InputError, match="row 2") as error:
        client.score(FRAME)
    assert error.value.fix == "correct it" and len(Stub.paths) == 1


def test_other_failures_are_not_retried(stub: str) -> None:
    for status, kind in ((401, InputError), (500, ServerError), (429, ServerError)):
        Stub.plan[:] = [(status, {}, b'{"error": "no"}')]
        with Client(stub) as client, pytest.raises(kind):
            client.score(FRAME)


def test_every_request_carries_routes_depth_and_deadline(stub: str) -> None:
    with Client(stub, routes=2, depth=3, deadline_ms=50, chunk_rows=10) as client:
        client.score(FRAME)
    assert Stub.paths == ["/score?routes=2&depth=3&deadline_ms=50"] * 3


@pytest.mark.parametrize("url", ["127.0.0.1:80", "ftp://x", "http://", "http://x/?a=1", "file:///etc/passwd"])
def test_urls_are_checked(url: str) -> None:
    with pytest.raises(InputError, match="not the URL of a server"):
        Client(url)


@pytest.fixture(scope="module")
def server() -> Iterator[Address]:
    with serve_in_thread(FakeEngine({}), token=TOKEN) as address:
        yield address


def test_chunks_come_back_in_order(server: Address) -> None:
    with Client(server.url, token=TOKEN, chunk_rows=7) as client:
        scores = client.score(FRAME)
        assert client.summary.requests == 4 and client.summary.models == ("test",)
    with Client(server.url + "/", token=TOKEN) as client:
        assert client.score(FRAME).equals(scores)
        assert client.score(FRAME.head(0)).height == 0
    assert scores.columns == ["probability", "logit", "raw_logit", "disagreement"]
    assert scores["probability"].n_unique() == 5


def test_rows_without_any_field_are_refused(server: Address) -> None:
    """Without its columns the data frame would have no rows, and the answer none."""
    with Client(server.url, token=TOKEN) as client:
        with pytest.raises(InputError, match=r"none of the model's fields\n  fix: fields are site, user id"):
            client.score(FRAME.select("row"))
        assert client.score(FRAME.select("row").head(0)).height == 0


@pytest.mark.slow
def test_the_command_scores_a_file(
    server: Address, tmp_path: Path, recap: Recap, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, out = tmp_path / "rows.csv", tmp_path / "scores.csv"
    FRAME.write_csv(rows)
    denied = recap("score", server.url, rows, "--out", out)
    assert denied.code == 2 and "RECAP_TOKEN" in denied.err and not out.exists()
    monkeypatch.setenv("RECAP_TOKEN", TOKEN)
    done = recap("score", server.url, rows, "--out", out, "--chunk-rows", 4)
    assert done.code == 0 and "25 rows in 7 requests" in done.err
    assert ": row." in done.err, "the column that is not a field"
    assert ": user id, age, tags, device." in done.err, "the fields without a column"
    scored = pl.read_csv(out)
    assert scored.columns[:3] == ["row", "site", "price"] and scored.height == 25
    assert recap("score", server.url, rows, "--out", out).code == 2, "the file exists"
    summary = json.loads(recap("score", server.url, rows, "--out", out, "--force", "--json").out)
    assert summary["rows"] == 25 and summary["unused"] == ["row"]
    bad = tmp_path / "bad.csv"
    bad.write_text("site,price\n" + "a,1\n" * 8 + "b,cheap\n")
    wrong = recap("score", server.url, bad, "--chunk-rows", 4)
    assert wrong.code == 2 and "row 9" in wrong.err and "'cheap'" in wrong.err
    gone = recap("score", "http://127.0.0.1:9", rows, "--timeout", 0.3)
    assert gone.code == 1 and "no answer" in gone.err
