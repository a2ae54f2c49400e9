"""What both generating endpoints do: read, parse, generate, answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing

from fastapi import Request, Response

from gateway.body import read_body
from gateway.call import Arrival, Call, CallParser
from gateway.config import GatewayConfig
from gateway.generation import Generation
from gateway.live_requests import LiveRequests
from gateway.responses import Format
from gateway.served_model import ServedModel
from gateway.streaming import EventStream, events
from gateway.tokenizer import Tokenizer
from gateway.transcript import Piece
from protocol import Backend
from telemetry import Metrics

_INLINE_BODY_BYTES = 16 * 1024  # a larger body is parsed in a thread: other streams go on


class Answering:
    """What both endpoints do: read, parse, generate, answer."""

    def __init__(
        self,
        config: GatewayConfig,
        backend: Backend,
        model: ServedModel,
        metrics: Metrics,
        live: LiveRequests,
    ) -> None:
        self.parser = CallParser(model, config)
        self._config = config
        self._backend = backend
        self._model = model
        self._metrics = metrics
        self._live = live

    async def answer(
        self,
        request: Request,
        parse: Callable[[bytes, Arrival], Call],
        format_of: Callable[[Call, Tokenizer], Format],
    ) -> Response:
        arrival = Arrival(request.state.request_id, time.time())
        body = await read_body(request, self._config.max_body_bytes)
        if len(body) <= _INLINE_BODY_BYTES:
            call = parse(body, arrival)
        else:
            call = await asyncio.to_thread(parse, body, arrival)
        generation = Generation(call, self._backend, self._model.tokenizer, self._metrics)
        answer = format_of(call, self._model.tokenizer)
        if call.stream:
            source = events(call, generation, answer)
            return EventStream(source, self._live, self._config.send_timeout_s)
        choices = await self._live.attend(request.receive, _collected(call, generation))
        whole = answer.whole(choices, generation.usage)
        return Response(whole, media_type="application/json")


async def _collected(call: Call, generation: Generation) -> list[Piece]:
    """Every choice in one piece."""
    choices: list[list[Piece]] = [[] for _ in call.requests]
    async with aclosing(generation.pieces()) as pieces:
        async for piece in pieces:
            choices[piece.index].append(piece)
    return [Piece.joined(choice) for choice in choices]
