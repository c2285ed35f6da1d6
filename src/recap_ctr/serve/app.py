"""The HTTP application of one worker."""

import asyncio
import hmac
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Protocol

import msgspec
import numpy as np
import polars as pl
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from recap_ctr.inference.engine import Floats
from recap_ctr.inference.explain import Contribution
from recap_ctr.serve import arrow
from recap_ctr.serve.batcher import Batch, Batcher, clock, num_scored, scoring_failed
from recap_ctr.serve.codec import (
    JSON,
    MAX_COUNT,
    SCORES,
    Provenance,
    ScoreRequest,
    contributions_column,
    to_json,
)
from recap_ctr.serve.config import ServeConfig, host_name, is_loopback
from recap_ctr.serve.counters import Counters, exposition, labelled
from recap_ctr.serve.log import log, log_refusal
from recap_ctr.serve.openapi import OPEN_PATHS, make_document
from recap_ctr.serve.page import POLICY, html
from recap_ctr.serve.problem import Problem
from recap_ctr.serve.versions import RecentRows, Version, describe

MAX_SUGGESTIONS = 50
MAX_PREFIX = 200  # characters
_QUERY = ("routes", "depth", "deadline_ms", "explain")


class VersionHolder(Protocol):
    """The object that knows which version serves."""

    current: Version | None
    history: dict[str, Any]


class Service:
    """The endpoints, and what they share: the serving version, the queue, the counters and recent rows."""

    def __init__(
        self, config: ServeConfig, versions: VersionHolder, counters: Counters, token: str | None
    ) -> None:
        self.config, self.versions, self.counters, self.token = config, versions, counters, token
        self.recent = RecentRows()
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
        """The queue; `start` must have been called."""
        assert self._batcher is not None
        return self._batcher

    @property
    def version(self) -> Version:
        """The serving version; raises Problem 503 while there is none."""
        if self.versions.current is None:
            raise Problem(503, "no model is loaded yet", retry_after=1)
        return self.versions.current

    async def score(self, request: Request) -> Response:
        """Answer POST /score, and count the answer."""
        start = clock()
        try:
            with self._reserve_bytes() as reserve:
                response, deadline = await self._score(request, start, reserve)
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

    async def _score(
        self, request: Request, start: float, reserve: Callable[[int], None]
    ) -> tuple[Response, float]:
        """Return the answer and its deadline."""
        content_type = _content_type(request)
        query = self._query(request)
        # The body is still unread: without a deadline in the URL, a JSON body may set the longest one allowed.
        default = self.config.limits.deadline_ms if content_type == JSON else self.config.deadline_ms
        if self.batcher.is_overloaded(query.get("deadline_ms", default) / 1000):
            raise self.batcher.refusal()
        body = await self._body(request, reserve)
        version = self.version
        codec = version.codec
        asked = codec.from_json(body) if content_type == JSON else codec.from_arrow(body, content_type)
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
            self.recent.add(asked.table, len(body))
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
        return _score_response(asked, columns, contributions, provenance, content_type), deadline

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
        length = request.headers.get("content-length", "")
        if length.isdigit() and int(length) > limits.body_bytes:
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
        return b"".join(parts)

    def _query(self, request: Request) -> dict[str, Any]:
        """Return routes, depth, deadline_ms and explain from the URL; those in a JSON body take precedence."""
        values: dict[str, Any] = {}
        for name, text in request.query_params.multi_items():
            if name not in _QUERY:
                raise Problem(
                    400,
                    f"the URL has the unknown parameter {name[:200]!r}",
                    fix="use routes, depth, deadline_ms and explain, each at most once",
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

    async def page(self, _: Request) -> Response:
        """Answer GET / with the page to try the model on."""
        return Response(
            html(), media_type="text/html; charset=utf-8", headers={"content-security-policy": POLICY}
        )


def make_app(service: Service) -> ASGIApp:
    """Return the application that routes requests to the endpoints of `service`."""
    routes = [
        Route("/score", service.score, methods=["POST"]),
        Route("/model", service.model),
        Route("/vocabulary/{field:path}", service.vocabulary),
        Route("/health/live", service.live),
        Route("/health/ready", service.ready),
        Route("/metrics", service.metrics),
        Route("/openapi.json", service.openapi),
        Route("/", service.page),
    ]

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        service.start()
        yield
        service.stop()

    app = Starlette(
        routes=routes,
        exception_handlers={
            Problem: _answer_problem,
            HTTPException: _answer_http_exception,
            ClientDisconnect: _answer_disconnect,
        },
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    return _Guard(app, service.token, service.config.hosts)


class _Guard:
    """Checks the token before anything else looks at the request.

    Without a token it checks the Host header. A web page from anywhere can make its own name resolve to this machine,
    and the browser that shows it would then let it read our answers; but it can't change the name that the browser
    sends.
    """

    def __init__(self, app: ASGIApp, token: str | None, hosts: Sequence[str]) -> None:
        self._app, self._authorization = app, None if token is None else f"Bearer {token}".encode()
        self._hosts = {host_name(host) for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = self._problem(scope) if scope["type"] == "http" else None
        if problem is None:
            await self._app(scope, receive, send)
            return
        response = _problem_response(problem)
        if problem.status == 401:
            response.headers["www-authenticate"] = "Bearer"
        await response(scope, receive, send)

    def _problem(self, scope: Scope) -> Problem | None:
        """Return why the request is refused, or None."""
        if self._authorization is None:
            hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
            # A request without a Host header does not come from a browser.
            if len(hosts) <= 1 and all(map(self._is_ours, map(host_name, hosts))):
                return None
            host = f"not for the host {hosts[0][:200]!r}" if len(hosts) == 1 else "for one host at a time"
            return Problem(
                421,
                f"this server has no token and answers only for its own names, {host}",
                fix="serve with --allow-host NAME, or with a token",
            )
        sent = [value for name, value in scope["headers"] if name == b"authorization"]
        if scope["path"] in OPEN_PATHS or (
            len(sent) == 1 and hmac.compare_digest(sent[0], self._authorization)
        ):
            return None
        return Problem(401, "this server requires a token", fix="send the header Authorization: Bearer TOKEN")

    def _is_ours(self, name: str) -> bool:
        return is_loopback(name) or name in self._hosts


def _content_type(request: Request) -> str:
    header, encoding = request.headers.get("content-type", ""), request.headers.get("content-encoding")
    kind, _, parameter = header.partition(";")
    kind = kind.strip().lower()
    is_utf8 = parameter.strip().lower() in ("", "charset=utf-8", 'charset="utf-8"')
    if kind not in (JSON, arrow.STREAM, arrow.FILE) or not is_utf8 or encoding:
        what = f"content encoding {encoding[:50]!r}" if encoding else f"content type {header[:200]!r}"
        raise Problem(
            415,
            f"{what} is not supported",
            fix=f"send {JSON}, {arrow.STREAM} or {arrow.FILE}, not compressed",
        )
    return kind


def _score_response(
    asked: ScoreRequest,
    columns: dict[str, Floats],
    contributions: list[list[Contribution]] | None,
    provenance: Provenance,
    content_type: str,
) -> Response:
    if content_type == JSON:
        return Response(
            to_json(columns, provenance, by_rows=asked.by_rows, contributions=contributions), media_type=JSON
        )
    frame = pl.DataFrame(columns, schema=dict.fromkeys(SCORES, pl.Float64))
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
    matches = values.filter(values.str.starts_with(prefix)) if prefix else values
    return matches.head(MAX_SUGGESTIONS).to_list()


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type=JSON)


def _problem_response(problem: Problem) -> Response:
    body = {"error": problem.message} | ({"fix": problem.fix} if problem.fix else {})
    response = Response(msgspec.json.encode(body), problem.status, media_type=JSON)
    if problem.retry_after is not None:
        response.headers["retry-after"] = str(int(problem.retry_after))
    if problem.status in (401, 408, 413, 415, 421):  # The rest of the body is not worth reading.
        response.headers["connection"] = "close"
    return response


async def _answer_problem(_: Request, error: Exception) -> Response:
    assert isinstance(error, Problem)
    return _problem_response(error)


async def _answer_http_exception(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    response = _problem_response(
        Problem(error.status_code, error.detail.lower(), fix="GET /openapi.json lists all paths")
    )
    for name, value in (error.headers or {}).items():
        response.headers[name] = value
    return response


async def _answer_disconnect(_: Request, error: Exception) -> Response:
    return Response(status_code=499)
