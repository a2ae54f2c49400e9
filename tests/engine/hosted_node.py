"""One engine host on the hash model, with a runner that a test can hold."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

from engine import ActiveJob, Engine, EngineHost, KVCacheConfig
from protocol import (
    BlockEventBatch,
    DecodeJob,
    Delta,
    GenerationRequest,
    LiveTransfer,
    NodeInfo,
    NodeStatus,
    OutputBatch,
    Role,
    SamplingParams,
    TransferCounts,
)
from scheduler import (
    CacheConfig,
    ModelRunnerOutput,
    RequestUpdate,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
)
from tests.hash_model import HashRunner, hash_kv_cache

TIMEOUT_S = 10.0
CALLER = "caller"
LONG = 480  # tokens: a second's work, so a test can look while it is done


class SteeredRunner(HashRunner):
    """Stops in the middle of a step, or breaks, when a test says so."""

    def __init__(self, kv_cache: KVCacheConfig) -> None:
        super().__init__(kv_cache, step_s=0.002)
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.in_step = threading.Event()
        self.breaks = False
        self.computed: set[str] = set()
        self.num_steps = 0

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        self.num_steps += 1
        self.in_step.set()
        assert self.may_go_on.wait(TIMEOUT_S)
        if self.breaks and step.num_scheduled_tokens:
            raise ZeroDivisionError("the model is broken")
        self.computed.update(step.num_scheduled_tokens)
        output = super().execute(step)
        self.in_step.clear()
        return output

    def hold(self) -> None:
        self.may_go_on.clear()
        self.in_step.clear()


class PlainRole:
    """Computes jobs and tells what came out. Nothing is handed to anybody."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host
        self.started: list[str] = []
        self.cancelled: list[str] = []
        self.given_back: list[str] = []
        self.ending: set[str] = set()  # jobs that end soon, if one has patience
        self.num_transfers = 0

    def accept(self, job: DecodeJob) -> None:
        active = ActiveJob(job)
        self._host.add_job(active)
        self._host.add_request(active.make_request(job.request.sampling))

    def act(self) -> None: ...

    def must_act(self) -> bool:
        return False

    def on_started(self, job: ActiveJob) -> None:
        self.started.append(job.key)

    def on_update(self, job: ActiveJob, update: RequestUpdate) -> None:
        reason = update.request.finish_reason
        self._host.emit(job, job.delta(update.new_token_ids, finish_reason=reason))
        if update.finished:
            self._host.end_job(job)

    def on_cancel(self, job: ActiveJob) -> None:
        self.cancelled.append(job.key)

    def on_give_back(self, job: ActiveJob) -> None:
        self.given_back.append(job.key)

    def ends_soon(self, job: ActiveJob) -> bool:
        return job.key in self.ending

    def num_intake(self) -> int:
        return 0

    def next_deadline(self) -> float | None:
        return None

    def transfers(self) -> TransferCounts:
        return TransferCounts(active=self.num_transfers)

    def live(self) -> tuple[LiveTransfer, ...]:
        return ()


class Follower:
    """A listener that keeps what it heard."""

    def __init__(self) -> None:
        self.statuses: list[NodeStatus] = []
        self.batches: list[BlockEventBatch] = []

    def on_status(self, info: NodeInfo, status: NodeStatus) -> None:
        self.statuses.append(status)

    def on_blocks(self, info: NodeInfo, batch: BlockEventBatch) -> None:
        self.batches.append(batch)


class Node:
    """A host with everything that a test wants to look at."""

    def __init__(self, *, num_blocks: int = 64, max_jobs: int = 100) -> None:
        kv_cache = hash_kv_cache(num_blocks + 1)
        self.runner = SteeredRunner(kv_cache)
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=512),
            CacheConfig(num_blocks=num_blocks + 1, block_size=16),
        )
        self.info = NodeInfo(
            node_id="node",
            role=Role.UNIFIED,
            model="hash",
            fingerprint="hash",
            endpoint="none:",
            block_size=16,
            num_blocks=num_blocks,
            max_model_len=512,
            max_num_seqs=8,
            max_num_batched_tokens=64,
        )
        self.follower = Follower()
        self.host = EngineHost(
            self.info, Engine(self.scheduler, self.runner), self.follower, max_jobs=max_jobs
        )
        self.role = PlainRole(self.host)
        self._numbers = iter(range(10_000))

    @property
    def thread(self) -> threading.Thread:
        return self.host._thread

    def make_job(
        self, prompt: list[int], max_tokens: int = 8, caller: str = CALLER, **fields: Any
    ) -> DecodeJob:
        request = GenerationRequest(
            request_id=f"r{next(self._numbers)}",
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(max_tokens=max_tokens),
            arrival_time=0.0,
        )
        return DecodeJob(request=request, caller=caller, **fields)

    def submit(
        self, prompt: list[int], max_tokens: int = 8, caller: str = CALLER, **fields: Any
    ) -> DecodeJob:
        job = self.make_job(prompt, max_tokens, caller, **fields)
        self.host.submit(job, self.role)
        return job

    def cancel(self, job: DecodeJob) -> None:
        self.host.post(lambda: self.host.cancel(job.request.request_id))

    async def hold_step(self) -> None:
        """The engine is in the middle of a step from now on."""
        self.runner.hold()
        self.host.wake()
        assert await asyncio.to_thread(self.runner.in_step.wait, TIMEOUT_S)

    def let_go(self) -> None:
        self.runner.may_go_on.set()

    async def on_thread(self, command: Callable[[], object] = lambda: None) -> None:
        """Return when the engine's thread has run this, between two steps."""
        done = threading.Event()

        def run() -> None:
            command()
            done.set()

        self.host.post(run)
        assert await asyncio.to_thread(done.wait, TIMEOUT_S)

    async def round(self) -> None:
        """Return when a whole round has passed since."""
        await self.on_thread()
        await self.on_thread()

    def check_at_rest(self) -> None:
        status = self.host.status()
        assert status.blocks.balanced
        busy = (status.num_running, status.num_waiting, status.num_skipped_waiting)
        assert busy == (0, 0, 0)
        assert status.queued_tokens == status.blocks.used == status.blocks.quarantined == 0
        assert not self.host.jobs
        assert not self.host._pending
        assert not self.scheduler.has_requests()
        self.scheduler.check_integrity()


async def deltas_of(stream: AsyncIterator[OutputBatch], *jobs: DecodeJob) -> dict[str, list[Delta]]:
    """All deltas, until each of the jobs has its last."""
    told: dict[str, list[Delta]] = {}
    open_ids = {job.request.request_id for job in jobs}
    async with asyncio.timeout(TIMEOUT_S):
        while open_ids:
            batch = await anext(stream)
            assert batch.deltas, "an empty batch"
            for delta in batch.deltas:
                told.setdefault(delta.request_id, []).append(delta)
                if delta.finish_reason is not None or delta.failure is not None:
                    open_ids.discard(delta.request_id)
    return told


def tokens_of(deltas: list[Delta]) -> list[int]:
    """Checks that positions fit together, and that only the last delta says that it is the last."""
    tokens: list[int] = []
    for delta in deltas:
        assert delta.position == deltas[0].position + len(tokens)
        assert (delta.finish_reason is not None) == (delta is deltas[-1])
        assert (delta.timeline is not None) == (delta is deltas[-1])
        tokens.extend(delta.token_ids)
    return tokens


async def close(stream: AsyncIterator[OutputBatch]) -> None:
    await getattr(stream, "aclose")()  # noqa: B009
