"""Replays recorded runs of vLLM's scheduler, step by step, against ours.

The format is that of the recorded traces: each step has inputs (`add`, `abort`, the answers of the
connector, what the runner sampled) and what the recorded scheduler decided and knew afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

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

Trace = dict[str, Any]
Step = dict[str, Any]


@dataclass
class RecordedConnector:
    """Gives the recorded answers, in the recorded order, and complains about other questions."""

    send_ids: set[str] = field(default_factory=set)
    answers: list[list[Any]] = field(default_factory=list)
    held: set[str] = field(default_factory=set)

    def get_num_new_matched_tokens(
        self, request: RequestView, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        assert self.answers, f"{request.request_id} was asked about, which the recording was not"
        request_id, local, number, is_async = self.answers.pop(0)
        assert (request.request_id, num_computed_tokens) == (request_id, local)
        return number, is_async

    def update_state_after_alloc(
        self, request: RequestView, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        pass

    def build_connector_meta(self, step: StepView) -> object:
        return None

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        pass

    def request_finished(self, request: RequestView, block_ids: Sequence[int]) -> bool:
        assert isinstance(request, Request)
        ended_well = request.status in (
            RequestStatus.FINISHED_STOPPED,
            RequestStatus.FINISHED_LENGTH_CAPPED,
        )
        return ended_well and request.request_id in self.send_ids

    def revoke_pin(self) -> str | None:
        return None


@dataclass(frozen=True)
class Difference:
    """The first thing that is not as recorded."""

    step: int
    field: str
    recorded: object
    ours: object


_REASONS = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    RequestStatus.FINISHED_ERROR: "error",
}


class Replay:
    """One trace, fed to a new scheduler."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        config = trace["config"]
        self.connector = RecordedConnector() if config["kv_connector"] else None
        self.scheduler = Scheduler(_scheduler_config(config), _cache_config(config), self.connector)
        self.hash_block_size: int = config["block_size"]

    def first_difference(self) -> Difference | None:
        return next(self.differences(), None)

    def differences(self) -> Iterator[Difference]:
        """In the order of steps; each step is checked as a whole."""
        for number, step in enumerate(self.trace["steps"]):
            for name, recorded, ours in self._run_step(step):
                if recorded != ours:
                    yield Difference(number, name, recorded, ours)
            self.scheduler.check_integrity()

    def _run_step(self, step: Step) -> Iterator[tuple[str, object, object]]:
        scheduler = self.scheduler
        for entry in step.get("add", ()):
            scheduler.add_request(self._request(entry))
        for request_id in step.get("abort", ()):
            scheduler.finish_requests([request_id], RequestStatus.FINISHED_ABORTED)
        if self.connector is not None:
            self.connector.answers = list(step.get("connector", ()))
        output = scheduler.schedule()
        if self.connector is not None:
            yield "connector", [], self.connector.answers
        yield from self._compare_expect(step["expect"], output)
        for request_id in step.get("abort_during", ()):
            scheduler.finish_requests([request_id], RequestStatus.FINISHED_ABORTED)
        updates = scheduler.update_from_output(output, self._runner_output(step["runner"]))
        yield from self._compare_after(step["after"], updates)

    def _request(self, entry: dict[str, Any]) -> Request:
        if self.connector is not None and entry.get("send_steps"):
            self.connector.send_ids.add(entry["id"])
        eos = entry.get("eos_token_id")
        lora = entry.get("lora")
        return Request(
            entry["id"],
            entry["prompt_token_ids"],
            SamplingParams(
                max_tokens=entry["max_tokens"],
                min_tokens=entry.get("min_tokens", 0),
                stop_token_ids=tuple(entry.get("stop_token_ids", ())),
                eos_token_ids=() if eos is None else (eos,),
            ),
            arrival_time=entry["arrival_time"],
            priority=entry.get("priority", 0),
            cache_salt=entry.get("cache_salt"),
            lora_name=None if lora is None else f"lora-{lora}",
            hash_block_size=self.hash_block_size,
        )

    def _runner_output(self, runner: dict[str, Any]) -> ModelRunnerOutput:
        transfers = KVConnectorOutput(
            finished_recving=dict.fromkeys(runner.get("finished_recving", ()), ()),
            finished_sending=tuple(runner.get("finished_sending", ())),
        )
        return ModelRunnerOutput(
            sampled_token_ids=runner["sampled"],
            kv_connector_output=transfers or None,
        )

    def _compare_expect(
        self, expect: dict[str, Any], output: SchedulerOutput
    ) -> Iterator[tuple[str, object, object]]:
        scheduler = self.scheduler
        new, resumed = output.scheduled_new_reqs, output.scheduled_resumed_reqs
        before = {r.request_id: r.num_computed_tokens for r in [*new, *resumed]}
        before |= {r.request_id: r.num_computed_tokens for r in output.scheduled_cached_reqs}
        tables = {i: list(scheduler.kv.block_table(i)) for i in scheduler.requests}
        whole = {r.request_id: list(r.block_ids) for r in [*new, *resumed]}
        loading = {
            i: tables[i] for i in expect.get("block_ids", {}) if i in tables and i not in whole
        }
        appended = {
            r.request_id: list(r.new_block_ids)
            for r in output.scheduled_cached_reqs
            if r.new_block_ids
        }
        ours = {
            "num_scheduled_tokens": [list(x) for x in output.num_scheduled_tokens.items()],
            "new": [r.request_id for r in new],
            "resumed": [r.request_id for r in resumed],
            "preempted": output.preempted_req_ids,
            "num_computed_tokens_before": before,
            "block_ids": whole | loading,
            "appended_block_ids": appended,
            "num_blocks": {i: len(t) for i, t in tables.items() if t},
            "running": _ids(scheduler.running),
            "waiting": _ids(scheduler.waiting),
            "skipped_waiting": _ids(scheduler.skipped_waiting),
            "free_blocks": scheduler.kv.pool.num_unused,
            "status": {i: r.status.name for i, r in scheduler.requests.items()},
            "finished_req_ids": output.finished_req_ids,
        }
        empty: dict[str, object] = {"block_ids": {}, "appended_block_ids": {}}
        for name, value in ours.items():
            yield f"expect.{name}", expect.get(name, empty.get(name, [])), value

    def _compare_after(
        self, after: dict[str, Any], updates: list[RequestUpdate]
    ) -> Iterator[tuple[str, object, object]]:
        scheduler = self.scheduler
        ended = [u.request for u in updates if u.finished]
        waiting = [*scheduler.waiting, *scheduler.skipped_waiting]
        known = [*scheduler.running, *(r for r in waiting if r.num_computed_tokens)]
        ours = {
            "finished": {r.request_id: _REASONS[r.status] for r in ended},
            "stop_reason": {
                r.request_id: r.stop_token_id for r in ended if r.stop_token_id is not None
            },
            "num_tokens": {r.request_id: r.num_tokens for r in known},
            "num_computed_tokens": {r.request_id: r.num_computed_tokens for r in known},
            "free_blocks": scheduler.kv.pool.num_unused,
        }
        for name, value in ours.items():
            yield f"after.{name}", after.get(name, {}), value
        emitted = {u.request.request_id: list(u.new_token_ids) for u in updates}
        for request_id, tokens in after.get("emitted", {}).items():
            yield f"after.emitted.{request_id}", tokens, emitted.get(request_id, [])


def _ids(requests: Iterable[Request]) -> list[str]:
    return [r.request_id for r in requests]


def _scheduler_config(config: dict[str, Any]) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_seqs=config["max_num_seqs"],
        max_num_batched_tokens=config["max_num_batched_tokens"],
        max_num_scheduled_tokens=config["max_num_scheduled_tokens"],
        max_model_len=config["max_model_len"],
        enable_chunked_prefill=config["enable_chunked_prefill"],
        long_prefill_token_threshold=config["long_prefill_token_threshold"],
        policy=config["policy"],
        scheduler_reserve_full_isl=config["scheduler_reserve_full_isl"],
    )


def _cache_config(config: dict[str, Any]) -> CacheConfig:
    return CacheConfig(
        num_blocks=config["num_blocks_including_null"],
        block_size=config["block_size"],
        enable_prefix_caching=config["enable_prefix_caching"],
        hash_block_size=config["block_size"],
    )
