"""Clients that ask one thing after another, and look at every token that they get."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

import httpx

from protocol import GenerationRequest, KvrelayError, SamplingParams
from router import Dispatcher
from tests.hash_model import VOCABULARY, expected_tokens

_numbers = itertools.count()
_TIMEOUT_S = 90.0

Ask = Callable[[Sequence[int], int], AsyncIterator[Sequence[int]]]


class GatewayGone(Exception):
    """The connection was reset, or nobody took it."""


def through(dispatcher: Dispatcher) -> Ask:
    """A gateway in this process."""

    async def ask(prompt: Sequence[int], num_tokens: int) -> AsyncIterator[Sequence[int]]:
        request = GenerationRequest(
            request_id=f"load-{os.getpid()}-{next(_numbers)}",
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(max_tokens=num_tokens),
            arrival_time=time.time(),
        )
        stream = await dispatcher.submit(request)
        try:
            async for chunk in stream:
                yield chunk.token_ids
        finally:
            await stream.aclose()

    return ask


def over_http(client: httpx.AsyncClient, url: str, model: str) -> Ask:
    """Gateways on Ray."""

    async def ask(prompt: Sequence[int], num_tokens: int) -> AsyncIterator[Sequence[int]]:
        body = {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
        }
        try:
            async with client.stream("POST", f"{url}/completions", json=body) as answer:
                if answer.status_code != 200:
                    raise AssertionError(f"{answer.status_code}: {await answer.aread()!r}")
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        yield _token_ids(json.loads(line.removeprefix("data: ")))
        except httpx.TransportError as error:
            raise GatewayGone(repr(error)) from error

    return ask


def _token_ids(event: dict[str, object]) -> Sequence[int]:
    assert "error" not in event, event
    choices = event["choices"]
    assert isinstance(choices, list)
    ids = [number for choice in choices for number in choice.get("token_ids") or ()]
    text = "".join(choice["text"] for choice in choices)
    assert [int(word) for word in text.split()] == ids, event
    return ids


@dataclass(frozen=True)
class Limits:
    """What requests are like."""

    prompt: tuple[int, int] = (8, 120)
    tokens: tuple[int, int] = (8, 48)


class Load:
    """So many clients at a time, from `start` to `stop`. Client n uses the n-th way to ask."""

    def __init__(
        self,
        ways: Sequence[Ask],
        seed: int,
        *,
        concurrency: int = 16,
        limits: Limits | None = None,
    ) -> None:
        self.num_served = 0
        self.num_resets = 0
        self.problems: list[str] = []
        self.gateways_die = False
        self._ways = ways
        self._limits = limits or Limits()
        self._chances = [random.Random(f"{seed}/{number}") for number in range(concurrency)]
        self._concurrency = concurrency
        self._ending = False
        self._clients: list[asyncio.Task[None]] = []
        self._with_token: set[int] = set()
        self._busy = asyncio.Event()
        self._enough = 0
        self._served_enough = asyncio.Event()

    async def __aenter__(self) -> Load:
        self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        if error[0] is None:
            await self.stop()
        for client in self._clients:
            client.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)

    def start(self) -> None:
        self._ending = False
        self._with_token.clear()
        self._busy.clear()
        self._clients = [
            asyncio.create_task(self._client(number)) for number in range(self._concurrency)
        ]

    async def busy(self) -> None:
        """Until all clients have had a token."""
        async with asyncio.timeout(_TIMEOUT_S):
            await self._busy.wait()
        assert not self.problems, self.problems

    async def more(self, num_requests: int) -> None:
        """Until so many more were answered."""
        self._enough = self.num_served + num_requests
        self._served_enough.clear()
        async with asyncio.timeout(_TIMEOUT_S):
            await self._served_enough.wait()
        assert not self.problems, self.problems

    async def stop(self) -> None:
        """Let the last requests end. Raises AssertionError: one was not answered as it had to."""
        self._ending = True
        await asyncio.gather(*self._clients)
        self._clients = []
        assert not self.problems, "\n".join(self.problems)

    async def _client(self, number: int) -> None:
        chance = self._chances[number]
        ask = self._ways[number % len(self._ways)]
        while not self._ending and not self.problems:
            prompt = _prompt(chance, self._limits)
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    await self._ask(number, ask, prompt, chance.randint(*self._limits.tokens))
                self._note_served()
            except GatewayGone as error:
                self.num_resets += 1
                if not self.gateways_die:
                    self.problems.append(f"client {number}: {error}")
                await asyncio.sleep(0.05)  # nobody may listen for a moment
            except (KvrelayError, TimeoutError, AssertionError) as error:
                self.problems.append(f"client {number}: {error!r}")
        if self.problems:
            self._busy.set()
            self._served_enough.set()  # nobody waits for what does not come

    async def _ask(self, client: int, ask: Ask, prompt: Sequence[int], num_tokens: int) -> None:
        expected = expected_tokens(prompt, SamplingParams(max_tokens=num_tokens))
        so_far: list[int] = []
        async with contextlib.aclosing(ask(prompt, num_tokens)) as chunks:  # type: ignore[type-var]
            async for ids in chunks:
                so_far += ids
                assert so_far == expected[: len(so_far)], (
                    f"{len(so_far)} of {num_tokens} tokens of a prompt of {len(prompt)}: "
                    f"{so_far} are not {expected}"
                )
                self._note_token(client)
        assert so_far == expected, f"the answer ends after {len(so_far)} of {num_tokens} tokens"

    def _note_served(self) -> None:
        self.num_served += 1
        if self.num_served >= self._enough:
            self._served_enough.set()

    def _note_token(self, client: int) -> None:
        self._with_token.add(client)
        if len(self._with_token) == self._concurrency:
            self._busy.set()


def _prompt(chance: random.Random, limits: Limits) -> list[int]:
    """Every third one begins as others do."""
    length = chance.randint(*limits.prompt)
    fresh = chance.choices(range(2, VOCABULARY), k=length)
    if chance.random() < 1 / 3:
        common = random.Random(chance.randint(0, 3)).choices(range(2, VOCABULARY), k=48)
        return [*common, *fresh][: max(length, 49)]
    return fresh
