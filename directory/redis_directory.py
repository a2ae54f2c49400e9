"""A directory on a Redis or Valkey server, for clusters of more than one process.

    caller's threads                     one thread                        server
    register  ──► OwnNodes ──┐
    heartbeat ──► (memory)   ├─ every 50 ms, one round trip:  write ─────► scripts
    publish   ──►            │                                read  ◄─────
    nodes     ◄── Follower ◄─┘
    drain     ◄── EventQueues

The thread polls, and does not block on the stream: one exchange over one connection carries all
news both ways, and events and records of one instant, which is what makes lost events certain
to be noticed. An interval of 50 ms is what a router's index may lag behind.

While the server is away, everything goes on with the last view. What nodes do meanwhile is kept,
bounded, and told when the server is back, with the registrations if it has lost them.
"""

from __future__ import annotations

import concurrent.futures
import logging
import random
import secrets
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from directory.directory import (
    DEFAULT_MAX_BATCHES,
    AlreadyClaimed,
    DirectoryUnavailable,
    NodeRecord,
)
from directory.event_queue import EventQueue, EventQueues
from directory.follower import Answer, Follower
from directory.own_nodes import OwnNodes, Telling
from directory.redis_config import RedisConfig
from directory.server_link import Command, LinkError, ServerLink, load_client
from directory.server_scripts import ServerScripts
from protocol import BlockEventBatch, NodeInfo, NodeStatus

HASTE_S = 0.002  # between exchanges while there is more than goes into one
MAX_BACKOFF_S = 1.0
MIN_BACKOFF_S = 0.05
IDLE_INTERVAL_S = 1.0  # between exchanges that have nothing to say, to know that the server lives
ROUND_TRIP_S = 3.0  # that `register` and `claim` wait, at most
CLOSE_S = 2.0  # for the last words
MIN_SLACK_S = 0.3  # between answers; a busy host is late at times, which is not yet an outage
MAX_REQUESTS = 64
_PING: Command = ("PING",)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Request:
    """A command of a caller who waits for its answer."""

    command: Command
    answer: Future[Any] = field(default_factory=Future)


class RedisDirectory:
    """Implements `Directory`. Start it; until then it remembers what it is told."""

    def __init__(self, config: RedisConfig) -> None:
        """Raises ConfigError: the client library is not installed."""
        load_client()
        self._config = config
        self._where = str(config.address)
        self._session = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._scripts = ServerScripts(
            config.key_prefix, config.retention_s, config.max_stream_entries
        )
        self._queues = EventQueues(self._lock)
        self._own = OwnNodes(self._scripts, self._session, config.max_unsent_batches)
        slack_s = max(MIN_SLACK_S, 2 * config.event_interval_s, 2 * config.status_interval_s)
        self._follower = Follower(self._scripts, self._queues, slack_s)
        self._requests: deque[_Request] = deque()
        self._syncs: list[Future[None]] = []
        self._wake = threading.Event()
        self._first_try: Future[None] = Future()
        self._closing = False
        self._available = False
        self._thread: threading.Thread | None = None
        self._link: ServerLink | None = None
        self._lost_at: float | None = None
        self._tries = 0
        self._num_tokens = 0
        self._full_at = float("-inf")
        self._spoke_at = float("-inf")

    def start(self, *, need_server: bool = True) -> None:
        """Raises ConfigError: the server cannot be used as configured; then nothing is left over.

        Without `need_server` it goes on trying instead.
        """
        assert self._thread is None
        assert not self._closing
        self._thread = threading.Thread(target=self._run, name="directory", daemon=True)
        self._thread.start()
        if need_server:
            try:
                self._first_try.result(ROUND_TRIP_S + 2 * self._config.io_timeout_s)
            except LinkError as error:
                self.close()
                raise error.as_config_error() from error
            except concurrent.futures.TimeoutError:
                self.close()
                problem = f"{self._where} does not answer in time"
                raise LinkError("url", problem).as_config_error() from None

    @property
    def available(self) -> bool:
        """Whether the server has answered the last time. Everything else goes on without it."""
        return self._available

    # --- Directory ---------------------------------------------------------------------------

    def register(self, info: NodeInfo, *, ttl_s: float) -> None:
        """Takes one round trip, or none while the server is away: it is told later.

        Then StaleGeneration comes with a heartbeat.
        """
        assert ttl_s > 0
        with self._lock:
            confirmed = self._own.register(info, ttl_s)
            if not self._available:
                return
        self._wake.set()
        try:
            confirmed.result(ROUND_TRIP_S)
        except concurrent.futures.TimeoutError:
            logger.warning("%s is slow to register %s; going on", self._where, info.node_id)

    def heartbeat(self, status: NodeStatus, *, generation: int) -> None:
        with self._lock:
            self._own.heartbeat(status, generation, time.monotonic())

    def deregister(self, node_id: str, *, generation: int) -> None:
        with self._lock:
            self._own.deregister(node_id, generation)

    def nodes(self) -> tuple[NodeRecord, ...]:
        assert self._config.follow
        with self._lock:
            return self._follower.records(time.monotonic())

    def publish(self, batch: BlockEventBatch, *, generation: int) -> None:
        with self._lock:
            self._own.publish(batch, generation)

    def subscribe(self, *, max_batches: int = DEFAULT_MAX_BATCHES) -> EventQueue:
        assert self._config.follow
        with self._lock:
            return self._queues.add(max_batches)

    def close(self) -> None:
        """Waits for the last words to be told, but not for long."""
        self._closing = True
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_S + 2 * self._config.io_timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def sync(self, timeout_s: float) -> bool:
        """Wait until the server has all that was told here, and all that it had is known here."""
        done: Future[None] = Future()
        with self._lock:
            self._syncs.append(done)
        self._wake.set()
        try:
            done.result(timeout_s)
        except concurrent.futures.TimeoutError:
            with self._lock:
                if done in self._syncs:
                    self._syncs.remove(done)
            return done.done()
        return True

    # --- who controls the cluster ------------------------------------------------------------

    def claim(self, owner: str, *, ttl_s: float) -> None:
        """The cluster of this key prefix is `owner`'s for so long; again, for so long from now.

        `owner` tells people who it is, and has to be another one for each who claims.

        Raises:
            AlreadyClaimed: it is another one's.
            DirectoryUnavailable: nobody knows now.
        """
        assert ttl_s > 0
        holder, remaining_ms = self._ask(self._scripts.claim(owner, ttl_s))
        if holder != owner.encode():
            name = self._config.key_prefix
            raise AlreadyClaimed(name, holder.decode(errors="replace"), remaining_ms / 1000)

    def renew(self, owner: str, *, ttl_s: float) -> None:
        """As `claim`, which it is: a server that has lost its data has lost the claim, too."""
        self.claim(owner, ttl_s=ttl_s)

    def release(self, owner: str) -> None:
        """Harmless if it is another one's. Raises DirectoryUnavailable."""
        self._ask(self._scripts.release(owner))

    def _ask(self, command: Command) -> Any:
        request = _Request(command)
        with self._lock:
            if not self._available or len(self._requests) == MAX_REQUESTS:
                raise DirectoryUnavailable(f"{self._where} cannot be asked now")
            self._requests.append(request)
        self._wake.set()
        try:
            return request.answer.result(ROUND_TRIP_S)
        except concurrent.futures.TimeoutError:
            raise DirectoryUnavailable(f"{self._where} does not answer in time") from None

    # --- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        pause_s = 0.0
        while not self._closing:
            self._wake.wait(pause_s)
            self._wake.clear()
            pause_s = self._turn()
        self._say_goodbye()

    def _turn(self) -> float:
        """Talk to the server once; returns how long to wait before the next time."""
        try:
            if self._link is None:
                self._link = ServerLink(self._config)
                self._full_at = float("-inf")
            more = self._exchange(self._link)
        except LinkError as error:
            return self._lost(error)
        self._found()
        return (
            min(HASTE_S, self._config.event_interval_s) if more else self._config.event_interval_s
        )

    def _exchange(self, link: ServerLink) -> bool:
        """One round trip. Returns whether there is more to say or to hear at once."""
        asked_at = time.monotonic()
        with self._lock:
            syncs = list(self._syncs)
            full = bool(syncs) or asked_at - self._full_at >= self._config.status_interval_s
            tellings = self._own.tellings(asked_at, with_status=full, check=bool(syncs))
            requests = list(self._requests)
            commands = [telling.command for telling in tellings]
            commands += [request.command for request in requests]
            if self._config.follow:
                commands.append(self._follower.question(self._token(), full=full))
        if not commands and not syncs and asked_at - self._spoke_at < IDLE_INTERVAL_S:
            return False
        answers = link.exchange(commands or [_PING])
        self._spoke_at = now = time.monotonic()
        if full:
            self._full_at = asked_at
        news = self._parsed(answers[-1]) if self._config.follow else None
        with self._lock:
            self._take(tellings, requests, answers, now)
            if news is not None:
                self._follower.take(news, asked_at, now)
                self._own.learn(self._follower.generations)
            heard = self._follower.caught_up or not self._config.follow
            told = self._own.all_told
            if heard and told:
                self._answer_syncs(syncs)
            in_haste = bool(syncs) or self._closing
            return not heard or self._own.in_haste or (in_haste and not told)

    def _answer_syncs(self, syncs: list[Future[None]]) -> None:
        for sync in syncs:
            if sync in self._syncs:  # who waited may have given up
                self._syncs.remove(sync)
                sync.set_result(None)

    def _parsed(self, answer: Any) -> Answer:
        """Without the lock: it may be much."""
        try:
            return Answer.parse(answer)
        except (ValueError, TypeError) as error:
            problem = f"{self._where} holds what this version cannot read: {error}"
            raise LinkError("key_prefix", problem) from error

    def _take(
        self, tellings: list[Telling], requests: list[_Request], answers: list[Any], now: float
    ) -> None:
        """With the lock held."""
        for telling, answer in zip(tellings, answers, strict=False):
            self._own.told(telling, answer, now)
        for request, answer in zip(requests, answers[len(tellings) :], strict=False):
            self._requests.popleft()
            request.answer.set_result(answer)

    def _lost(self, error: LinkError) -> float:
        """Returns how long to wait before the next try."""
        if self._link is not None:
            self._link.close()
            self._link = None
        with self._lock:
            if self._lost_at is None:
                self._lost_at = time.monotonic()
                logger.warning("the directory is away, going on without it: %s", error)
            self._available = False
            self._follower.expect_losses()
            self._own.expect_losses()
            self._refuse_requests()
        if not self._first_try.done():
            self._first_try.set_exception(error)
        backoff_s = min(MAX_BACKOFF_S, MIN_BACKOFF_S * 2.0**self._tries)
        self._tries = min(self._tries + 1, 16)
        return backoff_s * random.uniform(0.5, 1.0)  # not all at the same moment

    def _found(self) -> None:
        self._tries = 0
        if self._lost_at is not None:
            away_s = time.monotonic() - self._lost_at
            logger.warning("the directory at %s is back after %.1f s", self._where, away_s)
            self._lost_at = None
        self._available = True
        if not self._first_try.done():
            self._first_try.set_result(None)

    def _say_goodbye(self) -> None:
        deadline = time.monotonic() + CLOSE_S
        if self._link is not None:
            try:
                while self._exchange(self._link) and time.monotonic() < deadline:
                    pass
            except LinkError as error:
                logger.debug("the directory did not hear the last words: %s", error)
            self._link.close()
            self._link = None
        with self._lock:
            self._available = False
            self._own.expect_losses()
            self._refuse_requests()

    def _refuse_requests(self) -> None:
        """With the lock held."""
        for request in self._requests:
            request.answer.set_exception(DirectoryUnavailable(f"{self._where} is away"))
        self._requests.clear()

    def _token(self) -> str:
        self._num_tokens += 1
        return f"{self._session}.r{self._num_tokens}"
