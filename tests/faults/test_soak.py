"""Many hand-offs, some of which go wrong in every way at once: right tokens, and nothing grows."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster import LocalConfig, TransportChoice
from kv_transfer import Fault, FaultKind, FaultPlan
from protocol import SamplingParams
from router import RouterConfig
from tests.faults.fault_cluster import NUM_BLOCKS, FaultCluster, Shape, fault_config, running
from tests.faults.journal import entries
from tests.hash_model import expected_tokens, prompt_of

CONCURRENCY = 16
NUM_SHORT, NUM_LONG = 400, 10_000
WARM_UP = 0.25  # of all rounds; caches, pools and tables are full by then
MAX_GROWTH_BYTES = 6 << 20  # of a process, from the warm-up to the end
MIN_HIT = 0.05  # of all hand-offs
_LEAVING = 0.03  # of all clients, after their first token

_MESSAGE, _WRITE = 0.004, 0.006  # probabilities; a hand-off has about seven messages, three writes

pytestmark = pytest.mark.slow


# Kind, probability, seconds. Twice a stall: the second is beyond all deadlines.
_FAULTS: list[tuple[FaultKind, float, float | None]] = [
    (FaultKind.DROP, _MESSAGE, None),
    (FaultKind.DUPLICATE, _MESSAGE, None),
    (FaultKind.REORDER, _MESSAGE, 0.03),
    (FaultKind.DELAY, _MESSAGE, 0.03),
    (FaultKind.CORRUPT, _WRITE, None),
    (FaultKind.STALL, _WRITE, 0.2),
    (FaultKind.STALL, _WRITE / 3, 1.0),
    (FaultKind.CUT, _MESSAGE / 8, 0.1),
]


def soak_faults() -> Iterator[Fault]:
    """A few percent of all hand-offs are hit, and each kind of fault comes for sure."""
    for number, (kind, probability, seconds) in enumerate(_FAULTS):
        yield Fault(kind=kind, probability=probability, seconds=seconds)
        yield Fault(kind=kind, seconds=seconds, after=5 * number, times=1)  # for sure


def _config(transport: TransportChoice, journal: Path) -> LocalConfig:
    plan = FaultPlan(seed=7, faults=tuple(soak_faults()), journal=str(journal))
    config = fault_config(transport, plan, Shape(2, 2))
    # A client would see an error if all its attempts fell into one cut.
    router = RouterConfig(default_prefill_tokens_per_s=1e5, max_attempts=10)
    # Nor is anybody refused, however many faults come together.
    transfer = dataclasses.replace(config.transfer, max_quarantine=NUM_BLOCKS)
    return dataclasses.replace(config, router=router, transfer=transfer)


class Soak:
    """Rounds on one cluster: a request, its answer, and whether that is right."""

    def __init__(self, cluster: FaultCluster, num_rounds: int) -> None:
        self._cluster = cluster
        self._num_rounds = num_rounds
        self._random = random.Random(3)
        self._prefixes = [prompt_of(48, seed) for seed in range(3)]
        self.outcomes: Counter[str] = Counter()

    async def run(self, on_warm: Callable[[], None]) -> None:
        rounds = iter(range(self._num_rounds))
        async with asyncio.TaskGroup() as seats:
            for _ in range(CONCURRENCY):
                seats.create_task(self._sit(rounds, on_warm))

    async def _sit(self, rounds: Iterator[int], on_warm: Callable[[], None]) -> None:
        for number in rounds:
            if number == int(WARM_UP * self._num_rounds):
                on_warm()
            await self._round(number)

    async def _round(self, number: int) -> None:
        dice = self._random
        prefix = dice.choice([[], *self._prefixes])
        prompt = [*prefix, *prompt_of(dice.choice((7, 16, 40, 90)), number)]
        sampling = SamplingParams(max_tokens=dice.choice((2, 6, 12)))
        leaves = dice.random() < _LEAVING
        stream = await self._cluster.submit(f"r{number}", prompt, sampling)
        tokens: list[int] = []
        async for chunk in stream:
            tokens += chunk.token_ids
            if leaves:
                break
        await stream.aclose()
        expected = expected_tokens(prompt, sampling)
        assert tokens == (expected[: len(tokens)] if leaves else expected), number
        self.outcomes["left" if leaves else "answered"] += 1


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("transport", [TransportChoice.MEMORY, TransportChoice.SHM])
async def test_nothing_is_wrong_or_grows_however_long_it_goes_on(
    transport: TransportChoice,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
) -> None:
    num_rounds = NUM_LONG if request.config.getoption("--all-faults") else NUM_SHORT
    journal = tmp_path / "journal"
    warm: dict[str, int] = {}
    async with running(_config(transport, journal)) as cluster:

        def on_warm() -> None:
            warm.update(cluster.resident_bytes())

        soak = Soak(cluster, num_rounds)
        await soak.run(on_warm)
        await cluster.at_rest()
        cluster.check_usage()
        gc.collect()
        growth = {w: size - warm[w] for w, size in cluster.resident_bytes().items()}
        retries = await cluster.retries()
    assert soak.outcomes.total() == num_rounds
    assert max(growth.values()) < MAX_GROWTH_BYTES, growth
    report = _report(journal, num_rounds, growth)
    with capsys.disabled():
        sys.stdout.write(f"\n{transport}: {dict(soak.outcomes)}, retries {dict(retries)}\n{report}")


def _report(journal: Path, num_rounds: int, growth: dict[str, int]) -> str:
    """What went wrong; enough of everything, or the rounds have proven nothing."""
    hits = entries(journal)
    rounds = {kind: {e.ticket for e in hits if e.kind == kind} for kind in FaultKind}
    assert all(rounds.values()), "of some kind, nothing went wrong"
    all_hit = {entry.ticket.partition("/")[0] for entry in hits}
    assert len(all_hit) >= MIN_HIT * num_rounds
    lines = [f"  {kind}: {len(tickets)} hand-offs" for kind, tickets in rounds.items()]
    lines.append(f"  any: {len(all_hit)} of {num_rounds} requests")
    lines += [f"  {what} has grown by {size >> 10} KiB" for what, size in growth.items()]
    return "\n".join(lines) + "\n"
