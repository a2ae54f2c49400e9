"""Every error as HTTP: a status, and a body in the shape that OpenAI clients expect.

    {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}

`code` is the label of the error's class, `param` the field that is wrong, if it is one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from http import HTTPStatus

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from protocol import (
    InvalidRequest,
    KvrelayError,
    ModelNotFound,
    NoHealthyNode,
    Overloaded,
    RequestAborted,
)

logger = logging.getLogger(__name__)

OK = "ok"  # the outcome of a request that ended in no error
INTERNAL = "internal_error"


class Unauthorized(KvrelayError):
    """The request has no API key, or a wrong one."""

    label = "invalid_api_key"


class BodyTooLarge(KvrelayError):
    """The body has more bytes than the gateway reads."""

    label = "body_too_large"


class ClientGone(KvrelayError):
    """The client closed the connection, or reads no more. Nobody sees this error but the log."""

    label = "disconnected"


# The status and OpenAI's type of each class; a subclass has those of its nearest ancestor here.
_RESPONSES: dict[type[BaseException], tuple[int, str]] = {
    InvalidRequest: (400, "invalid_request_error"),
    Unauthorized: (401, "authentication_error"),
    ModelNotFound: (404, "invalid_request_error"),
    BodyTooLarge: (413, "invalid_request_error"),
    Overloaded: (429, "rate_limit_error"),
    ClientGone: (499, "client_error"),
    NoHealthyNode: (503, "service_unavailable_error"),
    RequestAborted: (503, "service_unavailable_error"),
    KvrelayError: (500, "server_error"),
}


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


INTERNAL_BODY = ErrorBody(
    ErrorDetail("the gateway failed; its log says why", "server_error", None, INTERNAL)
)


def error_body(error: KvrelayError) -> ErrorBody:
    _, kind = _response_to(error)
    return ErrorBody(ErrorDetail(str(error), kind, _param(error), error.label))


def install_error_handlers(app: FastAPI) -> None:
    """Let every error that leaves a route become a response in OpenAI's shape."""
    app.add_exception_handler(KvrelayError, _on_kvrelay_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_bug)


async def _on_kvrelay_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, KvrelayError)
    request.state.outcome = error.label
    status, _ = _response_to(error)
    if status >= 500:
        level = logging.INFO if isinstance(error, RequestAborted) else logging.WARNING
        logger.log(level, "%s failed: %s: %s", request.state.request_id, error.label, error)
    return _json(status, error_body(error), _headers(error))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """What the routes do not know: a path (404) or a method (405)."""
    assert isinstance(error, HTTPException)
    label = HTTPStatus(error.status_code).name.lower()
    request.state.outcome = label
    message = f"{request.method} {request.url.path}: {error.detail}"
    body = ErrorBody(ErrorDetail(message, "invalid_request_error", None, label))
    return _json(error.status_code, body, error.headers or {})


async def _on_bug(request: Request, error: Exception) -> Response:
    """The server logs the traceback; the client learns which request it was, and no more."""
    return _json(500, INTERNAL_BODY, {"X-Request-Id": request.state.request_id})


def _response_to(error: KvrelayError) -> tuple[int, str]:
    return next(_RESPONSES[kind] for kind in type(error).__mro__ if kind in _RESPONSES)


def _param(error: KvrelayError) -> str | None:
    if isinstance(error, InvalidRequest):
        return error.field or None
    return "model" if isinstance(error, ModelNotFound) else None


_REPLACED_S = 5  # a node that has died is about to be there again


def _headers(error: KvrelayError) -> dict[str, str]:
    if isinstance(error, Overloaded):
        return {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
    if isinstance(error, NoHealthyNode):
        return {"Retry-After": str(_REPLACED_S)}
    return {"WWW-Authenticate": "Bearer"} if isinstance(error, Unauthorized) else {}


def _json(status: int, body: ErrorBody, headers: Mapping[str, str]) -> Response:
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")
