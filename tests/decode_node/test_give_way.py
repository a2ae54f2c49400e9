"""Requests that hold loaded blocks, and requests that lack them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from protocol import KVConnectorOutput, RequestView, SamplingParams, StepView
from scheduler import CacheConfig, ModelRunnerOutput, Request, Scheduler, SchedulerConfig


class LoadsOne:
    """A connector that loads one request, once."""

    def __init__(self, request_id: str) -> None:
        self._wanted: str | None = request_id

    def get_num_new_matched_tokens(
        self, request: RequestView, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if request.request_id != self._wanted:
            return 0, False
        self._wanted = None
        return request.num_tokens - num_computed_tokens, True

    def update_state_after_alloc(
        self, request: RequestView, block_ids: Sequence[int], num_external_tokens: int
    ) -> None: ...

    def build_connector_meta(self, step: StepView) -> object: ...

    def update_connector_output(self, output: KVConnectorOutput) -> None: ...

    def request_finished(self, request: RequestView, block_ids: Sequence[int]) -> bool:
        return False

    def revoke_pin(self) -> str | None:
        return None

    def revoke_reservation(self, request_id: str) -> bool:
        return False


def step(scheduler: Scheduler, transfers: KVConnectorOutput | None = None) -> None:
    scheduled = scheduler.schedule()
    sampled = {
        request_id: [5]
        for request_id in scheduled.num_scheduled_tokens
        if scheduler.requests[request_id].num_computed_tokens
        == scheduler.requests[request_id].num_tokens
    }
    scheduler.update_from_output(scheduled, ModelRunnerOutput(sampled, transfers))
    scheduler.check_integrity()


@pytest.mark.parametrize("whole_must_fit", [True, False])
def test_an_urgent_request_and_a_loaded_one_that_has_what_it_lacks(whole_must_fit: bool) -> None:
    """Nine blocks: the loaded one holds three and waits, the urgent one needs seven.

    It finds five of them in the cache and gets a sixth; the seventh is not to be had, so it starts
    over, and is always faster than the loaded one, that would free three if it got one more.
    """
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=4,
            max_num_batched_tokens=24,
            long_prefill_token_threshold=12,
            max_model_len=144,
            policy="priority",
            scheduler_reserve_full_isl=whole_must_fit,
        ),
        CacheConfig(num_blocks=10, block_size=16),
        LoadsOne("loaded"),
    )
    sampling = SamplingParams(max_tokens=3)
    scheduler.add_request(Request("earlier", range(1000, 1080), sampling))
    while scheduler.has_requests():
        step(scheduler)
    scheduler.add_request(Request("loaded", range(48), sampling, priority=1))
    step(scheduler, KVConnectorOutput(finished_recving={"loaded": (7,)}))
    scheduler.add_request(Request("urgent", range(1000, 1097), sampling, priority=0))
    for _ in range(100):
        step(scheduler)
    assert not scheduler.has_requests()


def test_a_request_that_outgrows_the_whole_pool() -> None:
    """Ten blocks hold 160 tokens, max_model_len allows more: it has to end where it is."""
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=512),
        CacheConfig(num_blocks=11, block_size=16),
    )
    scheduler.add_request(Request("grows", range(140), SamplingParams(max_tokens=60)))
    for _ in range(300):
        step(scheduler)
    assert not scheduler.has_requests()
