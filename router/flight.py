"""One request on its way, from admission to its last token: the `TokenStream` of a client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from protocol import (
    Delta,
    GenerationRequest,
    HandoffTicket,
    KvrelayError,
    RequestAborted,
    RequestFailed,
    Timeline,
    TokenChunk,
)
from router.admission import Lease
from router.token_log import TokenLog


class Flight:
    """The token log of a request and the attempt that adds to it.

    Only the current attempt is listened to; whatever an earlier one still says is stale. Iterating
    gives all tokens that are new, so a slow reader gets larger chunks and nothing piles up.
    """

    def __init__(
        self,
        request: GenerationRequest,
        lease: Lease,
        abandon: Callable[[Flight], Awaitable[None]],
        stall_timeout_s: float,
    ) -> None:
        self.request = request
        self.lease = lease
        self.attempt = 0
        self.failed_nodes: set[str] = set()
        self.nodes: frozenset[str] = frozenset()  # of this attempt
        self.open_nodes: set[str] = set()  # of those, whose last delta is to come
        self.starting = asyncio.Lock()  # held until all nodes of an attempt have answered
        self.timeline = Timeline(arrived=request.arrival_time)
        self.num_cached_tokens = 0
        self.log = TokenLog()
        self._abandon = abandon
        self._stall_timeout_s = stall_timeout_s
        self._num_read = 0
        self._changed = asyncio.Event()
        self._last: Delta | None = None
        self._error: KvrelayError | None = None
        self._closed = False

    # ------------------------------------------------------------------ the client's side

    @property
    def request_id(self) -> str:
        return self.request.request_id

    def __aiter__(self) -> AsyncIterator[TokenChunk]:
        return self._read()

    async def _read(self) -> AsyncIterator[TokenChunk]:
        while True:
            chunk = await self._next_chunk()
            yield chunk
            if chunk.finish_reason is not None:
                return

    async def _next_chunk(self) -> TokenChunk:
        """Raises the error that ended the request, once all tokens are read."""
        while self._num_read == len(self.log.emitted) and not self.ended:
            self._changed.clear()
            try:
                # Not `wait_for`, which loses a cancellation that comes together with a token.
                async with asyncio.timeout(self._stall_timeout_s):
                    await self._changed.wait()
            except TimeoutError:
                await self.aclose()
                raise RequestFailed(f"no token for {self._stall_timeout_s:g} s") from None
        tokens = tuple(self.log.emitted[self._num_read :])
        self._num_read += len(tokens)
        if self._last is not None:
            return TokenChunk(
                token_ids=tokens,
                finish_reason=self._last.finish_reason,
                stop_token_id=self._last.stop_token_id,
            )
        if self._error is not None and not tokens:
            raise self._error
        return TokenChunk(token_ids=tokens)

    async def aclose(self) -> None:
        """Stop now, on all nodes."""
        if not self._closed:
            self._closed = True
            if not self.ended:
                await self._abandon(self)

    # ------------------------------------------------------------------ the dispatcher's side

    @property
    def ticket(self) -> HandoffTicket:
        return HandoffTicket(self.request_id, self.attempt)

    @property
    def ended(self) -> bool:
        return self._last is not None or self._error is not None

    def listens_to(self, ticket: HandoffTicket) -> bool:
        """Whether this is the attempt that is under way."""
        return ticket == self.ticket and not self.ended

    def take(self, delta: Delta) -> bool:
        """A delta of the current attempt; whether the request has ended with it."""
        if delta.num_cached_tokens is not None and not self.log.emitted:
            self.num_cached_tokens = delta.num_cached_tokens
        if delta.timeline is not None:
            self.timeline.merge(delta.timeline)
        if delta.token_ids or delta.finish_reason is not None:
            self._log_tokens(delta)
        return self.ended

    def _log_tokens(self, delta: Delta) -> None:
        for due in self.log.add(delta):
            if due.finish_reason is not None:
                self._last = due
                break
        self._changed.set()

    def next_attempt(self) -> None:
        """Start over behind the tokens that are emitted."""
        self.attempt += 1
        self.open_nodes = set()
        self.log.forget_ahead()

    def fail(self, error: KvrelayError) -> None:
        """End the request unhappily."""
        if not self.ended:
            self._error = error
            self._changed.set()

    def abort(self) -> None:
        self.fail(RequestAborted(f"request {self.request_id} was cancelled"))
