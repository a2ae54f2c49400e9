"""What a request would cost on each node, as far as the router's view tells."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from protocol import Role
from router.decision import Candidate, RouteKind, RoutingDecision
from router.facts import RequestFacts
from router.plan import Plan
from router.view import NodeLoad, NodeView, RouterView

_USUAL_SPREAD = 1.5
_MAX_SLOWNESS = 8.0


class Prediction:
    """Estimates for one request against one view. Pure."""

    def __init__(self, facts: RequestFacts, view: RouterView) -> None:
        self._facts = facts
        self._config = view.config
        self._nodes = view.nodes
        measured = [
            node.status.prefill_tokens_per_s
            for node in view.nodes
            if node.info.fingerprint == view.fingerprint
            and node.status is not None
            and node.status.prefill_tokens_per_s > 0
        ]
        # A node that has not prefilled yet is taken for one like the others, or else it would
        # look much slower or faster than they are and lose or win every request.
        self._usual_rate = (
            median(measured) if measured else self._config.default_prefill_tokens_per_s
        )

    def slowness(self, node: NodeView) -> float:
        """How slow the steps of this node are: their length, in steps of its peers, beyond 1.5.

        Below that it says nothing: whoever has more to do has longer steps. At most 8; 0 if
        nothing was measured lately.
        """
        peers = [
            peer.step_s
            for peer in self._nodes
            if peer.step_s > 0 and peer.info.role is node.info.role and peer is not node
        ]
        if not peers or node.step_s == 0:
            return 0.0
        return min(max(0.0, node.step_s / median(peers) - _USUAL_SPREAD), _MAX_SLOWNESS)

    def prefill_rate(self, node: NodeView) -> float:
        """Tokens per second."""
        measured = 0.0 if node.status is None else node.status.prefill_tokens_per_s
        return measured if measured > 0 else self._usual_rate

    def queued_tokens(self, node: NodeView) -> float:
        """Prompt tokens in front of a new request.

        The queue that the status shows has gone on to shrink since. What was sent later stands
        behind it, and leaves the load when its own first token is seen.
        """
        shown = 0 if node.status is None else node.status.queued_tokens
        done_since = self.prefill_rate(node) * node.status_age_s
        return max(0.0, shown - done_since) + node.load.queued_tokens

    def prefill_s(self, node: NodeView) -> float:
        """Until the first token is sampled on this node."""
        tokens = self.queued_tokens(node) + self._facts.uncached_tokens(node.node_id)
        return tokens / self.prefill_rate(node)

    def transfer_s(self, decode: NodeView) -> float:
        """To move what the decode node does not have yet."""
        moved_s = self._facts.uncached_tokens(decode.node_id) / self._config.transfer_tokens_per_s
        return self._config.handoff_latency_s + moved_s

    def blocks(self, node: NodeView) -> int:
        """Blocks that the request takes on the node that decodes.

        Blocks that it shares with requests of now are counted too: the router cannot know
        whether a cached block has a user, and promising too little keeps running decodes alive.
        """
        headroom = min(self._facts.max_new_tokens, self._config.output_headroom_tokens)
        wanted = -(-(self._facts.num_tokens + headroom) // node.info.block_size)
        return min(wanted, node.info.num_blocks)

    def spare_blocks(self, node: NodeView) -> int:
        """Blocks left when the request has its own; below 0 if it does not fit."""
        return node.available_blocks - self.blocks(node)

    def seats(self, node: NodeView) -> float:
        """Share of the running batch that is taken with this request in it; above 1: it waits."""
        return (node.num_requests + 1) / node.info.max_num_seqs

    def fits(self, node: NodeView) -> bool:
        """Whether the node that decodes has a seat and KV headroom for the request now."""
        return self.spare_blocks(node) >= 0 and self.seats(node) <= 1

    def skips_prefill(self, decode: NodeView) -> bool:
        """Whether so little is left to compute that a hand-off is not worth it."""
        limit = self._config.local_prefill_max_tokens
        return self._facts.uncached_tokens(decode.node_id) <= limit

    def plan(self, prefill: NodeView | None, decode: NodeView) -> Plan:
        """The plan that uses these nodes; without a prefill node `decode` does everything."""
        fits = self.fits(decode)
        if prefill is not None:
            ttft_s = self.prefill_s(prefill) + self.transfer_s(decode)
            return Plan(RouteKind.DISAGGREGATED, prefill, decode, ttft_s, fits)
        unified = decode.info.role is Role.UNIFIED
        kind = RouteKind.UNIFIED if unified else RouteKind.LOCAL_PREFILL
        return Plan(kind, None, decode, self.prefill_s(decode), fits)

    def decide(
        self, plan: Plan, *, reason: str, candidates: Sequence[Candidate]
    ) -> RoutingDecision:
        """The decision for this plan."""
        return RoutingDecision(
            kind=plan.kind,
            prefill_node_id=None if plan.prefill is None else plan.prefill.node_id,
            decode_node_id=plan.decode.node_id,
            predicted_ttft_s=plan.ttft_s,
            reason=reason,
            loads=self._loads(plan),
            candidates=tuple(candidates),
        )

    def _loads(self, plan: Plan) -> dict[str, NodeLoad]:
        """What the plan puts on each node."""
        blocks = self.blocks(plan.decode)
        if plan.prefill is None:
            tokens = self._facts.uncached_tokens(plan.decode.node_id)
            return {plan.decode.node_id: NodeLoad(tokens, blocks, requests=1)}
        tokens = self._facts.uncached_tokens(plan.prefill.node_id)
        loads = {plan.prefill.node_id: NodeLoad(tokens, requests=1)}
        if self._facts.max_new_tokens > 1:  # else the prefill node's token is all there is
            loads[plan.decode.node_id] = NodeLoad(blocks=blocks, requests=1)
        return loads
