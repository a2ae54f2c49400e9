"""/metrics, /cluster and /health of a cluster that has served requests."""

from __future__ import annotations

import math
import secrets

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.serve_process import REAL_MODEL, ServeProcess

pytestmark = pytest.mark.real_model

NUM_PROMPT_TOKENS = 40
NUM_TOKENS = 5
BLOCK_SIZE = 16
BLOCK_BYTES = BLOCK_SIZE * 30 * 2 * 3 * 64 * 4  # layers, keys and values, heads, numbers, float32


class TestARequest:
    """One whose prompt no node has cached, seen from outside."""

    @pytest.fixture(autouse=True)
    def _ask(self, server: ServeProcess) -> None:
        self.server = server
        self.before = _samples(server)
        body = {
            "model": REAL_MODEL,
            "prompt": list(range(1000, 1000 + NUM_PROMPT_TOKENS)),
            "max_tokens": NUM_TOKENS,
            "ignore_eos": True,
            "cache_salt": secrets.token_hex(8),
        }
        with server.client() as client:
            client.post("/v1/completions", json=body).raise_for_status()
        server.wait_until_at_rest()
        self.after = _samples(server)

    def grown(self, name: str, **labels: str) -> float:
        """By how much a sample is larger than before the request."""
        key = (f"kvrelay_{name}", *sorted(labels.items()))
        return self.after[key] - self.before.get(key, 0)

    def of(self, node: str, name: str, **labels: str) -> float:
        return self.grown(name, node=f"{node}-0", role=node, **labels)

    def test_its_blocks_moved_from_prefill_to_decode(self) -> None:
        num_blocks = math.ceil(NUM_PROMPT_TOKENS / BLOCK_SIZE)
        assert self.of("prefill", "kv_transfer_blocks_total") == num_blocks
        assert self.of("prefill", "kv_transfer_bytes_total") == num_blocks * BLOCK_BYTES
        for node in ("prefill", "decode"):
            assert self.of(node, "kv_transfers_total", outcome="committed") == 1

    def test_its_hand_off_took_a_while_and_is_over(self) -> None:
        assert 0 < self.of("prefill", "kv_transfer_seconds_total") < 30
        for node in ("prefill", "decode"):
            labels = {"node": f"{node}-0", "role": node}
            key = ("kvrelay_node_admitting", *sorted(labels.items()))
            assert self.after[key] == 1
        ended = ("kv_transfers_live", "kv_transfers_ended_total", "kv_transfer_failures_total")
        grown = {key for key in self.after if self.after[key] > self.before.get(key, 0)}
        assert not {key for key in grown if str(key[0]).removeprefix("kvrelay_") in ended}

    def test_the_decode_node_computed_no_prompt_token(self) -> None:
        def prompt_tokens(node: str, source: str) -> float:
            return self.of(node, "node_prompt_tokens_total", source=source)

        assert prompt_tokens("prefill", "computed") == NUM_PROMPT_TOKENS
        assert prompt_tokens("decode", "loaded") == NUM_PROMPT_TOKENS
        labels = {"node": "decode-0", "role": "decode", "source": "computed"}
        key = ("kvrelay_node_prompt_tokens_total", *sorted(labels.items()))
        assert self.after[key] == 0, "of this request or any before"

    def test_its_tokens_are_counted(self) -> None:
        assert self.grown("prompt_tokens_total") == NUM_PROMPT_TOKENS
        assert self.grown("generated_tokens_total") == NUM_TOKENS
        assert self.of("prefill", "node_generated_tokens_total") == 1
        assert self.of("decode", "node_generated_tokens_total") == NUM_TOKENS - 1

    def test_it_is_counted_and_timed(self) -> None:
        assert self.grown("requests_total", endpoint="completions", outcome="ok") == 1
        assert self.grown("routing_decisions_total", kind="disaggregated") == 1
        for name in ("time_to_first_token", "request", "prefill_queue", "exposed_transfer"):
            assert self.grown(f"{name}_seconds_count") == 1, name
        assert self.grown("inter_token_seconds_count") == NUM_TOKENS - 1

    def test_the_cluster_shows_the_same(self) -> None:
        decode = self.server.node("decode")
        labels = {"node": "decode-0", "role": "decode"}
        for state in ("free", "cached", "used", "quarantined"):
            key = ("kvrelay_kv_blocks", *sorted({**labels, "state": state}.items()))
            assert self.after[key] == decode["blocks"][state]


def test_the_cluster(server: ServeProcess) -> None:
    cluster = server.cluster()
    nodes = {node["node_id"]: node for node in cluster["nodes"]}
    assert list(nodes) == ["prefill-0", "decode-0"]
    for node_id, node in nodes.items():
        assert node["role"] == node_id.removesuffix("-0")
        assert node["model"] == REAL_MODEL
        assert node["healthy"]
        assert node["answered"]
        assert not node["draining"]
        assert node["admitting"]
        assert node["transfers"]["live"] == []
        assert (node["block_size"], node["max_num_seqs"]) == (16, 64)
        assert node["num_blocks"] == (1 << 30) // BLOCK_BYTES - 1, "1 GiB less the null block"
    assert nodes["prefill-0"]["fingerprint"] == nodes["decode-0"]["fingerprint"]


def test_health(server: ServeProcess) -> None:
    with server.client() as client:
        answer = client.get("/health")
    assert answer.status_code == 200
    one = {"healthy": 1, "known": 1}
    assert answer.json() == {"status": "ok", "roles": {"prefill": one, "decode": one}}


def _samples(server: ServeProcess) -> dict[tuple[object, ...], float]:
    """Name and sorted labels → value."""
    with server.client() as client:
        text = client.get("/metrics").raise_for_status().text
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
