"""The settings of hand-offs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from protocol import ConfigError

OnTransferFailure = Literal["retry", "recompute", "fail"]

_SHORTEST_HEARTBEAT_S = 0.01  # below that, nodes would do little else


@dataclass(frozen=True, kw_only=True)
class HandoffConfig:
    """How long a hand-off may stay in a state, in seconds, and how its bytes travel.

    Raises:
        ConfigError: a time is not above 0, signs of life would come too late or far too often,
            or `on_transfer_failure` is none of its values.
    """

    reserve_timeout_s: float = 300.0  # P: until D has blocks; D: until P starts
    transfer_timeout_s: float = 60.0  # then D: without a sign of life; P: for the last push
    heartbeat_s: float = 5.0  # between signs of life, and until a question is repeated
    checksums: bool = True  # of each block; only of memory that the CPU can read
    layerwise: bool = False  # send each layer of the last chunk as soon as it is computed
    # What becomes of a request whose hand-off failed: another attempt, if possible on other nodes;
    # or D computes the prompt itself; or the client gets the error.
    on_transfer_failure: OnTransferFailure = "retry"
    max_early: int = 4096  # starts of requests that D has not been told of yet

    def __post_init__(self) -> None:
        choices = get_args(OnTransferFailure)
        if self.on_transfer_failure not in choices:
            raise ConfigError(
                "on_transfer_failure",
                f"must be one of {', '.join(choices)}, not {self.on_transfer_failure!r}",
            )
        for name in ("reserve_timeout_s", "transfer_timeout_s", "heartbeat_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(name, f"must be above 0, not {getattr(self, name)}")
        if self.heartbeat_s < _SHORTEST_HEARTBEAT_S:
            raise ConfigError(
                "heartbeat_s", f"must be at least {_SHORTEST_HEARTBEAT_S}, not {self.heartbeat_s}"
            )
        shortest = min(self.reserve_timeout_s, self.transfer_timeout_s)
        if self.heartbeat_s >= shortest:
            raise ConfigError(
                "heartbeat_s", f"must be below the timeouts ({shortest:g}), not {self.heartbeat_s}"
            )
