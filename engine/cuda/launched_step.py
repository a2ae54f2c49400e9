"""A step on its way through the device, and what comes back of it."""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from engine.cuda.stream import Event, Stream
from engine.runner_request import RunnerRequest
from engine.sampling import RowLogprobs, told_logprobs
from scheduler import ModelRunnerOutput

OnLayer = Callable[[int], None]


@dataclass(frozen=True)
class _Fetched:
    """In host memory, as soon as the device has got there."""

    tokens: Tensor  # [num_sampled]
    logprobs: RowLogprobs | None


class LaunchedStep:
    """See `engine.loop.StepHandle`.

    A request that samples in a step has, until the host knows the token, a number below 0 in its
    place: another one for each step, so that a token which does not count after all, because the
    scheduler went back behind it, is not mistaken for a later one in the same place.
    """

    def __init__(self, number: int, sampled: tuple[RunnerRequest, ...]) -> None:
        self._placeholder = -1 - number
        self._places = [(request, len(request.token_ids)) for request in sampled]
        self._fetched: _Fetched | None = None
        self._layers: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._end: Event | None = None
        self._on_layer: OnLayer | None = None
        self._unwritten_layers = range(0)

    def reserve(self) -> None:
        """Put placeholders behind the tokens of all that sample."""
        for request, _ in self._places:
            request.token_ids.append(self._placeholder)

    # ------------------------------------------------------------------ on the device

    def watch_layers(self, on_layer: OnLayer | None, num_layers: int) -> None:
        """Who reads the result tells `on_layer` of each layer that has been written by then."""
        self._on_layer = on_layer
        self._unwritten_layers = range(num_layers)

    def layer_written(self, event: Event) -> None:
        self._layers.put(event)

    def no_more_layers(self) -> None:
        """Of which it could be said sooner than of the whole step."""
        self._layers.put(None)

    def fetch(self, stream: Stream, tokens: Tensor, logprobs: RowLogprobs | None) -> None:
        """Queue the way back, within work."""
        if logprobs is not None:
            logprobs = RowLogprobs(
                stream.fetch(logprobs.own),
                stream.fetch(logprobs.top_ids),
                stream.fetch(logprobs.top_logprobs),
            )
        self._fetched = _Fetched(stream.fetch(tokens), logprobs)

    def end(self, event: Event) -> None:
        """All of it has been submitted; this comes behind."""
        self._end = event

    # ------------------------------------------------------------------ on the host

    def result(self) -> ModelRunnerOutput:
        """Returns when the step has been computed, and all that it wrote is there."""
        assert self._end is not None
        self._tell_layers()
        self._end.synchronize()
        for layer in self._unwritten_layers:
            if self._on_layer is not None:
                self._on_layer(layer)
        return self._output()

    def _tell_layers(self) -> None:
        if self._on_layer is None:
            return
        while (event := self._layers.get()) is not None:
            event.synchronize()
            self._on_layer(self._unwritten_layers[0])
            self._unwritten_layers = self._unwritten_layers[1:]

    def _output(self) -> ModelRunnerOutput:
        if self._fetched is None:
            return ModelRunnerOutput()
        ids = [request.request_id for request, _ in self._places]
        wanted = [request.sampling.logprobs for request, _ in self._places]
        told = told_logprobs(self._fetched.logprobs, wanted)
        tokens = self._fetched.tokens.tolist()
        return ModelRunnerOutput(
            sampled_token_ids={i: (token,) for i, token in zip(ids, tokens, strict=True)},
            logprobs={i: (its,) for i, its in zip(ids, told, strict=True) if its is not None},
        )

    @property
    def computed(self) -> bool:
        return self._end is not None and self._end.query()

    def settle(self) -> None:
        """Wait, and give the requests their tokens. For the thread that launches."""
        assert self._end is not None
        self._end.synchronize()
        if self._fetched is None:
            return
        for (request, place), token in zip(
            self._places, self._fetched.tokens.tolist(), strict=True
        ):
            tokens = request.token_ids
            if place < len(tokens) and tokens[place] == self._placeholder:
                tokens[place] = token
