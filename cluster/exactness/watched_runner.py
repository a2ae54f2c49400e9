"""A node's runner under observation: what it computed, and what was computed with it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cluster.exactness.comparison import LogitSink
from engine.model_runner import ModelRunner
from protocol import Role
from scheduler import ModelRunnerOutput, SchedulerOutput

_LAYER_S = 0.001  # a small model is faster than messages, and no layer would travel by itself


class WatchedRunner:
    """A `LayeredRunner`. All but `is_computing` is read when the node has stopped."""

    def __init__(
        self, runner: ModelRunner, role: Role, logits: LogitSink, step_s: float = 0.0
    ) -> None:
        """`step_s`: how long a step takes at least."""
        self.role = role
        self.most_requests = 0  # in a step
        self.pieces: dict[str, list[int]] = defaultdict(list)  # tokens, but for single ones
        self.sampled: set[str] = set()  # requests
        self.threads: set[int] = set()  # numbers of threads that have computed a step
        self._runner = runner
        self._logits = logits
        self._step_s = step_s
        self._on_layer: Callable[[int], None] | None = None
        self._computing: frozenset[str] = frozenset()  # with more than a token
        runner.on_logits = self._note

    @property
    def on_layer(self) -> Callable[[int], None] | None:
        return self._on_layer

    @on_layer.setter
    def on_layer(self, told: Callable[[int], None] | None) -> None:
        self._on_layer = told
        self._runner.on_layer = None if told is None else self._tell

    def is_computing(self, request_id: str) -> bool:
        """Whether a part of this prompt is being computed."""
        return request_id in self._computing

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        tokens = step.num_scheduled_tokens
        self.most_requests = max(self.most_requests, len(tokens))
        parts = {request_id: number for request_id, number in tokens.items() if number > 1}
        for request_id, number in parts.items():
            self.pieces[request_id].append(number)
        self._computing = frozenset(request_id.partition("/")[0] for request_id in parts)
        until = time.monotonic() + self._step_s if tokens else 0.0
        try:
            return self._runner.execute(step)
        finally:
            self._computing = frozenset()
            time.sleep(max(0.0, until - time.monotonic()))

    def _note(self, rows: Sequence[tuple[str, int]], logits: Tensor) -> None:
        self.threads.add(torch.get_num_threads())
        self.sampled.update(request_id.partition("/")[0] for request_id, _ in rows)
        self._logits.note(rows, logits)

    def _tell(self, layer: int) -> None:
        assert self._on_layer is not None
        if self._computing:
            time.sleep(_LAYER_S)
        self._on_layer(layer)
