"""The cluster status as people and probes want to read it."""

from __future__ import annotations

from typing import Any

import msgspec

from protocol import ClusterStatus, NodeReport, Role


def health(status: ClusterStatus) -> tuple[bool, dict[str, Any]]:
    """Whether requests can be served, and how many nodes of each role can take some.

    Needed is a unified node, or a prefill node and a decode node.
    """
    healthy = dict.fromkeys(Role, 0)
    known = dict.fromkeys(Role, 0)
    for report in status.nodes:
        known[report.info.role] += 1
        healthy[report.info.role] += _takes_requests(report)
    serving = bool(healthy[Role.UNIFIED] or (healthy[Role.PREFILL] and healthy[Role.DECODE]))
    roles = {
        role.value: {"healthy": healthy[role], "known": known[role]} for role in Role if known[role]
    }
    return serving, {"status": "ok" if serving else "unavailable", "roles": roles}


def cluster(status: ClusterStatus) -> dict[str, Any]:
    return {
        "num_requests": status.num_requests,
        "decisions": status.decisions,
        "retries": status.retries,
        "rejected": status.rejected,
        "nodes": [_node(report) for report in status.nodes],
    }


def _takes_requests(report: NodeReport) -> bool:
    status = report.status
    return status is not None and status.healthy and status.admitting and not status.draining


def _node(report: NodeReport) -> dict[str, Any]:
    """The facts of a node and, if it answered, its state with the queues under one key."""
    facts = msgspec.to_builtins(report.info)
    if report.status is None:
        return {**facts, "answered": False, "healthy": False}
    state = msgspec.to_builtins(report.status)
    queues = {name: state.pop(f"num_{name}") for name in _QUEUES}
    return {**facts, **state, "answered": True, "queues": queues}


_QUEUES = ("running", "waiting", "skipped_waiting", "intake")
