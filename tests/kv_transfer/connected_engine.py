"""An engine on the hash model with a connector: what it computes, loads, and leaves behind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from engine import Engine, PipelinedEngine
from kv_transfer import BlockLayout, BlockPoolMemory, KVConnector
from protocol import SamplingParams
from scheduler import CacheConfig, Request, Scheduler, SchedulerConfig, SchedulerStats
from tests.hash_model import HashRunner, expected_tokens, hash_kv_cache

BLOCK = 16  # tokens
BLOCK_BYTES = hash_kv_cache(2, BLOCK).bytes_per_block
_MAX_STEPS = 5_000


@dataclass
class ConnectedEngine:
    """Runs requests, and compares them with what an undisturbed run gives."""

    engine: Engine
    scheduler: Scheduler
    runner: HashRunner

    @property
    def stats(self) -> SchedulerStats:
        return self.scheduler.stats

    def add(self, name: str, prompt: Sequence[int], max_tokens: int = 4) -> Request:
        request = Request(name, prompt, SamplingParams(max_tokens=max_tokens))
        self.scheduler.add_request(request)
        return request

    def step(self) -> None:
        self.engine.step()
        self.scheduler.check_integrity()

    def run_out(self) -> None:
        """Until nothing is computed, loaded or kept any more."""
        for _ in range(_MAX_STEPS):
            if not self.scheduler.has_requests():
                break
            self.step()
        assert not self.scheduler.has_requests(), list(self.scheduler.requests.values())
        counts = self.scheduler.block_counts()
        assert (counts.used, counts.quarantined) == (0, 0)

    def check(self, prompts: Mapping[str, Sequence[int]], max_tokens: int = 4) -> None:
        """Run these together; their tokens must be right."""
        requests = [self.add(name, prompt, max_tokens) for name, prompt in prompts.items()]
        self.run_out()
        sampling = SamplingParams(max_tokens=max_tokens)
        for request, prompt in zip(requests, prompts.values(), strict=True):
            assert request.output_token_ids == expected_tokens(prompt, sampling), request

    def reset(self) -> None:
        assert self.scheduler.reset_prefix_cache()


@contextmanager
def connected(
    connector: KVConnector, *, pipelined: bool, num_blocks: int = 64, **knobs: int
) -> Iterator[ConnectedEngine]:
    """An engine with this connector, and a prefix cache that is empty."""
    kv_cache = hash_kv_cache(num_blocks + 1, BLOCK)
    runner = HashRunner(kv_cache)
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 512} | knobs
    scheduler = Scheduler(
        SchedulerConfig(**settings),  # type: ignore[arg-type]
        CacheConfig(num_blocks=num_blocks + 1, block_size=BLOCK),
        connector,
    )
    make = PipelinedEngine if pipelined else Engine
    engine = make(scheduler, runner, connector)
    layout = BlockLayout(
        fingerprint="hash",
        dtype=kv_cache.dtype,
        block_size=BLOCK,
        num_layers=kv_cache.num_layers,
        num_kv_heads=kv_cache.num_kv_heads,
        head_dim=kv_cache.head_dim,
        bytes_per_block=kv_cache.bytes_per_block,
    )
    address = runner.pool.ctypes.data
    pool = BlockPoolMemory(layout, address, kv_cache.num_blocks, runner.pool)
    connector.register_kv_caches(pool, engine.activity.set)
    try:
        yield ConnectedEngine(engine, scheduler, runner)
    finally:
        engine.close()
        connector.shutdown()
