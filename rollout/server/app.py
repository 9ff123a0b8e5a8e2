"""The FastAPI application: routes, and the one form of every error, {"error": {"message": ...}}."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from miles_ext.api_key import VARIABLE, accepts
from miles_ext.errors import EngineError, RequestError
from rollout.embedded.engine import EmbeddedEngine
from rollout.server import info, native, openai
from rollout.server.batching import EngineThread
from rollout.server.front import Front
from rollout.server.meta import ContentError
from rollout.server.metrics import Metrics
from rollout.server.model import Model

Handler = Callable[[Front, Any], Awaitable[Any]]


LIVENESS = "/health"
"""The one route that needs no key: it tells nothing but that the process runs."""


def make_app(engine: EmbeddedEngine, model: Model, *, health_timeout_s: float = 20.0, api_key: str = "") -> FastAPI:
    """The application owns the engine from here on: its thread stops, and the engine closes, with the application.

    api_key: wanted as `Authorization: Bearer KEY` on every route but liveness; empty asks for none.
    """
    metrics = Metrics()
    front = Front(EngineThread(engine, engine.max_concurrency), model, metrics)
    metrics.watch(front.engine)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(front.engine.close)
        engine.close()

    app = FastAPI(title="rollout.server", lifespan=lifespan, openapi_url=None)
    _add_errors(app)

    @app.middleware("http")
    async def count(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        status_code = 500  # of an exception that the error handler answers further out
        try:
            response = await call_next(request)
            status_code = response.status_code
            return response
        finally:
            route = request.scope.get("route")
            metrics.count_http(route.path if route else "unknown", status_code)

    @app.middleware("http")  # added last, so it runs first: an intruder is not even counted by route
    async def guard(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        if request.url.path == LIVENESS or accepts(api_key, request.headers.get("authorization")):
            return await call_next(request)
        return _error(401, f"no API key, or another; send the server's as `Authorization: Bearer KEY` ({VARIABLE})")

    posts: dict[str, Handler] = {
        "/generate": native.generate,
        "/v1/completions": openai.completions,
        "/v1/chat/completions": openai.chat,
        "/weights_checker": info.weights_checker,
    }
    for path, handler in posts.items():
        app.add_api_route(path, _with_body(front, handler), methods=["POST"])

    gets: dict[str, Callable[[Front], Awaitable[Any]]] = {
        "/server_info": info.server_info,
        "/get_server_info": info.server_info,
        "/model_info": info.model_info,
        "/get_model_info": info.model_info,
    }
    for path, read in gets.items():
        app.add_api_route(path, _without_body(front, read), methods=["GET"])

    @app.get("/v1/models")
    async def models() -> JSONResponse:
        return JSONResponse(info.models(front))

    @app.get(LIVENESS)
    async def health() -> Response:
        """Whether the engine's thread runs. Answers at once, also while the engine works."""
        return Response(status_code=200 if front.engine.alive else 503)

    @app.get("/health_generate")
    async def health_generate() -> Response:
        """Whether the engine decodes a token now; 503 where it has not within the timeout, busy or broken."""
        try:
            healthy = await asyncio.wait_for(front.engine.call(lambda e: e.healthy()), health_timeout_s)
        except TimeoutError:
            return _error(503, f"no token within {health_timeout_s} s: the engine is busy with a long batch, or stuck")
        return Response(status_code=200) if healthy else _error(503, "the engine decoded no finite token")

    @app.get("/metrics")
    async def scrape() -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @app.api_route("/flush_cache", methods=["GET", "POST"])
    async def flush_cache() -> Response:
        return Response("Nothing to flush: no prefix is kept from one batch to the next.\n")

    return app


def _with_body(front: Front, handler: Handler) -> Callable[[Request], Awaitable[JSONResponse]]:
    async def route(request: Request) -> JSONResponse:
        try:
            body = json.loads(await request.body())
        except ValueError as error:
            raise RequestError(f"the body is not JSON: {error}") from error
        return JSONResponse(await handler(front, body))

    return route


def _without_body(front: Front, read: Callable[[Front], Awaitable[Any]]) -> Callable[[], Awaitable[JSONResponse]]:
    async def route() -> JSONResponse:
        return JSONResponse(await read(front))

    return route


def _error(status_code: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "code": status_code}}, status_code)


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(RequestError)
    async def refused(_: Request, error: RequestError) -> JSONResponse:
        return _error(400, str(error))

    @app.exception_handler(ContentError)
    async def unrecorded(_: Request, error: ContentError) -> JSONResponse:
        return _error(error.status_code, str(error))

    @app.exception_handler(EngineError)
    async def unavailable(_: Request, error: EngineError) -> JSONResponse:
        return _error(503, str(error))

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> JSONResponse:
        return _error(error.status_code, str(error.detail))

    @app.exception_handler(Exception)
    async def unexpected(_: Request, error: Exception) -> JSONResponse:
        """The HTTP server logs the traceback."""
        return _error(500, f"{type(error).__name__}: {error}")
