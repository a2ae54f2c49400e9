"""Prefill loads the beginning from files and pushes it on: a file that is bad must not get to D."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from examples.file_cache import FileCacheConnector
from kv_transfer import (
    ConnectorContext,
    HandoffConfig,
    HandoffConnector,
    MemoryHub,
    MemoryTransport,
    MultiConnector,
)
from protocol import HandoffTicket, Role, SamplingParams
from scheduler import Request
from tests.hash_model import expected_tokens, prompt_of
from tests.kv_transfer.connected_engine import BLOCK, connected
from tests.kv_transfer.pools import TIMEOUT_S

TICKET = HandoffTicket("r", 1)


def files(directory: Path) -> FileCacheConnector:
    options = {"directory": str(directory)}
    return FileCacheConnector(ConnectorContext("p", Role.PREFILL, BLOCK, "hash", options))


def handoff(transport: MemoryTransport, *, layerwise: bool) -> HandoffConnector:
    return HandoffConnector(transport, time.monotonic, HandoffConfig(layerwise=layerwise))


@pytest.mark.parametrize("pipelined", [False, True], ids=["alternating", "pipelined"])
@pytest.mark.parametrize("layerwise", [False, True], ids=["whole", "layerwise"])
@pytest.mark.parametrize("damaged", [None, 0, 3, 5])
@pytest.mark.parametrize("length", [100, 300])
def test_what_was_loaded_is_handed_over(
    tmp_path: Path, pipelined: bool, layerwise: bool, damaged: int | None, length: int
) -> None:
    prompt, sampling = prompt_of(length), SamplingParams(max_tokens=8)
    with connected(files(tmp_path), pipelined=False) as before:
        before.check({"before": prompt[:100]})
    if damaged is not None:
        paths = sorted(
            (path for path in tmp_path.rglob("*") if path.is_file()),
            key=lambda path: path.stat().st_mtime_ns,
        )
        paths[damaged].write_bytes(b"not what it was")
    hub = MemoryHub()
    ends = [MemoryTransport(hub, name) for name in "pd"]
    push, receive = (handoff(end, layerwise=layerwise) for end in ends)
    with (
        connected(MultiConnector([push, files(tmp_path)]), pipelined=pipelined) as p,
        connected(receive, pipelined=pipelined) as d,
    ):
        receive.add_sink(TICKET, ends[0].endpoint)
        push.add_source(TICKET, ends[1].endpoint, 0.0)
        answer = Request(str(TICKET), prompt, sampling)
        d.scheduler.add_request(answer)
        d.step()
        p.add(str(TICKET), prompt, max_tokens=1)
        deadline = time.monotonic() + TIMEOUT_S
        while p.scheduler.has_requests() or d.scheduler.has_requests():
            assert time.monotonic() < deadline
            p.step()
            d.step()
            assert receive.counts().failed == 0
        assert p.stats.prompt_loaded == 96
        assert d.stats.prompt_computed == 0
        assert answer.output_token_ids == expected_tokens(prompt, sampling)
