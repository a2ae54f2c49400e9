"""One request on its way, from admission to its last token: the `TokenStream` of a client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

from protocol import (
    Delta,
    Failure,
    GenerationRequest,
    HandoffTicket,
    KvrelayError,
    RequestAborted,
    RequestFailed,
    Role,
    Timeline,
    TokenChunk,
    TransferFailed,
)
from router.admission import Lease
from router.path import Path, path_between
from router.roster import Member
from router.setbacks import Setbacks
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
        setbacks: Setbacks,
    ) -> None:
        self.request = request
        self.lease = lease
        self.setbacks = setbacks
        self.attempt = 0
        self.failed_nodes: set[str] = set()
        self.failed_paths: set[Path] = set()
        self.doubts: dict[str, str] = {}  # a decode node → the prefill node that may be to blame
        self.decode_node_id: str | None = None  # that has had a part of it, and has not failed
        self.members: Mapping[str, Member] = {}  # the nodes of this attempt
        self.reserved_at: Member | None = None  # may keep blocks of an attempt that has failed
        self.open_nodes: set[str] = set()  # of those, whose last delta is to come
        self.starting = asyncio.Lock()  # held until all nodes of an attempt have answered
        self.timeline = Timeline(arrived=request.arrival_time)
        self.num_cached_tokens = 0
        self.log = TokenLog()
        self.settled = asyncio.Event()  # the KV of its prompt is where it is decoded; or it ended
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
        logprobs = tuple(self.log.logprobs[self._num_read :])
        self._num_read += len(tokens)
        if self._last is not None:
            return TokenChunk(
                token_ids=tokens,
                finish_reason=self._last.finish_reason,
                stop_token_id=self._last.stop_token_id,
                logprobs=logprobs,
            )
        if self._error is not None and not tokens:
            raise self._error
        return TokenChunk(token_ids=tokens, logprobs=logprobs)

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
        # One token from each node: the prefill node's own, and the first behind the hand-off.
        if self.ended or len(self.log.emitted) >= len(self.members):
            self.settled.set()
        self._changed.set()

    def begin_attempt(self, members: Mapping[str, Member], decode_node_id: str) -> None:
        """These nodes get its jobs."""
        self.members, self.open_nodes = members, set(members)
        self.decode_node_id = decode_node_id if decode_node_id in members else None

    def is_open_at(self, member: Member) -> bool:
        """Whether this very member has something to say yet."""
        node_id = member.node_id
        return node_id in self.open_nodes and self.members[node_id] is member

    def take_open(self) -> list[Member]:
        """The members that have something to say yet. Nothing of it will count."""
        members = [self.members[node_id] for node_id in self.open_nodes]
        self.open_nodes = set()
        return members

    def keep_reservation(self, member: Member) -> None:
        """The attempt is over, but this decode node need not give up what it has for it.

        The next attempt takes it over; or goes elsewhere, and then the node has to be told.
        """
        if not (member.lost.is_set() or member.silent):
            self.open_nodes.discard(member.node_id)
            self.reserved_at = member

    def leave_reservation(self, goes_on_at: Sequence[Member] = ()) -> list[Member]:
        """Where one is kept that nobody goes on with: what is there is to be ended.

        A node that goes on does that by itself, also if it was connected anew meanwhile.
        """
        member, self.reserved_at = self.reserved_at, None
        if member is None or any(member.node_id == other.node_id for other in goes_on_at):
            return []
        return [member]

    def blame(self, member: Member, failure: Failure) -> None:
        """Remember who is to be avoided for what has failed.

        Whoever noticed that a transfer failed, it failed between the two, or on their path. If it
        turns out that the prefill node has ended, the decode node is as good as ever.
        """
        prefill = next((m for m in self.members.values() if m.role is Role.PREFILL), None)
        if failure.label == TransferFailed.label and prefill is not None:
            self.failed_nodes.add(prefill.node_id)
            for other in self.members.values():
                if other is not prefill:
                    self.doubts[other.node_id] = prefill.node_id
                    self.failed_paths.add(path_between(prefill.info, other.info))
            return
        self.failed_nodes.add(member.node_id)
        if self.decode_node_id == member.node_id:
            self.decode_node_id = None

    def forgive(self, node_id: str) -> None:
        """It is not the node any more that it was."""
        self.failed_nodes.discard(node_id)
        self.doubts.pop(node_id, None)

    def blamed(self, connected: frozenset[str]) -> frozenset[str]:
        """Nodes to avoid, while these are connected."""
        doubtful = {node_id for node_id, other in self.doubts.items() if other in connected}
        return frozenset(self.failed_nodes | doubtful)

    def next_attempt(self) -> None:
        """Start over behind the tokens that are emitted."""
        self.attempt += 1
        self.open_nodes = set()
        self.log.forget_ahead()

    def fail(self, error: KvrelayError) -> None:
        """End the request unhappily."""
        if not self.ended:
            self._error = error
            self.settled.set()
            self._changed.set()

    def abort(self) -> None:
        self.fail(RequestAborted(f"request {self.request_id} was cancelled"))
