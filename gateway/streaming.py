"""Server-sent events.

    data: {"id": ..., "choices": [...]}      one for each chunk of tokens that the nodes delivered
    data: {"choices": [], "usage": {...}}    if asked for
    data: [DONE]

An error before the first event is an ordinary HTTP error, so the status tells the truth for as long
as it can. An error after it is the last event, `data: {"error": ...}`, with no [DONE].
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress

import msgspec
from fastapi import Response
from starlette.types import Message, Receive, Scope, Send

from gateway.call import Call
from gateway.errors import INTERNAL_BODY, ClientGone, ErrorBody, error_body
from gateway.generation import Generation
from gateway.live_requests import LiveRequests
from gateway.responses import Format
from protocol import KvrelayError, RequestAborted

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
_LAST_WORDS_S = 1.0  # an error is worth no long wait for a client that does not read


async def events(call: Call, generation: Generation, answer: Format) -> AsyncGenerator[bytes, None]:
    """The events of a call, from the first to the last."""
    async with aclosing(generation.pieces()) as pieces:
        async for piece in pieces:
            yield _event(answer.chunk(piece))
    if call.include_usage:
        yield _event(answer.usage(generation.usage))
    yield DONE


class EventStream(Response):
    """Sends events while they are made, and stops making them when nobody reads."""

    media_type = "text/event-stream"

    def __init__(
        self, source: AsyncGenerator[bytes, None], live: LiveRequests, send_timeout_s: float
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._source = source
        self._live = live
        self._send_timeout_s = send_timeout_s
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._live.attend(receive, self._send_all(send))
        except KvrelayError as error:
            if not self._begun:
                raise
            scope["state"]["outcome"] = error.label
            level = (
                logging.INFO if isinstance(error, ClientGone | RequestAborted) else logging.WARNING
            )
            logger.log(level, "%s ended: %s", scope["state"]["request_id"], error)
            await self._send_last(send, error_body(error))
        except Exception:
            if self._begun:
                await self._send_last(send, INTERNAL_BODY)
            raise

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._source) as source:
            first = await anext(source)
            self._begun = True
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await self._deliver(send, start)
            await self._deliver(send, _body(first))
            async for event in source:
                await self._deliver(send, _body(event))
        await self._deliver(send, _body(b"", more=False))

    async def _deliver(self, send: Send, message: Message) -> None:
        """Raises `ClientGone`: the client has not read for so long that it counts as gone."""
        try:
            async with asyncio.timeout(self._send_timeout_s):
                await send(message)
        except TimeoutError as error:
            raise ClientGone("the client does not read its answer") from error

    async def _send_last(self, send: Send, body: ErrorBody) -> None:
        """Say what went wrong, if the client still listens."""
        event = _event(msgspec.json.encode(body))
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_S):
                await send(_body(event, more=False))


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def _body(body: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}
