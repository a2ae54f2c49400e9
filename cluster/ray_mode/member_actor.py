"""What all actors have in common: they start and end once, and say that they live."""

from __future__ import annotations

import asyncio
import os
import threading
from abc import ABC, abstractmethod
from typing import Generic, Protocol, TypeVar

from cluster.ray_mode.spec import Done, Failed, NodeStarted, Started, pack
from protocol import KvrelayError

_ANSWER_S = 0.1  # that the last answer may take to arrive


class Runs(Protocol):
    """What an actor has brought up."""

    async def stop(self) -> None: ...


RunningT = TypeVar("RunningT", bound=Runs)


class MemberActor(ABC, Generic[RunningT]):
    """Its methods are for the controller; they answer with packed messages, never with objects.

    Its constructor is quick, so that whoever has made it can ask it things; `start` takes the time.
    """

    def __init__(self) -> None:
        self._starting = asyncio.Lock()
        self._brought_up: RunningT | None = None

    @abstractmethod
    async def _bring_up(self) -> RunningT:
        """Raises KvrelayError, TimeoutError: what keeps it from that. Nothing is left then."""

    @abstractmethod
    def _describe(self) -> Started | NodeStarted:
        """Of what runs."""

    @property
    def _running(self) -> RunningT:
        assert self._brought_up is not None, "it was not started"
        return self._brought_up

    async def start(self) -> bytes:
        """What runs, once it does, or Failed. Asked again, it says the same."""
        async with self._starting:
            try:
                if self._brought_up is None:
                    self._brought_up = await self._bring_up()
            except (KvrelayError, TimeoutError) as error:
                return pack(Failed.of(error))
        return pack(self._describe())

    async def ping(self) -> None:
        """Whoever gets an answer knows that this process is alive, and has time."""

    async def stop(self) -> bytes:
        """End what runs, and the process soon after the answer.

        An actor that merely lets go of everything would stay, since a process of Ray waits for
        work.
        """
        async with self._starting:
            if self._brought_up is not None:
                await self._brought_up.stop()
        timer = threading.Timer(_ANSWER_S, os._exit, args=(0,))
        timer.daemon = True
        timer.start()
        return pack(Done())
