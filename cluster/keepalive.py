"""Does the other end of a channel still live?

A process that was killed closes its sockets. One that is stopped, or whose host or network is gone,
says nothing at all. So both ends say something every few seconds, and listen for that.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from cluster.channel import Channel
from cluster.node_messages import Ping
from protocol import ConfigError


@dataclass(frozen=True, kw_only=True)
class KeepaliveConfig:
    """Of one end. The other end's `ping_s` has to be well below this end's `silence_s`.

    Raises:
        ConfigError: so short a silence may mean nothing.
    """

    ping_s: float = 2.0
    silence_s: float = 10.0

    def __post_init__(self) -> None:
        if self.ping_s <= 0:
            raise ConfigError("ping_s", f"must be above 0, not {self.ping_s:g}")
        if self.silence_s < 2 * self.ping_s:
            raise ConfigError(
                "silence_s",
                f"must be at least twice ping_s ({self.ping_s:g}), not {self.silence_s:g}",
            )


async def keep_alive(channel: Channel[Any], config: KeepaliveConfig) -> str:
    """Ping where nothing else is said; returns why the other end is to be taken for lost.

    It looks twice in each `ping_s` rather than being told of every frame.
    """
    taken, taken_at = channel.num_sent_bytes, time.monotonic()
    while True:
        await asyncio.sleep(config.ping_s / 2)
        now = time.monotonic()
        if now - channel.heard_at > config.silence_s:
            return f"it has said nothing for {config.silence_s:g} s"
        if channel.num_sent_bytes != taken or not channel.num_unsent_bytes:
            taken, taken_at = channel.num_sent_bytes, now
        elif now - taken_at > config.silence_s:
            return f"it has read nothing for {config.silence_s:g} s"
        if now - channel.said_at >= config.ping_s and not channel.num_unsent_bytes:
            channel.post(Ping())
