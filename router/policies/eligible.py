"""Which nodes may serve a request at all, before any policy has a preference."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from protocol import NoHealthyNode, PromptTooLong, Role
from router.decision import Candidate
from router.facts import RequestFacts
from router.path import path_between
from router.prediction import Prediction
from router.view import NodeView, RouterView

_SUSPECT_FACTOR = 3.0  # times the usual silence


@dataclass(frozen=True)
class Eligible:
    """The nodes to choose from, each kind ordered by id."""

    prefill: tuple[NodeView, ...]
    decode: tuple[NodeView, ...]
    unified: tuple[NodeView, ...]
    partners: Mapping[str, tuple[NodeView, ...]]  # by decode node; none: it needs no prefill node
    excluded: tuple[Candidate, ...]


def can_hand_off(prefill: NodeView, decode: NodeView) -> bool:
    """Whether the two nodes have a transport in common. Their blocks may be of different sizes."""
    return not _schemes(prefill.info.endpoint).isdisjoint(_schemes(decode.info.endpoint))


def find_eligible(facts: RequestFacts, view: RouterView, prediction: Prediction) -> Eligible:
    """Sort out the nodes that cannot serve the request, each with its reason.

    Those that have been silent for suspiciously long are sorted out as well, if others are left.

    Raises:
        NoHealthyNode: none is left that could; names the missing role.
        PromptTooLong: no node of that role, healthy or not, could ever hold it.
    """
    nodes = sorted(view.nodes, key=lambda node: node.node_id)
    reasons = {node.node_id: _why_not(node, facts, view) for node in nodes}
    suspects = [node for node in nodes if reasons[node.node_id] is None and _suspect(node, view)]
    trusted = {n.info.role for n in nodes if reasons[n.node_id] is None and n not in suspects}
    for avoided in (suspects, [node for node in suspects if node.info.role in trusted]):
        if avoided:
            doubted = reasons.copy()
            doubted.update((n.node_id, f"silent for {n.silence_s:.1f} s") for n in avoided)
            with contextlib.suppress(NoHealthyNode):
                return _sort_out(facts, view, prediction, nodes, doubted)
    return _sort_out(facts, view, prediction, nodes, reasons)


def _suspect(node: NodeView, view: RouterView) -> bool:
    """Whether it has shown no life for long, and longer than is usual among its peers.

    Where all are silent, it is the directory that is slow.
    """
    peers = [n.silence_s for n in view.nodes if n.connected and n is not node]
    usual = median(peers) if peers else 0.0
    return node.silence_s > max(view.config.suspect_after_s, _SUSPECT_FACTOR * usual)


def _sort_out(
    facts: RequestFacts,
    view: RouterView,
    prediction: Prediction,
    nodes: Sequence[NodeView],
    reasons: dict[str, str | None],
) -> Eligible:

    def left(role: Role) -> tuple[NodeView, ...]:
        return tuple(n for n in nodes if n.info.role is role and reasons[n.node_id] is None)

    prefill, decode = left(Role.PREFILL), left(Role.DECODE)
    partners: dict[str, tuple[NodeView, ...]] = {}
    for node in decode:
        able = tuple(
            candidate
            for candidate in prefill
            if can_hand_off(candidate, node)
            and path_between(candidate.info, node.info) not in facts.broken
        )
        if prediction.skips_prefill(node):
            partners[node.node_id] = ()
        elif able:
            partners[node.node_id] = able
    if not partners and facts.broken and view.config.decode_recomputes:
        partners = {node.node_id: () for node in decode}  # no path is left, and none is needed
    for node in decode:
        if node.node_id not in partners:
            reasons[node.node_id] = "no prefill node can hand off to it"
    if not partners and not left(Role.UNIFIED):
        raise _nobody(facts, view, Role.PREFILL if decode else Role.DECODE, reasons)
    excluded = tuple(
        Candidate(node.node_id, node.info.role, excluded=reasons[node.node_id])
        for node in nodes
        if reasons[node.node_id] is not None
    )
    return Eligible(prefill, left(Role.DECODE), left(Role.UNIFIED), partners, excluded)


def _why_not(node: NodeView, facts: RequestFacts, view: RouterView) -> str | None:
    if node.info.fingerprint != view.fingerprint:
        return "another fingerprint: it serves another model"
    if not node.connected:
        return "not connected"
    if not node.alive:
        return "its heartbeats stopped"
    if node.status is None:
        return "no status yet"
    if not node.status.healthy:
        return "unhealthy"
    if node.status.draining:
        return "draining"
    if not node.status.admitting:
        return "too many KV blocks in quarantine"
    if node.node_id in facts.avoid:
        return "failed this request before"
    if facts.num_tokens > node.max_request_tokens:
        return f"holds at most {node.max_request_tokens} tokens"
    return None


def _nobody(
    facts: RequestFacts, view: RouterView, role: Role, reasons: Mapping[str, str | None]
) -> NoHealthyNode | PromptTooLong:
    """The error that says why `role` cannot be filled; a unified node could have stood in."""
    nodes = [node for node in view.nodes if node.info.role in (role, Role.UNIFIED)]
    if nodes and all(node.info.role is Role.UNIFIED for node in view.nodes):
        role = Role.UNIFIED
    limits = [n.max_request_tokens for n in nodes if n.info.fingerprint == view.fingerprint]
    if limits and facts.num_tokens > max(limits):
        return PromptTooLong("prompt", facts.num_tokens, max(limits), "the largest node")
    causes = "; ".join(
        f"{node.node_id}: {reasons[node.node_id] or 'can hand off to no decode node'}"
        for node in nodes
    )
    return NoHealthyNode(f"no healthy {role} node for this request ({causes or 'none is known'})")


def _schemes(endpoint: str) -> set[str]:
    """An endpoint has a part for each transport of its node."""
    return {part.partition(":")[0] for part in endpoint.split("+")}
