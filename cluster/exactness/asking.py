"""Asks a cluster all prompts, in the manner that a way needs."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from cluster.engine_node import EngineNode
from cluster.exactness.prompts import Prompt
from cluster.local import LocalCluster
from protocol import GenerationRequest

_TIMES = 2  # that all are preempted
_SHARE = 4  # a node leaves when it has so many of all requests: a quarter


class Asking:
    """One cluster, and what it has answered by now."""

    def __init__(self, cluster: LocalCluster, prompts: Sequence[Prompt]) -> None:
        self.cluster = cluster
        self.prompts = prompts
        self.answers: dict[str, list[int]] = defaultdict(list)  # tokens of each request
        self._news = asyncio.Condition()

    @property
    def num_all(self) -> int:
        """Tokens, if each prompt is asked once."""
        return sum(prompt.sampling.max_tokens for prompt in self.prompts)

    def has_answered(self, num_tokens: int) -> bool:
        return sum(map(len, self.answers.values())) >= num_tokens

    async def ask(self, prompt: Prompt, time_number: int = 1) -> None:
        """Raises KvrelayError: it could not be answered."""
        request = GenerationRequest(
            request_id=f"{prompt.name}#{time_number}",
            prompt_token_ids=prompt.token_ids,
            sampling=prompt.sampling,
            arrival_time=time.time(),
        )
        stream = await self.cluster.dispatcher.submit(request)
        try:
            async for chunk in stream:
                async with self._news:
                    self.answers[request.request_id].extend(chunk.token_ids)
                    self._news.notify_all()
        finally:
            await stream.aclose()

    async def ask_all(self, time_number: int = 1) -> None:
        """At once. Raises KvrelayError: one of them could not be answered."""
        await _together([self.ask(prompt, time_number) for prompt in self.prompts])

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Look with each token, at the latest until all is answered."""
        async with self._news:
            await self._news.wait_for(lambda: condition() or self.has_answered(self.num_all))


Manner = Callable[[Asking], Awaitable[None]]


async def one_by_one(asking: Asking) -> None:
    for prompt in asking.prompts:
        await asking.ask(prompt)


async def at_once(asking: Asking) -> None:
    await asking.ask_all()


async def twice(asking: Asking) -> None:
    """The second time everything has been asked before, and other things since."""
    await asking.ask_all(1)
    await asking.ask_all(2)


async def while_nodes_leave(asking: Asking) -> None:
    """Decode nodes give away what they have, one after the other, and come back."""
    enough = len(asking.prompts) // _SHARE

    async def leave() -> None:
        for node in asking.cluster.decode_nodes:
            await asking.wait_for(partial(_runs, node, enough))
            await node.drain(0.0)
            await node.undrain()

    await _together([asking.ask_all(), leave()])


async def while_running_ones_make_room(asking: Asking) -> None:
    """All that run are preempted, again and again."""

    async def preempt() -> None:
        for number in range(1, _TIMES + 1):
            due = asking.num_all * number // (_TIMES + 1)
            await asking.wait_for(partial(asking.has_answered, due))
            await asking.cluster.dispatcher.reset_prefix_cache(reset_running_requests=True)

    await _together([asking.ask_all(), preempt()])


def _runs(node: EngineNode, num_requests: int) -> bool:
    """A decode node: what it runs is amid its output."""
    return node.host.status().num_running >= num_requests


async def _together(all_of: Sequence[Awaitable[None]]) -> None:
    """Raises the first error, when all others have been cancelled."""
    tasks = [asyncio.ensure_future(one) for one in all_of]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
