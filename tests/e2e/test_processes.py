"""What a server shows of hand-offs that are held back, or fail, between processes of nodes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster import TransferConfig
from cluster.remote_node import RemoteNode
from kv_transfer import FaultPlan
from protocol import DecodeJob, GenerationRequest, NodeStatus, Overloaded, SamplingParams
from tests.e2e.serve_process import ServeProcess, serving, until
from tests.faults.gate import Gate
from tests.process_cluster import at_rest, process_config, running, submit

MODEL = "tiny-llama"
BLOCK_SIZE = 16
PROMPT = [5, 6, 7, 8, 9] * 10
NUM_BLOCKS = math.ceil(len(PROMPT) / BLOCK_SIZE)
BODY: dict[str, Any] = {
    "model": MODEL,
    "prompt": PROMPT,
    "max_tokens": 8,
    "temperature": 0,
    "ignore_eos": True,
}


@contextlib.contextmanager
def serving_with(folder: Path, model: Path, **transfer: Any) -> Iterator[ServeProcess]:
    """A prefill and a decode process, with these settings of their transfers."""
    deployment = {
        "model": str(model),
        "processes": True,
        "max_model_len": 256,
        "cache": {"num_blocks": 64, "block_size": BLOCK_SIZE},
        "transfer": {"heartbeat_s": 0.2, **transfer},
    }
    file = folder / "cluster.yaml"
    file.write_text(json.dumps(deployment))  # which is YAML, too
    with serving(folder / "server", "--config", file) as server:
        yield server
        server.wait_until_at_rest()


def stalled_by(gate: Path) -> dict[str, Any]:
    return {"faults": [{"kind": "stall", "of": ["write"], "gate": str(gate)}]}


@pytest.mark.parametrize("transport", ["shm", "nixl"])
def test_a_hand_off_that_is_held_back_is_seen(
    tiny_model: Path, tmp_path: Path, transport: str
) -> None:
    path = tmp_path / "gate"
    with (
        Gate(path) as gate,
        serving_with(tmp_path, tiny_model, transport=transport, faults=stalled_by(path)) as server,
    ):
        with under_way(server) as lines:
            wait_until_pushing(server)
            check_it_is_live(server)
            gate.open()
            assert sum("text" in line for line in lines), "it goes on"
        server.wait_until_at_rest()
        after = samples(server)
    for role in ("prefill", "decode"):
        assert after[sample("kv_transfers_total", role, outcome="committed")] == 1
        assert sample("kv_transfers_live", role, state="pushing") not in after
    assert after[sample("kv_transfer_seconds_total", "prefill")] > 0
    assert after[sample("kv_transfer_blocks_total", "prefill")] == NUM_BLOCKS


def check_it_is_live(server: ServeProcess) -> None:
    """In `/cluster`, at both ends, and in `/metrics`."""
    nodes = {node["role"]: node for node in server.cluster()["nodes"]}
    (push,), (receive,) = live(nodes["prefill"]), live(nodes["decode"])
    assert (push["direction"], receive["direction"]) == ("push", "receive")
    assert push["ticket"] == receive["ticket"]
    assert push["peer"] == nodes["decode"]["endpoint"]
    assert receive["peer"] == nodes["prefill"]["endpoint"]
    assert push["tokens"] == len(PROMPT)
    assert (receive["blocks"], receive["quarantined"]) == (NUM_BLOCKS, False)
    for end in (push, receive):
        assert end["age_s"] > 0
        assert end["deadline_s"] > 0
    seen = samples(server)
    for role in nodes:
        assert seen[sample("kv_transfers_live", role, state="pushing")] == 1
        assert seen[sample("kv_transfers_active", role)] == 1
        assert seen[sample("kv_transfers_total", role, outcome="committed")] == 0
        assert seen[sample("node_admitting", role)] == 1


def test_too_much_quarantine(tiny_model: Path, tmp_path: Path) -> None:
    """The client leaves while blocks are written to; until that ends, D takes no requests."""
    path = tmp_path / "gate"
    with (
        Gate(path) as gate,
        serving_with(tmp_path, tiny_model, max_quarantine=0, faults=stalled_by(path)) as server,
    ):
        with under_way(server):
            wait_until_pushing(server)
            check_health(server, 200)
        until(lambda: server.node("decode")["blocks"]["quarantined"], "blocks are in quarantine")
        check_it_refuses(server)
        gate.open()
        server.wait_until_at_rest()
        check_health(server, 200)
        assert ask(server).status_code == 200
        server.wait_until_at_rest()
        after = samples(server)
    assert after[sample("node_admitting", "decode")] == 1
    assert after[sample("kv_transfers_ended_total", "decode", reason="cancelled")] == 1
    assert after[sample("kv_transfers_total", "decode", outcome="aborted")] == 1


async def test_too_much_quarantine_as_its_node_says(tmp_path: Path) -> None:
    """Also to those that have not heard of it."""
    path = tmp_path / "gate"
    faults = FaultPlan.parse(stalled_by(path))
    transfer = TransferConfig(heartbeat_s=0.2, max_quarantine=0, faults=faults)
    later = GenerationRequest(
        request_id="later", prompt_token_ids=(5, 6), sampling=SamplingParams(), arrival_time=0.0
    )
    async with running(replace(process_config(), transfer=transfer)) as cluster:
        with Gate(path) as gate:
            (node,) = cluster.decode_nodes
            stream = await submit(cluster, PROMPT, SamplingParams(max_tokens=8))
            await anext(aiter(stream))  # the first token, which is P's
            await has(node, lambda status: [t.state for t in status.transfers.live] == ["pushing"])
            await stream.aclose()
            await has(node, lambda status: status.blocks.quarantined > 0)
            with pytest.raises(Overloaded, match=r"in quarantine, more than max_quarantine \(0\)"):
                await node.decode(DecodeJob(request=later, caller="test"))
            gate.open()
            statuses = await at_rest(cluster)
            assert all(status.admitting for status in statuses)


async def has(node: RemoteNode, condition: Callable[[NodeStatus], bool]) -> None:
    """Wait until the status of the node is so; nothing tells when it changes."""
    async with asyncio.timeout(30):
        while not condition(await node.status()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def check_it_refuses(server: ServeProcess) -> None:
    (receive,) = live(server.node("decode"))
    assert (receive["reason"], receive["quarantined"]) == ("cancelled", True)
    assert not server.node("decode")["admitting"]
    check_health(server, 503)
    refused = ask(server)
    assert refused.status_code == 503
    error = refused.json()["error"]
    assert error["code"] == "no_healthy_node"
    assert "decode-0: too many KV blocks in quarantine" in error["message"]
    seen = samples(server)
    assert seen[sample("node_admitting", "decode")] == 0
    assert seen[sample("node_admitting", "prefill")] == 1
    assert seen[sample("kv_blocks", "decode", state="quarantined")] == NUM_BLOCKS


def check_health(server: ServeProcess, status: int) -> None:
    with server.client() as client:
        answer = client.get("/health")
    assert answer.status_code == status
    assert answer.json()["roles"] == {
        "prefill": {"healthy": 1, "known": 1},
        "decode": {"healthy": int(status == 200), "known": 1},
    }


@pytest.mark.parametrize("outcome", ["retry", "recompute", "fail"])
def test_a_damaged_block(tiny_model: Path, tmp_path: Path, outcome: str) -> None:
    """One time; then there is nothing wrong."""
    faults = {"faults": [{"kind": "corrupt", "of": ["write"], "times": 1}]}
    with serving_with(tmp_path, tiny_model, on_transfer_failure=outcome, faults=faults) as server:
        first, again = ask(server), ask(server)
        server.wait_until_at_rest()
        after, retries = samples(server), server.cluster()["retries"]
    undamaged = again.raise_for_status().json()["choices"]
    if outcome == "fail":
        assert first.status_code == 500
        assert first.json()["error"]["code"] == "transfer_failed"
    else:
        assert first.raise_for_status().json()["choices"] == undamaged
    assert retries == ({"transfer_failed": 1} if outcome == "retry" else {})
    assert after[sample("kv_transfer_failures_total", "decode", outcome=outcome)] == 1
    assert after[sample("kv_transfers_ended_total", "decode", reason="checksum")] == 1


@contextlib.contextmanager
def under_way(server: ServeProcess) -> Iterator[Iterator[str]]:
    """A stream whose first token is there; the client leaves at the end. Gives the lines."""
    body = BODY | {"stream": True}
    with server.client() as client, client.stream("POST", "/v1/completions", json=body) as answer:
        lines = (line for line in answer.raise_for_status().iter_lines() if line)
        assert next(lines).startswith("data: {")
        yield lines


def ask(server: ServeProcess) -> httpx.Response:
    with server.client() as client:
        return client.post("/v1/completions", json=BODY)


def wait_until_pushing(server: ServeProcess) -> None:
    def states() -> list[str]:
        return [end["state"] for node in server.cluster()["nodes"] for end in live(node)]

    until(lambda: states() == ["pushing", "pushing"], "both ends know that blocks move")


def live(node: dict[str, Any]) -> list[dict[str, Any]]:
    ends: list[dict[str, Any]] = node["transfers"]["live"]
    return ends


def sample(name: str, role: str, **labels: str) -> tuple[object, ...]:
    """The key of a sample of the only node of a role."""
    return (f"kvrelay_{name}", *sorted({**labels, "node": f"{role}-0", "role": role}.items()))


def samples(server: ServeProcess) -> dict[tuple[object, ...], float]:
    """Name and sorted labels → value."""
    with server.client() as client:
        text = client.get("/metrics").raise_for_status().text
    return {
        (found.name, *sorted(found.labels.items())): found.value
        for family in text_string_to_metric_families(text)
        for found in family.samples
    }
