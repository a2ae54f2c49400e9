"""Does what the scheduler decided: computes the tokens of a step and samples the next ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention import AttentionMetadata, CpuAttention
from engine.core_share import CoreShare
from engine.kv_cache import KVCache
from engine.models import CausalLM
from engine.sampler import sample
from protocol import SamplingParams
from scheduler import ModelRunnerOutput, NewRequestData, SchedulerOutput


@dataclass
class _RunnerRequest:
    """The runner's own copy of a request; it appends what it sampled itself."""

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    block_ids: list[int]
    num_computed_tokens: int

    @property
    def output_position(self) -> int:
        """The place that the next token will have in the output."""
        return len(self.token_ids) - self.num_prompt_tokens


@dataclass(frozen=True)
class _Batch:
    """The packed tokens of one step, and whose last token is among them."""

    input_ids: Tensor  # [num_tokens]
    metadata: AttentionMetadata
    sampled: list[_RunnerRequest]
    sampled_rows: Tensor  # [num_sampled] rows of the packed tokens


class ModelRunner:
    """One model with one KV cache. Not thread-safe; several runners may share the model."""

    def __init__(self, model: CausalLM, kv_cache: KVCache, cores: CoreShare | None = None) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.on_layer: Callable[[int], None] | None = None  # see `engine.loop.LayeredRunner`
        self._cores = cores or CoreShare()
        self._requests: dict[str, _RunnerRequest] = {}

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step. Without scheduled tokens there is only the bookkeeping to do."""
        self._update_requests(step)
        if not step.num_scheduled_tokens:
            return ModelRunnerOutput()
        with self._cores.step():
            batch = self._prepare(step.num_scheduled_tokens)
            attention = CpuAttention(self.kv_cache, batch.metadata, self.on_layer)
            hidden = self.model.forward(batch.input_ids, batch.metadata.positions, attention)
            return ModelRunnerOutput(sampled_token_ids=self._sample(hidden, batch))

    def _update_requests(self, step: SchedulerOutput) -> None:
        for request_id in (*step.finished_req_ids, *step.preempted_req_ids):
            self._requests.pop(request_id, None)
        for new in (*step.scheduled_new_reqs, *step.scheduled_resumed_reqs):
            self._requests[new.request_id] = _known(new)
        for diff in step.scheduled_cached_reqs:
            request = self._requests[diff.request_id]
            request.block_ids.extend(diff.new_block_ids)
            request.num_computed_tokens = diff.num_computed_tokens
            del request.token_ids[diff.num_tokens :]

    def _prepare(self, num_scheduled_tokens: dict[str, int]) -> _Batch:
        requests = [self._requests[request_id] for request_id in num_scheduled_tokens]
        query_lens = list(num_scheduled_tokens.values())
        input_ids: list[int] = []
        ends: list[int] = []
        sampled: list[tuple[_RunnerRequest, int]] = []
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
            sampled_rows=torch.tensor([row for _, row in sampled]),
        )

    def _sample(self, hidden: Tensor, batch: _Batch) -> dict[str, Sequence[int]]:
        if not batch.sampled:
            return {}
        tokens = sample(
            self.model.compute_logits(hidden[batch.sampled_rows]),
            [request.sampling for request in batch.sampled],
            [request.output_position for request in batch.sampled],
        )
        for request, token in zip(batch.sampled, tokens, strict=True):
            request.token_ids.append(token)
        return {
            request.request_id: (token,)
            for request, token in zip(batch.sampled, tokens, strict=True)
        }


def _known(new: NewRequestData) -> _RunnerRequest:
    return _RunnerRequest(
        request_id=new.request_id,
        token_ids=list(new.token_ids),
        num_prompt_tokens=new.num_prompt_tokens,
        sampling=new.sampling,
        block_ids=list(new.block_ids),
        num_computed_tokens=new.num_computed_tokens,
    )
