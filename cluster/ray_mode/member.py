"""One process of a cluster: started, watched, and started again when it ends.

make ─► start ─► ready ─► … it ends, or does not answer ─► backoff ─► make …
                   └─ restart: drained, stopped, made again
                   └─ leave: drained, stopped, for good
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from cluster.eventually import eventually
from cluster.ray_config import RayConfig
from cluster.ray_mode.spec import (
    Answer,
    MemberReport,
    MemberState,
    NodeStarted,
    Started,
    unpack_or_raise,
)
from protocol import KvrelayError, NodeInfo, NodeLost

logger = logging.getLogger(__name__)

Actor = Any  # a handle on one of ours

_FIRST_BACKOFF_S = 0.2
_LAST_BACKOFF_S = 10.0
_LONG_LIFE_S = 60.0  # after which an end is not held against it
_STOP_TIMEOUT_S = 40.0  # a node gives its engine 30 s
_GONE_TIMEOUT_S = 10.0


class Member:
    """Supervises an actor. `make` places and makes it; `find` gives the one that is there."""

    def __init__(
        self,
        name: str,
        kind: str,
        config: RayConfig,
        *,
        find: Callable[[], Actor | None],
        make: Callable[[], Awaitable[Actor]],
        max_restarts: int | None = None,
        drain_s: float | None = None,
    ) -> None:
        """`drain_s`: what a node's requests get before it stops; None: it has none."""
        self.name = name
        self.kind = kind
        self.state = MemberState.STARTING
        self.restarts = 0
        self.problem = ""
        self.host = ""
        self.pid = 0
        self.url = ""
        self.info: NodeInfo | None = None
        self._config = config
        self._find = find
        self._make = make
        self._max_restarts = max_restarts
        self._drain_s = drain_s
        self._actor: Actor | None = None
        self._order = asyncio.Event()  # to leave, or to restart
        self._leaving = False
        self._first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ready = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name=f"member {name}")

    @property
    def report(self) -> MemberReport:
        return MemberReport(
            name=self.name,
            kind=self.kind,
            state=self.state,
            host=self.host,
            pid=self.pid,
            restarts=self.restarts,
            problem=self.problem,
            url=self.url,
            info=self.info,
        )

    # ------------------------------------------------------------------ for the controller

    async def first_start(self) -> None:
        """Returns when it is ready for the first time. Raises what kept it from that."""
        await asyncio.shield(self._first)

    async def wait_ready(self) -> None:
        """Returns when it is ready; at once, if it is."""
        await self._ready.wait()

    async def ask(self, method: str, *args: object, timeout_s: float | None) -> Answer:
        """Raises NodeLost, TimeoutError, and what the actor says that it could not do."""
        if self._actor is None or self.state is not MemberState.READY:
            raise NodeLost(f"{self.name} is not running ({self.state})")
        return unpack_or_raise(await _call(self._actor, method, *args, timeout_s=timeout_s))

    async def restart(self) -> None:
        """Drain it, stop it and make it again; returns when it is ready."""
        self._ready.clear()
        self._order.set()
        if self.state is MemberState.FAILED:
            self.restarts = 0
            self._task = asyncio.create_task(self._run(), name=f"member {self.name}")
        await self.wait_ready()

    async def leave(self, drain_s: float | None = None) -> None:
        """Drain it and stop it. Returns when its process is gone."""
        if drain_s is not None and self._drain_s is not None:
            self._drain_s = drain_s
        self._leaving = True
        self._order.set()
        if self.state is MemberState.STARTING:  # it has nothing to drain, and may take minutes
            self._task.cancel()
        await asyncio.wait({self._task})

    # ------------------------------------------------------------------ its life

    async def _run(self) -> None:
        backoff_s = _FIRST_BACKOFF_S
        while not self._leaving:
            began = time.monotonic()
            ordered = await self._live_noting_problems()
            if ordered or self._leaving:
                continue
            if time.monotonic() - began > _LONG_LIFE_S:
                backoff_s = _FIRST_BACKOFF_S
            self.restarts += 1
            if self._max_restarts is not None and self.restarts > self._max_restarts:
                self.state = MemberState.FAILED
                logger.error(
                    "%s is not started again: %d times are enough", self.name, self._max_restarts
                )
                return
            self.state = MemberState.BACKOFF
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(backoff_s):
                    await self._order.wait()
            backoff_s = min(2 * backoff_s, _LAST_BACKOFF_S)

    async def _live_noting_problems(self) -> bool:
        """Whether its life ended because it was ordered to."""
        try:
            return await self._live()
        except (KvrelayError, TimeoutError) as error:
            self.problem = str(error)
            logger.error("%s: %s", self.name, error)
            if not self._first.done():
                named = NodeLost(f"{self.name}: {error}") if type(error) is NodeLost else error
                self._first.set_exception(named)
                self._first.exception()  # asked for or not, it has been logged
            return False
        finally:
            self._ready.clear()

    async def _live(self) -> bool:
        """From a process to none. True: as ordered. Raises what it died of."""
        self.state = MemberState.STARTING
        self._actor = actor = self._find() or await self._make()
        async with contextlib.AsyncExitStack() as on_failure:
            on_failure.push_async_callback(self._kill, actor)
            await self._start(actor)
            self._be_ready()
            ordered = await self._watch(actor)
            on_failure.pop_all()
        if ordered:
            await self._stop(actor)
        return ordered

    async def _start(self, actor: Actor) -> None:
        timeout_s = self._config.start_timeout_s
        try:
            data = await _call(actor, "start", timeout_s=timeout_s)
        except TimeoutError as error:
            raise NodeLost(
                f"it was not ready within {timeout_s:g} s (ray.start_timeout_s)"
            ) from error
        match unpack_or_raise(data):
            case NodeStarted(info, host, pid):
                self.info, self.host, self.pid = info, host, pid
            case Started(url, host, pid):
                self.url, self.host, self.pid = url, host, pid
            case other:
                raise AssertionError(other)

    def _be_ready(self) -> None:
        if not self._leaving:
            self._order.clear()
        self.state = MemberState.READY
        self._ready.set()
        if not self._first.done():
            self._first.set_result(None)

    async def _watch(self, actor: Actor) -> bool:
        """Until an order comes: True. Raises NodeLost when it ends or does not answer."""
        ended = asyncio.ensure_future(_call(actor, "run", timeout_s=None))
        ordered = asyncio.create_task(self._order.wait())
        try:
            while True:
                done, _ = await asyncio.wait(
                    {ended, ordered},
                    timeout=self._config.health_interval_s,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if ended in done:
                    raise NodeLost(ended.result())
                if ordered in done:
                    return True
                await self._check_health(actor)
        finally:
            for waiting in (ended, ordered):
                waiting.cancel()
            await asyncio.gather(ended, ordered, return_exceptions=True)

    async def _check_health(self, actor: Actor) -> None:
        try:
            await _call(actor, "ping", timeout_s=self._config.health_timeout_s)
        except TimeoutError as error:
            raise NodeLost(
                f"it has not answered for {self._config.health_timeout_s:g} s"
            ) from error

    async def _stop(self, actor: Actor) -> None:
        self.state = MemberState.LEAVING
        try:
            if self._drain_s is not None:
                await _call(actor, "drain", self._drain_s, timeout_s=self._drain_s + 30)
            await _call(actor, "stop", timeout_s=_STOP_TIMEOUT_S)
        except (NodeLost, TimeoutError) as error:
            logger.warning("%s did not stop in order: %s", self.name, error)
        await self._kill(actor)

    async def _kill(self, actor: Actor) -> None:
        """Returns when Ray has noticed its end."""
        with contextlib.suppress(RayError):
            ray.kill(actor, no_restart=True)
        await eventually(lambda: self._find() is None, within_s=_GONE_TIMEOUT_S)


async def _call(actor: Actor, method: str, *args: object, timeout_s: float | None) -> Any:
    """Raises NodeLost, in words of ours; TimeoutError."""
    try:
        async with asyncio.timeout(timeout_s):
            return await getattr(actor, method).remote(*args)
    except RayTaskError as error:  # a bug of ours, which has a traceback
        raise NodeLost(f"{method} failed: {error.cause!r}") from error
    except RayActorError as error:
        raise NodeLost(describe_death(error)) from error
    except RayError as error:
        raise NodeLost(f"{method} was not answered: {_first_line(error)}") from error


_EXIT = re.compile(r"Worker exit type: \w+ Worker exit detail: (.*?\.)(?:\s|$)")


def describe_death(error: RayActorError) -> str:
    """Why an actor is dead, in a sentence of Ray's many."""
    text = " ".join(str(error).split())
    if "its node has died" in text or "The node with node id" in text:  # Ray's word for a host
        return "its host is gone"
    if "connection error code 2" in text:  # so Ray says of one that closed its socket unasked
        return "its process was killed, or has crashed"
    found = _EXIT.search(text)
    return f"its process has ended: {found.group(1) if found else _first_line(error)}"


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
