"""A client of `recap serve`: Arrow bodies in chunks, one kept connection, deadlines and retries.

It needs only the standard library and polars. Scoring the same rows twice does no harm, so a request that fails on its
way is sent again.
"""

import http.client
import io
import json
import random
import re
import ssl
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import polars as pl

from recap_ctr.data.sink import Sink
from recap_ctr.data.source import Source
from recap_ctr.errors import InputError
from recap_ctr.jobs.progress import meter

ARROW = "application/vnd.apache.arrow.stream"
_RETRY_STATUSES = (408, 429, 503)
_CONNECTION_ERRORS = (OSError, http.client.HTTPException)


class ServerError(RuntimeError):
    """The server did not answer, or did not answer with scores, although the request was right."""


@dataclass
class Summary:
    """What a client has sent and received so far."""

    rows: int = 0
    requests: int = 0
    retries: int = 0
    lowered: int = 0
    """Requests that the server answered at a cheaper setting than its best."""
    models: tuple[str, ...] = ()
    """Versions that answered, in order."""


class Client:
    """Scores rows on a server, in requests of `chunk_rows`; threads must not share one.

    `deadline_ms` is the deadline of each request at the server; `timeout` is how many seconds a request may take in
    all, waits and retries included.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        deadline_ms: float | None = None,
        timeout: float = 60.0,
        chunk_rows: int = 1000,
        routes: int | None = None,
        depth: int | None = None,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise InputError(
                f"{url} is not the URL of a server", fix="give one such as http://127.0.0.1:8000"
            )
        self._parts, self._token, self._timeout, self._chunk_rows = parts, token, timeout, chunk_rows
        query = {"routes": routes, "depth": depth, "deadline_ms": deadline_ms}
        self._query = urlencode({name: value for name, value in query.items() if value is not None})
        self._connection: http.client.HTTPConnection | None = None
        self._fields: list[str] | None = None
        self.summary = Summary()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def model(self) -> dict[str, Any]:
        """Return the server's description of its model: fields, settings, quality."""
        description: dict[str, Any] = json.loads(self._ask("GET", "/model")[1])
        return description

    @property
    def fields(self) -> list[str]:
        """Return the names of the model's fields; the server is asked once."""
        if self._fields is None:
            self._fields = [field["name"] for field in self.model()["fields"]]
        return self._fields

    def score(self, frame: pl.DataFrame, first_row: int = 1) -> pl.DataFrame:
        """Return probability, logit, raw_logit and disagreement of each row.

        Columns that are not fields of the model are not sent. Errors count rows from `first_row`.
        """
        sent = frame.select([name for name in self.fields if name in frame.columns])
        if frame.height and not sent.width:  # A frame without columns would have no rows.
            raise _no_fields("the data frame", self.fields)
        chunks = []
        for start in range(0, max(sent.height, 1), self._chunk_rows):
            try:
                chunks.append(self._score(sent.slice(start, self._chunk_rows)))
            except InputError as error:  # The server counts the rows of one request.
                raise InputError(_renumbered(error.message, start + first_row - 1), fix=error.fix) from None
        return pl.concat(chunks)

    def _score(self, chunk: pl.DataFrame) -> pl.DataFrame:
        body = io.BytesIO()
        chunk.write_ipc_stream(body)
        path = f"/score?{self._query}" if self._query else "/score"
        headers, answer = self._ask("POST", path, body.getvalue())
        scores = pl.read_ipc_stream(io.BytesIO(answer))
        if scores.height != chunk.height:
            raise ServerError(f"{chunk.height} rows were sent, but {scores.height} were answered")
        self.summary.rows += chunk.height
        self.summary.requests += 1
        self.summary.lowered += headers.get("recap-lowered") == "true"
        model = headers.get("recap-model", "")
        if model not in self.summary.models:
            self.summary.models += (model,)
        return scores

    def _ask(self, method: str, path: str, body: bytes | None = None) -> tuple[dict[str, str], bytes]:
        """Return the answer's headers and body; try again until the timeout."""
        end = time.monotonic() + self._timeout
        wait, reason = 0.1, "the timeout is not above 0"
        while (seconds_left := end - time.monotonic()) > 0:
            try:
                status, headers, answer = self._ask_once(method, path, body, seconds_left)
            except _CONNECTION_ERRORS as error:
                self.close()
                reason = f"no answer from {self._parts.netloc}: {error or type(error).__name__}"
            else:
                if status == 200:
                    return headers, answer
                reason = _reason(status, answer)
                if status not in _RETRY_STATUSES or (status == 429 and "retry-after" not in headers):
                    raise _refusal(status, reason)
                with suppress(ValueError):
                    wait = max(wait, float(headers.get("retry-after", "")))
            pause = wait * random.uniform(1.0, 1.5)  # Clients must not all return at once.
            if pause > end - time.monotonic():
                break
            time.sleep(pause)
            self.summary.retries += 1
            wait = min(2 * wait, 5.0)
        raise ServerError(f"{reason}\n  (tried for {self._timeout:g} s)")

    def _ask_once(
        self, method: str, path: str, body: bytes | None, timeout: float
    ) -> tuple[int, dict[str, str], bytes]:
        if self._connection is None:
            self._connection = self._connect()
        connection = self._connection
        connection.timeout = timeout
        if connection.sock is not None:
            connection.sock.settimeout(timeout)
        headers = {"content-type": ARROW} if body is not None else {}
        if self._token is not None:
            headers["authorization"] = f"Bearer {self._token}"
        connection.request(method, quote(self._parts.path.rstrip("/")) + path, body, headers)
        answer = connection.getresponse()
        answer_headers = {name.lower(): value for name, value in answer.getheaders()}
        return answer.status, answer_headers, answer.read()

    def _connect(self) -> http.client.HTTPConnection:
        host, port = self._parts.hostname or "", self._parts.port
        if self._parts.scheme == "https":
            return http.client.HTTPSConnection(host, port, context=ssl.create_default_context())
        return http.client.HTTPConnection(host, port)


def score_rows(
    client: Client, source: Source, sink: Sink, *, quiet: bool = False
) -> tuple[list[str], list[str]]:
    """Append scores to every row of `source` and write it to `sink`, in order, one block at a time.

    Return the columns that are not fields of the model, and the fields that have no column.
    """
    unused: dict[str, None] = {}
    absent: dict[str, None] = {}
    with meter("scoring", source.total_bytes or None, "rows", quiet=quiet) as progress:
        for block, size in source.blocks():
            columns = block.frame.columns
            unused |= dict.fromkeys(name for name in columns if name not in client.fields)
            absent |= dict.fromkeys(name for name in client.fields if name not in columns)
            if not set(columns) & set(client.fields):
                raise _no_fields(block.origin, client.fields)
            scores = client.score(block.frame, block.first_row)
            for name in scores.columns:
                if name in columns:
                    raise InputError(
                        f"{block.origin} already has a column {name!r}", fix="rename it before scoring"
                    )
            sink.write(pl.concat([block.frame, scores], how="horizontal"))
            progress.advance(block.frame.height, size)
    return list(unused), list(absent)


def _no_fields(origin: str, fields: list[str]) -> InputError:
    return InputError(f"{origin} has none of the model's fields", fix=f"fields are {', '.join(fields[:40])}")


def _renumbered(message: str, before: int) -> str:
    """Return a message about a row of one request with the row's number in the whole table.

    >>> _renumbered("row 2, field 'price': 'cheap' is not a number", 1000)
    "row 1002, field 'price': 'cheap' is not a number"
    """
    return re.sub(r"\brow (\d+)", lambda match: f"row {int(match[1]) + before}", message, count=1)


def _reason(status: int, answer: bytes) -> str:
    try:
        problem = json.loads(answer)
        return str(problem["error"]) + (f"\n  fix: {problem['fix']}" if "fix" in problem else "")
    except (ValueError, KeyError, TypeError):
        return f"the server answered with status {status}"


def _refusal(status: int, reason: str) -> Exception:
    if status == 401:
        return InputError(
            "the server requires a token, and got none or a wrong one",
            fix="set RECAP_TOKEN, or give --token-file",
        )
    if status in (400, 404, 413, 415, 421):
        message, _, fix = reason.partition("\n  fix: ")
        return InputError(message, fix=fix or None)
    return ServerError(reason)
