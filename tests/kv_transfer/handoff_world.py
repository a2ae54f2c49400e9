"""Two whole nodes without a thread, on a network where everything happens when a test says so.

Schedulers, connectors, roles and a model that reads back every KV slot are the real ones. Only
threads, clock and transport are replaced, so any order of events can be played, and played again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from decode_node import DecodeConfig, DecodeRole
from decode_node.config import Reserve
from engine import Engine, EngineHost, KVCacheConfig, PipelinedEngine
from engine.loop import ComputedStep
from engine.outputs import OutputStream
from kv_transfer import (
    BlockLayout,
    BlockPoolMemory,
    Extents,
    HandoffConfig,
    HandoffConnector,
    OnTransferFailure,
    PeerLost,
    PeerPool,
    PeerUnreachable,
    Received,
    WriteState,
)
from kv_transfer.digest import Digest, bytes_of, digest_of
from kv_transfer.geometry import Runs
from prefill_node import PrefillRole
from protocol import (
    DecodeJob,
    Delta,
    GenerationRequest,
    HandoffTicket,
    NodeInfo,
    OutputBatch,
    PrefillJob,
    Role,
    SamplingParams,
)
from scheduler import (
    CacheConfig,
    ModelRunnerOutput,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
)
from tests.hash_model import HashRunner, expected_tokens, hash_kv_cache
from tests.kv_transfer.handoff_ends import check_connector_is_empty

NUM_BLOCKS = 9  # usable ones of each node, if of 16 tokens: room for one long request and a bit
MAX_LEN = NUM_BLOCKS * 16
CALLER = "router"
NOWHERE = "played:nowhere"
CONFIG = HandoffConfig(
    reserve_timeout_s=300.0, transfer_timeout_s=60.0, heartbeat_s=5.0, max_early=2
)


class PlayedWrite:
    """Copies a block whenever it is told to, from a block that nobody else may have by then."""

    def __init__(
        self,
        source: PlayedTransport,
        target: PlayedTransport,
        ticket: HandoffTicket,
        extents: Extents,
    ) -> None:
        self.state = WriteState.PENDING
        self.ticket = ticket
        self.target = target
        self.source = source
        self.begun = False
        self._rows: list[list[int]] = extents.rows.tolist()

    def go_on(self) -> None:
        """Copy the next block, if the target lets us begin."""
        source, target = self.source, self.target
        if not self.begun and not target.may_begin(self.ticket, self._rows):
            self.state = WriteState.FAILED
            return
        self.begun = True
        ours, theirs, size = self._rows.pop(0)
        may_read = self.is_void or source.holds(self.ticket, ours) or source.gives_up(self.ticket)
        assert may_read, "P gave away what is read"
        assert target.takes(self.ticket, theirs), "D gave away what is written to"
        target.bytes[theirs : theirs + size] = source.bytes[ours : ours + size]
        if not self._rows:
            self.state = WriteState.DONE

    @property
    def is_void(self) -> bool:
        """Whether P knows that its request lost the blocks."""
        source = self.source.connector.sources.get(str(self.ticket))
        return source is not None and source._void

    def fail(self) -> None:
        self.state = WriteState.FAILED


class Network:
    """Messages that were sent and not yet delivered, and writes that are under way.

    With `exact_fences` a target refuses writes under a ticket that it has closed. Without, it can
    only hope that P stops, as with remote DMA, and nothing but P's word is proof.
    """

    def __init__(self, *, exact_fences: bool) -> None:
        self.exact_fences = exact_fences
        self.dead: set[str] = set()  # endpoints; that their node has exited is proof as well
        self.ends: dict[str, PlayedTransport] = {}
        self.mail: list[tuple[PlayedTransport, Received]] = []
        self._writes: list[PlayedWrite] = []

    def find(self, endpoint: str) -> PlayedTransport:
        if endpoint not in self.ends:
            raise PeerUnreachable(f"there is no node at {endpoint}")
        return self.ends[endpoint]

    @property
    def writes(self) -> list[PlayedWrite]:
        """Those that are under way."""
        self._writes = [write for write in self._writes if write.state is WriteState.PENDING]
        return self._writes

    def add(self, write: PlayedWrite) -> PlayedWrite:
        self._writes.append(write)
        return write

    def cut(self, one: PlayedTransport, other: PlayedTransport) -> None:
        """The two lose each other, and what they had sent. Writes go on, as with remote DMA."""
        for here, there in ((one, other), (other, one)):
            here.lost.append(PeerLost(there.endpoint, PeerUnreachable("cut")))
            here.inbox = [received for received in here.inbox if received.peer != there.endpoint]
        pair = {one.endpoint, other.endpoint}
        self.mail = [(t, m) for t, m in self.mail if {t.endpoint, m.peer} != pair]

    def kill(self, end: PlayedTransport) -> None:
        """The node is gone, and its writes are as far as they were."""
        for other in self.ends.values():
            if other is not end:
                self.cut(end, other)
        del self.ends[end.endpoint]
        self.dead.add(end.endpoint)
        for write in self.writes:
            if write.source is end:
                write.fail()

    def deliver(self, index: int = 0) -> None:
        target, message = self.mail.pop(index)
        target.inbox.append(message)


class PlayedTransport:
    def __init__(self, network: Network, name: str) -> None:
        self.endpoint = f"played:{name}"
        self.inbox: list[Received] = []
        self._network = network
        self.lost: list[PeerLost] = []
        self._open: dict[HandoffTicket, frozenset[int]] = {}
        self._writers: dict[HandoffTicket, str] = {}
        self.table_of: Callable[[str], Sequence[int]]
        self.is_given_up: Callable[[str], bool]
        self.connector: HandoffConnector

    def register(self, pool: BlockPoolMemory, on_activity: Callable[[], None]) -> None:
        self._pool = pool
        self.bytes: NDArray[np.uint8] = np.frombuffer(bytes_of(pool), dtype=np.uint8)
        self._network.ends[self.endpoint] = self

    def resolve(self, endpoint: str) -> str:
        if endpoint == NOWHERE:
            raise PeerUnreachable(f"nothing leads to {endpoint}")
        return endpoint

    def connect(self, peer: str) -> None:
        """That nobody is there is noticed later."""
        if peer in self._network.dead:
            self.lost.append(PeerLost(peer, PeerUnreachable("nobody is there")))

    def peer_pool(self, peer: str) -> PeerPool:
        return self._network.find(peer)._pool.shape

    def open(self, ticket: HandoffTicket, peer: str, block_ids: Sequence[int]) -> None:
        assert ticket not in self._open
        self._open[ticket] = frozenset(block_ids)
        self._writers[ticket] = peer

    def write(self, peer: str, ticket: HandoffTicket, extents: Extents) -> PlayedWrite:
        assert len(extents)
        assert extents.within(self._pool.num_bytes, self._network.find(peer)._pool.num_bytes)
        return self._network.add(PlayedWrite(self, self._network.find(peer), ticket, extents))

    def notify(self, peer: str, message: bytes) -> None:
        received = Received(self.endpoint, message)
        self._network.mail.append((self._network.find(peer), received))

    def receive(self) -> Sequence[Received]:
        received, self.inbox = self.inbox, []
        return received

    def lost_peers(self) -> Sequence[PeerLost]:
        lost, self.lost = self.lost, []
        return lost

    def fence(self, ticket: HandoffTicket) -> bool:
        self._open.pop(ticket, None)
        running = any(w.ticket == ticket and w.begun for w in self._network.writes)
        exact = self._network.exact_fences and not running
        return exact or self._writers.get(ticket) in self._network.dead

    def close(self) -> None:
        del self._network.ends[self.endpoint]

    # ------------------------------------------------------------------ as the target of a write

    def may_begin(self, ticket: HandoffTicket, rows: Sequence[Sequence[int]]) -> bool:
        if not self._network.exact_fences:
            return True
        blocks = {self._block_at(theirs) for _, theirs, _ in rows}
        return self._open.get(ticket, frozenset()).issuperset(blocks)

    def holds(self, ticket: HandoffTicket, offset: int) -> bool:
        """Whether the block at this place still belongs to this request."""
        return self._block_at(offset) in self.table_of(str(ticket))

    def takes(self, ticket: HandoffTicket, offset: int) -> bool:
        """Whether the block belongs to the request whose hand-off this is, and no later one."""
        sink = self.connector._receive._by_ticket.get(ticket)
        return sink is not None and self._block_at(offset) in self.table_of(sink.request_id)

    def gives_up(self, ticket: HandoffTicket) -> bool:
        """Whether a step that is planned, but has not begun, takes the blocks of this request.

        Until it begins nobody writes to them; then the write is void.
        """
        return self.is_given_up(str(ticket))

    def _block_at(self, offset: int) -> int:
        return offset // self._pool.layout.bytes_per_block

    @property
    def open_tickets(self) -> list[HandoffTicket]:
        return list(self._open)


class PlayedDigester:
    """Reads at once: what a thread would do later, before blocks change hands."""

    def __init__(self, pool: BlockPoolMemory, on_done: Callable[[], None]) -> None:
        self._memory = bytes_of(pool)

    def start(self, blocks: Sequence[Runs]) -> Digest:
        digest = Digest(blocks)
        digest.values = tuple(digest_of(self._memory, runs) for runs in blocks)
        return digest

    def close(self) -> None:
        pass


class PlayedStream:
    """Stands in for the caller's stream: what the caller was told."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []

    def put(self, batch: OutputBatch) -> bool:
        self.deltas.extend(batch.deltas)
        return True


class PlayedRunner(HashRunner):
    """Lets bytes travel before it computes, as they do while a real step runs."""

    def __init__(self, kv_cache: KVCacheConfig, network: Network) -> None:
        super().__init__(kv_cache)
        self._network = network
        self.num_early_blocks = 0  # copied of each write before the step is computed

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        for _ in range(self.num_early_blocks):
            for write in list(self._network.writes):
                write.go_on()
        return super().execute(step)


class LateFuture(Future[ComputedStep]):
    """Computed when somebody asks for the result."""

    def __init__(self, compute: Callable[[], ComputedStep]) -> None:
        super().__init__()
        self._compute = compute

    def result(self, timeout: float | None = None) -> ComputedStep:
        if not self.done():
            self.set_result(self._compute())
        return super().result(timeout)


class LateExecutor(Executor):
    """Leaves a step in flight until its results are needed."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        return LateFuture(lambda: fn(*args, **kwargs))


class PlayedPipeline(PipelinedEngine):
    """A step in flight is computed by the next round, while messages come."""

    def _wait(self, step: Any) -> ComputedStep:
        assert self.connector is not None
        self.connector.poll()
        computed: ComputedStep = step.future.result()
        self.connector.poll()
        return computed


class PlayedNode:
    """A node whose rounds are run by hand."""

    def __init__(
        self,
        network: Network,
        name: str,
        role: Role,
        clock: Callable[[], float],
        *,
        pipelined: bool,
        config: HandoffConfig,
        block_size: int,
    ) -> None:
        num_blocks = -(-MAX_LEN // block_size)
        kv_cache = hash_kv_cache(num_blocks + 1, block_size)
        self.runner = PlayedRunner(kv_cache, network)
        self.transport = PlayedTransport(network, name)
        self.connector = HandoffConnector(
            self.transport, clock, config, make_digester=PlayedDigester
        )
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=6,
                max_num_batched_tokens=24,
                long_prefill_token_threshold=12,
                policy="priority",
                scheduler_reserve_full_isl=role is Role.DECODE,  # P is to be preempted often
                max_model_len=MAX_LEN,
                max_parked_blocks=num_blocks,
            ),
            CacheConfig(num_blocks=num_blocks + 1, block_size=block_size),
            self.connector,
        )
        info = NodeInfo(
            node_id=name,
            role=role,
            model="hash",
            fingerprint="hash",
            endpoint=self.transport.endpoint,
            block_size=block_size,
            num_blocks=num_blocks,
            max_model_len=MAX_LEN,
            max_num_seqs=6,
            max_num_batched_tokens=24,
        )
        engine = (
            PlayedPipeline(self.scheduler, self.runner, self.connector, executor=LateExecutor())
            if pipelined
            else Engine(self.scheduler, self.runner, self.connector)
        )
        self.host = EngineHost(info, engine, clock=clock)
        layout = BlockLayout(
            fingerprint="hash",
            dtype="float32",
            block_size=block_size,
            num_layers=kv_cache.num_layers,
            num_kv_heads=1,
            head_dim=1,
            bytes_per_block=kv_cache.bytes_per_block,
        )
        memory = self.runner.pool
        pool = BlockPoolMemory(layout, memory.ctypes.data, num_blocks + 1, memory)
        self.connector.register_kv_caches(pool, self.host.wake)
        self.transport.table_of = self._table_of
        self.transport.is_given_up = self._is_given_up
        self.transport.connector = self.connector
        self.stream = PlayedStream()
        self.host._callers._streams[CALLER] = cast(OutputStream, self.stream)

    def _is_given_up(self, request_id: str) -> bool:
        """With two steps in flight, the first is computed, and the second has not begun."""
        steps = self.scheduler._in_flight
        return len(steps) == 2 and request_id in steps[-1].output.preempted_req_ids

    def _table_of(self, request_id: str) -> Sequence[int]:
        request = self.scheduler.requests.get(request_id)
        return () if request is None else request.block_ids

    def play(self, role: PrefillRole | DecodeRole) -> None:
        """Be ready, as `start` makes it, but for the thread."""
        self.host._role = role
        self.host._publish()

    def round(self, num_early_blocks: int = 0) -> None:
        """What the thread would do once, while so many blocks of each write travel."""
        self.runner.num_early_blocks = num_early_blocks
        self.host._run_once()
        self.scheduler.check_integrity()

    def cancel(self, request_id: str) -> None:
        self.host.post(lambda: self.host.cancel(request_id))

    @property
    def at_rest(self) -> bool:
        counts = self.scheduler.block_counts()
        return not (
            self.host.jobs
            or self.scheduler.has_requests()
            or counts.used
            or counts.quarantined
            or not self.connector.idle
            or self.host._commands
        )

    def check_nothing_is_left(self) -> None:
        assert self.at_rest
        assert self.transport.open_tickets == []
        assert self.connector.next_deadline() is None
        check_connector_is_empty(self.connector)
        assert self.host._status.blocks.balanced
        assert self.host._status.transfers.active == 0
        assert self.host._status.num_intake == 0
        assert not self.host._pending


class World:
    """P, D, the network between them, and what was asked of them."""

    def __init__(
        self,
        *,
        exact_fences: bool = True,
        reserve: Reserve = "on_start",
        pipelined: bool = False,
        layerwise: bool = False,
        block_sizes: tuple[int, int] = (16, 16),
        on_transfer_failure: OnTransferFailure = "retry",
        spare: bool = False,
    ) -> None:
        """`spare`: there is a second prefill node, `q`."""
        self.now = 1000.0
        self.network = Network(exact_fences=exact_fences)
        config = replace(CONFIG, layerwise=layerwise, on_transfer_failure=on_transfer_failure)
        self.p, self.d, *spares = (
            PlayedNode(
                self.network,
                name,
                role,
                lambda: self.now,
                pipelined=pipelined,
                config=config,
                block_size=block_size,
            )
            for name, role, block_size in zip(
                "pdq"[: 2 + spare],
                (Role.PREFILL, Role.DECODE, Role.PREFILL),
                (*block_sizes, block_sizes[0]),
                strict=False,
            )
        )
        self.nodes = (self.p, self.d, *spares)  # what they have told stays, if they die or not
        self.prefill = [self.p, *spares]  # those that are alive
        self._roles = {p.host.info.node_id: PrefillRole(p.host, p.connector) for p in self.prefill}
        self._decode = DecodeRole(self.d.host, self.d.connector, DecodeConfig(reserve=reserve))
        for node in self.prefill:
            node.play(self._roles[node.host.info.node_id])
        self.d.play(self._decode)
        self.requests: dict[str, GenerationRequest] = {}
        self.cancelled: set[str] = set()

    def ask(
        self, prompt: Sequence[int], max_tokens: int, priority: int = 0, **sampling: Any
    ) -> GenerationRequest:
        """Nobody has it yet."""
        request = GenerationRequest(
            request_id=f"r{len(self.requests)}",
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(max_tokens=max_tokens, **sampling),
            arrival_time=self.now + len(self.requests),
            priority=priority,
        )
        self.requests[request.request_id] = request
        return request

    def give_p(
        self, request: GenerationRequest, node: PlayedNode | None = None, **fields: Any
    ) -> None:
        node = node or self.p
        fields.setdefault("decode_endpoint", self.d.transport.endpoint)
        job = PrefillJob(request=request, caller=CALLER, **fields)
        node.host.submit(job, self._roles[node.host.info.node_id])

    def give_d(self, request: GenerationRequest, **fields: Any) -> None:
        fields.setdefault("prefill_endpoint", self.p.transport.endpoint)
        job = DecodeJob(request=request, caller=CALLER, **fields)
        self.d.host.submit(job, self._decode)

    def cancel(self, request: GenerationRequest) -> None:
        """On both, as a dispatcher does when one of them failed or the client left."""
        self.cancelled.add(request.request_id)
        for node in (*self.prefill, self.d):
            node.cancel(request.request_id)

    def kill(self, node: PlayedNode) -> None:
        """A prefill node ends without a word."""
        self.prefill.remove(node)
        self.network.kill(node.transport)

    def emitted(self, request: GenerationRequest) -> tuple[int, ...]:
        """The tokens that the caller has, in order."""
        told = [delta for node in self.nodes for delta in self.told(node, request)]
        tokens: list[int] = []
        for delta in sorted(told, key=lambda delta: delta.position):
            if delta.position <= len(tokens):
                tokens.extend(delta.token_ids[len(tokens) - delta.position :])
        return tuple(tokens)

    def go_on(self, rounds: int = 1, *, writes: bool = True) -> None:
        """What was sent arrives, both nodes have a round, and all writes end."""
        for _ in range(rounds):
            while self.network.mail:
                self.network.deliver()
            for node in (*self.prefill, self.d):
                node.round()
            for write in list(self.network.writes) if writes else ():
                while write.state is WriteState.PENDING:
                    write.go_on()

    def calm_down(self) -> None:
        """All messages and writes arrive, and time goes by, until nothing happens any more."""
        for _ in range(200):
            if all(n.at_rest for n in (*self.prefill, self.d)) and not self.network.mail:
                self.go_on()
                return
            self.go_on(30)
            self.now += CONFIG.heartbeat_s + 0.1
        raise AssertionError(
            [vars(self.p.connector), vars(self.d.connector), self.p.host.jobs, self.d.host.jobs]
        )

    def told(self, node: PlayedNode, request: GenerationRequest) -> list[Delta]:
        """What the caller heard from this node."""
        return [d for d in node.stream.deltas if d.request_id == request.request_id]

    def check_answers(self) -> None:
        """Each request has its tokens, or a failure was told, or nobody wants it any more."""
        for request_id, request in self.requests.items():
            mine = [delta for node in self.nodes for delta in self.told(node, request)]
            expected = expected_tokens(request.prompt_token_ids, request.sampling)
            for delta in mine:
                end = delta.position + len(delta.token_ids)
                assert list(delta.token_ids) == expected[delta.position : end], "wrong tokens"
            by_position = {
                delta.position + index: token
                for delta in mine
                for index, token in enumerate(delta.token_ids)
            }  # of a prompt that D computed itself, both may have told the first token
            tokens = [by_position[position] for position in sorted(by_position)]
            ends = {delta.attempt for delta in mine if delta.finish_reason}
            if ends:
                assert tokens == expected
                told = self.told(self.d, request)
                assert not any(delta.failure for delta in told if delta.attempt in ends)
            elif request_id not in self.cancelled:
                assert any(delta.failure for delta in mine), "no answer and no failure"
