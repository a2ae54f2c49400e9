"""Blocks that are reserved for a load which has not begun, and an older request that lacks them."""

from __future__ import annotations

import pytest

from protocol import KVConnectorOutput
from scheduler import CacheConfig, ModelRunnerOutput, RequestStatus, Scheduler, SchedulerConfig
from scheduler.recording import RecordingScheduler
from scheduler.trace import parse_trace
from tests.scheduler.recordings import MemoryFile, check_replays
from tests.scheduler.small_scheduler import (
    BLOCK,
    RemotePrefill,
    abort,
    add,
    make,
    request,
    run,
    running,
)


@pytest.fixture
def connector() -> RemotePrefill:
    return RemotePrefill(remote={"young", "younger"}, revocable={"young", "younger"})


@pytest.fixture
def scheduler(connector: RemotePrefill) -> Scheduler:
    """Six blocks, four of which are reserved for the load of `young`."""
    scheduler = make(6, connector)
    add(scheduler, request("young", 16, arrival_time=2.0))
    run(scheduler)
    return scheduler


def used_and_quarantined(scheduler: Scheduler) -> tuple[int, int]:
    counts = scheduler.block_counts()
    assert counts.balanced
    return counts.used, counts.quarantined


def test_the_younger_gives_way_to_the_older(scheduler: Scheduler, connector: RemotePrefill) -> None:
    assert scheduler.stats.prompt_loaded == 16
    add(scheduler, request("old", 12, max_tokens=2, arrival_time=1.0))
    step, _ = run(scheduler)
    assert step.num_scheduled_tokens == {}
    assert connector.asked_back == ["young"]
    assert used_and_quarantined(scheduler) == (4, 0)  # asking alone frees nothing
    run(scheduler, revoked=("young",))
    assert used_and_quarantined(scheduler) == (0, 0)
    assert scheduler.stats.num_revoked_reservations == 1
    assert scheduler.stats.prompt_loaded == 0
    assert scheduler.stats.num_preemptions == 0
    connector.remote.add("young")
    step, _ = run(scheduler)  # three blocks are left, and it needs four
    assert step.num_scheduled_tokens == {"old": 12}
    assert used_and_quarantined(scheduler) == (3, 0)
    run(scheduler)
    run(scheduler)
    assert used_and_quarantined(scheduler) == (4, 0)
    run(scheduler, recving={"young": (7,)})
    assert scheduler.stats.prompt_loaded == 16
    run(scheduler)
    assert running(scheduler) == ["young"]
    assert set(connector.asked_back) == {"young"}


def test_nobody_gives_way_to_a_younger_one(scheduler: Scheduler, connector: RemotePrefill) -> None:
    add(scheduler, request("last", 12, arrival_time=3.0))
    run(scheduler)
    assert connector.asked_back == []
    run(scheduler, recving={"young": (7,)})
    assert scheduler.stats.num_revoked_reservations == 0


def test_the_youngest_that_can_gives_way() -> None:
    connector = RemotePrefill(remote=set("abc"), revocable=set("ab"))
    scheduler = make(6, connector)
    for number, name in enumerate("abc"):
        add(scheduler, request(name, 8, arrival_time=1.0 + number))
    run(scheduler)
    add(scheduler, request("old", 8, arrival_time=0.0))
    run(scheduler)
    assert connector.asked_back == ["c", "b"]  # that of c has begun


def test_one_whose_load_began_meanwhile_keeps_its_blocks(
    scheduler: Scheduler, connector: RemotePrefill
) -> None:
    add(scheduler, request("old", 12, arrival_time=1.0))
    run(scheduler)
    assert connector.asked_back == ["young"]
    run(scheduler, recving={"young": (7,)})
    step, _ = run(scheduler)
    assert "young" in step.num_scheduled_tokens
    assert scheduler.stats.num_revoked_reservations == 0


def test_an_aborted_request_whose_blocks_are_given_back_later(
    scheduler: Scheduler, connector: RemotePrefill
) -> None:
    add(scheduler, request("old", 12, arrival_time=1.0))
    run(scheduler)
    abort(scheduler, "young")
    assert used_and_quarantined(scheduler) == (0, 4)
    run(scheduler)
    assert used_and_quarantined(scheduler) == (0, 4)
    run(scheduler, revoked=("young",))
    assert used_and_quarantined(scheduler) == (0, 0)
    assert "young" not in scheduler.requests
    assert scheduler.stats.num_revoked_reservations == 0  # nobody waits for another one
    step, _ = run(scheduler)
    assert step.num_scheduled_tokens == {"old": 12}


def test_what_a_reservation_found_in_the_cache_was_not_loaded() -> None:
    connector = RemotePrefill(revocable={"young"})
    scheduler = make(6, connector)
    add(scheduler, request("first", 9, max_tokens=1, prompt_of="p"))
    run(scheduler)
    connector.remote.add("young")
    add(scheduler, request("young", 16, prompt_of="p", arrival_time=2.0))
    run(scheduler)
    assert scheduler.stats.prompt_loaded == 8  # two blocks of four were hit
    add(scheduler, request("old", 12, arrival_time=1.0))
    run(scheduler)
    run(scheduler, revoked=("young",))
    assert scheduler.stats.prompt_loaded == 0
    assert used_and_quarantined(scheduler) == (0, 0)


def test_it_is_recorded_and_replayed(connector: RemotePrefill) -> None:
    stream = MemoryFile()
    scheduler = RecordingScheduler(
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64),
        CacheConfig(num_blocks=7, block_size=BLOCK, hash_block_size=BLOCK),
        connector,
        stream=stream,
    )

    def step(revoked: tuple[str, ...] = (), **sampled: list[int]) -> None:
        transfers = KVConnectorOutput(revoked_recving=revoked) if revoked else None
        scheduler.update_from_output(scheduler.schedule(), ModelRunnerOutput(sampled, transfers))

    add(scheduler, request("young", 16, arrival_time=2.0))
    step()
    add(scheduler, request("old", 12, max_tokens=1, arrival_time=1.0))
    step()
    step(revoked=("young",))
    connector.remote.add("young")
    step(old=[7])
    step()
    assert scheduler.block_counts().used == 4  # reserved once more
    scheduler.finish_requests(["young"], RequestStatus.FINISHED_ABORTED)
    step(revoked=("young",))
    assert scheduler.block_counts().used == 0
    scheduler.close()
    trace = parse_trace(stream.content)
    told = [s.runner.revoked_recving for s in trace.steps if s.runner is not None]
    assert told == [[], [], ["young"], [], [], ["young"]]
    check_replays(trace)
