"""Decisions of the policy on what is known now, for the first attempt and for later ones."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Hashable, Sequence

from protocol import GenerationRequest, NoHealthyNode, Role
from router.cluster_view import ClusterView
from router.decision import RoutingDecision
from router.flight import Flight
from router.path import Path
from router.policies import RoutingPolicy
from router.roster import Roster
from router.snapshots import Snapshots
from router.view import NodeView

logger = logging.getLogger(__name__)


class Routing:
    """Asks the policy, and counts what it says."""

    def __init__(
        self, policy: RoutingPolicy, cluster: ClusterView, roster: Roster, snapshots: Snapshots
    ) -> None:
        self._policy = policy
        self._cluster = cluster
        self._roster = roster
        self._snapshots = snapshots
        self._seen: Sequence[NodeView] = ()
        self.decisions: Counter[str] = Counter()

    @property
    def seen(self) -> Hashable:
        """How the nodes were at the last decision, as far as it tells who can be used at all."""
        return state_of(self._seen)

    def first(
        self,
        request: GenerationRequest,
        avoid: frozenset[str] = frozenset(),
        siblings_at: frozenset[str] = frozenset(),
    ) -> RoutingDecision:
        """Raises NoHealthyNode or PromptTooLong, as a policy does."""
        return self._decide(request, (), avoid, frozenset(), frozenset(), siblings_at)

    def again(self, flight: Flight) -> RoutingDecision:
        """Elsewhere if possible; if not, with another prefill node, or at least on another path.

        What did not fail is kept: the decode node has had a part of the request.
        """
        emitted, blamed = flight.log.emitted, flight.blamed(self._roster.connected)
        prefer = frozenset(filter(None, [flight.decode_node_id])) - blamed
        prefill = {m.node_id for m in self._roster if m.role is Role.PREFILL}
        none, broken = frozenset[str](), frozenset(flight.failed_paths)
        for avoid in (blamed, blamed & prefill, none):
            with contextlib.suppress(NoHealthyNode):
                return self._decide(flight.request, emitted, avoid, prefer, broken)
        return self._decide(flight.request, emitted, none, prefer, frozenset())

    def _decide(
        self,
        request: GenerationRequest,
        emitted: Sequence[int],
        avoid: frozenset[str],
        prefer: frozenset[str],
        broken: frozenset[Path],
        siblings_at: frozenset[str] = frozenset(),
    ) -> RoutingDecision:
        view = self._cluster.look(self._roster.contacts())
        self._seen = view.nodes
        facts = self._cluster.facts(request, emitted, avoid, prefer, broken, siblings_at)
        decision = self._policy(facts, view)
        self._snapshots.ask()
        self.decisions[decision.kind] += 1
        logger.debug("%s", decision.explain())
        return decision


def state_of(nodes: Sequence[NodeView]) -> Hashable:
    """What has to change before a node that could not be used can be."""
    return tuple(
        (
            node.node_id,
            node.info.generation,
            node.connected,
            node.alive,
            None
            if node.status is None
            else (node.status.healthy, node.status.draining, node.status.admitting),
        )
        for node in nodes
    )
