"""The instants of a request, from which every latency metric, span and plot is derived."""

from __future__ import annotations

import msgspec


class Timeline(msgspec.Struct, kw_only=True):
    """Seconds of the wall clock (`time.time()`); None where the instant was not reached.

    arrived → admitted → routed → prefill_queued → prefill_started → prefill_finished
                                        └→ reserved → first_block_pushed → last_block_pushed
                                                    → committed → promoted
    first_token → last_token → finished
    """

    arrived: float | None = None
    admitted: float | None = None
    routed: float | None = None
    prefill_queued: float | None = None
    prefill_started: float | None = None
    prefill_finished: float | None = None
    reserved: float | None = None
    first_block_pushed: float | None = None
    last_block_pushed: float | None = None
    committed: float | None = None
    promoted: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None

    def merge(self, other: Timeline) -> None:
        """Take over the instants that `other` has and this one lacks."""
        for name in self.__struct_fields__:
            if getattr(self, name) is None:
                setattr(self, name, getattr(other, name))

    def between(self, start: str, end: str) -> float | None:
        """Seconds from instant `start` to instant `end`; None if either was not reached."""
        began, ended = getattr(self, start), getattr(self, end)
        return None if began is None or ended is None else max(0.0, ended - began)

    @property
    def ttft_s(self) -> float | None:
        return self.between("arrived", "first_token")

    @property
    def queue_s(self) -> float | None:
        return self.between("routed", "prefill_started")

    @property
    def exposed_transfer_s(self) -> float | None:
        """The part of the transfer that computing did not hide."""
        return self.between("prefill_finished", "committed")

    @property
    def e2e_s(self) -> float | None:
        return self.between("arrived", "finished")
