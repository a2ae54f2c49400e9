"""Nodes that take, refuse and answer jobs when a test says so, and a dispatcher over them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

from directory import MemoryDirectory
from protocol import (
    CacheSnapshot,
    DecodeJob,
    Delta,
    Failure,
    FinishReason,
    GenerationRequest,
    Job,
    KvrelayError,
    NodeInfo,
    NodeLost,
    NodeStatus,
    OutputBatch,
    PauseMode,
    PrefillJob,
    Role,
    SamplingParams,
    Timeline,
)
from router import Dispatcher, NodeLoad, RouterConfig
from tests.router.nodes import FINGERPRINT, make_info, make_status

TIMEOUT_S = 10.0

PROMPT = tuple(range(100))
OUTPUT = tuple(range(1000, 1008))  # what any honest node answers, token after token


def make_request(request_id: str = "r", max_tokens: int = len(OUTPUT)) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=PROMPT,
        sampling=SamplingParams(max_tokens=max_tokens),
        arrival_time=1.0,
    )


class ScriptedNode:
    """A node of any role. It says nothing by itself."""

    def __init__(self, node_id: str, role: Role, **info: object) -> None:
        self.info: NodeInfo = make_info(node_id, role, **info)
        self.closed = False
        self.jobs: list[Job] = []  # taken
        self.cancelled: list[str] = []
        self.orders: list[str] = []
        self.refuse: KvrelayError | None = None  # raised instead of taking a job
        self.answers = asyncio.Event()  # jobs are taken or refused while this is set
        self.cancels = asyncio.Event()  # and this lets cancellations through
        self.answers.set()
        self.cancels.set()
        self.asked = asyncio.Event()  # a job has come, taken or not
        self._streams: list[asyncio.Queue[OutputBatch | None]] = []
        self._lost = False

    # ------------------------------------------------------------------ protocol.Node

    async def prefill(self, job: PrefillJob) -> None:
        await self._take(job)

    async def decode(self, job: DecodeJob) -> None:
        await self._take(job)

    async def _take(self, job: Job) -> None:
        self.asked.set()
        await self.answers.wait()
        if self._lost:
            raise NodeLost(f"node {self.info.node_id} is down")
        if self.refuse is not None:
            raise self.refuse
        if isinstance(job, DecodeJob):  # which takes over from an older attempt, or ends it
            self.jobs = [j for j in self.jobs if j.request.request_id != job.request.request_id]
        self.jobs.append(job)

    async def cancel(self, request_id: str) -> None:
        await self.cancels.wait()
        self.cancelled.append(request_id)
        self.jobs = [job for job in self.jobs if job.request.request_id != request_id]

    async def status(self) -> NodeStatus:
        return make_status(self.info)

    async def drain(self, timeout_s: float | None = None) -> None:
        raise NotImplementedError

    async def undrain(self) -> None:
        raise NotImplementedError

    async def change_role(self, role: Role) -> NodeInfo:
        raise NotImplementedError

    async def snapshot(self) -> CacheSnapshot:
        return CacheSnapshot(self.info.node_id, 0, (), ())

    async def pause(self, mode: PauseMode) -> None:
        self._note(f"pause {mode}")

    async def resume(self) -> None:
        self._note("resume")

    async def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        self._note(f"reset {reset_running_requests}")
        return not self.jobs  # whose blocks are in use

    def _note(self, order: str) -> None:
        if self._lost:
            raise NodeLost(f"node {self.info.node_id} is down")
        self.orders.append(order)

    async def outputs(self, caller: str) -> AsyncIterator[OutputBatch]:
        stream: asyncio.Queue[OutputBatch | None] = asyncio.Queue()
        self._streams.append(stream)
        if self._lost:
            return
        try:
            while (batch := await stream.get()) is not None:
                yield batch
        finally:
            self.jobs = [job for job in self.jobs if job.caller != caller]  # nobody listens

    async def close(self) -> None:
        """What a connection to the node does."""
        self.closed = True
        self.lose()

    # ------------------------------------------------------------------ what a test makes it do

    @property
    def job(self) -> Job:
        """The only one that is here."""
        (job,) = self.jobs
        return job

    def lose(self) -> None:
        """Die: the stream ends, jobs are gone, later ones are refused."""
        self._lost = True
        self.jobs.clear()
        for stream in self._streams:
            stream.put_nowait(None)

    def say(self, *deltas: Delta) -> None:
        """In one batch."""
        for stream in self._streams:
            stream.put_nowait(OutputBatch(self.info.node_id, deltas))

    def tokens(self, count: int = 1, *, start: int | None = None, job: Job | None = None) -> None:
        """The right tokens: from `start`, or behind what was emitted before the job."""
        job = job or self.job
        first = len(job.emitted) if start is None else start
        self.say(self._delta(job, first, OUTPUT[first : first + count]))

    def finish(self, *, start: int, end: int | None = None, job: Job | None = None) -> None:
        """The last tokens, from `start` on."""
        job = job or self.job
        delta = self._delta(job, start, OUTPUT[start:end], finish_reason=FinishReason.LENGTH)
        self._forget(job)
        self.say(delta)

    def hand_off(self, job: Job | None = None) -> None:
        """A prefill node has done its part."""
        job = job or self.job
        self._forget(job)
        self.say(self._delta(job, len(job.emitted) + 1, handed_off=True))

    def fail(
        self, label: str = "node_lost", *, retryable: bool = True, job: Job | None = None
    ) -> None:
        job = job or self.job
        self._forget(job)
        failure = Failure(label, f"{self.info.node_id} failed", retryable)
        self.say(self._delta(job, len(job.emitted), failure=failure))

    def _forget(self, job: Job) -> None:
        if job in self.jobs:
            self.jobs.remove(job)

    @staticmethod
    def _delta(
        job: Job,
        position: int,
        token_ids: Sequence[int] = (),
        *,
        finish_reason: FinishReason | None = None,
        handed_off: bool = False,
        failure: Failure | None = None,
    ) -> Delta:
        return Delta(
            request_id=job.request.request_id,
            attempt=job.attempt,
            position=position,
            token_ids=tuple(token_ids),
            finish_reason=finish_reason,
            handed_off=handed_off,
            failure=failure,
            timeline=Timeline(prefill_queued=2.0) if finish_reason else None,
            num_cached_tokens=16,
        )


class ScriptedCluster:
    """A dispatcher over scripted nodes, and what must be true of it when nothing is under way."""

    def __init__(
        self, prefill: int = 2, decode: int = 2, unified: int = 0, **config: object
    ) -> None:
        self.now = 1000.0
        self.ttl_s = 3600.0
        self.directory = MemoryDirectory(clock=lambda: self.now)
        self.prefill = [ScriptedNode(f"p{n}", Role.PREFILL) for n in range(prefill)]
        self.decode = [ScriptedNode(f"d{n}", Role.DECODE) for n in range(decode)]
        self.decode += [ScriptedNode(f"u{n}", Role.UNIFIED) for n in range(unified)]
        for node in self.nodes:
            self.directory.register(node.info, ttl_s=3600.0)
            self.directory.heartbeat(make_status(node.info), generation=0)
        values = {"retry_backoff_s": 0.001, "recovery_timeout_s": 0.3} | config
        self.dispatcher = Dispatcher(
            self.directory,
            FINGERPRINT,
            self.prefill,
            self.decode,
            RouterConfig(**values),  # type: ignore[arg-type]
        )

    @property
    def nodes(self) -> list[ScriptedNode]:
        return [*self.prefill, *self.decode]

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[ScriptedCluster]:
        before = asyncio.all_tasks()
        await self.dispatcher.start()
        try:
            yield self
            await until(lambda: self.is_at_rest)
        finally:
            await self.dispatcher.stop()
        await until(lambda: asyncio.all_tasks() == before)

    @property
    def is_at_rest(self) -> bool:
        """Nothing is counted, held or under way for any request, here or on a node."""
        dispatcher = self.dispatcher
        return not (
            dispatcher._flights
            or dispatcher._admission.num_inflight
            or dispatcher._admission.queued_tokens
            or dispatcher._cluster.load.num_attempts
            or any(dispatcher._cluster.load.load(n.info.node_id) != NodeLoad() for n in self.nodes)
            or any(node.jobs for node in self.nodes)
            or len(dispatcher._background)
            or dispatcher._gate.num_inside
            or dispatcher._gate.num_waiting
            or len(dispatcher._room)
        )

    def tell(self, node: ScriptedNode, **status: object) -> None:
        """The node has this to say to the directory."""
        self.directory.register(node.info, ttl_s=self.ttl_s)
        status_now = make_status(node.info, **status)  # type: ignore[arg-type]
        self.directory.heartbeat(status_now, generation=node.info.generation)

    def join(self, node_id: str, role: Role, **info: object) -> ScriptedNode:
        """A node comes, or comes back under a later generation."""
        node = ScriptedNode(node_id, role, **info)
        self.tell(node)
        self.forget(node_id)
        (self.prefill if role is Role.PREFILL else self.decode).append(node)
        self.dispatcher.add_node(node)
        return node

    def forget(self, node_id: str) -> None:
        """It is not of this cluster any more, for a test."""
        self.prefill = [node for node in self.prefill if node.info.node_id != node_id]
        self.decode = [node for node in self.decode if node.info.node_id != node_id]

    def holders(self, nodes: Iterable[ScriptedNode]) -> list[ScriptedNode]:
        return [node for node in nodes if node.jobs]

    async def pair(self, attempt: int = 0) -> tuple[ScriptedNode, ScriptedNode]:
        """The two nodes that have the jobs of this attempt, as soon as they do."""

        def found(nodes: list[ScriptedNode]) -> list[ScriptedNode]:
            return [n for n in nodes if any(job.attempt == attempt for job in n.jobs)]

        await until(lambda: bool(found(self.prefill) and found(self.decode)))
        (p,), (d,) = found(self.prefill), found(self.decode)
        return p, d


async def until(condition: Callable[[], bool]) -> None:
    """Let everything else run until it is so."""
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.0005)
