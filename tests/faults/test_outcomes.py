"""What becomes of a request whose hand-off failed, as it is configured."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cluster import TransportChoice
from kv_transfer import Fault, FaultKind, FaultPlan, OnTransferFailure
from protocol import SamplingParams, TransferFailed
from tests.faults.fault_cluster import FaultCluster, Shape, fault_config, running
from tests.faults.journal import counts
from tests.faults.world import read
from tests.hash_model import expected_tokens, prompt_of

TRANSPORTS = [TransportChoice.MEMORY, TransportChoice.SHM, TransportChoice.NIXL]
OUTCOMES: list[OnTransferFailure] = ["retry", "recompute", "fail"]

# How the first attempt at a request fails, by the beginning of its name; and for which reason.
FAILURES = {
    "corrupted": (Fault(kind=FaultKind.CORRUPT, times=1, ticket="corrupted/0"), "checksum"),
    "late": (Fault(kind=FaultKind.STALL, seconds=1.2, ticket="late/0"), "deadline"),
    "silent": (Fault(kind=FaultKind.DROP, of=("started",), ticket="silent/0"), "deadline"),
    "cut": (
        Fault(
            kind=FaultKind.CUT,
            of=("pushing",),
            node="decode-*",
            seconds=0.5,
            times=1,
            ticket="cut/0",
        ),
        "peer_lost",
    ),
}
NOTICED_BY_DECODE = 2  # for certain: the damaged block, and the cut
SAMPLING = SamplingParams(max_tokens=6)

pytestmark = pytest.mark.slow


@contextlib.asynccontextmanager
async def failing(
    transport: TransportChoice, outcome: OnTransferFailure, journal: Path
) -> AsyncIterator[FaultCluster]:
    """A cluster in which the requests of FAILURES fail at first."""
    faults = tuple(fault for fault, _ in FAILURES.values())
    plan = FaultPlan(faults=faults, journal=str(journal))
    shape = Shape(2, 1) if outcome == "retry" else Shape(1, 1)
    config = fault_config(transport, plan, shape, on_transfer_failure=outcome)
    async with running(config) as cluster:
        yield cluster
        await cluster.at_rest()
        cluster.check_usage()
    assert counts(journal).keys() >= {str(fault.kind) for fault in faults}


async def check_answer(cluster: FaultCluster, name: str, outcome: OnTransferFailure) -> None:
    prompt = prompt_of(130, len(name))
    stream = await cluster.submit(name, prompt, SAMPLING)
    if outcome == "fail":
        # The other end may be the first to tell: it was cancelled, or its write refused.
        reasons = f"{FAILURES[name][1]}|peer_cancelled|write_failed"
        with pytest.raises(TransferFailed, match=reasons):
            await read(stream)
    else:
        assert await read(stream) == expected_tokens(prompt, SAMPLING)


async def check_counts(cluster: FaultCluster, outcome: OnTransferFailure) -> None:
    """A failure is counted by each end that notices it before it is told to stop because of it."""
    statuses = await cluster.statuses()
    prefill, decode = (
        sum((Counter(statuses[name].transfers.outcomes) for name in names), Counter[str]())
        for names in (cluster.living_of("prefill"), cluster.living_of("decode"))
    )
    assert {*prefill, *decode} == {outcome}
    if outcome == "recompute":  # which is the decode node's to decide
        assert (prefill.total(), decode.total()) == (0, len(FAILURES))
    else:
        assert NOTICED_BY_DECODE <= decode.total() <= len(FAILURES) <= (prefill + decode).total()
        assert prefill.total() <= len(FAILURES)


@pytest.mark.parametrize("outcome", OUTCOMES)
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_failed_hand_off_has_the_outcome_that_was_asked_for(
    transport: TransportChoice, outcome: OnTransferFailure, tmp_path: Path
) -> None:
    async with failing(transport, outcome, tmp_path / "journal") as cluster:
        alone = "cut"  # all that goes on with that peer fails with it
        together = [name for name in FAILURES if name != alone]
        await asyncio.gather(*(check_answer(cluster, name, outcome) for name in together))
        await cluster.at_rest()
        await check_answer(cluster, alone, outcome)
        await check_counts(cluster, outcome)
        retries = await cluster.retries()
        assert retries.total() == (len(FAILURES) if outcome == "retry" else 0), retries
