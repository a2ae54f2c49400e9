"""Random life: requests come, go, are aborted at every point of the hand-off; nothing is left."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from kv_transfer import MemoryHub, MemoryTransport, Transport
from protocol import HandoffTicket, SamplingParams, TokenStream
from tests.hash_cluster import HashCluster
from tests.hash_model import expected_tokens
from tests.slow_transport import SlowTransport

NUM_REQUESTS = 400  # in each run
CONCURRENCY = 12

# Where a request can be aborted: what its hand-off does next, or what its client has seen.
HANDOFF_POINTS = ("PrefillStarted", "Destination", "Write", "Written", "Commit")
CLIENT_POINTS = ("submitted", "first_token", "decoding")
POINTS = (*CLIENT_POINTS, *HANDOFF_POINTS)


@dataclass
class Plan:
    """One request, and where its client leaves, if it does."""

    prompt: list[int]
    sampling: SamplingParams
    leave_at: str | None
    reached: asyncio.Event = field(default_factory=asyncio.Event)


class Life:
    """Runs planned requests on one cluster; knows which hand-off is to be aborted where."""

    def __init__(self, seed: int, shape: dict[str, Any]) -> None:
        self.random = random.Random(seed)
        self.plans: dict[str, Plan] = {}
        self.aborted: Counter[str] = Counter()
        self.completed = 0
        self.cluster = HashCluster(make_transport=self._make_transport, **shape)
        self._prefixes = [self._tokens(48) for _ in range(3)]

    def _make_transport(self, hub: MemoryHub, name: str) -> Transport:
        delays = random.Random(name)
        delay: Callable[[str], float] = lambda _: delays.choice((0, 0, 0.0005, 0.002))  # noqa: E731
        return SlowTransport(MemoryTransport(hub, name), delay, self._on_point)

    def _on_point(self, point: str, ticket: HandoffTicket) -> None:
        """Called from the nodes' threads."""
        plan = self.plans.get(ticket.request_id)
        if plan is not None and plan.leave_at == point:
            self.loop.call_soon_threadsafe(plan.reached.set)

    def _tokens(self, count: int) -> list[int]:
        return self.random.choices(range(2, 50_000), k=count)

    def _plan(self) -> Plan:
        prefix = self.random.choice([[], *self._prefixes])
        prompt = [*prefix, *self._tokens(self.random.choice((1, 7, 16, 33, 90)))]
        sampling = SamplingParams(max_tokens=self.random.choice((1, 2, 5, 30)))
        if self.random.random() < 0.2:  # ends early, sometimes with the first token
            outputs = expected_tokens(prompt, sampling)
            sampling = SamplingParams(
                max_tokens=sampling.max_tokens, stop_token_ids=(self.random.choice(outputs),)
            )
        leave_at = self.random.choice(POINTS) if self.random.random() < 0.5 else None
        return Plan(prompt, sampling, leave_at)

    async def run(self) -> None:
        self.loop = asyncio.get_running_loop()
        async with self.cluster.running():
            seats = asyncio.Semaphore(CONCURRENCY)

            async def live() -> None:
                async with seats:
                    await self._live(self._plan())

            await asyncio.wait_for(asyncio.gather(*(live() for _ in range(NUM_REQUESTS))), 120)

    async def _live(self, plan: Plan) -> None:
        self.plans[f"r{len(self.plans)}"] = plan
        stream = await self.cluster.submit(plan.prompt, plan.sampling)
        if plan.leave_at == "submitted":
            plan.reached.set()
        reading = asyncio.create_task(self._read(stream, plan))
        leaving = asyncio.create_task(plan.reached.wait())
        await asyncio.wait({reading, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if plan.reached.is_set() and not reading.done():
            assert plan.leave_at is not None
            self.aborted[plan.leave_at] += 1
            reading.cancel()
            await stream.aclose()
        else:
            assert await reading == expected_tokens(plan.prompt, plan.sampling)
            self.completed += 1
        leaving.cancel()
        await asyncio.gather(reading, leaving, return_exceptions=True)

    @staticmethod
    async def _read(stream: TokenStream, plan: Plan) -> list[int]:
        tokens: list[int] = []
        async for chunk in stream:
            tokens.extend(chunk.token_ids)
            here = "first_token" if len(tokens) == 1 else "decoding"
            if plan.leave_at == here and chunk.finish_reason is None:
                plan.reached.set()
                await asyncio.Event().wait()  # until it has been made to leave
        return tokens


@pytest.mark.parametrize(
    "shape",
    [
        {"num_blocks": 64},
        {"num_blocks": 20, "max_num_batched_tokens": 16, "max_num_seqs": 4},
        {"num_blocks": 32, "prefill": 2, "decode": 2},
    ],
    ids=["roomy", "tight", "2x2"],
)
async def test_whatever_happens_nothing_is_left(shape: dict[str, Any]) -> None:
    life = Life(seed=1, shape=shape)
    await life.run()  # checks blocks, jobs, threads, tasks and descriptors at its end
    assert life.completed + sum(life.aborted.values()) == NUM_REQUESTS
    assert life.completed > NUM_REQUESTS / 4
    assert set(life.aborted) == set(POINTS), life.aborted
