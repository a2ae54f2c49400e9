"""Does what the scheduler decided: computes the tokens of a step and samples the next ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention import AttentionMetadata, attend_with
from engine.core_share import Cores, CoreShare
from engine.kernels import Kernels, TorchKernels
from engine.kv_cache import KVCache
from engine.models import CausalLM
from engine.runner_request import RunnerRequest, RunnerRequests
from engine.sampling import sample, token_logprobs
from scheduler import ModelRunnerOutput, SchedulerOutput

# Called with (request id, output position) of each row, and `[num_rows, vocab_size]`, before
# anything that a request asks for is done to them.
OnLogits = Callable[[Sequence[tuple[str, int]], Tensor], None]


@dataclass(frozen=True)
class _Batch:
    """The packed tokens of one step, and whose last token is among them."""

    input_ids: Tensor  # [num_tokens]
    metadata: AttentionMetadata
    sampled: list[RunnerRequest]
    sampled_rows: Tensor  # [num_sampled] rows of the packed tokens


class ModelRunner:
    """One model with one KV cache. Not thread-safe; several runners may share the model."""

    def __init__(
        self,
        model: CausalLM,
        kv_cache: KVCache,
        cores: Cores | None = None,
        kernels: Kernels | None = None,
    ) -> None:
        """`kernels`: what the model computes with, by default plain torch."""
        self.model = model
        self.kv_cache = kv_cache
        self.on_layer: Callable[[int], None] | None = None  # see `engine.loop.LayeredRunner`
        self.on_logits: OnLogits | None = None  # called by the thread that computes
        self._cores = cores or CoreShare()
        self._make_attention = attend_with(kernels or TorchKernels(), kv_cache)
        self._requests = RunnerRequests()

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step. Without scheduled tokens there is only the bookkeeping to do."""
        self._requests.update(step)
        if not step.num_scheduled_tokens:
            return ModelRunnerOutput()
        with self._cores.step():
            batch = self._prepare(step.num_scheduled_tokens)
            attention = self._make_attention(batch.metadata, self.on_layer)
            wanted = batch.sampled_rows if len(batch.sampled) < len(batch.input_ids) else None
            hidden = self.model.forward(
                batch.input_ids, batch.metadata.positions, attention, wanted
            )
            return self._sample(hidden, batch)

    def _prepare(self, num_scheduled_tokens: dict[str, int]) -> _Batch:
        requests = [self._requests[request_id] for request_id in num_scheduled_tokens]
        query_lens = list(num_scheduled_tokens.values())
        input_ids: list[int] = []
        ends: list[int] = []
        sampled: list[tuple[RunnerRequest, int]] = []
        for request, query_len in zip(requests, query_lens, strict=True):
            start, end = request.num_computed_tokens, request.num_computed_tokens + query_len
            assert end <= len(request.token_ids), (request.request_id, end)
            input_ids += request.token_ids[start:end]
            ends.append(end)
            if end == len(request.token_ids):
                sampled.append((request, len(input_ids) - 1))
        return _Batch(
            input_ids=torch.tensor(input_ids),
            metadata=AttentionMetadata.build(
                query_lens,
                ends,
                [request.block_ids for request in requests],
                self.kv_cache.config.block_size,
            ),
            sampled=[request for request, _ in sampled],
            sampled_rows=torch.tensor([row for _, row in sampled], dtype=torch.int64),
        )

    def _sample(self, hidden: Tensor, batch: _Batch) -> ModelRunnerOutput:
        if not batch.sampled:
            return ModelRunnerOutput()
        logits = self.model.compute_logits(hidden)
        if self.on_logits is not None:
            self.on_logits([(r.request_id, r.output_position) for r in batch.sampled], logits)
        tokens = _next_tokens(logits, batch.sampled)
        wanted = [request.sampling.logprobs for request in batch.sampled]
        told = token_logprobs(logits, tokens, wanted)
        ids = [request.request_id for request in batch.sampled]
        return ModelRunnerOutput(
            sampled_token_ids={i: (token,) for i, token in zip(ids, tokens, strict=True)},
            logprobs={i: (its,) for i, its in zip(ids, told, strict=True) if its is not None},
        )


def _next_tokens(logits: Tensor, requests: Sequence[RunnerRequest]) -> list[int]:
    """One for each row of `logits`, which its request has from then on."""
    for request in requests:
        if request.adjuster is not None:
            request.adjuster.catch_up(request.token_ids)
    tokens = sample(
        logits,
        [request.sampling for request in requests],
        [request.output_position for request in requests],
        [request.adjuster for request in requests],
    )
    for request, token in zip(requests, tokens, strict=True):
        request.token_ids.append(token)
    return tokens
