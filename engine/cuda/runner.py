"""The runner of a CUDA device: it launches steps, and never waits for the device to do so.

    launch(n)     books, packing │ copy │ plan │ kernels or a graph │ sampling │ copy back │ event
    launch(n+1)   the same, while n is computed: tokens that n samples are on the device by then
    result(n)     waits for the event

All goes through one `Stream`, so whatever a step writes is there for the next. Decodes of up to a
number of sequences are padded to the size of a CUDA graph; any other batch is launched kernel by
kernel. The host waits at two places only: for the step before the last, whose staging memory is
used again; and, if a request is penalized for the tokens that it has, for these tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from engine.cuda.attention_backend import AttentionBackend
from engine.cuda.decode_graphs import DecodeGraphs, DecodeWork, graph_sizes
from engine.cuda.kv_writer import KVWriter
from engine.cuda.launched_step import LaunchedStep
from engine.cuda.packed_step import PackedStep
from engine.cuda.seats import Seats
from engine.cuda.staging import Arrays, Staged, StagingRing
from engine.cuda.stream import Stream
from engine.kv_cache import KVCache
from engine.models import CausalLM
from engine.runner_request import RunnerRequest, RunnerRequests
from engine.sampling import choose, row_logprobs
from protocol import ConfigError
from scheduler import ModelRunnerOutput, SchedulerOutput


@dataclass(frozen=True, kw_only=True)
class CudaRunnerConfig:
    """The scheduler's limits, which bound all memory, and what is captured.

    Raises ConfigError: something is not positive.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_graph_seqs: int = 256  # decodes of more are launched kernel by kernel; 0: no graphs

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise ConfigError(name, f"must be positive: {getattr(self, name)}")
        if self.max_graph_seqs < 0:
            raise ConfigError("max_graph_seqs", f"must not be negative: {self.max_graph_seqs}")


class CudaRunner:
    """See `engine.loop.LaunchingRunner` and `LayeredRunner`. One thread launches."""

    def __init__(
        self,
        model: CausalLM,
        kv_cache: KVCache,
        stream: Stream,
        backend: AttentionBackend,
        config: CudaRunnerConfig,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`dtype`: of the model's hidden states, if not that of the KV cache."""
        self.model = model
        self.kv_cache = kv_cache
        self.backend = backend
        self.on_layer: Callable[[int], None] | None = None  # see `engine.loop.LayeredRunner`
        self._stream = stream
        self._requests = RunnerRequests()
        max_blocks = -(-config.max_model_len // kv_cache.config.block_size)
        self._seats = Seats(config.max_num_seqs, max_blocks)
        # What each seat's request has sampled last.
        self._last_tokens = torch.zeros(
            config.max_num_seqs, dtype=torch.int64, device=stream.device
        )
        self._ring = StagingRing(stream, _ring_bytes(config, max_blocks))
        self._unsettled: deque[LaunchedStep] = deque()  # whose tokens the requests lack
        self._num_launched = 0
        self._dtype = dtype or kv_cache.tensor.dtype
        self.decodes = self._make_decodes(config)

    # ------------------------------------------------------------------ steps

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        return self.launch(step).result()

    def launch(self, step: SchedulerOutput) -> LaunchedStep:
        while self._unsettled and self._unsettled[0].computed:
            self._unsettled.popleft().settle()
        self._requests.update(step)
        self._seats.update(step, self._requests)
        if not step.num_scheduled_tokens:
            return self._nothing()
        if any(_needs_tokens(self._requests[i]) for i in step.num_scheduled_tokens):
            self._settle_all()
        packed = PackedStep.of(
            step.num_scheduled_tokens,
            self._requests,
            self._seats,
            self.kv_cache.config.block_size,
        )
        return self._launch(packed)

    def _nothing(self) -> LaunchedStep:
        launched = LaunchedStep(self._num_launched, ())
        launched.no_more_layers()
        launched.end(self._stream.record())
        return launched

    def _settle_all(self) -> None:
        while self._unsettled:
            self._unsettled.popleft().settle()

    def _launch(self, packed: PackedStep) -> LaunchedStep:
        size = self.decodes.size_for(packed.num_seqs) if packed.is_decode else None
        self._num_launched += 1
        launched = LaunchedStep(self._num_launched, packed.sampled)
        launched.watch_layers(self.on_layer, self.kv_cache.config.num_layers)
        sampling = _Sampling.of(packed.sampled)
        packed = packed if size is None else packed.padded(size)
        with self._ring.stage(self._arrays(packed)) as staged:
            if size is None:
                self._stream.submit(lambda: self._ragged(packed, staged, sampling, launched))
            else:
                self.decodes.work(size).attention.plan(packed, staged)
                launched.no_more_layers()
                self._stream.submit(lambda: self._decode(size, staged, sampling, launched))
        launched.end(self._stream.record())
        launched.reserve()
        self._unsettled.append(launched)
        return launched

    def _arrays(self, packed: PackedStep) -> Arrays:
        inputs = packed.inputs(self.kv_cache)
        return {**inputs, **self.backend.arrays(packed), **packed.outputs()}

    # ------------------------------------------------------------------ on the device

    @torch.inference_mode()
    def _ragged(
        self, packed: PackedStep, staged: Staged, sampling: _Sampling, launched: LaunchedStep
    ) -> None:
        try:
            on_written = None if self.on_layer is None else partial(self._written, launched)
            writer = KVWriter(self.kv_cache, staged.device, on_written)
            attention = self.backend.ragged(packed, staged, writer)
            tokens = self._input_ids(staged.device)
            hidden = self.model.forward(tokens, staged.device["positions"], attention)
        finally:
            launched.no_more_layers()
        self._sample(hidden, staged, sampling, launched)

    def _written(self, launched: LaunchedStep, layer: int) -> None:
        launched.layer_written(self._stream.record())

    @torch.inference_mode()
    def _decode(
        self, size: int, staged: Staged, sampling: _Sampling, launched: LaunchedStep
    ) -> None:
        self.decodes.run(size)
        self._sample(self.decodes.work(size).hidden, staged, sampling, launched)

    def _input_ids(self, staged: Mapping[str, Tensor]) -> Tensor:
        """Tokens that the host does not know are where their seats are."""
        token_ids = staged["token_ids"]
        return torch.where(token_ids < 0, self._last_tokens[staged["token_seats"]], token_ids)

    def _sample(
        self, hidden: Tensor, staged: Staged, sampling: _Sampling, launched: LaunchedStep
    ) -> None:
        if not sampling.requests:
            return
        logits = self.model.compute_logits(hidden[staged.device["sampled_rows"]])
        tokens = sampling.choose(logits)
        self._last_tokens.index_copy_(0, staged.device["sampled_seats"], tokens)
        wanted = [request.sampling.logprobs for request in sampling.requests]
        launched.fetch(self._stream, tokens, row_logprobs(logits, tokens, wanted))

    # ------------------------------------------------------------------ decodes of fixed sizes

    def _make_decodes(self, config: CudaRunnerConfig) -> DecodeGraphs:
        if not config.max_graph_seqs:
            return DecodeGraphs(self._stream, {})
        sizes = graph_sizes(config.max_num_seqs, config.max_graph_seqs)
        hidden = torch.zeros(
            (sizes[-1], self.model.config.hidden_size),
            dtype=self._dtype,
            device=self._stream.device,
        )
        work = {size: self._decode_work(size, hidden[:size]) for size in sizes}
        return DecodeGraphs(self._stream, work)

    def _decode_work(self, size: int, hidden: Tensor) -> DecodeWork:
        arrays = self._arrays(_idle(size))
        # Of these no data is read, only where it will lie.
        staged = Staged({}, self._ring.views(arrays))
        attention = self.backend.decode(size, staged, KVWriter(self.kv_cache, staged.device))

        @torch.inference_mode()
        def forward() -> None:
            tokens = self._input_ids(staged.device)
            positions = staged.device["positions"]
            hidden.copy_(self.model.forward(tokens, positions, attention))

        return DecodeWork(attention, forward, hidden)

    def capture(self) -> None:
        """Capture all graphs, which takes seconds; the null block is written to.

        Without this decodes give the same numbers, launched kernel by kernel.
        """
        for size in reversed(self.decodes.sizes):
            packed = _idle(size)
            with self._ring.stage(self._arrays(packed)) as staged:
                self.decodes.work(size).attention.plan(packed, staged)
                self.decodes.capture(size)


@dataclass(frozen=True)
class _Sampling:
    """Who samples and how, as it was when the step was launched."""

    requests: tuple[RunnerRequest, ...]
    positions: tuple[int, ...]

    @classmethod
    def of(cls, requests: tuple[RunnerRequest, ...]) -> _Sampling:
        for request in requests:
            if request.adjuster is not None:
                request.adjuster.catch_up(request.token_ids)
        return cls(requests, tuple(request.output_position for request in requests))

    def choose(self, logits: Tensor) -> Tensor:
        return choose(
            logits,
            [request.sampling for request in self.requests],
            self.positions,
            [request.adjuster for request in self.requests],
        )


def _needs_tokens(request: RunnerRequest) -> bool:
    """Whether it can be sampled only if the host knows all of its tokens."""
    return request.adjuster is not None and request.adjuster.counts is not None


def _idle(size: int) -> PackedStep:
    """A decode that nobody asked for."""
    return PackedStep.nothing().padded(size)


def _ring_bytes(config: CudaRunnerConfig, max_blocks: int) -> int:
    """What the arrays of a step take at most, with room for their alignment."""
    num_tokens = max(config.max_num_batched_tokens, config.max_num_seqs + _PADDING_SEQS)
    num_seqs = config.max_num_seqs + _PADDING_SEQS
    return 8 * 7 * num_tokens + 4 * num_seqs * (max_blocks + 6) + _ALIGNMENT_BYTES


_PADDING_SEQS = 8  # a decode may be padded by so many
_ALIGNMENT_BYTES = 1024
