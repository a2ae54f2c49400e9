"""A small scheduler and small requests, played step by step."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from protocol import KVConnectorOutput, RequestView, SamplingParams, StepView
from scheduler import (
    CacheConfig,
    ModelRunnerOutput,
    Request,
    RequestStatus,
    RequestUpdate,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
)

BLOCK = 4  # tokens


@dataclass
class RemotePrefill:
    """Loads whole prompts of the ids in `remote`; keeps the blocks of those in `pinned`.

    Those in `at_once` are loaded, up to that number of tokens, within the step that admits them.
    """

    remote: set[str] = field(default_factory=set)
    at_once: dict[str, int] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)  # asked for, it does not know yet
    pinned: list[str] = field(default_factory=list)
    pin_all: bool = False
    reserved: dict[str, tuple[int, ...]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    revocable: set[str] = field(default_factory=set)  # loads that have not begun
    asked_back: list[str] = field(default_factory=list)  # whoever it was asked to give back

    def get_num_new_matched_tokens(
        self, request: RequestView, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        self.asked.append(request.request_id)
        if request.request_id in self.unknown:
            return None, False
        if request.request_id in self.at_once:
            number = self.at_once[request.request_id] - num_computed_tokens
            return max(0, number), False
        if request.request_id not in self.remote:
            return 0, False
        return request.num_tokens - num_computed_tokens, True

    def update_state_after_alloc(
        self, request: RequestView, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        if num_external_tokens:
            self.remote.discard(request.request_id)
            self.at_once.pop(request.request_id, None)
            self.reserved[request.request_id] = tuple(block_ids)

    def build_connector_meta(self, step: StepView) -> object:
        return None

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        pass

    def request_finished(self, request: RequestView, block_ids: Sequence[int]) -> bool:
        if self.pin_all and block_ids:
            self.pinned.append(request.request_id)
        return request.request_id in self.pinned

    def revoke_pin(self) -> str | None:
        return self.pinned.pop() if self.pinned else None

    def revoke_reservation(self, request_id: str) -> bool:
        self.asked_back.append(request_id)
        return request_id in self.revocable


def make(
    num_blocks: int = 10,
    connector: RemotePrefill | None = None,
    *,
    caching: bool = True,
    **config: object,
) -> Scheduler:
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64} | config
    return Scheduler(
        SchedulerConfig(**settings),  # type: ignore[arg-type]
        CacheConfig(
            num_blocks=num_blocks + 1,
            block_size=BLOCK,
            hash_block_size=BLOCK,
            enable_prefix_caching=caching,
        ),
        connector,
    )


def request(
    name: str,
    length: int,
    max_tokens: int = 8,
    *,
    prompt_of: str | None = None,
    min_tokens: int = 0,
    **fields: object,
) -> Request:
    """Prompts of equal names, or `prompt_of` the same, begin alike."""
    prompt = random.Random(prompt_of or name).choices(range(10, 1000), k=length)
    sampling = SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens, stop_token_ids=(3,))
    return Request(name, prompt, sampling, hash_block_size=BLOCK, **fields)  # type: ignore[arg-type]


def add(scheduler: Scheduler, *requests: Request) -> None:
    for one in requests:
        scheduler.add_request(one)


def finish(
    scheduler: Scheduler,
    step: SchedulerOutput,
    sampled: Mapping[str, Sequence[int]] | None = None,
    *,
    recving: dict[str, tuple[int, ...]] | None = None,
    sending: tuple[str, ...] = (),
    invalid: Sequence[int] = (),
    revoked: tuple[str, ...] = (),
) -> list[RequestUpdate]:
    """The results of a step."""
    transfers = KVConnectorOutput(recving or {}, sending, frozenset(invalid), revoked)
    output = ModelRunnerOutput(sampled or {}, transfers or None)
    updates = scheduler.update_from_output(step, output)
    scheduler.check_integrity()
    return updates


def run(
    scheduler: Scheduler,
    *,
    recving: dict[str, tuple[int, ...]] | None = None,
    sending: tuple[str, ...] = (),
    invalid: Sequence[int] = (),
    revoked: tuple[str, ...] = (),
    token: int = 7,
) -> tuple[SchedulerOutput, list[RequestUpdate]]:
    """One step in which every request that is at its end samples `token`."""
    step = scheduler.schedule()
    scheduler.check_integrity()
    sampled = {
        request_id: [token]
        for request_id in step.num_scheduled_tokens
        if scheduler.requests[request_id].num_computed_tokens
        == scheduler.requests[request_id].num_tokens
    }
    updates = finish(
        scheduler,
        step,
        sampled,
        recving=recving,
        sending=sending,
        invalid=invalid,
        revoked=revoked,
    )
    return step, updates


def run_out(scheduler: Scheduler, num_steps: int = 60) -> None:
    """Until nobody is left."""
    for _ in range(num_steps):
        if not scheduler.has_requests():
            return
        run(scheduler)
    raise AssertionError(f"still there: {list(scheduler.requests.values())}")


def abort(scheduler: Scheduler, *request_ids: str) -> None:
    scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)
    scheduler.check_integrity()


def running(scheduler: Scheduler) -> list[str]:
    return [one.request_id for one in scheduler.running]
