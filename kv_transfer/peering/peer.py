"""What is known of one peer."""

from __future__ import annotations

import os
from dataclasses import dataclass

from kv_transfer.peering.connection import Connection
from kv_transfer.peering.passport import Passport
from kv_transfer.transport import PeerUnreachable


@dataclass
class Peer:
    """
    unknown ──► dialled ──► met ──► lost ──► dialled …
                   └───► failed ──► dialled …
    """

    endpoint: str
    outgoing: Connection | None = None  # which we dialled
    incoming: Connection | None = None  # which it dialled
    passport: Passport | None = None  # kept when it is lost
    descriptors: tuple[int, ...] = ()  # that came with it, until somebody takes them
    pidfd: int | None = None
    exited: bool = False
    failure: PeerUnreachable | None = None
    retry_at: float = 0.0

    @property
    def connected(self) -> bool:
        return self.outgoing is not None or self.incoming is not None

    @property
    def is_stranger(self) -> bool:
        """Nothing that matters was ever said: messages and descriptors come after passports."""
        return self.passport is None and not self.connected

    @property
    def forgettable(self) -> bool:
        """Whether an unknown peer would get the same answers."""
        return not self.connected and (self.exited or self.passport is None)

    def raise_failure(self) -> None:
        if self.failure is not None:
            raise type(self.failure)(*self.failure.args)

    def close_descriptors(self) -> None:
        for fd in self.descriptors:
            os.close(fd)
        self.descriptors = ()
