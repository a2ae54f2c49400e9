"""The output tokens of one request: in order, none missing, none twice.

Deltas come from several nodes and may overtake each other. Each says at which output position its
first token belongs:

    emitted   t0 t1 t2 | next position = 3
    delta     position 3: appended        position 4: kept until 3 has come
              position 2: its first token is known, the rest is appended
"""

from __future__ import annotations

from collections.abc import Sequence

from protocol import Delta, TokenLogprobs


class TokenLog:
    """What the client has, or will have next."""

    def __init__(self) -> None:
        self.emitted: list[int] = []
        self.logprobs: list[TokenLogprobs] = []  # as many, or none
        self._ahead: list[Delta] = []

    def add(self, delta: Delta) -> Sequence[Delta]:
        """The deltas that are due by now, in order; this one comes later if it is too early."""
        self._ahead.append(delta)
        due = []
        while (ready := self._take_ready()) is not None:
            num_known = len(self.emitted) - ready.position
            self.emitted.extend(ready.token_ids[num_known:])
            self.logprobs.extend(ready.logprobs[num_known:])
            due.append(ready)
        return due

    def forget_ahead(self) -> None:
        """The attempt is over: what is not in order yet will be made again."""
        self._ahead.clear()

    def _take_ready(self) -> Delta | None:
        for index, delta in enumerate(self._ahead):
            if delta.position <= len(self.emitted):
                return self._ahead.pop(index)
        return None
