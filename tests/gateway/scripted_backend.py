"""A backend that says what it is told to, and remembers how it was treated.

It is honest about what the gateway relies on: it ends at `max_tokens`, at an end-of-text token and
at stop tokens, it delivers every token once, `aclose` stops it, and iterating after that fails.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

from protocol import (
    ClusterStatus,
    FinishReason,
    GenerationRequest,
    KvrelayError,
    PauseMode,
    RequestAborted,
    SamplingParams,
    Timeline,
    TokenChunk,
    TokenLogprobs,
)
from tests.gateway.byte_tokenizer import ids


@dataclass(frozen=True)
class Script:
    """What the model says to one request; it says it again and again until something ends it."""

    answer: tuple[int, ...] = ids("hello ")
    chunk_tokens: int = 1
    delay_s: float = 0.0  # before each chunk
    num_cached_tokens: int = 0
    refusal: KvrelayError | None = None  # raised by submit
    failure: Exception | None = None  # raised once `fail_after` tokens have been delivered
    fail_after: int = 0
    hang_after: int | None = None  # tokens after which nothing comes any more


class ScriptedStream:
    """One request under way."""

    def __init__(self, request: GenerationRequest, script: Script) -> None:
        self.request = request
        self.timeline = Timeline(arrived=request.arrival_time, routed=time.time())
        self.num_cached_tokens = 0
        self.num_delivered = 0
        self.ended = False  # said everything
        self.closed = asyncio.Event()
        self._script = script

    @property
    def request_id(self) -> str:
        return self.request.request_id

    async def __aiter__(self) -> AsyncIterator[TokenChunk]:
        for chunk in _chunks(self._script, self.request.sampling):
            await self._fail_or_hang()
            await self._pause()
            self.num_cached_tokens = self._script.num_cached_tokens
            self.timeline.last_token = time.time()
            self.timeline.first_token = self.timeline.first_token or self.timeline.last_token
            self.num_delivered += len(chunk.token_ids)
            self.ended = chunk.finish_reason is not None
            if self.ended:
                self.timeline.finished = time.time()
            yield chunk

    async def aclose(self) -> None:
        self.closed.set()

    async def _pause(self) -> None:
        await asyncio.sleep(self._script.delay_s)
        if self.closed.is_set():
            raise RequestAborted("this stream was closed")

    async def _fail_or_hang(self) -> None:
        script = self._script
        if script.failure is not None and self.num_delivered >= script.fail_after:
            raise script.failure
        if script.hang_after is not None and self.num_delivered >= script.hang_after:
            await self.closed.wait()
            raise RequestAborted("this stream was closed")


class ScriptedBackend:
    """Answers each request by its script; `script` is one for all, or chooses."""

    def __init__(
        self,
        script: Script | Callable[[GenerationRequest], Script] = Script(),
        status: ClusterStatus | None = None,
    ) -> None:
        self._script = script
        self._status = status or ClusterStatus(
            nodes=(), num_requests=0, decisions={}, retries={}, rejected={}
        )
        self.streams: list[ScriptedStream] = []
        self.orders: list[str] = []  # to the whole cluster

    @property
    def requests(self) -> list[GenerationRequest]:
        return [stream.request for stream in self.streams]

    async def submit(self, request: GenerationRequest) -> ScriptedStream:
        script = self._script if isinstance(self._script, Script) else self._script(request)
        if script.refusal is not None:
            raise script.refusal
        stream = ScriptedStream(request, script)
        self.streams.append(stream)
        return stream

    async def status(self) -> ClusterStatus:
        return self._status

    async def pause(self, mode: PauseMode) -> dict[str, bool]:
        return self._note(f"pause {mode}")

    async def resume(self) -> dict[str, bool]:
        return self._note("resume")

    async def reset_prefix_cache(self, *, reset_running_requests: bool) -> dict[str, bool]:
        return self._note(f"reset {reset_running_requests}")

    def _note(self, order: str) -> dict[str, bool]:
        self.orders.append(order)
        return {report.info.node_id: report.status is not None for report in self._status.nodes}

    def assert_nothing_left(self) -> None:
        """Every stream that was started has been closed or has said everything."""
        assert [s.request_id for s in self.streams if not (s.closed.is_set() or s.ended)] == []


def scripted_logprobs(token: int, number: int) -> TokenLogprobs:
    """The token is the likeliest, and those with the next ids follow, each less likely."""
    places = range(number)
    return TokenLogprobs(
        -0.5, tuple(token + i for i in places), tuple(-0.5 - 0.25 * i for i in places)
    )


def _chunks(script: Script, sampling: SamplingParams) -> Iterator[TokenChunk]:
    said: list[int] = []
    for position in range(sampling.max_tokens):
        token = script.answer[position % len(script.answer)]
        said.append(token)
        stop = token in sampling.stop_token_ids
        if stop or token in sampling.eos_token_ids:
            reason: FinishReason | None = FinishReason.STOP
        else:
            reason = FinishReason.LENGTH if position + 1 == sampling.max_tokens else None
        if reason is not None or len(said) == script.chunk_tokens:
            yield TokenChunk(
                token_ids=tuple(said),
                finish_reason=reason,
                stop_token_id=token if stop else None,
                logprobs=()
                if sampling.logprobs is None
                else tuple(scripted_logprobs(token, sampling.logprobs) for token in said),
            )
            said.clear()
        if reason is not None:
            return
