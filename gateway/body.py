"""Reading a request's body without letting it fill the memory."""

from __future__ import annotations

from fastapi import Request
from starlette.requests import ClientDisconnect

from gateway.errors import BodyTooLarge, ClientGone


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body.

    Raises:
        BodyTooLarge: it has, or says that it will have, more than `max_bytes`.
        ClientGone: it ended too early.
    """
    if _announced(request) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > max_bytes:
                raise _too_large(max_bytes)
    except ClientDisconnect as error:
        raise ClientGone("the connection was closed within the request") from error
    return bytes(body)


def _announced(request: Request) -> int:
    length = request.headers.get("content-length", "")
    return int(length) if length.isdecimal() else 0


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"the request body has more than {max_bytes} bytes")
