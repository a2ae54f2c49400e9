"""A cluster status in which no two numbers are equal."""

from dataclasses import dataclass
from itertools import count
from typing import Any

from protocol import (
    BlockCounts,
    ClusterStatus,
    NodeInfo,
    NodeReport,
    NodeStatus,
    Role,
    TransferCounts,
)


@dataclass(frozen=True)
class NodeSketch:
    """What a test wants to say of a node."""

    name: str
    role: Role
    healthy: bool = True
    draining: bool = False
    admitting: bool = True
    answers: bool = True


def cluster_status(*sketches: NodeSketch) -> ClusterStatus:
    numbers = count(1)
    return ClusterStatus(
        nodes=tuple(_report(sketch, numbers) for sketch in sketches),
        num_requests=next(numbers),
        decisions={"disaggregated": next(numbers), "local": next(numbers)},
        retries={"node_lost": next(numbers)},
        rejected={"overloaded": next(numbers), "prompt_too_long": next(numbers)},
    )


def _report(sketch: NodeSketch, numbers: "count[int]") -> NodeReport:
    info = NodeInfo(
        node_id=sketch.name,
        role=sketch.role,
        model="scripted",
        fingerprint="f",
        endpoint=f"memory://{sketch.name}",
        block_size=16,
        num_blocks=100,
        max_model_len=64,
        max_num_seqs=8,
        max_num_batched_tokens=512,
    )
    return NodeReport(info, _status(sketch, numbers) if sketch.answers else None)


def _status(sketch: NodeSketch, numbers: "count[int]") -> NodeStatus:
    def some(*names: str) -> dict[str, Any]:
        return {name: next(numbers) for name in names}

    blocks = some("free", "cached", "used", "quarantined")
    transfers = some("active", "committed", "aborted", "expired", "failed", "blocks", "bytes")
    return NodeStatus(
        node_id=sketch.name,
        role=sketch.role,
        healthy=sketch.healthy,
        draining=sketch.draining,
        admitting=sketch.admitting,
        prefill_tokens_per_s=next(numbers) + 0.5,
        blocks=BlockCounts(total=sum(blocks.values()), **blocks),
        transfers=TransferCounts(**transfers),
        **some("num_running", "num_waiting", "num_skipped_waiting", "num_intake", "queued_tokens"),
        **some("num_preemptions", "num_prefix_queries", "num_prefix_hits", "num_steps"),
        **some("num_prompt_tokens_computed", "num_prompt_tokens_loaded"),
        **some("num_prompt_tokens_recomputed", "num_generated_tokens"),
    )
