"""The default policy: the least predicted time to first token, where the KV cache has room.

    1. Decode node: one with a free seat and KV headroom; of those, the least
       batch share + KV usage + weight * share of the prompt that would have to be transferred
       + weight * how much longer its steps take than usual.
       Before all others, one that has had a part of the request: its hits are there. While it
       has room, one that decodes others of the same prompt: that is there only once.
    2. Prefill node, of those that can hand off to it: the least predicted TTFT,
       (queued + uncached tokens) / measured prefill rate + transfer.
       None, if the decode node has so much of the prompt that it computes the rest itself.
    3. Unified node, if there are any: the least predicted TTFT, without transfer.
    4. Of the pair and the unified node: one that has room; then the least predicted TTFT.

If nobody has room the request goes to where it comes closest, and waits there. All ties end at
the node id.
"""

from __future__ import annotations

from protocol import Role
from router.decision import Candidate, RouteKind, RoutingDecision
from router.facts import RequestFacts
from router.plan import Plan
from router.policies.eligible import find_eligible
from router.prediction import Prediction
from router.view import NodeView, RouterView

_REASONS = {
    RouteKind.DISAGGREGATED: "prefill node with the least predicted TTFT",
    RouteKind.LOCAL_PREFILL: "so little of the prompt is uncached that it skips prefill",
    RouteKind.UNIFIED: "unified node with the least predicted TTFT",
}


def kv_aware(facts: RequestFacts, view: RouterView) -> RoutingDecision:
    return _KvAware(facts, view).decide()


class _KvAware:
    """The steps above for one request; `min` keeps the first of equals, so ties go by node id."""

    def __init__(self, facts: RequestFacts, view: RouterView) -> None:
        self._facts = facts
        self._weight = view.config.decode_transfer_weight
        self._slowness_weight = view.config.slowness_weight
        self._prediction = Prediction(facts, view)
        self._eligible = find_eligible(facts, view, self._prediction)

    def decide(self) -> RoutingDecision:
        plans = self._plans()
        best = min(
            plans,
            key=lambda plan: (
                not self._preferred(plan.decode),
                not plan.fits,
                not self._has_siblings(plan.decode),
                plan.ttft_s,
            ),
        )
        reason = _REASONS[best.kind]
        if not best.fits:
            reason += "; it has no room now, the request will wait"
        if self._preferred(best.decode):
            reason += "; the decode node stays the same"
        return self._prediction.decide(best, reason=reason, candidates=self._candidates(plans[0]))

    def _plans(self) -> list[Plan]:
        """The best of each kind: with a decode node, if there is any, before a unified node."""
        plans = []
        if self._eligible.decode:
            decode = self._best_decode()
            plans.append(self._prediction.plan(self._best_prefill(decode), decode))
        if self._eligible.unified:
            plans.append(self._prediction.plan(None, self._best_unified()))
        return plans

    def _best_decode(self) -> NodeView:
        return min(
            self._eligible.decode,
            key=lambda node: (
                not self._preferred(node),
                not self._prediction.fits(node),
                not self._has_siblings(node),
                self._decode_score(node),
            ),
        )

    def _preferred(self, node: NodeView) -> bool:
        return node.node_id in self._facts.prefer

    def _has_siblings(self, node: NodeView) -> bool:
        return node.node_id in self._facts.siblings_at

    def _best_prefill(self, decode: NodeView) -> NodeView | None:
        return min(
            self._eligible.partners[decode.node_id],
            key=lambda node: (self._prediction.prefill_s(node), node.num_requests),
            default=None,
        )

    def _best_unified(self) -> NodeView:
        predict = self._prediction
        return min(
            self._eligible.unified,
            key=lambda n: (
                not predict.fits(n),
                not self._has_siblings(n),
                predict.prefill_s(n),
                predict.seats(n),
            ),
        )

    def _decode_score(self, node: NodeView) -> float:
        return sum(self._decode_terms(node).values())

    def _decode_terms(self, node: NodeView) -> dict[str, float]:
        """Shares of what the node has, with this request on it."""
        uncached = self._facts.uncached_tokens(node.node_id)
        return {
            "batch": self._prediction.seats(node),
            "kv": 1 - self._prediction.spare_blocks(node) / node.info.num_blocks,
            "transfer": self._weight * uncached / self._facts.num_tokens,
            "slowness": self._slowness_weight * self._prediction.slowness(node),
        }

    def _candidates(self, first: Plan) -> list[Candidate]:
        return [
            *(self._prefill_candidate(node, first) for node in self._eligible.prefill),
            *(self._decode_candidate(node) for node in self._eligible.decode),
            *(self._ttft_candidate(node, transfer_s=0.0) for node in self._eligible.unified),
            *self._eligible.excluded,
        ]

    def _decode_candidate(self, node: NodeView) -> Candidate:
        terms = self._decode_terms(node)
        return Candidate(node.node_id, Role.DECODE, self._decode_score(node), terms)

    def _prefill_candidate(self, node: NodeView, plan: Plan) -> Candidate:
        """Scored for the decode node of `plan`, or excluded if that one cannot use it."""
        if node in self._eligible.partners.get(plan.decode.node_id, ()):
            return self._ttft_candidate(node, self._prediction.transfer_s(plan.decode))
        local = plan.kind is RouteKind.LOCAL_PREFILL
        reason = "not needed" if local else "no decode node that it can hand off to was chosen"
        return Candidate(node.node_id, Role.PREFILL, excluded=reason)

    def _ttft_candidate(self, node: NodeView, transfer_s: float) -> Candidate:
        terms = {
            "queued_tokens": self._prediction.queued_tokens(node),
            "uncached_tokens": self._facts.uncached_tokens(node.node_id),
            "tokens_per_s": self._prediction.prefill_rate(node),
            "transfer_s": transfer_s,
        }
        score = self._prediction.prefill_s(node) + transfer_s
        return Candidate(node.node_id, node.info.role, score, terms)
