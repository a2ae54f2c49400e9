"""A cluster under a plan for many cases, and the walk through one of them."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

from cluster import TransportChoice
from kv_transfer import FaultPlan
from protocol import LiveTransfer, SamplingParams, TokenStream, TransferDirection
from tests.faults.cases import ALL, UNHAPPY, Case, Harm, State
from tests.faults.fault_cluster import FaultCluster, Shape, fault_config, running
from tests.faults.gate import Gate
from tests.faults.journal import entries
from tests.hash_model import expected_tokens, prompt_of

_PUSH, _RECEIVE = TransferDirection.PUSH, TransferDirection.RECEIVE


class World:
    """Cases are walked one after the other, on what earlier ones have left of the cluster."""

    def __init__(
        self, cluster: FaultCluster, transport: TransportChoice, directory: Path, seed: int
    ) -> None:
        self.cluster = cluster
        self.transport = transport
        self.directory = directory
        self.seed = seed

    @property
    def exact_fences(self) -> bool:
        """Whether D itself can tell at once that nothing is written any more."""
        return self.transport is TransportChoice.MEMORY

    @property
    def journal(self) -> Path:
        return self.directory / "journal"


@contextlib.asynccontextmanager
async def world_of(
    transport: TransportChoice, cases: Iterable[Case], seed: int, directory: Path, shape: Shape
) -> AsyncIterator[World]:
    faults = tuple(fault for case in cases for fault in case.faults(directory))
    plan = FaultPlan(seed=seed, faults=faults, journal=str(directory / "journal"))
    config = fault_config(transport, plan, shape, layerwise=seed % 2 == 1)
    async with running(config) as cluster:
        yield World(cluster, transport, directory, seed)


class Walk:
    """One case: bring the state about, do harm, and see that all is well in the end."""

    def __init__(self, world: World, case: Case) -> None:
        self.world = world
        self.case = case
        self.cluster = world.cluster
        dice = random.Random(f"{world.seed}/{case}")
        self._prompt = prompt_of(dice.choice((70, 96, 130, 160)), dice.randrange(1 << 30))
        self._sampling = SamplingParams(max_tokens=dice.choice((2, 5, 9)))
        self._p = self._d = ""  # the nodes of the first attempt
        self._stopped: list[str] = []  # which are not asked

    async def run(self) -> None:
        with contextlib.ExitStack() as stack:
            gate = Gate(self.case.gate(self.world.directory))
            stack.callback(self._go_on)
            if self.case.holds:
                stack.enter_context(gate)
            await self._run(gate)
        await self.cluster.at_rest()
        self.cluster.check_usage()
        await self._serves_another()
        self._check_journal()

    async def _run(self, gate: Gate) -> None:
        before, retries = await self._counts(), await self.cluster.retries()
        stream = await self.cluster.submit(str(self.case), self._prompt, self._sampling)
        reading = asyncio.create_task(read(stream))
        try:
            if self.case.holds:
                await self._reach(before, reading, stream)
                await self._harm(before, reading, stream)
            gate.open()
            if not reading.cancelled():
                assert await reading == expected_tokens(self._prompt, self._sampling)
                self._check_retries(await self.cluster.retries() - retries)
        finally:
            await _leave(reading, stream)

    # ------------------------------------------------------------------ the state

    async def _reach(
        self, before: Counts, reading: asyncio.Task[list[int]], stream: TokenStream
    ) -> None:
        state = self.case.state
        held = State.PUSHING if state in UNHAPPY else state
        if state is State.FAILED:  # both go further at once
            await self.cluster.until(self._has_been_held)
        else:
            await self.cluster.until(lambda: self._is_held(held))
        await self._name_nodes(before)
        match state:
            case State.COMMITTED:
                await self.cluster.until(lambda: self._has_counted(self._p, state, before))
            case State.ABORTED:
                await _leave(reading, stream)
                await self.cluster.until(lambda: self._shows(_PUSH, state))
                await self.cluster.until(lambda: self._has_ended_at_d(before))
            case State.EXPIRED | State.FAILED:
                await self.cluster.until(lambda: self._has_ended_at_d(before))

    async def _is_held(self, state: State) -> bool:
        match state:
            case State.PUSHING:
                return await self._shows(_PUSH, state) and await self._shows(_RECEIVE, state)
            case State.COMMITTED:
                pushing = await self._shows(_RECEIVE, State.PUSHING)
                return pushing and not await self._shows(_PUSH, State.PUSHING)
            case _:
                reserving = await self._shows(_PUSH, State.RESERVING)
                return reserving and await self._shows(_RECEIVE, state)

    async def _has_been_held(self) -> bool:
        push = (await self._ends()).get(_PUSH)
        return push is not None and push[1].state in (State.PUSHING, State.ABORTED)

    async def _shows(self, end: TransferDirection, state: State) -> bool:
        transfer = (await self._ends()).get(end)
        return transfer is not None and transfer[1].state == state

    async def _ends(self) -> dict[TransferDirection, tuple[str, LiveTransfer]]:
        """The ends of the first attempt's hand-off that a node still has, and where."""
        found = await self.cluster.transfers(str(self.case), *self._stopped)
        return {transfer.direction: (node_id, transfer) for node_id, transfer in found.items()}

    async def _name_nodes(self, before: Counts) -> None:
        """Where there is nothing to see of an end any more, it has been counted, or soon is."""
        ends = await self._ends()
        if _RECEIVE in ends:
            self._d = ends[_RECEIVE][0]
        else:  # with exact fences it is gone already
            self._d = await self._who_counted("decode", self.case.state, before)
        if _PUSH in ends:
            self._p = ends[_PUSH][0]
        else:
            self._p = await self._who_counted("prefill", State.COMMITTED, before)

    async def _who_counted(self, role: str, state: State, before: Counts) -> str:
        counted: list[str] = []

        async def has_been_counted() -> bool:
            names = self.cluster.living_of(role)
            counted[:] = [name for name in names if await self._has_counted(name, state, before)]
            return bool(counted)

        await self.cluster.until(has_been_counted)
        (name,) = counted
        return name

    # ------------------------------------------------------------------ counts of ended hand-offs

    async def _counts(self) -> Counts:
        return {
            (node_id, state): getattr(status.transfers, state)
            for node_id, status in (await self.cluster.statuses(*self._stopped)).items()
            for state in (State.COMMITTED, State.ABORTED, State.EXPIRED, State.FAILED)
        }

    async def _has_counted(self, node_id: str, state: State, before: Counts) -> bool:
        return (await self._counts())[node_id, state] > before[node_id, state]

    async def _has_ended_at_d(self, before: Counts) -> bool:
        """In the state of the case, with its blocks kept in quarantine until P has answered.

        With exact fences they are safe at once.
        """
        if self.world.exact_fences:
            return await self._has_counted(self._d, self.case.state, before)
        transfer = (await self._ends()).get(_RECEIVE)
        return (
            transfer is not None
            and transfer[1].state == self.case.state
            and (transfer[1].quarantined)
        )

    # ------------------------------------------------------------------ the harm

    async def _harm(
        self, before: Counts, reading: asyncio.Task[list[int]], stream: TokenStream
    ) -> None:
        match self.case.harm:
            case Harm.P_KILLED:
                await self.cluster.kill(self._p)
                await self._let_settle(reading)
            case Harm.D_KILLED:
                await self.cluster.kill(self._d)
                await self._let_settle(reading)
            case Harm.P_STOPPED:
                self.cluster.stop(self._p)
                self._stopped.append(self._p)
                await self._wait_for_d(before)
                self._go_on()
            case Harm.CLIENT_GONE:
                await _leave(reading, stream)
                if self.case.state is State.ABORTED:  # gone already: say so to the nodes once more
                    for node in self.cluster.living.values():
                        await node.cancel(str(self.case))
            case Harm.DEADLINE:
                await self._pass_deadline(before)

    def _go_on(self) -> None:
        while self._stopped:
            self.cluster.go_on(self._stopped.pop())

    async def _let_settle(self, reading: asyncio.Task[list[int]]) -> None:
        """What one node does when the other has died must not need what is held back."""
        if not reading.cancelled():
            await asyncio.wait([reading])
        if self.case.harm is Harm.P_KILLED:
            await self.cluster.at_rest()

    async def _wait_for_d(self, before: Counts) -> None:
        """P does not say a word: D gives up; or, where it has, keeps the blocks."""
        if self.case.state in UNHAPPY:
            await self._stay_past_deadline()
        else:
            await self.cluster.until(
                lambda: self._has_counted_or_shows(self._d, _RECEIVE, State.EXPIRED, before)
            )

    async def _pass_deadline(self, before: Counts) -> None:
        match self.case.state:
            case State.RESERVING:  # each end has the same deadline, and the first tells the other
                await self.cluster.until(lambda: self._either_expired(before))
                return
            case State.COMMITTED:
                node, end = self._d, _RECEIVE
            case State.READY | State.PUSHING:  # P gives D signs of life, but it also waits for D
                node, end = self._p, _PUSH
            case _:
                await self._stay_past_deadline()
                return
        await self.cluster.until(
            lambda: self._has_counted_or_shows(node, end, State.EXPIRED, before)
        )

    async def _has_counted_or_shows(
        self, node_id: str, end: TransferDirection, state: State, before: Counts
    ) -> bool:
        return await self._shows(end, state) or await self._has_counted(node_id, state, before)

    async def _either_expired(self, before: Counts) -> bool:
        ends = ((self._p, _PUSH), (self._d, _RECEIVE))
        expired = State.EXPIRED
        return any([await self._has_counted_or_shows(n, e, expired, before) for n, e in ends])

    async def _stay_past_deadline(self) -> None:
        """Time is no proof: P may write, so D's blocks stay in quarantine."""
        end = _PUSH if self.world.exact_fences else _RECEIVE
        if end is _PUSH and self._p in self._stopped:
            return  # with exact fences D has nothing left of it, and needs no proof

        async def is_over() -> bool:
            transfer = (await self._ends())[end][1]
            assert end is _PUSH or transfer.quarantined
            return transfer.deadline_s < 0

        await self.cluster.until(is_over)

    # ------------------------------------------------------------------ the outcome

    def _check_retries(self, retries: dict[str, int]) -> None:
        state, harm = self.case.state, self.case.harm
        if state in UNHAPPY:
            return
        if harm in (Harm.LOST, Harm.DOUBLED) or self.case == Case(State.READY, Harm.CORRUPTED):
            assert not retries, "the same attempt goes on"
        elif harm is Harm.CORRUPTED:
            assert dict(retries) == {"transfer_failed": 1}

    def _check_journal(self) -> None:
        """What the plan has for this case has happened."""
        mine = {e.kind for e in entries(self.world.journal) if e.ticket == f"{self.case}/0"}
        wanted = {str(fault.kind) for fault in self.case.faults(self.world.directory)}
        assert wanted <= mine, f"{wanted - mine} did not happen"

    async def _serves_another(self) -> None:
        prompt, sampling = prompt_of(90, ALL.index(self.case)), SamplingParams(max_tokens=4)
        stream = await self.cluster.submit(f"after-{self.case}", prompt, sampling)
        assert await read(stream) == expected_tokens(prompt, sampling)


Counts = dict[tuple[str, State], int]  # by node and end state


async def read(stream: TokenStream) -> list[int]:
    return [token async for chunk in stream for token in chunk.token_ids]


async def _leave(reading: asyncio.Task[list[int]], stream: TokenStream) -> None:
    """As a client that closes its connection. Harmless when the answer is complete."""
    reading.cancel()
    await asyncio.wait([reading])
    await stream.aclose()
