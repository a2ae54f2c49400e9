"""A model without weights whose tokens depend on every slot of the KV cache that it reads.

    KV of a token     mix(token, position, layer), written into its slot of each layer
    next token        mix over the KV of all slots of the request, read back from its blocks

So one wrong, stale or missing block anywhere changes what comes out, and the right answer can be
computed without any cache. It runs the whole cluster at thousands of steps a second.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cluster import NodeCompute
from engine import KVCacheConfig
from engine.weights import ModelConfig, ModelFiles
from protocol import Role, SamplingParams
from scheduler import ModelRunnerOutput, NewRequestData, SchedulerOutput

VOCABULARY = 50_000
EOS = 1  # rare; tests that want it choose a prompt that ends with it

_A, _B, _C = (np.uint64(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))

_HALF, _BITS = np.uint64(0xFFFFFFFF), np.uint64(32)

Slots = NDArray[np.uint64]


def _mix(values: Slots) -> Slots:
    """SplitMix64's finaliser."""
    mixed = (values ^ (values >> np.uint64(30))) * _B
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _C
    return mixed ^ (mixed >> np.uint64(31))


LAYERS = 3


def kv_of(tokens: Sequence[int], start: int) -> Slots:
    """What the slots of `tokens` hold, `[LAYERS, num_tokens]`, the first at position `start`."""
    positions = np.arange(start, start + len(tokens), dtype=np.uint64)
    layers = np.arange(LAYERS, dtype=np.uint64)[:, None]
    return _mix(np.asarray(tokens, dtype=np.uint64) * _A + positions * _C + layers * _A + _B)


def next_token(slots: Slots) -> int:
    """The token that follows, from the KV of all tokens so far, `[LAYERS, num_tokens]`."""
    weights = np.arange(1, slots.size + 1, dtype=np.uint64).reshape(slots.shape) * _A
    return int(_mix(np.atleast_1d(_mix(slots + weights).sum(dtype=np.uint64)))[0] % VOCABULARY)


def hash_kv_cache(num_blocks: int, block_size: int = 16) -> KVCacheConfig:
    """A pool for the hash model; `num_blocks` includes the null block."""
    return KVCacheConfig(
        num_blocks=num_blocks,
        block_size=block_size,
        num_layers=LAYERS,
        num_kv_heads=1,
        head_dim=1,
    )


def expected_tokens(prompt: Sequence[int], sampling: SamplingParams) -> list[int]:
    """What an undisturbed run gives."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < sampling.max_tokens:
        tokens.append(next_token(kv_of(tokens, 0)))
        if tokens[-1] in sampling.eos_token_ids or tokens[-1] in sampling.stop_token_ids:
            break
    return tokens[len(prompt) :]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """A prompt without the special token; another one for each length and seed."""
    return random.Random(f"{length}/{seed}").choices(range(2, VOCABULARY), k=length)


@dataclass(eq=False)
class _Known:
    tokens: list[int]
    blocks: list[int]
    computed: int


class HashRunner:
    """A `StepRunner` on a pool of its own, or in `buffer`.

    The pool is `[num_blocks, LAYERS, 2, block_size]`: the keys hold the lower half of a slot's
    number, the values the upper one. `step_s` lets a step take as long as one would.
    """

    def __init__(
        self, kv_cache: KVCacheConfig, step_s: float = 0.0, buffer: memoryview | None = None
    ) -> None:
        shape = (kv_cache.num_blocks, LAYERS, 2, kv_cache.block_size)
        self.pool: NDArray[np.uint32] = (
            np.zeros(shape, dtype=np.uint32)
            if buffer is None
            else np.frombuffer(buffer, np.uint32, math.prod(shape)).reshape(shape)
        )
        assert self.pool[0].nbytes == kv_cache.bytes_per_block
        self.step_s = step_s
        self.on_layer: Callable[[int], None] | None = None
        self._known: dict[str, _Known] = {}

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        for request_id in (*step.finished_req_ids, *step.preempted_req_ids):
            self._known.pop(request_id, None)
        for new in (*step.scheduled_new_reqs, *step.scheduled_resumed_reqs):
            self._known[new.request_id] = self._know(new)
        for diff in step.scheduled_cached_reqs:
            known = self._known[diff.request_id]
            known.blocks.extend(diff.new_block_ids)
            known.computed = diff.num_computed_tokens
            del known.tokens[diff.num_tokens :]
        counts = {self._known[i]: count for i, count in step.num_scheduled_tokens.items()}
        for known, count in counts.items():
            known.computed += count
        for layer in range(LAYERS if counts else 0):
            if self.step_s:
                time.sleep(self.step_s / LAYERS)
            for known, count in counts.items():
                self._write(known, count, layer)
            if self.on_layer is not None:
                self.on_layer(layer)
        return ModelRunnerOutput(
            {
                request_id: [self._sample(self._known[request_id])]
                for request_id, count in step.num_scheduled_tokens.items()
                if self._known[request_id].computed == len(self._known[request_id].tokens)
            }
        )

    @staticmethod
    def _know(new: NewRequestData) -> _Known:
        return _Known(list(new.token_ids), list(new.block_ids), new.num_computed_tokens)

    def _slots(self, known: _Known) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        size = self.pool.shape[3]
        positions = np.arange(known.computed)
        return np.asarray(known.blocks)[positions // size], positions % size

    def _write(self, known: _Known, count: int, layer: int) -> None:
        start = known.computed - count
        blocks, offsets = self._slots(known)
        values = kv_of(known.tokens[start : known.computed], start)[layer]
        self.pool[blocks[start:], layer, 0, offsets[start:]] = values & _HALF
        self.pool[blocks[start:], layer, 1, offsets[start:]] = values >> _BITS

    def _sample(self, known: _Known) -> int:
        blocks, offsets = self._slots(known)
        halves = self.pool[blocks, :, :, offsets].astype(np.uint64)
        token = next_token((halves[:, :, 0] | halves[:, :, 1] << _BITS).T)
        known.tokens.append(token)
        return token


HASH_MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    hidden_act="silu",
    attention_bias=False,
    mlp_bias=False,
    bos_token_id=None,
    eos_token_ids=(EOS,),
    hidden_size=2,
    intermediate_size=1,
    num_layers=LAYERS,
    num_attention_heads=1,
    num_kv_heads=1,
    head_dim=1,
    vocab_size=VOCABULARY,
    rope_theta=1.0,
    rms_norm_eps=1e-6,
    max_position_embeddings=1 << 20,
    tie_word_embeddings=True,
)


def hash_files() -> ModelFiles:
    """The hash model as far as a cluster wants to know it: there are no files."""
    return ModelFiles(
        name="hash",
        directory=Path("nowhere"),
        config=HASH_MODEL,
        fingerprint="hash",
        eos_token_ids=(EOS,),
        bos_token_id=None,
    )


class HashComputeFactory:
    """Makes a runner for each node, and keeps them in the order of the nodes."""

    def __init__(self, num_blocks: int, block_size: int = 16, step_s: float = 0.0) -> None:
        self._kv_cache = hash_kv_cache(num_blocks + 1, block_size)
        self._step_s = step_s
        self.runners: list[HashRunner] = []

    def __call__(self, role: Role) -> NodeCompute:
        runner = HashRunner(self._kv_cache, self._step_s)
        self.runners.append(runner)
        return NodeCompute(runner, self._kv_cache, runner.pool.ctypes.data, runner.pool)
