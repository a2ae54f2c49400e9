"""Running a call: a token stream for each choice, merged into one stream of pieces."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing

import msgspec

from gateway.call import Call
from gateway.detokenizer import IncrementalDetokenizer
from gateway.merge import merge
from gateway.tokenizer import Tokenizer
from gateway.transcript import Piece, Transcript
from protocol import Backend, FinishReason, GenerationRequest, RequestFailed, TokenStream
from telemetry import Metrics


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Tokens of all choices of a call together; those of a prompt once, however many choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Generation:
    """The choices of one call while they are made."""

    def __init__(
        self, call: Call, backend: Backend, tokenizer: Tokenizer, metrics: Metrics
    ) -> None:
        self._call = call
        self._backend = backend
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._choices: list[_Choice] = []

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Submit every choice, then yield the pieces of all choices as they come.

        However this ends, and wherever it is closed, all token streams are closed with it.

        Raises:
            Overloaded, NoHealthyNode, InvalidRequest: a prompt was not admitted.
            RequestFailed: a choice ended unhappily.
        """
        async with AsyncExitStack() as streams:
            for index, request in enumerate(self._call.requests):
                stream = await self._backend.submit(request)
                streams.push_async_callback(stream.aclose)
                detokenizer = IncrementalDetokenizer(self._tokenizer)
                transcript = Transcript(
                    index,
                    detokenizer,
                    self._call.stop_strings,
                    min_tokens=request.sampling.min_tokens,
                    with_offsets=self._call.logprobs,
                )
                self._choices.append(_Choice(request, stream, transcript, self._metrics))
            async with aclosing(merge([choice.pieces() for choice in self._choices])) as pieces:
                async for piece in pieces:
                    yield piece

    @property
    def usage(self) -> Usage:
        firsts = [choice for choice in self._choices if choice.request.follows is None]
        prompt = sum(len(choice.request.prompt_token_ids) for choice in firsts)
        generated = sum(choice.num_generated for choice in self._choices)
        cached = sum(choice.stream.num_cached_tokens for choice in firsts)
        return Usage(prompt, generated, prompt + generated, PromptTokensDetails(cached))


class _Choice:
    def __init__(
        self,
        request: GenerationRequest,
        stream: TokenStream,
        transcript: Transcript,
        metrics: Metrics,
    ) -> None:
        self.request = request
        self.stream = stream
        self.num_generated = 0
        self._transcript = transcript
        self._metrics = metrics
        self._last_arrival: float | None = None

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        try:
            async for chunk in self.stream:
                self._clock()
                piece = self._transcript.add(chunk)
                self.num_generated += len(piece.token_ids)
                if chunk.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
                    raise RequestFailed(f"the request ended with {chunk.finish_reason.value!r}")
                if piece.finish_reason is not None and chunk.finish_reason is None:
                    await self.stream.aclose()  # a stop string: the nodes know nothing of it
                yield piece
                if piece.finish_reason is not None:
                    return
            raise RequestFailed("the tokens ended without a reason")
        finally:
            await self.stream.aclose()
            self._count()

    def _clock(self) -> None:
        now = time.perf_counter()
        if self._last_arrival is not None:
            self._metrics.tokens_arrived(now - self._last_arrival)
        self._last_arrival = now

    def _count(self) -> None:
        self._metrics.sequence_ended(
            self.stream.timeline,
            num_prompt_tokens=len(self.request.prompt_token_ids),
            num_cached_tokens=self.stream.num_cached_tokens,
            num_generated_tokens=self.num_generated,
        )
