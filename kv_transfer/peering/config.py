"""How long peers may take, and how much of them is kept."""

from __future__ import annotations

from dataclasses import dataclass

from kv_transfer.wire import MAX_MESSAGE_BYTES


@dataclass(frozen=True)
class PeeringConfig:
    """Of one node. What exceeds a limit is refused, or waits where it is; nothing grows."""

    connect_timeout_s: float = 3.0
    handshake_timeout_s: float = 5.0  # then who has not said who it is, is dropped
    retry_after_s: float = 1.0  # a failed peer is not dialled again before
    linger_s: float = 1.0  # that `close` waits for last words to leave
    max_strangers: int = 64  # connections in their handshake; more push out the oldest
    max_peers: int = 1024
    max_message_bytes: int = MAX_MESSAGE_BYTES + 16  # a transport may put some of its own in front
    max_extra_bytes: int = 1 << 20
    max_outgoing_bytes: int = 16 << 20  # for each peer
    max_inbox_messages: int = 1 << 16
    max_inbox_bytes: int = 64 << 20
