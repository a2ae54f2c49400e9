"""Every number of a timeline and of a cluster status has its place in the exposition."""

import math

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from protocol import Role, Timeline
from telemetry import Metrics
from tests.telemetry.cluster_status import NodeSketch, cluster_status

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]

STATUS = cluster_status(
    NodeSketch("p0", Role.PREFILL),
    NodeSketch("d0", Role.DECODE, draining=True),
    NodeSketch("d1", Role.DECODE, answers=False),
)
EMPTY = cluster_status()


def samples(exposition: bytes) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(exposition.decode())
        for sample in family.samples
    }


def value(found: Samples, name: str, **labels: str) -> float | None:
    return found.get((f"kvrelay_{name}", frozenset(labels.items())))


class TestSequences:
    def observed(self, timeline: Timeline, num_generated: int = 11) -> Samples:
        metrics = Metrics()
        metrics.sequence_ended(
            timeline, num_prompt_tokens=7, num_cached_tokens=3, num_generated_tokens=num_generated
        )
        return samples(metrics.exposition(EMPTY))

    def test_tokens(self) -> None:
        found = self.observed(Timeline())
        assert value(found, "prompt_tokens_total") == 7
        assert value(found, "cached_prompt_tokens_total") == 3
        assert value(found, "generated_tokens_total") == 11

    def test_latencies_are_those_of_the_timeline(self) -> None:
        timeline = Timeline(
            arrived=100.0,
            routed=100.5,
            prefill_started=101.0,
            prefill_finished=102.0,
            first_token=102.25,
            committed=103.0,
            last_token=104.25,
            finished=105.0,
        )
        found = self.observed(timeline)
        for name, seconds in {
            "time_to_first_token_seconds": 2.25,
            "request_seconds": 5.0,
            "prefill_queue_seconds": 0.5,
            "exposed_transfer_seconds": 1.0,
            "time_per_output_token_seconds": 0.2,
        }.items():
            assert value(found, f"{name}_count") == 1
            assert value(found, f"{name}_sum") == pytest.approx(seconds)

    @pytest.mark.parametrize(
        ("timeline", "seen"),
        [
            (Timeline(arrived=1.0), set()),
            (Timeline(arrived=1.0, first_token=2.0), {"time_to_first_token_seconds"}),
            (Timeline(arrived=1.0, finished=2.0), {"request_seconds"}),
        ],
    )
    def test_what_was_not_reached_is_left_out(self, timeline: Timeline, seen: set[str]) -> None:
        found = self.observed(timeline)
        counts = {
            name.removeprefix("kvrelay_").removesuffix("_count")
            for (name, _), number in found.items()
            if name.endswith("_seconds_count") and number
        }
        assert counts == seen

    def test_one_token_has_no_time_after_the_first(self) -> None:
        timeline = Timeline(first_token=1.0, last_token=1.0)
        found = self.observed(timeline, num_generated=1)
        assert value(found, "time_per_output_token_seconds_count") == 0


def test_requests_by_endpoint_and_outcome() -> None:
    metrics = Metrics()
    for outcome in ("ok", "ok", "overloaded"):
        metrics.request_ended("chat", outcome)
    found = samples(metrics.exposition(EMPTY))
    assert value(found, "requests_total", endpoint="chat", outcome="ok") == 2
    assert value(found, "requests_total", endpoint="chat", outcome="overloaded") == 1


def test_gaps_between_tokens() -> None:
    metrics = Metrics()
    for gap_s in (0.004, 0.04, 4.0):
        metrics.tokens_arrived(gap_s)
    found = samples(metrics.exposition(EMPTY))
    assert value(found, "inter_token_seconds_bucket", le="0.005") == 1
    assert value(found, "inter_token_seconds_bucket", le="0.04") == 2
    assert value(found, "inter_token_seconds_sum") == pytest.approx(4.044)


class TestCluster:
    @pytest.fixture
    def found(self) -> Samples:
        return samples(Metrics().exposition(STATUS))

    @pytest.mark.parametrize("node", [0, 1])
    def test_every_number_of_a_node(self, found: Samples, node: int) -> None:
        status = STATUS.nodes[node].status
        assert status is not None
        blocks, transfers = status.blocks, status.transfers
        own = {"node": status.node_id, "role": status.role.value}
        plain = {
            "node_up": 1,
            "node_healthy": status.healthy,
            "node_draining": status.draining,
            "queued_tokens": status.queued_tokens,
            "prefill_tokens_per_second": status.prefill_tokens_per_s,
            "kv_transfers_active": transfers.active,
            "kv_transfer_blocks_total": transfers.blocks,
            "kv_transfer_bytes_total": transfers.bytes,
            "preemptions_total": status.num_preemptions,
            "prefix_cache_query_tokens_total": status.num_prefix_queries,
            "prefix_cache_hit_tokens_total": status.num_prefix_hits,
            "node_generated_tokens_total": status.num_generated_tokens,
            "steps_total": status.num_steps,
        }
        assert {name: value(found, name, **own) for name in plain} == plain
        for name, label, numbers in (
            (
                "queue_requests",
                "queue",
                {
                    "running": status.num_running,
                    "waiting": status.num_waiting,
                    "skipped_waiting": status.num_skipped_waiting,
                    "intake": status.num_intake,
                },
            ),
            (
                "kv_blocks",
                "state",
                {
                    "free": blocks.free,
                    "cached": blocks.cached,
                    "used": blocks.used,
                    "quarantined": blocks.quarantined,
                },
            ),
            (
                "kv_transfers_total",
                "outcome",
                {
                    "committed": transfers.committed,
                    "aborted": transfers.aborted,
                    "expired": transfers.expired,
                    "failed": transfers.failed,
                },
            ),
            (
                "node_prompt_tokens_total",
                "source",
                {
                    "computed": status.num_prompt_tokens_computed,
                    "loaded": status.num_prompt_tokens_loaded,
                    "recomputed": status.num_prompt_tokens_recomputed,
                },
            ),
        ):
            assert {v: value(found, name, **own, **{label: v}) for v in numbers} == numbers

    def test_a_node_that_did_not_answer_is_down_and_nothing_else(self, found: Samples) -> None:
        of_it = {name: v for (name, labels), v in found.items() if ("node", "d1") in labels}
        assert of_it == {"kvrelay_node_up": 0}

    def test_the_router(self, found: Samples) -> None:
        assert value(found, "active_requests") == STATUS.num_requests
        for name, label, counts in (
            ("routing_decisions_total", "kind", STATUS.decisions),
            ("retries_total", "reason", STATUS.retries),
            ("rejected_total", "reason", STATUS.rejected),
        ):
            assert {v: value(found, name, **{label: v}) for v in counts} == counts

    def test_each_scrape_shows_the_status_it_is_given(self) -> None:
        metrics = Metrics()
        metrics.exposition(STATUS)
        found = samples(metrics.exposition(EMPTY))
        assert not any(labels for (name, labels) in found if name == "kvrelay_node_up")


def test_two_gateways_in_one_process_count_apart() -> None:
    one, other = Metrics(), Metrics(CollectorRegistry())
    one.request_ended("chat", "ok")
    assert value(samples(other.exposition(EMPTY)), "requests_total") is None
    names = {name for name, _ in samples(one.exposition(EMPTY))}
    assert any(name.startswith("process_") for name in names)
    assert all(name.startswith(("kvrelay_", "process_")) for name in names)
    assert math.isfinite(sum(samples(one.exposition(EMPTY)).values()) * 0)
