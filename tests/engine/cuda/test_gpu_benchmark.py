"""The benchmark for GPUs is tried where there is none: a tiny model on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import decode_bytes, num_weights, prefill_operations
from engine.weights import tensor_shapes
from kv_transfer.transports.nixl_agent import load_nixl
from protocol import ConfigError
from tests.hash_model import HASH_MODEL

ROOT = Path(__file__).parents[3]


def run(*arguments: str) -> list[dict[str, object]]:
    """The lines that it prints; what is wrong is on stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_a_dry_run_measures_everything() -> None:
    try:
        load_nixl()
    except ConfigError as error:
        pytest.skip(str(error))
    lines = run("--dry-run")
    by_name = {str(line["name"]): line for line in lines}
    assert set(by_name) == {"limits", "prefill", "handoff", "decode", "graphs"}
    assert by_name["handoff"]["same_tokens"] is True
    assert by_name["handoff"]["same_first_tokens"] is True
    assert by_name["handoff"]["loaded_tokens"] == 45
    decodes = [(line["batch"], line["context"]) for line in lines if line["name"] == "decode"]
    assert decodes == [(1, 16), (3, 16), (1, 40), (3, 40)]
    for line in lines:
        if line["name"] == "graphs":
            assert line["same_tokens"] is line["same_kv"] is True


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_without_a_gpu_that_is_said() -> None:
    (line,) = run()
    assert line["name"] == "limits"
    assert "has no CUDA" in str(line["left_out"])


def test_the_least_that_a_step_costs() -> None:
    total = sum(torch.Size(shape).numel() for shape in tensor_shapes(HASH_MODEL).values())
    assert num_weights(HASH_MODEL) == total  # the embedding is the output projection
    per_token = 3 * 2 * 1 * 1 * 2  # layers, keys and values, heads, numbers, bytes
    assert decode_bytes(HASH_MODEL, 4, 100, 2) == 2 * total + 4 * 100 * per_token
    embedding = HASH_MODEL.vocab_size * HASH_MODEL.hidden_size
    attention = 3 * 2 * 10**2  # layers; scores and values, of half of the square
    assert prefill_operations(HASH_MODEL, 10) == 2 * (total - embedding) * 10 + attention
