"""The cluster status as Prometheus metrics, made anew at each scrape.

Nodes count for themselves since they started; nothing is added up here. A node that did not
answer in time has no samples but `kvrelay_node_up` = 0, which is better than stale ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from protocol import ClusterStatus, NodeStatus

_NODE = ("node", "role")

_Number = Callable[[NodeStatus], float]
_Numbers = Callable[[NodeStatus], Mapping[str, float]]

# One number of each node: name, documentation, where it is.
_GAUGES: tuple[tuple[str, str, _Number], ...] = (
    ("node_healthy", "Whether the node serves.", lambda s: s.healthy),
    ("node_draining", "Whether the node refuses new jobs.", lambda s: s.draining),
    (
        "node_admitting",
        "Whether it takes new jobs: not too many KV blocks are in quarantine.",
        lambda s: s.admitting,
    ),
    ("queued_tokens", "Prompt tokens that are not computed yet.", lambda s: s.queued_tokens),
    (
        "prefill_tokens_per_second",
        "Measured prefill rate; 0 until there is one.",
        lambda s: s.prefill_tokens_per_s,
    ),
    ("kv_transfers_active", "Hand-offs under way.", lambda s: s.transfers.active),
)
_COUNTERS: tuple[tuple[str, str, _Number], ...] = (
    ("kv_transfer_blocks", "KV blocks moved by hand-offs.", lambda s: s.transfers.blocks),
    ("kv_transfer_bytes", "Bytes of KV moved by hand-offs.", lambda s: s.transfers.bytes),
    (
        "kv_transfer_seconds",
        "From the first byte to the commit, over all hand-offs that were committed.",
        lambda s: s.transfers.seconds,
    ),
    ("preemptions", "Requests that had to give up their blocks.", lambda s: s.num_preemptions),
    (
        "prefix_cache_query_tokens",
        "Tokens looked up in the prefix cache.",
        lambda s: s.num_prefix_queries,
    ),
    ("prefix_cache_hit_tokens", "Tokens found in it.", lambda s: s.num_prefix_hits),
    ("node_generated_tokens", "Tokens sampled by the node.", lambda s: s.num_generated_tokens),
    ("steps", "Steps of the engine.", lambda s: s.num_steps),
)
# Several numbers of each node: name, documentation, the label that tells them apart, where.
_LABELLED_GAUGES: tuple[tuple[str, str, str, _Numbers], ...] = (
    (
        "queue_requests",
        "Requests in each queue of the node.",
        "queue",
        lambda s: {
            "running": s.num_running,
            "waiting": s.num_waiting,
            "skipped_waiting": s.num_skipped_waiting,
            "intake": s.num_intake,
        },
    ),
    (
        "kv_transfers_live",
        "Hand-offs under way by the state that this node sees, of the 64 oldest.",
        "state",
        lambda s: Counter(transfer.state for transfer in s.transfers.live),
    ),
    (
        "kv_blocks",
        "Usable KV blocks by where they are.",
        "state",
        lambda s: {
            "free": s.blocks.free,
            "cached": s.blocks.cached,
            "used": s.blocks.used,
            "quarantined": s.blocks.quarantined,
        },
    ),
)
_LABELLED_COUNTERS: tuple[tuple[str, str, str, _Numbers], ...] = (
    (
        "kv_transfers",
        "Hand-offs by how they ended.",
        "outcome",
        lambda s: {
            "committed": s.transfers.committed,
            "aborted": s.transfers.aborted,
            "expired": s.transfers.expired,
            "failed": s.transfers.failed,
        },
    ),
    (
        "kv_transfers_ended",
        "Hand-offs that were not committed, by reason.",
        "reason",
        lambda s: s.transfers.reasons,
    ),
    (
        "kv_transfer_failures",
        "Failed hand-offs by what this node did about them: retry, recompute or fail.",
        "outcome",
        lambda s: s.transfers.outcomes,
    ),
    (
        "kv_transfers_retargeted",
        "Hand-offs that got another prefill node, by what became of the blocks that were reserved.",
        "reservation",
        lambda s: s.transfers.retargeted,
    ),
    (
        "node_prompt_tokens",
        "Prompt tokens by how the node got their KV.",
        "source",
        lambda s: {
            "computed": s.num_prompt_tokens_computed,
            "loaded": s.num_prompt_tokens_loaded,
            "recomputed": s.num_prompt_tokens_recomputed,
        },
    ),
)


class ClusterCollector(Collector):
    """Shows `status`, which its owner sets before each scrape; shows nothing before that."""

    def __init__(self) -> None:
        self.status: ClusterStatus | None = None

    def describe(self) -> Iterable[Metric]:
        """Nothing, so that registering does not scrape."""
        return ()

    def collect(self) -> Iterator[Metric]:
        if self.status is None:
            return
        yield from _of_router(self.status)
        yield _up(self.status)
        nodes = [report.status for report in self.status.nodes if report.status is not None]
        for name, documentation, number in _GAUGES:
            yield _filled(
                GaugeMetricFamily(_full(name), documentation, labels=_NODE), nodes, number
            )
        for name, documentation, number in _COUNTERS:
            counter = CounterMetricFamily(_full(name), documentation, labels=_NODE)
            yield _filled(counter, nodes, number)
        for name, documentation, label, numbers in _LABELLED_GAUGES:
            gauge = GaugeMetricFamily(_full(name), documentation, labels=(*_NODE, label))
            yield _filled_by_label(gauge, nodes, numbers)
        for name, documentation, label, numbers in _LABELLED_COUNTERS:
            counter = CounterMetricFamily(_full(name), documentation, labels=(*_NODE, label))
            yield _filled_by_label(counter, nodes, numbers)


def _of_router(status: ClusterStatus) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "kvrelay_active_requests", "Admitted and not ended.", value=status.num_requests
    )
    for name, documentation, label, counts in (
        ("routing_decisions", "Routing decisions by kind.", "kind", status.decisions),
        ("retries", "Attempts after the first, by what failed.", "reason", status.retries),
        ("rejected", "Requests not admitted, by reason.", "reason", status.rejected),
    ):
        counter = CounterMetricFamily(_full(name), documentation, labels=(label,))
        for value, count in counts.items():
            counter.add_metric((value,), count)
        yield counter


def _up(status: ClusterStatus) -> Metric:
    up = GaugeMetricFamily("kvrelay_node_up", "Whether the node answered.", labels=_NODE)
    for report in status.nodes:
        up.add_metric((report.info.node_id, report.info.role), report.status is not None)
    return up


_Family = GaugeMetricFamily | CounterMetricFamily


def _filled(family: _Family, nodes: Iterable[NodeStatus], number: _Number) -> Metric:
    for node in nodes:
        family.add_metric((node.node_id, node.role), number(node))
    return family


def _filled_by_label(family: _Family, nodes: Iterable[NodeStatus], numbers: _Numbers) -> Metric:
    for node in nodes:
        for value, count in numbers(node).items():
            family.add_metric((node.node_id, node.role, value), count)
    return family


def _full(name: str) -> str:
    return f"kvrelay_{name}"
