"""Nodes that serve, with few blocks and callers that leave: what each recorded replays."""

from __future__ import annotations

import asyncio
import json
import stat
from collections import Counter
from pathlib import Path

import pytest

from protocol import SamplingParams
from scheduler.replay import load
from scheduler.trace import Trace
from tests.hash_cluster import HashCluster, read
from tests.hash_model import prompt_of
from tests.scheduler.recordings import check_replays


def recordings(directory: Path) -> dict[str, Trace]:
    found = {}
    for path in sorted(directory.iterdir()):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        json.loads(path.read_bytes())  # whole
        found[path.name] = load(path)
        assert path.stem == found[path.name].name
    return found


async def ask(cluster: HashCluster, number: int) -> None:
    sampling = SamplingParams(max_tokens=20 + number % 7, seed=number)
    stream = await cluster.submit(prompt_of(20 + 3 * number, number % 5), sampling)
    if number % 6:
        await read(stream)
    else:
        async for _ in stream:
            break
        await stream.aclose()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("unified", [False, True])
async def test_each_node_replays(tmp_path: Path, unified: bool, asynchronous: bool) -> None:
    cluster = HashCluster(
        unified=unified,
        decode=2,
        num_blocks=14,
        max_num_seqs=6,
        max_model_len=200,
        step_s=0.0005,
        async_scheduling=asynchronous,
        reserve_full_isl=False,
        record_schedules=tmp_path,
    )
    await cluster.local.start()
    try:
        await asyncio.gather(*(ask(cluster, number) for number in range(30)))
        await cluster.at_rest()
        cluster.check_integrity()
    finally:
        await cluster.local.stop()
    traces = recordings(tmp_path)
    names = ["unified-0", "unified-1"] if unified else ["decode-0", "decode-1", "prefill-0"]
    assert list(traces) == [f"{name}.json" for name in names]
    for trace in traces.values():
        assert trace.config.async_scheduling is asynchronous
        check_replays(trace)
    steps = [step for trace in traces.values() for step in trace.steps]
    assert any(step.expect and step.expect["preempted"] for step in steps)
    assert any(step.abort or step.abort_during for step in steps)
    ahead = any(step.expect is not None and step.runner is None for step in steps)
    assert ahead is asynchronous
    if not unified:
        received = [step.runner.finished_recving for step in steps if step.runner]
        assert any(isinstance(r, dict) and any(r.values()) for r in received)
        assert any(step.kept for step in steps)
        assert any(step.revoked for step in steps)
        added = Counter(
            request.id for step in traces["prefill-0.json"].steps for request in step.add
        )
        assert max(added.values()) > 1, "nothing was computed again for its KV"
