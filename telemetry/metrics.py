"""What one gateway counts: requests, tokens, and latencies derived from timelines.

What the nodes count themselves is read from the cluster status at scrape time, in
`cluster_collector.py`. Everything lives in a registry of its own, so that two gateways in one
process do not add up.
"""

from __future__ import annotations

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    generate_latest,
)

from protocol import ClusterStatus, Timeline
from telemetry.cluster_collector import ClusterCollector

# Seconds. The first for what takes a step or so, the second for what may wait in a queue.
_STEP_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0),
)
_REQUEST_BUCKETS = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 320.0),
)


class Metrics:
    """The metrics of one gateway and, at scrape time, of the cluster behind it."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._cluster = ClusterCollector()
        self.registry.register(self._cluster)
        self._requests = Counter(
            "kvrelay_requests",
            "HTTP requests for a generation: ok, disconnected, or the label of the error.",
            ("endpoint", "outcome"),
            registry=self.registry,
        )
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of ended sequences.")
        self._cached_tokens = self._counter(
            "cached_prompt_tokens", "Prompt tokens that the first node had in its prefix cache."
        )
        self._generated_tokens = self._counter(
            "generated_tokens", "Output tokens of ended sequences, as the client's usage has them."
        )
        self._inter_token = self._histogram(
            "inter_token_seconds", "Between two deliveries of tokens of a sequence.", _STEP_BUCKETS
        )
        self._per_output_token = self._histogram(
            "time_per_output_token_seconds",
            "From the first token to the last, divided by the tokens after the first.",
            _STEP_BUCKETS,
        )
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", _REQUEST_BUCKETS
        )
        self._end_to_end = self._histogram(
            "request_seconds", "From arrival to the end of a sequence.", _REQUEST_BUCKETS
        )
        self._queue = self._histogram(
            "prefill_queue_seconds", "From routing to the start of prefill.", _REQUEST_BUCKETS
        )
        self._exposed_transfer = self._histogram(
            "exposed_transfer_seconds",
            "The part of a KV transfer that computing did not hide.",
            _STEP_BUCKETS,
        )

    def request_ended(self, endpoint: str, outcome: str) -> None:
        """An HTTP request got its whole answer or failed; once for each request."""
        self._requests.labels(endpoint, outcome).inc()

    def tokens_arrived(self, gap_s: float) -> None:
        """Tokens of a sequence came `gap_s` seconds after the ones before them."""
        self._inter_token.observe(gap_s)

    def sequence_ended(
        self,
        timeline: Timeline,
        *,
        num_prompt_tokens: int,
        num_cached_tokens: int,
        num_generated_tokens: int,
    ) -> None:
        """A sequence ended, happily or not. Spans of instants not reached are left out."""
        self._prompt_tokens.inc(num_prompt_tokens)
        self._cached_tokens.inc(num_cached_tokens)
        self._generated_tokens.inc(num_generated_tokens)
        _observe(self._first_token, timeline.ttft_s)
        _observe(self._end_to_end, timeline.e2e_s)
        _observe(self._queue, timeline.queue_s)
        _observe(self._exposed_transfer, timeline.exposed_transfer_s)
        decode_s = timeline.between("first_token", "last_token")
        if decode_s is not None and num_generated_tokens > 1:
            self._per_output_token.observe(decode_s / (num_generated_tokens - 1))

    def exposition(self, status: ClusterStatus) -> bytes:
        """Everything in the Prometheus text format, with the cluster as `status` has it."""
        self._cluster.status = status
        return generate_latest(self.registry)

    def _counter(self, name: str, documentation: str) -> Counter:
        return Counter(f"kvrelay_{name}", documentation, registry=self.registry)

    def _histogram(self, name: str, documentation: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"kvrelay_{name}", documentation, buckets=buckets, registry=self.registry)


def _observe(histogram: Histogram, seconds: float | None) -> None:
    if seconds is not None:
        histogram.observe(seconds)
