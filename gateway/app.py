"""The routes of the gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from starlette.middleware.cors import CORSMiddleware

from gateway.answering import Answering
from gateway.auth import ApiKeys
from gateway.cluster_view import cluster, health
from gateway.config import GatewayConfig
from gateway.errors import install_error_handlers
from gateway.live_requests import LiveRequests
from gateway.request_scope import RequestScope
from gateway.responses import ChatFormat, CompletionFormat
from gateway.served_model import ServedModel
from protocol import Backend, InvalidRequest, ModelNotFound, PauseMode
from telemetry import Metrics


def create_app(
    config: GatewayConfig, *, backend: Backend, model: ServedModel, metrics: Metrics
) -> FastAPI:
    """The gateway as an ASGI application.

    `app.state.live_requests.abort()` ends every request at once, each with an error that says so.
    Whoever runs the server calls it as the first step of a shutdown: servers wait for open
    connections before they tell the application, in its lifespan, that they stop.
    """
    live = LiveRequests()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        live.abort()

    app = FastAPI(
        title="kvrelay",
        lifespan=lifespan,
        openapi_url=None,  # the API is OpenAI's, and documented there
        redirect_slashes=False,
    )
    app.state.live_requests = live
    install_error_handlers(app)
    app.add_middleware(RequestScope, metrics=metrics)
    if config.cors_allow_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_allow_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    protected = [Depends(ApiKeys(config.api_keys).check)]
    answering = Answering(config, backend, model, metrics, live)
    app.include_router(_generation_routes(answering), dependencies=protected)
    app.include_router(_model_routes(model), dependencies=protected)
    app.include_router(_cluster_routes(backend), dependencies=protected)
    app.include_router(_open_routes(backend, metrics))
    return app


def _generation_routes(answering: Answering) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await answering.answer(request, answering.parser.completion, CompletionFormat)

    @router.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await answering.answer(request, answering.parser.chat, ChatFormat)

    return router


def _model_routes(model: ServedModel) -> APIRouter:
    router = APIRouter()

    def card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": model.created,
            "owned_by": "kvrelay",
            "root": model.name,
            "max_model_len": model.max_model_len,
        }

    @router.get("/v1/models")
    async def models() -> Response:
        return _json({"object": "list", "data": [card(name) for name in model.names]})

    @router.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        if name not in model.names:
            raise ModelNotFound(name, model.names)
        return _json(card(name))

    return router


def _cluster_routes(backend: Backend) -> APIRouter:
    router = APIRouter()

    @router.get("/cluster")
    async def cluster_status() -> Response:
        return _json(cluster(await backend.status()))

    @router.post("/pause")
    async def pause(request: Request) -> Response:
        mode = _choice(request, "mode", tuple(PauseMode), PauseMode.KEEP)
        return _json({"nodes": await backend.pause(PauseMode(mode))})

    @router.post("/resume")
    async def resume() -> Response:
        return _json({"nodes": await backend.resume()})

    @router.post("/reset_prefix_cache")
    async def reset_prefix_cache(request: Request) -> Response:
        running = _choice(request, "reset_running_requests", ("true", "false"), "false")
        done = await backend.reset_prefix_cache(reset_running_requests=running == "true")
        return _json({"nodes": done})

    return router


def _open_routes(backend: Backend, metrics: Metrics) -> APIRouter:
    """What probes and scrapers ask, without a key."""
    router = APIRouter()

    @router.get("/health")
    async def health_status() -> Response:
        serving, detail = health(await backend.status())
        return _json(detail, status=200 if serving else 503)

    @router.get("/metrics")
    async def exposition() -> Response:
        status = await backend.status()
        return Response(metrics.exposition(status), media_type=metrics.content_type)

    return router


def _choice(request: Request, name: str, values: Sequence[str], default: str) -> str:
    """A parameter of the query. Raises InvalidRequest: it is none of these values."""
    value = request.query_params.get(name, default)
    if value not in values:
        raise InvalidRequest(name, f"must be {' or '.join(values)}, not {value!r}")
    return value


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
