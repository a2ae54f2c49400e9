"""Where a request goes, and why."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from protocol import Role
from router.view import NodeLoad


class RouteKind(enum.StrEnum):
    DISAGGREGATED = "disaggregated"  # prefill node → KV → decode node
    LOCAL_PREFILL = "local_prefill"  # the decode node computes the little that is not cached
    UNIFIED = "unified"  # one node for both


@dataclass(frozen=True)
class Candidate:
    """What a policy thought of one node. Of those in one role, the lowest score is best."""

    node_id: str
    role: Role
    score: float | None = None
    terms: Mapping[str, float] = field(default_factory=dict)  # what the score was made of
    excluded: str | None = None  # why it was not considered


@dataclass(frozen=True, kw_only=True)
class RoutingDecision:
    """The nodes of one attempt. A unified node stands as the decode node."""

    kind: RouteKind
    prefill_node_id: str | None  # for `DISAGGREGATED` only
    decode_node_id: str
    predicted_ttft_s: float  # from the decision on
    reason: str
    loads: Mapping[str, NodeLoad]  # what this puts on each chosen node
    candidates: tuple[Candidate, ...]  # every node of the view

    def __post_init__(self) -> None:
        assert (self.kind is RouteKind.DISAGGREGATED) == (self.prefill_node_id is not None)

    def chose(self, candidate: Candidate) -> bool:
        return candidate.node_id in (self.prefill_node_id, self.decode_node_id)

    def explain(self) -> str:
        """A table of all candidates, for people.

        disaggregated: p0 → d1, predicted TTFT 0.514 s
        least predicted TTFT of the prefill nodes
            role     node  score  terms
          * prefill  p0    0.514  queued_tokens=0 uncached_tokens=512 …
            prefill  p1    1.026  queued_tokens=512 uncached_tokens=512 …
        """
        rows = [("", "role", "node", "score", "terms")]
        rows += [self._row(candidate) for candidate in self.candidates]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        table = [
            "  ".join(
                [*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]
            )
            for row in rows
        ]
        route = " → ".join(filter(None, (self.prefill_node_id, self.decode_node_id)))
        title = f"{self.kind}: {route}, predicted TTFT {self.predicted_ttft_s:.3f} s"
        return "\n".join([title, self.reason, *(line.rstrip() for line in table)])

    def _row(self, candidate: Candidate) -> tuple[str, str, str, str, str]:
        mark = "*" if self.chose(candidate) else ""
        score = "-" if candidate.score is None else f"{candidate.score:.3f}"
        terms = " ".join(f"{name}={value:.4g}" for name, value in candidate.terms.items())
        if candidate.excluded is not None:
            terms = f"excluded: {candidate.excluded}"
        return mark, candidate.role, candidate.node_id, score, terms
