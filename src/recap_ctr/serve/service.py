"""The endpoints of one worker, and what they share: the serving version, the queue and the counters."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Protocol

import msgspec
import numpy as np
import polars as pl
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Scope

from recap_ctr.inference.engine import Floats
from recap_ctr.inference.explain import Contribution
from recap_ctr.serve import arrow, docs_page
from recap_ctr.serve.batcher import Batch, Batcher, clock, num_scored, scoring_failed
from recap_ctr.serve.codec import (
    JSON,
    MAX_COUNT,
    MAX_KEPT,
    SCORES,
    Provenance,
    ScoreRequest,
    contributions_column,
    to_json,
)
from recap_ctr.serve.config import ServeConfig
from recap_ctr.serve.counters import Counters, exposition, labelled
from recap_ctr.serve.log import log, log_refusal
from recap_ctr.serve.open_inference import (
    model_metadata,
    model_name,
    read_inference,
    server_metadata,
    write_inference,
)
from recap_ctr.serve.openapi import make_document
from recap_ctr.serve.page import POLICY, html
from recap_ctr.serve.problem import Problem
from recap_ctr.serve.request import (
    GZIP,
    body_kind,
    content_encoding,
    content_length,
    content_type_of,
    deadline_in_url,
    unpack,
)
from recap_ctr.serve.versions import RecentRows, Version, describe
from recap_ctr.serve.watch import RowsWatch

MAX_SUGGESTIONS = 50
MAX_PREFIX = 200  # characters
INFERENCE_HEADER = "inference-header-content-length"
_QUERY = ("routes", "depth", "deadline_ms", "explain")


class VersionHolder(Protocol):
    """The object that knows which version serves."""

    current: Version | None
    history: dict[str, Any]


@dataclass(frozen=True, eq=False)
class _Scored:
    """The scores of one request, and what an answer says of them."""

    columns: dict[str, Floats]
    contributions: list[list[Contribution]] | None
    provenance: Provenance
    deadline: float


_Answering = Callable[[Request, float, Callable[[int], None]], Awaitable[tuple[Response, float]]]


class Service:
    """The endpoints, and what they share: the serving version, the queue, the counters and recent rows."""

    def __init__(
        self, config: ServeConfig, versions: VersionHolder, counters: Counters, token: str | None
    ) -> None:
        self.config, self.versions, self.counters, self.token = config, versions, counters, token
        self.recent = RecentRows()
        self._watch = RowsWatch(counters)
        self._row_bytes: dict[tuple[str, str], float] = {}  # Of bodies, by their kind: a running mean.
        self._held_bytes = 0
        self._batcher: Batcher | None = None
        self.draining = False

    def start(self) -> None:
        """Start the scoring thread; call this on the event loop."""
        limits = self.config.limits
        self._batcher = Batcher(
            dial=self.config.dial,
            batch_rows=limits.batch_rows,
            max_requests=limits.requests,
            on_queue=self._count_queue,
            on_batch=self._count_batch,
            log=log,
        )

    def stop(self) -> None:
        """Finish the queue and end the scoring thread."""
        self.batcher.close()

    @property
    def batcher(self) -> Batcher:
        """Return the queue; `start` must have been called."""
        assert self._batcher is not None
        return self._batcher

    @property
    def version(self) -> Version:
        """Return the serving version; raises Problem 503 while there is none."""
        if self.versions.current is None:
            raise Problem(503, "no model is loaded yet", retry_after=1)
        return self.versions.current

    async def score(self, request: Request) -> Response:
        """Answer POST /score, and count the answer."""
        return await self._counted(request, self._score)

    async def infer(self, request: Request) -> Response:
        """Answer POST /v2/models/NAME/infer, and count the answer."""
        return await self._counted(request, self._infer)

    async def _counted(self, request: Request, answer: "_Answering") -> Response:
        """Answer a request for scores, and count the answer."""
        start = clock()
        try:
            with self._reserve_bytes() as reserve:
                response, deadline = await answer(request, start, reserve)
        except Problem as problem:
            self._count(problem.status)
            # The message of a 400 may quote the body, which only the client may see.
            reason = {} if problem.status == 400 else {"reason": problem.message}
            log_refusal(status=problem.status, **reason)
            raise
        except ClientDisconnect:
            self._count(499)
            raise
        except (Exception, pl.exceptions.PanicException) as error:  # a panic is not an Exception
            self._count(500)
            log_refusal(status=500, reason=type(error).__name__)
            raise scoring_failed() from None
        seconds = clock() - start
        self._count(200)
        self.counters.observe(seconds)
        if deadline < clock():
            self.counters.add("recap_late_total")
        return response

    def busy(self, scope: Scope) -> Problem | None:
        """Return the refusal of a request to /score that can't be answered in time, before its body is read.

        A deadline in the body comes too late for this; one in the URL counts.
        """
        version = self.versions.current
        if version is None or scope["method"] != "POST":
            return None
        seconds = deadline_in_url(scope["query_string"], self.config.deadline_ms) / 1000
        if not self.batcher.is_overloaded(self._about_rows(Headers(scope=scope)), version, seconds):
            return None
        problem = self.batcher.refusal()
        self._count(problem.status)
        log_refusal(status=problem.status, reason=problem.message)
        return problem

    def _about_rows(self, headers: Headers) -> int:
        """Return about how many rows a body holds, by its length and by those of earlier bodies."""
        row_bytes = self._row_bytes.get(body_kind(headers))
        length = content_length(headers)
        if row_bytes is None or length is None:
            return 1
        return min(max(int(length / row_bytes), 1), self.config.limits.rows)

    def _learn_row_bytes(self, headers: Headers, body: bytes, rows: int) -> None:
        kind, row_bytes = body_kind(headers), (content_length(headers) or len(body)) / rows
        self._row_bytes[kind] = row_bytes + 0.95 * (self._row_bytes.get(kind, row_bytes) - row_bytes)

    async def _score(
        self, request: Request, start: float, reserve: Callable[[int], None]
    ) -> tuple[Response, float]:
        """Return the answer to /score and its deadline."""
        content_type = content_type_of(request)
        query = self._query(request)
        version = self.version
        codec = version.codec
        with self.batcher.expecting(self._about_rows(request.headers), version):
            body = await self._body(request, reserve)
            asked = (
                codec.from_json(body)
                if content_type == JSON
                else codec.from_arrow(body, content_type, query.get("keep", ()))
            )
        scored = await self._scored(asked, version, query, start)
        if asked.table.height:
            self._learn_row_bytes(request.headers, body, asked.table.height)
            self.recent.add(asked.table, len(body))
        response = _score_response(
            asked, scored.columns, scored.contributions, scored.provenance, content_type
        )
        return response, scored.deadline

    async def _infer(
        self, request: Request, start: float, reserve: Callable[[int], None]
    ) -> tuple[Response, float]:
        """Return the answer to a request of the Open Inference Protocol, and its deadline."""
        version = self._named_version(request)
        if INFERENCE_HEADER in request.headers:
            raise Problem(
                400,
                "tensors come in JSON here, not in binary",
                fix="binary_data=False in Triton's client, for inputs and outputs",
            )
        if content_type_of(request, JSON) != JSON:
            raise Problem(415, "an inference request is JSON", fix=f"send {JSON}")
        query = self._query(request)
        with self.batcher.expecting(self._about_rows(request.headers), version):
            body = await self._body(request, reserve)
            inference = read_inference(body, version.codec)
        scored = await self._scored(inference.asked, version, query, start)
        return Response(write_inference(inference, scored.columns, version), media_type=JSON), scored.deadline

    async def _scored(
        self, asked: ScoreRequest, version: Version, query: dict[str, Any], start: float
    ) -> "_Scored":
        """Score the rows of a request as it and its URL say."""
        codec = version.codec
        fixed = version.setting(asked.routes or query.get("routes"), asked.depth or query.get("depth"))
        deadline_ms = asked.deadline_ms or query.get("deadline_ms") or self.config.deadline_ms
        deadline = start + deadline_ms / 1000
        columns = dict.fromkeys(SCORES, np.zeros(0))
        setting = fixed or 0
        explain = asked.explain or query.get("explain")
        contributions: list[list[Contribution]] | None = None if explain is None else []
        if asked.table.height:
            self._refuse_long_explanation(asked.table.height, version, explain)
            answer = await self.batcher.score(
                asked.table, version, fixed, deadline, explain=explain is not None
            )
            columns, setting = answer.columns, answer.setting
            if explain is not None and answer.contributions_BF is not None:
                contributions = codec.largest(asked.table, answer.contributions_BF, explain)
        provenance = Provenance(
            version.name,
            version.engine.settings[setting].routes,
            version.engine.settings[setting].depth,
            fixed is None and setting > 0,
        )
        if provenance.lowered:
            self.counters.add("recap_lowered_total")
        if self.config.access_log:
            log(
                "scored",
                rows=asked.table.height,
                routes=provenance.routes,
                depth=provenance.depth,
                milliseconds=round(1000 * (clock() - start), 3),
            )
        return _Scored(columns, contributions, provenance, deadline)

    def _refuse_long_explanation(self, rows: int, version: Version, explain: int | None) -> None:
        """Refuse a request whose rows, each scored once more for each field, exceed the limit of rows."""
        limit, scored = self.config.limits.rows, num_scored(rows, version, explain=explain is not None)
        if scored > limit:
            fields = version.engine.encoder.layout.num_fields
            raise Problem(
                413,
                f"to explain {rows:,} rows of {fields} fields, {scored:,} rows are scored, more than {limit:,}",
                fix=f"send at most {limit // (fields + 1):,} rows at a time",
            )

    @contextmanager
    def _reserve_bytes(self) -> Iterator[Callable[[int], None]]:
        """Yield a function that reserves part of the memory for bodies; release it all when the request ends."""
        reserved, limits = 0, self.config.limits

        def reserve(size: int) -> None:
            nonlocal reserved
            if self._held_bytes + size > limits.held_bytes:
                raise Problem(
                    429,
                    f"the bodies of this and other requests take more than {limits.held_bytes:,} bytes",
                    fix="wait, or send fewer rows at a time",
                    retry_after=1,
                )
            reserved += size
            self._held_bytes += size

        try:
            yield reserve
        finally:
            self._held_bytes -= reserved

    async def _body(self, request: Request, reserve: Callable[[int], None]) -> bytes:
        """Read the body; refuse one that is too large or too slow."""
        limits = self.config.limits
        too_large = Problem(
            413,
            f"the body is larger than {limits.body_bytes:,} bytes",
            fix="send the rows in several requests",
        )
        if (content_length(request.headers) or 0) > limits.body_bytes:
            raise too_large
        parts, size = [], 0
        try:
            async with asyncio.timeout(limits.body_seconds):
                async for part in request.stream():
                    size += len(part)
                    if size > limits.body_bytes:
                        raise too_large
                    reserve(len(part))
                    parts.append(part)
        except TimeoutError:
            raise Problem(
                408, f"the body took longer than {limits.body_seconds:g} s to arrive", fix="send it faster"
            ) from None
        body = b"".join(parts)
        if content_encoding(request.headers) != GZIP:
            return body
        unpacked = unpack(body, limits.body_bytes)
        if unpacked is None:
            raise too_large
        reserve(len(unpacked))
        return unpacked

    def _query(self, request: Request) -> dict[str, Any]:
        """Return routes, depth, deadline_ms and explain from the URL; those in a JSON body take precedence."""
        values: dict[str, Any] = {}
        for name, text in request.query_params.multi_items():
            if name == "keep":
                values[name] = (*values.get(name, ()), text)
                if len(values[name]) > MAX_KEPT or len(set(values[name])) < len(values[name]):
                    raise Problem(400, f"keep in the URL names a column twice, or more than {MAX_KEPT}")
                continue
            if name not in _QUERY:
                raise Problem(
                    400,
                    f"the URL has the unknown parameter {name[:200]!r}",
                    fix="use routes, depth, deadline_ms and explain, each at most once, and keep",
                )
            if name in values:
                raise Problem(400, f"the URL has the parameter {name!r} more than once", fix="send it once")
            largest = self.config.limits.deadline_ms if name == "deadline_ms" else MAX_COUNT
            kind: type = float if name == "deadline_ms" else int
            try:
                values[name] = msgspec.convert(text, kind, strict=False)
            except msgspec.ValidationError:
                values[name] = 0
            if not 0 < values[name] <= largest:
                number = "a number" if kind is float else "a whole number"
                raise Problem(400, f"{name} in the URL must be {number} above 0 and at most {largest:g}")
        return values

    def _count(self, status: int) -> None:
        self.counters.add(labelled("recap_requests_total", status=status))

    def _count_queue(self, requests: int, rows: int) -> None:
        self.counters.set("recap_waiting_requests", requests)
        self.counters.set("recap_waiting_rows", rows)

    def _count_batch(self, batch: Batch) -> None:
        add, setting = self.counters.add, batch.version.engine.settings[batch.setting]
        add("recap_batches_total")
        add("recap_busy_seconds_total", batch.seconds)
        if batch.encoded is None:
            return
        depth = "full" if setting.depth is None else setting.depth
        add(labelled("recap_rows_total", routes=setting.routes, depth=depth), batch.rows)
        for name, missing, unseen in zip(
            batch.version.codec.fields, batch.encoded.num_missing, batch.encoded.num_unseen, strict=True
        ):
            if missing:
                add(labelled("recap_missing_total", field=name), float(missing))
            if unseen:
                add(labelled("recap_unseen_total", field=name), float(unseen))
        self._watch.add(batch.version.engine, batch.encoded)

    async def model(self, _: Request) -> Response:
        """Answer GET /model."""
        return _json(describe(self.version, self.versions.history))

    async def vocabulary(self, request: Request) -> Response:
        """Answer GET /vocabulary/{field} with frequent values, those that start with `prefix` if one is given."""
        name, prefix = request.path_params["field"], request.query_params.get("prefix", "")
        unknown = set(request.query_params) - {"prefix"}
        if unknown or len(prefix) > MAX_PREFIX:
            raise Problem(400, f"this URL takes only the parameter prefix, of up to {MAX_PREFIX} characters")
        fields = self.version.engine.encoder.fields
        fitted = next((fitted for fitted in fields if fitted.field.name == name), None)
        if fitted is None:
            raise Problem(404, f"the model has no field {name[:200]!r}", fix="GET /model lists the fields")
        values = await asyncio.to_thread(_starting_with, prefix, fitted.values)
        return _json({"field": name, "values": values})

    async def live(self, _: Request) -> Response:
        """Answer GET /health/live."""
        return _json({"live": True})

    async def ready(self, _: Request) -> Response:
        """Answer GET /health/ready."""
        if self.draining:
            raise Problem(503, "the server is stopping")
        return _json({"ready": True, "model": self.version.name})

    async def server_metadata(self, _: Request) -> Response:
        """Answer GET /v2."""
        return _json(server_metadata(version("recap-ctr")))

    async def model_metadata(self, request: Request) -> Response:
        """Answer GET /v2/models/NAME."""
        return _json(model_metadata(self._named_version(request)))

    async def model_ready(self, request: Request) -> Response:
        """Answer GET /v2/models/NAME/ready."""
        return _json({"name": model_name(self._named_version(request)), "ready": True})

    def _named_version(self, request: Request) -> Version:
        """Return the serving version if the address names it; raises Problem 404 otherwise."""
        serving, parts = self.version, request.path_params
        if parts["name"] != model_name(serving):
            raise Problem(
                404,
                f"there is no model {parts['name'][:200]!r}",
                fix=f"the model here is {model_name(serving)}",
            )
        if parts.get("version", serving.name) != serving.name:
            raise Problem(
                404, f"version {parts['version'][:200]!r} does not serve", fix=f"version {serving.name} does"
            )
        return serving

    async def metrics(self, _: Request) -> Response:
        """Answer GET /metrics."""
        info = [
            "# HELP recap_model_info The version that this worker serves.",
            "# TYPE recap_model_info gauge",
            labelled("recap_model_info", model=self.version.name) + " 1",
        ]
        text = exposition(self.counters.totals(), info)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def openapi(self, _: Request) -> Response:
        """Answer GET /openapi.json."""
        return _json(make_document(self.version.codec, self.config, token=self.token is not None))

    async def docs(self, request: Request) -> Response:
        """Answer GET /docs with a page made of the OpenAPI document."""
        document = make_document(self.version.codec, self.config, token=self.token is not None)
        host = request.headers.get("host", "localhost")
        text = docs_page.html(document, model_metadata(self.version), host)
        return Response(
            text,
            media_type="text/html; charset=utf-8",
            headers={"content-security-policy": docs_page.POLICY},
        )

    async def page(self, _: Request) -> Response:
        """Answer GET / with the page to try the model on."""
        return Response(
            html(), media_type="text/html; charset=utf-8", headers={"content-security-policy": POLICY}
        )


def _score_response(
    asked: ScoreRequest,
    columns: dict[str, Floats],
    contributions: list[list[Contribution]] | None,
    provenance: Provenance,
    content_type: str,
) -> Response:
    if content_type == JSON:
        return Response(
            to_json(columns, provenance, by_rows=asked.by_rows, contributions=contributions, keep=asked.keep),
            media_type=JSON,
        )
    frame = pl.DataFrame(columns, schema=dict.fromkeys(SCORES, pl.Float64))
    if asked.keep:
        frame = pl.DataFrame(asked.keep).hstack(frame)
    if contributions is not None:
        frame = frame.with_columns(contributions_column(contributions))
    headers = {
        "recap-model": provenance.model,
        "recap-routes": str(provenance.routes),
        "recap-lowered": str(provenance.lowered).lower(),
    }
    if provenance.depth is not None:
        headers["recap-depth"] = str(provenance.depth)
    return Response(arrow.write(frame, content_type), media_type=content_type, headers=headers)


def _starting_with(prefix: str, values: pl.Series) -> list[str]:
    """Return the first values that start with `prefix`; `values` are ordered by frequency."""
    values = values.drop_nulls()
    matches = values.filter(values.str.starts_with(prefix)) if prefix else values
    return matches.head(MAX_SUGGESTIONS).to_list()


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type=JSON)
