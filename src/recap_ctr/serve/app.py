"""The HTTP application of one worker."""

import hmac
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from recap_ctr.serve.codec import JSON
from recap_ctr.serve.config import host_name, is_loopback
from recap_ctr.serve.open_inference import PREFIX as OPEN_INFERENCE
from recap_ctr.serve.openapi import OPEN_PATHS
from recap_ctr.serve.problem import Problem
from recap_ctr.serve.service import Service

SCORE = "/score"


def make_app(service: Service) -> ASGIApp:
    """Return the application that routes requests to the endpoints of `service`."""
    routes = [
        Route(SCORE, service.score, methods=["POST"]),
        Route("/model", service.model),
        Route("/vocabulary/{field:path}", service.vocabulary),
        Route("/health/live", service.live),
        Route("/health/ready", service.ready),
        Route("/metrics", service.metrics),
        Route("/openapi.json", service.openapi),
        Route("/docs", service.docs),
        Route("/", service.page),
        Route("/v2", service.server_metadata),
        Route("/v2/health/live", service.live),
        Route("/v2/health/ready", service.ready),
    ]
    for model in ("/v2/models/{name}", "/v2/models/{name}/versions/{version}"):
        routes += [
            Route(model, service.model_metadata),
            Route(f"{model}/ready", service.model_ready),
            Route(f"{model}/infer", service.infer, methods=["POST"]),
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
    guarded: ASGIApp = _Guard(app, service)
    if not service.config.origins:
        return guarded
    # It answers the questions of browsers, which carry no token, itself.
    return CORSMiddleware(
        guarded,
        allow_origins=service.config.origins,
        allow_methods=["GET", "POST"],
        allow_headers=["authorization", "content-type", "content-encoding"],
        expose_headers=["retry-after", "recap-model", "recap-routes", "recap-depth", "recap-lowered"],
    )


class _Guard:
    """Checks the token, and whether there is time for the request, before anything else looks at it.

    Without a token it checks the Host header. A web page from anywhere can make its own name resolve to this machine,
    and the browser that shows it would then let it read our answers; but it can't change the name that the browser
    sends.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service
        self._authorization = None if service.token is None else f"Bearer {service.token}".encode()
        self._hosts = {host_name(host) for host in service.config.hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = None
        if scope["type"] == "http":
            problem = self._problem(scope)
            if problem is None and scope["path"].startswith((SCORE, OPEN_INFERENCE)):
                problem = self._service.busy(scope)
        if problem is None:
            await self._app(scope, receive, send)
            return
        response = _problem_response(problem)
        if problem.status == 401:
            response.headers["www-authenticate"] = "Bearer"
        await response(scope, receive, send)

    def _problem(self, scope: Scope) -> Problem | None:
        """Return why the request is refused, or None."""
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if not hosts and scope["http_version"] == "1.1":
            return Problem(400, "the request has no Host header, which HTTP/1.1 requires", fix="send one")
        if self._authorization is None:
            # A request without a Host header, by HTTP/1.0, does not come from a browser.
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
