"""The settings of a router."""

from __future__ import annotations

from dataclasses import dataclass

from protocol import ConfigError


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """How requests are admitted and placed.

    Raises:
        ConfigError: a value is out of its range.
    """

    policy: str = "kv_aware"

    # Admission. A limit is on what all nodes together have in hand.
    max_inflight_requests: int = 1024
    max_queued_tokens: int = 1_048_576  # prompt tokens admitted, first token not yet seen
    max_predicted_ttft_s: float | None = None  # the SLO; None: no request is refused for it

    # Conditional disaggregation: a prompt of which the decode node would have to compute at most
    # this many tokens skips the prefill node. 0: never.
    local_prefill_max_tokens: int = 0

    # Prediction.
    default_prefill_tokens_per_s: float = 1000.0  # until any node has measured its own
    transfer_tokens_per_s: float = 100_000.0
    handoff_latency_s: float = 0.002  # of a hand-off, however short
    output_headroom_tokens: int = 256  # a decode node should have room for, beyond the prompt
    decode_transfer_weight: float = 0.5  # of tokens to transfer, against batch and KV usage

    # What happens to an attempt that fails. With decode_recomputes, a prefill node that is lost is
    # no reason for another one: the decode node notices and computes the prompt itself.
    decode_recomputes: bool = False
    # Attempts are counted since the last one that brought a token.
    max_attempts: int = 3
    max_lost_attempts: int = 8  # that a node's end took, so that no request can end all nodes
    retry_backoff_s: float = 0.05  # before the second attempt; doubled before each later one
    retry_backoff_max_s: float = 2.0
    retry_jitter: float = 0.5  # each pause is longer by up to this share, by chance
    # Attempts after the first that have no token yet: at most so many at a time, or this share of
    # all requests in flight if that is more. The others wait for their turn.
    retry_burst: int = 8
    retry_share: float = 0.2
    stall_timeout_s: float = 600.0  # without a token, before a request is given up

    # While no node can take it, a request waits for one that long: one that is under way, and one
    # that is new. Then it fails with NoHealthyNode (503), which a client may try again.
    recovery_timeout_s: float = 30.0
    admission_wait_s: float = 0.0

    # Nodes that are slow rather than dead.
    suspect_after_s: float = 3.0  # without a sign of life, if that is long among its peers
    slowness_weight: float = 0.25  # of decode steps that take longer than usual

    # Prefix index.
    max_index_entries: int = 1_000_000  # (node, block) pairs, about half a KB each

    def __post_init__(self) -> None:
        self._at_least("max_inflight_requests", self.max_inflight_requests, 1)
        self._at_least("max_queued_tokens", self.max_queued_tokens, 1)
        if self.max_predicted_ttft_s is not None:
            self._above_zero("max_predicted_ttft_s", self.max_predicted_ttft_s)
        self._at_least("local_prefill_max_tokens", self.local_prefill_max_tokens, 0)
        self._above_zero("default_prefill_tokens_per_s", self.default_prefill_tokens_per_s)
        self._above_zero("transfer_tokens_per_s", self.transfer_tokens_per_s)
        self._at_least("handoff_latency_s", self.handoff_latency_s, 0)
        self._at_least("output_headroom_tokens", self.output_headroom_tokens, 1)
        self._at_least("decode_transfer_weight", self.decode_transfer_weight, 0)
        self._at_least("max_attempts", self.max_attempts, 1)
        self._at_least("max_lost_attempts", self.max_lost_attempts, 1)
        self._at_least("retry_backoff_s", self.retry_backoff_s, 0)
        self._at_least("retry_backoff_max_s", self.retry_backoff_max_s, 0)
        self._at_least("retry_jitter", self.retry_jitter, 0)
        self._at_least("retry_burst", self.retry_burst, 1)
        self._at_least("retry_share", self.retry_share, 0)
        self._above_zero("stall_timeout_s", self.stall_timeout_s)
        self._at_least("recovery_timeout_s", self.recovery_timeout_s, 0)
        self._at_least("admission_wait_s", self.admission_wait_s, 0)
        self._above_zero("suspect_after_s", self.suspect_after_s)
        self._at_least("slowness_weight", self.slowness_weight, 0)
        self._at_least("max_index_entries", self.max_index_entries, 1)

    # `not (a >= b)` also refuses NaN.
    @staticmethod
    def _at_least(field: str, value: float, limit: int) -> None:
        if not value >= limit:
            raise ConfigError(field, f"must be at least {limit}, not {value}")

    @staticmethod
    def _above_zero(field: str, value: float) -> None:
        if not value > 0:
            raise ConfigError(field, f"must be above 0, not {value}")
