"""What every HTTP request has: an id, and an outcome that is counted once."""

from __future__ import annotations

import asyncio
import secrets

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.errors import INTERNAL, OK
from protocol import RequestAborted
from telemetry import Metrics

# Path → endpoint label and prefix of the request id.
_GENERATING = {
    "/v1/completions": ("completions", "cmpl"),
    "/v1/chat/completions": ("chat", "chatcmpl"),
}


class RequestScope:
    """ASGI middleware: makes `state.request_id`, sends it as X-Request-Id, counts the outcome.

    Whoever turns an error into an answer writes its label into `state.outcome`.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        endpoint, prefix = _GENERATING.get(scope["path"], (None, "req"))
        request_id = f"{prefix}-{secrets.token_hex(16)}"
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        outcome = INTERNAL

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
            outcome = state.get("outcome", OK)
        except asyncio.CancelledError:
            outcome = RequestAborted.label
            raise
        finally:
            if endpoint is not None:
                self._metrics.request_ended(endpoint, outcome)
