"""One end of a hand-off, in a process of its own: P computes prompts, D what follows them.

    python -m benchmarks._gpu_node (prefill|decode) MODEL BLOCK_SIZE NUM_BLOCKS [--cpu]

prints its endpoint, reads a line of JSON (`Order`), carries it out, prints what came of it
(`Outcome`), and ends. KV goes by nixl, from the memory of a device into that of the same one.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks._gpu_machine import CpuMachine, CudaMachine, Machine, kv_cache_on
from engine import PipelinedEngine, StepRunner
from engine.cuda import CudaRunnerConfig
from engine.kv_cache import KVCache
from engine.model_runner import ModelRunner
from engine.models import CausalLM
from kv_transfer import BlockLayout, BlockPoolMemory, EventKind, HandoffConnector
from kv_transfer.peering import ClusterToken
from kv_transfer.transports.nixl import NixlTransport
from protocol import HandoffTicket, SamplingParams
from scheduler import CacheConfig, Request, Scheduler, SchedulerConfig

LIMITS = CudaRunnerConfig(max_num_seqs=8, max_num_batched_tokens=4096, max_model_len=4096)
TOKEN = "of this benchmark only"
_PATIENCE_S = 60.0


@dataclass(frozen=True)
class Order:
    peer: str  # its endpoint
    prompts: list[list[int]]  # one after the other
    max_tokens: int


@dataclass(frozen=True)
class Outcome:
    tokens: list[list[int]]  # that each request has generated here; D's without the first
    num_loaded: int  # tokens of prompts whose KV has come
    num_bytes: int  # that were pushed
    push_s: float  # from the first byte of each hand-off to its end, summed up


class Node:
    """A scheduler, a runner and a connector."""

    def __init__(
        self, name: str, machine: Machine, model: CausalLM, num_blocks: int, block_size: int
    ) -> None:
        self.connector = HandoffConnector(NixlTransport(name, ClusterToken(TOKEN)), time.monotonic)
        kv_cache = kv_cache_on(machine, model, num_blocks, block_size)
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=LIMITS.max_num_seqs,
                max_num_batched_tokens=LIMITS.max_num_batched_tokens,
                max_model_len=LIMITS.max_model_len,
            ),
            CacheConfig(num_blocks=num_blocks, block_size=block_size, enable_prefix_caching=False),
            self.connector,
        )
        runner = _runner(machine, model, kv_cache)
        self.engine = PipelinedEngine(self.scheduler, runner, self.connector, name=name)
        self.connector.register_kv_caches(_pool(machine, kv_cache), self.engine.activity.set)
        self.endpoint = self.connector._transport.endpoint
        self.tokens: dict[str, list[int]] = {}

    def prefill(self, ticket: HandoffTicket, peer: str, prompt: Sequence[int]) -> None:
        self.connector.add_source(ticket, peer, time.time())
        self._run(ticket, prompt, 1)

    def decode(
        self, ticket: HandoffTicket, peer: str, prompt: Sequence[int], max_tokens: int
    ) -> None:
        started = self.connector.add_sink(ticket, peer)
        deadline = time.monotonic() + _PATIENCE_S
        while not started:
            assert time.monotonic() < deadline, "the prefill node does not start"
            self._step()
            events = self.connector.take_events()
            started = any(event.kind is EventKind.STARTED for event in events)
        self._run(ticket, prompt, max_tokens)

    def _run(self, ticket: HandoffTicket, prompt: Sequence[int], max_tokens: int) -> None:
        """Until the request has ended, and its blocks have been pushed, if they are to be."""
        name = str(ticket)
        self.tokens[name] = []
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        self.scheduler.add_request(Request(name, list(prompt), sampling))
        deadline = time.monotonic() + _PATIENCE_S
        while self.scheduler.has_requests() or name in self.connector.sources:
            assert time.monotonic() < deadline, "the hand-off does not end"
            self._step()
            for event in self.connector.take_events():
                assert event.reason is None, event

    def _step(self) -> None:
        result = self.engine.step()
        for update in result.updates:
            self.tokens[update.request.request_id] += update.new_token_ids
        if not result.progressed:
            self.engine.activity.wait(0.005)
            self.engine.activity.clear()

    def outcome(self) -> Outcome:
        counts = self.connector.counts()
        return Outcome(
            list(self.tokens.values()),
            self.scheduler.stats.prompt_loaded,
            counts.bytes,
            counts.seconds,
        )

    def close(self) -> None:
        self.engine.close()
        self.connector.shutdown()


def _runner(machine: Machine, model: CausalLM, kv_cache: KVCache) -> StepRunner:
    if isinstance(machine, CudaMachine):
        return machine.runner(model, kv_cache, LIMITS, graphs=True)
    return ModelRunner(model, kv_cache)


def _pool(machine: Machine, kv_cache: KVCache) -> BlockPoolMemory:
    config = kv_cache.config
    layout = BlockLayout(
        fingerprint="benchmark",
        dtype=config.dtype,
        block_size=config.block_size,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        bytes_per_block=config.bytes_per_block,
    )
    return BlockPoolMemory(
        layout,
        kv_cache.base_address,
        config.num_blocks,
        kv_cache,
        device=machine.device,
        copier=machine.copier,
    )


def ticket_of(number: int) -> HandoffTicket:
    return HandoffTicket(f"r{number}", 0)


def carry_out(node: Node, role: str, order: Order) -> Outcome:
    for number, prompt in enumerate(order.prompts):
        if role == "prefill":
            node.prefill(ticket_of(number), order.peer, prompt)
        else:
            node.decode(ticket_of(number), order.peer, prompt, order.max_tokens)
    return node.outcome()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=["prefill", "decode"])
    parser.add_argument("model", type=Path)
    parser.add_argument("block_size", type=int)
    parser.add_argument("num_blocks", type=int)
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    machine: Machine = CpuMachine() if options.cpu else CudaMachine()
    model = machine.load(options.model)
    node = Node(options.role, machine, model, options.num_blocks, options.block_size)
    print(node.endpoint, flush=True)
    outcome = carry_out(node, options.role, Order(**json.loads(sys.stdin.readline())))
    print(json.dumps(asdict(outcome)), flush=True)
    sys.stdin.readline()  # the peer may still need us
    node.close()


if __name__ == "__main__":
    main()
