"""The HTTP application of one worker."""

import asyncio
import hmac
from collections import deque
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

from recap_ctr.serve import arrow
from recap_ctr.serve.batcher import Batch, Batcher, clock, failed
from recap_ctr.serve.codec import JSON, MAX_COUNT, SCORES, Table, Used, to_json
from recap_ctr.serve.codec import Request as Asked
from recap_ctr.serve.config import ServeConfig, is_loopback, named_host
from recap_ctr.serve.counters import Counters, exposition, labelled
from recap_ctr.serve.engine import Floats
from recap_ctr.serve.log import log, log_refusal
from recap_ctr.serve.openapi import document
from recap_ctr.serve.page import POLICY, html
from recap_ctr.serve.problem import Problem
from recap_ctr.serve.versions import Version, about

OPEN = ("/", "/health/live", "/health/ready")  # paths that need no token
MAX_SUGGESTIONS = 50
MAX_PREFIX = 200
SAMPLE_ROWS, SAMPLE_BYTES = 256, 64 << 10  # kept of recent requests in all, and the largest body of one


class Serving(Protocol):
    """Who knows which version serves."""

    current: Version | None
    history: dict[str, Any]


class Service:
    """What the endpoints share: the version that serves, the line, the counters, and rows of recent requests."""

    def __init__(self, config: ServeConfig, serving: Serving, counters: Counters, token: str | None) -> None:
        self.config, self.serving, self.counters, self.token = config, serving, counters, token
        self.recent: deque[Table] = deque()
        self._recent_rows = 0
        self._held_bytes = 0
        self._batcher: Batcher | None = None
        self.draining = False

    def start(self) -> None:
        """On the event loop."""
        limits = self.config.limits
        self._batcher = Batcher(
            dial=self.config.dial,
            batch_rows=limits.batch_rows,
            max_requests=limits.requests,
            waiting=self._count_waiting,
            done=self._count_batch,
            log=log,
        )

    def stop(self) -> None:
        self.batcher.close()

    @property
    def batcher(self) -> Batcher:
        assert self._batcher is not None
        return self._batcher

    @property
    def version(self) -> Version:
        if self.serving.current is None:
            raise Problem(503, "no model is loaded yet", retry_after=1)
        return self.serving.current

    async def score(self, request: Request) -> Response:
        start = clock()
        try:
            with self._room() as take:
                response, late = await self._score(request, start, take)
        except Problem as problem:
            self._count(problem.status)
            # What is wrong with a body may quote it: that is for the client alone.
            log_refusal(
                status=problem.status, **({} if problem.status == 400 else {"reason": problem.message})
            )
            raise
        except ClientDisconnect:
            self._count(499)
            raise
        except (Exception, pl.exceptions.PanicException) as error:  # the latter is none
            self._count(500)
            log_refusal(status=500, reason=type(error).__name__)
            raise failed() from None
        seconds = clock() - start
        self._count(200)
        self.counters.observe(seconds)
        if late < clock():
            self.counters.add("recap_late_total")
        return response

    async def _score(
        self, request: Request, start: float, take: Callable[[int], None]
    ) -> tuple[Response, float]:
        """The answer, and until when it was wanted."""
        content_type = _content_type(request)
        settings = self._query(request)
        # JSON may set a longer deadline in its body; what is in the address is known before the body is read.
        default = self.config.limits.deadline_ms if content_type == JSON else self.config.deadline_ms
        if self.batcher.is_full(settings.get("deadline_ms", default) / 1000):
            raise self.batcher.full()
        body = await self._body(request, take)
        version = self.version
        codec = version.codec
        asked = codec.from_json(body) if content_type == JSON else codec.from_arrow(body, content_type)
        fixed = version.setting(asked.routes or settings.get("routes"), asked.depth or settings.get("depth"))
        wanted = asked.deadline_ms or settings.get("deadline_ms") or self.config.deadline_ms
        deadline = start + wanted / 1000
        columns = dict.fromkeys(SCORES, np.zeros(0))
        setting = fixed or 0
        if asked.table.height:
            answer = await self.batcher.score(asked.table, version, fixed, deadline)
            columns, setting = answer.columns, answer.setting
            self._remember(asked.table, len(body))
        used = Used(
            version.name,
            version.engine.settings[setting].routes,
            version.engine.settings[setting].depth,
            fixed is None and setting > 0,
        )
        if used.lowered:
            self.counters.add("recap_lowered_total")
        if self.config.access_log:
            log(
                "scored", rows=asked.table.height, routes=used.routes, depth=used.depth,
                milliseconds=round(1000 * (clock() - start), 3),
            )  # fmt: skip
        return _answer(asked, columns, used, content_type), deadline

    @contextmanager
    def _room(self) -> Iterator[Callable[[int], None]]:
        """What takes so many bytes of the room that all bodies share, until the request is answered."""
        own, limits = 0, self.config.limits

        def take(size: int) -> None:
            nonlocal own
            if self._held_bytes + size > limits.held_bytes:
                raise Problem(
                    429,
                    f"the server holds {limits.held_bytes:,} bytes of other requests",
                    fix="wait, or send fewer rows at a time",
                    retry_after=1,
                )
            own += size
            self._held_bytes += size

        try:
            yield take
        finally:
            self._held_bytes -= own

    async def _body(self, request: Request, take: Callable[[int], None]) -> bytes:
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
                    take(len(part))
                    parts.append(part)
        except TimeoutError:
            raise Problem(
                408, f"the body took longer than {limits.body_seconds:g} s to arrive", fix="send it faster"
            ) from None
        return b"".join(parts)

    def _query(self, request: Request) -> dict[str, Any]:
        """Settings in the address; those in a JSON body take precedence."""
        found: dict[str, Any] = {}
        for name, text in request.query_params.multi_items():
            if name not in ("routes", "depth", "deadline_ms") or name in found:
                fix = "known are routes, depth and deadline_ms, once each"
                raise Problem(400, f"the address holds {name[:200]!r}, which is not taken there", fix=fix)
            most = self.config.limits.deadline_ms if name == "deadline_ms" else MAX_COUNT
            kind: type = float if name == "deadline_ms" else int
            try:
                found[name] = msgspec.convert(text, kind, strict=False)
            except msgspec.ValidationError:
                found[name] = 0
            if not 0 < found[name] <= most:
                raise Problem(400, f"{name} in the address must be a number above 0, up to {most:g}")
        return found

    def _remember(self, table: Table, size: int) -> None:
        """Keep some rows, in memory only, to compare an offered version by; `size` is that of their body."""
        if table.height > SAMPLE_ROWS or size > SAMPLE_BYTES:
            return
        self.recent.append(table)
        self._recent_rows += table.height
        while self._recent_rows > SAMPLE_ROWS:
            self._recent_rows -= self.recent.popleft().height

    def _count(self, status: int) -> None:
        self.counters.add(labelled("recap_requests_total", status=status))

    def _count_waiting(self, requests: int, rows: int) -> None:
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
        return _json(about(self.version, self.serving.history))

    async def vocabulary(self, request: Request) -> Response:
        name, prefix = request.path_params["field"], request.query_params.get("prefix", "")
        unknown = set(request.query_params) - {"prefix"}
        if unknown or len(prefix) > MAX_PREFIX:
            raise Problem(400, f"one prefix of up to {MAX_PREFIX} characters is all that is taken")
        fitted = next((one for one in self.version.engine.encoder.fields if one.field.name == name), None)
        if fitted is None:
            raise Problem(404, f"the model has no field {name[:200]!r}", fix="GET /model lists the fields")
        values = await asyncio.to_thread(_starting, fitted.values, prefix)
        return _json({"field": name, "values": values})

    async def live(self, _: Request) -> Response:
        return _json({"live": True})

    async def ready(self, _: Request) -> Response:
        if self.draining:
            raise Problem(503, "the server is stopping")
        return _json({"ready": True, "model": self.version.name})

    async def metrics(self, _: Request) -> Response:
        info = [
            "# HELP recap_model_info The version that this worker serves.",
            "# TYPE recap_model_info gauge",
            labelled("recap_model_info", model=self.version.name) + " 1",
        ]
        text = exposition(self.counters.totals(), info)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def openapi(self, _: Request) -> Response:
        return _json(document(self.version.codec, self.config, token=self.token is not None))

    async def page(self, _: Request) -> Response:
        return Response(
            html(), media_type="text/html; charset=utf-8", headers={"content-security-policy": POLICY}
        )


def make_app(service: Service) -> ASGIApp:
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
        exception_handlers={Problem: _problem, HTTPException: _http_problem, ClientDisconnect: _gone},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    return _Guard(app, service.token, service.config.hosts)


class _Guard:
    """Asks who calls, before anything else looks at the request.

    Without a token, it asks whom they call: a page from anywhere can have its own name lead to this machine, and would
    then be let read the answers by the browser that shows it. It can't change the name that the browser sends.
    """

    def __init__(self, app: ASGIApp, token: str | None, hosts: Sequence[str]) -> None:
        self._app, self._wanted = app, None if token is None else f"Bearer {token}".encode()
        self._hosts = {named_host(host) for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = self._problem(scope) if scope["type"] == "http" else None
        if problem is None:
            await self._app(scope, receive, send)
            return
        response = _to_response(problem)
        if problem.status == 401:
            response.headers["www-authenticate"] = "Bearer"
        await response(scope, receive, send)

    def _problem(self, scope: Scope) -> Problem | None:
        if self._wanted is None:
            named = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
            # Who sends none is no browser.
            if len(named) <= 1 and all(map(self._is_ours, map(named_host, named))):
                return None
            what = f"it is not called {named[0][:200]!r}" if len(named) == 1 else "it has one name"
            return Problem(
                421,
                f"this server asks for no token, and {what}",
                fix="serve with --allow-host NAME, or a token",
            )
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if scope["path"] in OPEN or (len(given) == 1 and hmac.compare_digest(given[0], self._wanted)):
            return None
        return Problem(401, "this server wants a token", fix="send the header Authorization: Bearer TOKEN")

    def _is_ours(self, name: str) -> bool:
        return is_loopback(name) or name in self._hosts


def _content_type(request: Request) -> str:
    given, packed = request.headers.get("content-type", ""), request.headers.get("content-encoding")
    kind, _, parameter = given.partition(";")
    kind = kind.strip().lower()
    plain = parameter.strip().lower() in ("", "charset=utf-8", 'charset="utf-8"')
    if kind not in (JSON, arrow.STREAM, arrow.FILE) or not plain or packed:
        what = f"content encoding {packed[:50]!r}" if packed else f"content type {given[:200]!r}"
        raise Problem(
            415,
            f"{what} is not read here",
            fix=f"send {JSON}, {arrow.STREAM} or {arrow.FILE}, not compressed",
        )
    return kind


def _answer(asked: Asked, columns: dict[str, Floats], used: Used, content_type: str) -> Response:
    if content_type == JSON:
        return Response(to_json(columns, used, by_rows=asked.by_rows), media_type=JSON)
    frame = pl.DataFrame(columns, schema=dict.fromkeys(SCORES, pl.Float64))
    headers = {
        "recap-model": used.model,
        "recap-routes": str(used.routes),
        "recap-lowered": str(used.lowered).lower(),
    }
    if used.depth is not None:
        headers["recap-depth"] = str(used.depth)
    return Response(arrow.write(frame, content_type), media_type=content_type, headers=headers)


def _starting(values: pl.Series, prefix: str) -> list[str]:
    """Kept values in order of frequency."""
    found = values.filter(values.str.starts_with(prefix)) if prefix else values
    return found.head(MAX_SUGGESTIONS).to_list()


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type=JSON)


def _to_response(problem: Problem) -> Response:
    said = {"error": problem.message} | ({"fix": problem.fix} if problem.fix else {})
    response = Response(msgspec.json.encode(said), problem.status, media_type=JSON)
    if problem.retry_after is not None:
        response.headers["retry-after"] = str(int(problem.retry_after))
    if problem.status in (401, 408, 413, 415, 421):  # the rest of the body is not wanted
        response.headers["connection"] = "close"
    return response


async def _problem(_: Request, error: Exception) -> Response:
    assert isinstance(error, Problem)
    return _to_response(error)


async def _http_problem(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    response = _to_response(
        Problem(error.status_code, error.detail.lower(), fix="/openapi.json lists all addresses")
    )
    for name, value in (error.headers or {}).items():
        response.headers[name] = value
    return response


async def _gone(_: Request, error: Exception) -> Response:
    return Response(status_code=499)
