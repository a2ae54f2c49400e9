"""What is to be shown of a request in a step, and of a step as a whole, in any medium."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from scheduler.scenario import ScenarioStep, Share, Waiting, Work


class CellState(enum.StrEnum):
    """What a request does in a step. In the order of a legend."""

    PREFILL = "prefill"
    DECODE = "decode"
    RECOMPUTE = "recompute"
    WAIT = "wait"
    PREEMPTED = "preempted"
    IDLE = "idle"
    ABORTED = "aborted"
    REFUSED = "refused"
    ABSENT = "absent"  # not there yet, or no more

    @property
    def meaning(self) -> str:
        return _MEANINGS[self]


_MEANINGS = {
    CellState.PREFILL: "tokens of its prompt are computed",
    CellState.DECODE: "its newest token is computed",
    CellState.RECOMPUTE: "computed again after a preemption",
    CellState.WAIT: "waits to be admitted",
    CellState.PREEMPTED: "loses its blocks and waits",
    CellState.IDLE: "has a seat, but gets nothing",
    CellState.ABORTED: "ended from outside",
    CellState.REFUSED: "can never fit",
    CellState.ABSENT: "",
}

_STATES = {
    Work.PREFILL: CellState.PREFILL,
    Work.DECODE: CellState.DECODE,
    Work.RECOMPUTE: CellState.RECOMPUTE,
}


@dataclass(frozen=True)
class Cell:
    """One request in one step."""

    state: CellState
    num_tokens: int = 0
    is_last: bool = False  # it has all its tokens with this step
    reason: str = ""

    @classmethod
    def of(cls, step: ScenarioStep, request_id: str) -> Cell:
        if request_id in step.refused:
            return cls(CellState.REFUSED, reason=f"refused: {step.refused[request_id]}")
        if request_id in step.aborted:
            return cls(CellState.ABORTED, reason="aborted before this step was decided")
        if (share := step.shares.get(request_id)) is not None:
            return cls(
                _STATES[share.work],
                share.num_tokens,
                request_id in step.finished,
                ", ".join(_share_words(step, request_id, share)),
            )
        if request_id in step.preempted:
            return cls(CellState.PREEMPTED, reason="preempted: its blocks are given to others")
        if request_id in step.idle:
            return cls(CellState.IDLE, reason=f"has a seat, but {step.why_idle}")
        if (waiting := step.waiting.get(request_id)) is not None:
            return cls(CellState.WAIT, reason=_waiting_words(waiting))
        return cls(CellState.ABSENT)


def _share_words(step: ScenarioStep, request_id: str, share: Share) -> Iterator[str]:
    if (start := step.starts.get(request_id)) is not None:
        yield "resumed" if start.resumed else "admitted"
        if start.num_cached_tokens:
            yield f"{_tokens(start.num_cached_tokens)} hit in the prefix cache"
    yield f"{share.work} of {_tokens(share.num_tokens)}"
    if share.num_again:
        yield f"{share.num_again} of them once more"
    if share.num_computed_before:
        yield f"{share.num_computed_before} were there before"
    if request_id in step.finished:
        yield "finished"


def _waiting_words(waiting: Waiting) -> str:
    return f"waits {waiting.reason if waiting.behind else f'for {waiting.reason}'}"


def _tokens(number: int) -> str:
    return "1 token" if number == 1 else f"{number} tokens"


@dataclass(frozen=True)
class Remark:
    """Something that is worth a word about a step."""

    text: str
    state: CellState | None = None  # which it is about


def remarks(step: ScenarioStep, *, with_ends: bool = False) -> Iterator[Remark]:
    """What happened in a step, most of all why the head of the queue was not admitted."""
    for request_id, problem in step.refused.items():
        yield Remark(f"{request_id} refused: {problem}", CellState.REFUSED)
    for request_id in step.aborted:
        yield Remark(f"{request_id} aborted", CellState.ABORTED)
    if step.preempted:
        yield Remark(f"{some(step.preempted)} preempted", CellState.PREEMPTED)
    for request_id, start in step.starts.items():
        if start.resumed:
            yield Remark(f"{request_id} resumed", CellState.RECOMPUTE)
        if start.num_cached_tokens:
            yield Remark(f"{request_id}: {start.num_cached_tokens} tokens cached")
    if step.idle:
        yield Remark(f"{some(step.idle)} idle: {step.why_idle}", CellState.IDLE)
    yield from _waiting_remarks(step)
    if with_ends and step.finished:
        yield Remark(f"{some(step.finished)} finished")


def _waiting_remarks(step: ScenarioStep) -> Iterator[Remark]:
    """Those that wait for the same are told of together."""
    groups: dict[tuple[str | None, str], list[str]] = {}
    for request_id, waiting in step.waiting.items():
        if request_id not in step.preempted:  # that is told already
            groups.setdefault((waiting.behind, waiting.label), []).append(request_id)
    for (behind, label), ids in groups.items():
        if behind is not None:
            words = label
        else:
            words = f"waits for {label}" if len(ids) == 1 else f"wait for {label}"
        yield Remark(f"{some(ids)} {words}", CellState.WAIT)


def some(ids: Sequence[str], most: int = 4, separator: str = " ") -> str:
    """The first of them, and how many more there are."""
    shown = separator.join(ids[:most])
    return shown if len(ids) <= most else f"{shown} +{len(ids) - most}"
