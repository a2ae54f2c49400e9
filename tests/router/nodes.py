"""Nodes as a router sees them, idle and healthy unless said otherwise."""

from __future__ import annotations

from typing import Any

from protocol import BlockCounts, NodeInfo, NodeStatus, Role, TransferCounts
from router import NodeLoad, NodeView, RouterConfig, RouterView

FINGERPRINT = "f"


def make_info(node_id: str, role: Role = Role.PREFILL, **changes: Any) -> NodeInfo:
    values: dict[str, Any] = {
        "model": "m",
        "fingerprint": FINGERPRINT,
        "endpoint": "memory:pool",
        "block_size": 16,
        "num_blocks": 1000,
        "max_model_len": 8192,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 512,
    }
    return NodeInfo(node_id=node_id, role=role, **(values | changes))


def make_status(info: NodeInfo, *, used_blocks: int = 0, **changes: Any) -> NodeStatus:
    free = info.num_blocks - used_blocks
    values: dict[str, Any] = {
        "healthy": True,
        "draining": False,
        "num_running": 0,
        "num_waiting": 0,
        "num_skipped_waiting": 0,
        "num_intake": 0,
        "queued_tokens": 0,
        "prefill_tokens_per_s": 1000.0,
        "blocks": BlockCounts(
            total=info.num_blocks, free=free, cached=0, used=used_blocks, quarantined=0
        ),
        "transfers": TransferCounts(),
        "num_preemptions": 0,
        "num_prefix_queries": 0,
        "num_prefix_hits": 0,
        "num_prompt_tokens_computed": 0,
        "num_prompt_tokens_loaded": 0,
        "num_prompt_tokens_recomputed": 0,
        "num_generated_tokens": 0,
        "num_steps": 0,
    }
    return NodeStatus(node_id=info.node_id, role=info.role, **(values | changes))


def make_node(
    node_id: str,
    *,
    info: dict[str, Any] | None = None,
    load: NodeLoad | None = None,
    status_age_s: float = 0.0,
    alive: bool = True,
    connected: bool = True,
    silence_s: float = 0.0,
    step_s: float = 0.0,
    **status: Any,
) -> NodeView:
    """The first letter of the id is the role: p0, d1, u2."""
    role = {"p": Role.PREFILL, "d": Role.DECODE, "u": Role.UNIFIED}[node_id[0]]
    made = make_info(node_id, role, **(info or {}))
    return NodeView(
        made,
        make_status(made, **status),
        load or NodeLoad(),
        status_age_s,
        alive,
        connected,
        silence_s,
        step_s=step_s,
    )


def make_view(*nodes: NodeView, turn: int = 0, **config: Any) -> RouterView:
    return RouterView(nodes, FINGERPRINT, RouterConfig(**config), turn)
