"""What probes, scrapers and operators are told about the cluster."""

from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from gateway import GatewayConfig
from protocol import ClusterStatus, LiveTransfer, NodeReport, Role, TransferDirection
from tests.gateway.gateway_under_test import Gateway
from tests.gateway.scripted_backend import ScriptedBackend
from tests.telemetry.cluster_status import NodeSketch, cluster_status

PREFILL, DECODE, UNIFIED = Role.PREFILL, Role.DECODE, Role.UNIFIED


def gateway_with(directory: Path, *nodes: NodeSketch) -> Gateway:
    return Gateway(ScriptedBackend(status=cluster_status(*nodes)), directory)


@pytest.mark.parametrize(
    ("nodes", "status"),
    [
        ([], 503),
        ([NodeSketch("p", PREFILL)], 503),
        ([NodeSketch("d", DECODE)], 503),
        ([NodeSketch("p", PREFILL), NodeSketch("d", DECODE)], 200),
        ([NodeSketch("p", PREFILL), NodeSketch("d", DECODE, healthy=False)], 503),
        ([NodeSketch("p", PREFILL), NodeSketch("d", DECODE, draining=True)], 503),
        ([NodeSketch("p", PREFILL), NodeSketch("d", DECODE, admitting=False)], 503),
        ([NodeSketch("p", PREFILL, answers=False), NodeSketch("d", DECODE)], 503),
        ([NodeSketch("u", UNIFIED)], 200),
        ([NodeSketch("u", UNIFIED, healthy=False)], 503),
        ([NodeSketch("u", UNIFIED), NodeSketch("d", DECODE, healthy=False)], 200),
    ],
)
async def test_health(tmp_path: Path, nodes: list[NodeSketch], status: int) -> None:
    async with gateway_with(tmp_path, *nodes).client() as client:
        response = await client.get("/health")
    assert response.status_code == status
    assert response.json()["status"] == ("ok" if status == 200 else "unavailable")


async def test_health_counts_nodes_by_role(tmp_path: Path) -> None:
    nodes = (
        NodeSketch("p0", PREFILL),
        NodeSketch("p1", PREFILL, answers=False),
        NodeSketch("d0", DECODE),
    )
    async with gateway_with(tmp_path, *nodes).client() as client:
        roles = (await client.get("/health")).json()["roles"]
    assert roles == {"prefill": {"healthy": 1, "known": 2}, "decode": {"healthy": 1, "known": 1}}


async def test_the_cluster(tmp_path: Path) -> None:
    gateway = gateway_with(
        tmp_path, NodeSketch("p0", PREFILL), NodeSketch("d0", DECODE, answers=False)
    )
    async with gateway.client() as client:
        shown = (await client.get("/cluster")).json()
    status = await gateway.backend.status()
    node = status.nodes[0].status
    assert node is not None
    assert shown["num_requests"] == status.num_requests
    assert shown["decisions"] == status.decisions
    assert shown["retries"] == status.retries
    assert shown["rejected"] == status.rejected
    prefill, decode = shown["nodes"]
    assert (prefill["node_id"], prefill["role"], prefill["answered"]) == ("p0", "prefill", True)
    assert prefill["queues"] == {
        "running": node.num_running,
        "waiting": node.num_waiting,
        "skipped_waiting": node.num_skipped_waiting,
        "intake": node.num_intake,
    }
    blocks = prefill["blocks"]
    assert set(blocks) == {"total", "free", "cached", "used", "quarantined"}
    assert blocks["quarantined"] == node.blocks.quarantined
    assert prefill["transfers"]["bytes"] == node.transfers.bytes
    assert prefill["endpoint"] == "memory://p0"
    assert decode["answered"] is False
    assert "blocks" not in decode


async def test_a_node_that_takes_no_requests_is_known_but_not_healthy(tmp_path: Path) -> None:
    nodes = (NodeSketch("u0", UNIFIED), NodeSketch("u1", UNIFIED, admitting=False))
    async with gateway_with(tmp_path, *nodes).client() as client:
        health = await client.get("/health")
        shown = (await client.get("/cluster")).json()["nodes"]
    assert health.status_code == 200
    assert health.json()["roles"] == {"unified": {"healthy": 1, "known": 2}}
    assert [node["admitting"] for node in shown] == [True, False]


async def test_the_cluster_shows_what_is_under_way(tmp_path: Path) -> None:
    """As the node has said it, whatever that is."""
    live = LiveTransfer(
        ticket="r/0",
        direction=TransferDirection.RECEIVE,
        peer="shm:0/p",
        state="aborted",
        reason="cancelled",
        tokens=40,
        blocks=3,
        quarantined=True,
        age_s=1.5,
        deadline_s=-0.5,
    )
    backend = ScriptedBackend(status=with_transfers(NodeSketch("d", DECODE), live))
    async with Gateway(backend, tmp_path).client() as client:
        (node,) = (await client.get("/cluster")).json()["nodes"]
        lines = (await client.get("/metrics")).text.splitlines()
    assert node["transfers"]["live"] == [msgspec.to_builtins(live)]
    labels = 'node="d",role="decode",state="aborted"'
    assert f"kvrelay_kv_transfers_live{{{labels}}} 1.0" in lines


def with_transfers(sketch: NodeSketch, *live: LiveTransfer) -> ClusterStatus:
    status = cluster_status(sketch)
    (report,) = status.nodes
    assert report.status is not None
    transfers = replace(report.status.transfers, live=live)
    changed = NodeReport(report.info, replace(report.status, transfers=transfers))
    return replace(status, nodes=(changed,))


async def test_metrics(tmp_path: Path) -> None:
    gateway = gateway_with(tmp_path, NodeSketch("p0", PREFILL))
    async with gateway.client() as client:
        response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    node = (await gateway.backend.status()).nodes[0].status
    assert node is not None
    line = f'kvrelay_kv_transfer_blocks_total{{node="p0",role="prefill"}} {node.transfers.blocks}.0'
    assert line in response.text.splitlines()


async def test_pause_resume_and_reset(tmp_path: Path) -> None:
    """Each node answers for itself."""
    gateway = gateway_with(
        tmp_path, NodeSketch("u0", UNIFIED), NodeSketch("u1", UNIFIED, answers=False)
    )
    both = {"nodes": {"u0": True, "u1": False}}
    async with gateway.client() as client:
        for path in (
            "/pause",
            "/pause?mode=wait",
            "/resume",
            "/reset_prefix_cache",
            "/reset_prefix_cache?reset_running_requests=true",
        ):
            response = await client.post(path)
            assert (response.status_code, response.json()) == (200, both), path
    assert gateway.backend.orders == [
        "pause keep",
        "pause wait",
        "resume",
        "reset False",
        "reset True",
    ]


@pytest.mark.parametrize(
    ("path", "field"),
    [("/pause?mode=stop", "mode"), ("/reset_prefix_cache?reset_running_requests=1", "reset_")],
)
async def test_orders_that_mean_nothing(tmp_path: Path, path: str, field: str) -> None:
    gateway = gateway_with(tmp_path, NodeSketch("u", UNIFIED))
    async with gateway.client() as client:
        response = await client.post(path)
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith(field)
    assert gateway.backend.orders == []


async def test_orders_need_a_key(tmp_path: Path) -> None:
    gateway = Gateway(ScriptedBackend(), tmp_path, GatewayConfig(api_keys=("sk-a-key",)))
    async with gateway.client() as client:
        for path in ("/pause", "/resume", "/reset_prefix_cache"):
            assert (await client.post(path)).status_code == 401
    assert gateway.backend.orders == []
