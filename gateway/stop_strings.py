"""Finding the end of a text that comes in pieces, without showing a piece of the end.

    stop strings   "</s>"   "\\n\\n"
    text so far    A n s w e r : _ 4 2 \\n
                   └──── may be shown ──┘└ held: the first half of "\\n\\n"

The text ends before the stop string that is complete first; of several complete at the same
character, before the longest. So the cut depends on the text only, not on how it was split.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStringScanner:
    """Cuts one text. Feed it piece by piece; after `stopped` is set, feed it no more."""

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self._matches = [_Match(stop) for stop in stop_strings]
        self._held = ""
        self.stopped: str | None = None  # the stop string that ended the text

    def feed(self, text: str, *, may_stop: bool = True) -> str:
        """What may be shown now that `text` has been added; ends before the stop string.

        Unless it `may_stop`, a stop string that gets complete in `text` is text like any other.
        """
        assert self.stopped is None
        pending = self._held + text
        for position, char in enumerate(text, start=len(self._held) + 1):
            complete = [match.stop for match in self._matches if match.advance(char)]
            if complete and may_stop:
                self.stopped = max(complete, key=len)
                self._held = ""
                return pending[: position - len(self.stopped)]
        num_held = max((match.length for match in self._matches), default=0)
        shown = len(pending) - num_held
        self._held = pending[shown:]
        return pending[:shown]

    def flush(self) -> str:
        """What was held back, at the end of a text that no stop string ended."""
        held, self._held = self._held, ""
        return held


class _Match:
    """How much of one stop string the text ends with (Knuth, Morris and Pratt 1977)."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.length = 0  # the longest proper prefix of `stop` that the text ends with
        self._borders = _borders(stop)

    def advance(self, char: str) -> bool:
        """Whether the text, now that `char` has been added, ends with the whole stop string."""
        self.length = _advanced(self.stop, self._borders, self.length, char)
        if self.length < len(self.stop):
            return False
        self.length = self._borders[-1]
        return True


def _borders(stop: str) -> list[int]:
    """For each prefix of `stop`: the length of its longest border, a prefix that also ends it."""
    borders = [0]
    for char in stop[1:]:
        borders.append(_advanced(stop, borders, borders[-1], char))
    return borders


def _advanced(stop: str, borders: Sequence[int], length: int, char: str) -> int:
    while length and stop[length] != char:
        length = borders[length - 1]
    return length + (stop[length] == char)
