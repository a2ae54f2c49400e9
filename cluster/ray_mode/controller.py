"""Keeps a cluster as it is meant to be: the one actor that makes, moves and replaces the others.

    memory: prefill-0 …, decode-0 …, 1 gateway ─► crew: a supervised process for each
       ▲ scale, role                                 │ drain, restart
    command line, autoscaler ────────────────────────┘

Nobody needs it to serve. It may die, and Ray starts it again: it then finds the others by their
names, and what it had been told last in Ray's own store.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Awaitable, Coroutine, Iterable, Mapping
from functools import partial
from typing import Any

import msgspec
import ray

from cluster.connect_directory import hidden
from cluster.directory_config import DirectoryAddress
from cluster.free_port import free_port
from cluster.node_setup import set_up_logging, use_modules
from cluster.ray_mode.autoscaler import Autoscaler
from cluster.ray_mode.connect_directory import follow_directory
from cluster.ray_mode.crew import DRAIN_S, Crew
from cluster.ray_mode.memory import Memory, MemoryStore
from cluster.ray_mode.spec import (
    CONTROLLER,
    DIRECTORY,
    Answer,
    ClusterReport,
    Done,
    Failed,
    NodeStarted,
    Spec,
    pack,
    unpack,
)
from cluster.secret import Secret
from directory import DirectoryError, RedisDirectory
from protocol import ConfigError, KvrelayError, NodeLost, Role

logger = logging.getLogger(__name__)

_CLAIM_TTL_S = 10.0  # of the cluster's name, so that it is free soon after a crash


class Controller:
    """Its methods are for the command line; they answer with packed messages."""

    def __init__(self, spec: bytes) -> None:
        told = unpack(spec)
        assert isinstance(told, Spec), told
        use_modules(told.module_path)
        set_up_logging(CONTROLLER, told.log_level)
        self._spec = told
        self._store = MemoryStore(told.name)
        self._crew = Crew(told, lambda: self._memory)
        self._changing = asyncio.Lock()  # the cluster changes in one way at a time
        self._directory: RedisDirectory | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._change: asyncio.Task[None] | None = None  # that is under way
        self._stopping = False
        known = self._store.load()
        self._memory = known or self._first_memory()
        if known is not None:  # started again by Ray: nobody is going to call `start`
            self._spawn(self._revive())

    # ------------------------------------------------------------------ start and end

    async def start(self) -> bytes:
        """Done when everything has started, or Failed with the first thing that has not."""
        self._store.save(self._memory)
        return await self._carry_out(self._start(need_server=True))

    async def _start(self, *, need_server: bool) -> None:
        if self._spec.directory.url is None:
            await self._crew.add_directory(self._directory_host).first_start()
        connect = partial(
            follow_directory, self._spec, self._memory.directory, need_server=need_server
        )
        self._directory = directory = await asyncio.to_thread(connect)
        await self._hold_name(directory, need_server)
        members = [self._crew.add_node(node_id) for node_id in self._memory.nodes]
        members += [
            self._crew.add_gateway(name, is_first=not place)
            for place, name in enumerate(self._memory.gateways)
        ]
        await asyncio.gather(*(member.first_start() for member in members))
        self._crew.has_started = True
        if self._spec.autoscaling.enabled:
            self._spawn(self._autoscale(directory))

    async def _revive(self) -> None:
        async with self._changing:
            logger.warning("started again; the cluster has %s", self._memory.counts)
            try:
                await self._start(need_server=False)
            except (KvrelayError, TimeoutError) as error:
                logger.error("not all is as it was: %s", error)

    async def stop(self) -> bytes:
        """Everything ends, gateways first, so that no request is taken that nobody serves."""
        self._stopping = True
        for task in (*self._tasks, *([self._change] if self._change else [])):
            task.cancel()
        async with self._changing:
            await self._crew.leave(self._memory.gateways, 0.0)
            await self._crew.leave(self._memory.nodes, 0.0)
            if self._directory is not None:
                await asyncio.to_thread(_let_go, self._directory, self._owner)
            await self._crew.leave([DIRECTORY], 0.0)
            self._store.forget()
        return pack(Done())

    # ------------------------------------------------------------------ what may be asked

    async def report(self) -> bytes:
        records = {}
        if self._directory is not None:
            records = {record.info.node_id: record.status for record in self._directory.nodes()}
        return pack(
            ClusterReport(
                name=self._spec.name,
                model=self._spec.serve.model,
                members=tuple(
                    msgspec.structs.replace(member.report, status=records.get(name))
                    for name, member in self._crew.members.items()
                ),
                targets=self._memory.counts,
                directory=hidden(self._memory.directory.url),
                directory_available=self._directory is not None and self._directory.available,
            )
        )

    async def scale(self, targets: dict[str, int], drain_s: float | None) -> bytes:
        """Done when there are so many nodes of these roles."""
        counts = {Role(role): count for role, count in targets.items()}
        return await self._carry_out(self._scale(counts, drain_s))

    async def change_role(self, node_id: str, role: str, drain_s: float | None) -> bytes:
        """Done when the node has its new role."""
        return await self._carry_out(self._change_role(node_id, Role(role), drain_s))

    async def restart(self, names: tuple[str, ...], rolling: bool) -> bytes:
        """Done when all these, or all nodes and gateways, have been replaced."""
        return await self._carry_out(self._restart(names, rolling))

    async def drain(self, node_id: str, timeout_s: float | None) -> bytes:
        """Done when the node has no request left; it takes none until `undrain`."""
        return await self._answer(self._ask_node(node_id, "drain", timeout_s))

    async def undrain(self, node_id: str) -> bytes:
        return await self._answer(self._ask_node(node_id, "undrain"))

    async def _carry_out(self, change: Coroutine[Any, Any, None]) -> bytes:
        """One change after the other; `stop` calls off the one that is under way."""
        async with self._changing:
            self._change = asyncio.create_task(change)
            try:
                return await self._answer(self._change)
            except asyncio.CancelledError:
                if not self._stopping:
                    raise
                return pack(Failed.of(NodeLost("the cluster is being stopped")))
            finally:
                self._change = None

    async def _answer(self, work: Awaitable[Answer | None]) -> bytes:
        try:
            return pack(await work or Done())
        except (KvrelayError, TimeoutError) as error:
            return pack(Failed.of(error))

    # ------------------------------------------------------------------ changes

    async def _scale(self, targets: Mapping[Role, int], drain_s: float | None) -> None:
        memory = self._memory
        self._check_serves(memory.counts | dict(targets), "scale")
        surplus = [i for role, count in targets.items() for i in memory.ids_of(role)[count:]]
        added = {
            node_id: role
            for role, count in targets.items()
            for node_id in memory.new_ids(role, count - memory.counts.get(role, 0))
        }
        self._remember(nodes={**memory.nodes, **added})
        new = [self._crew.add_node(node_id) for node_id in added]
        try:
            await asyncio.gather(*(member.first_start() for member in new))
        except (KvrelayError, TimeoutError):
            await self._remove(added, 0.0)
            raise
        await self._remove(surplus, DRAIN_S if drain_s is None else drain_s)

    async def _remove(self, node_ids: Iterable[str], drain_s: float) -> None:
        gone = set(node_ids)
        await self._crew.leave(gone, drain_s)
        self._remember(nodes={n: r for n, r in self._memory.nodes.items() if n not in gone})

    async def _change_role(self, node_id: str, role: Role, drain_s: float | None) -> None:
        self._check_is_node(node_id)
        nodes = {**self._memory.nodes, node_id: role}
        if nodes == self._memory.nodes:
            return
        self._check_serves({its: list(nodes.values()).count(its) for its in Role}, "role")
        member = self._crew.member(node_id)
        await member.ask("drain", DRAIN_S if drain_s is None else drain_s, timeout_s=None)
        changed = await member.ask("change_role", role.value, timeout_s=DRAIN_S)
        assert isinstance(changed, NodeStarted), changed
        member.info, member.kind = changed.info, role.value
        self._remember(nodes=nodes)

    async def _restart(self, names: tuple[str, ...], rolling: bool) -> None:
        chosen = names or (*self._memory.nodes, *self._memory.gateways)
        for name in chosen:
            self._crew.member(name)  # checks it
        if not rolling:
            await asyncio.gather(*(self._crew.member(name).restart() for name in chosen))
            return
        for name in chosen:
            if name in self._memory.gateways:
                await self._replace_gateway(name)
            else:
                await self._crew.member(name).restart()

    async def _replace_gateway(self, old: str) -> None:
        """The new one listens, at the same port, before the old one leaves: none is refused."""
        memory = self._memory
        place, new = memory.gateways.index(old), memory.new_gateway
        self._remember(gateways=(*memory.gateways, new))
        try:
            await self._crew.add_gateway(new, is_first=not place).first_start()
        except (KvrelayError, TimeoutError):
            await self._crew.leave([new], 0.0)
            self._remember(gateways=memory.gateways)
            raise
        await self._crew.leave([old], DRAIN_S)
        left = tuple(new if name == old else name for name in memory.gateways)
        self._remember(gateways=left)

    async def _ask_node(self, node_id: str, method: str, *args: object) -> Answer:
        self._check_is_node(node_id)
        return await self._crew.member(node_id).ask(method, *args, timeout_s=None)

    def _check_is_node(self, node_id: str) -> None:
        if node_id not in self._memory.nodes:
            known = ", ".join(self._memory.nodes)
            raise ConfigError("node", f"{node_id} is none of the nodes {known}")

    def _check_serves(self, counts: Mapping[Role, int], field: str) -> None:
        pairs = min(counts.get(Role.PREFILL, 0), counts.get(Role.DECODE, 0))
        if not pairs and not counts.get(Role.UNIFIED, 0):
            raise ConfigError(
                field,
                "nobody would serve: one prefill and one decode node, or a unified node, have to "
                "stay; `kvrelay down` ends the cluster",
            )

    # ------------------------------------------------------------------ in the background

    async def _hold_name(self, directory: RedisDirectory, need_server: bool) -> None:
        """As long as we renew it, no other cluster takes our prefix in this directory.

        Raises:
            AlreadyClaimed: another has it.
        """
        if need_server:
            await asyncio.to_thread(directory.claim, self._owner, ttl_s=_CLAIM_TTL_S)
        self._spawn(self._renew_name(directory))

    async def _renew_name(self, directory: RedisDirectory) -> None:
        while True:
            try:
                await asyncio.to_thread(directory.renew, self._owner, ttl_s=_CLAIM_TTL_S)
            except DirectoryError as error:  # it is away, or was away for so long
                logger.warning("%s", error)
            await asyncio.sleep(_CLAIM_TTL_S / 3)

    async def _autoscale(self, directory: RedisDirectory) -> None:
        autoscaler = Autoscaler(self._spec.autoscaling)
        while True:
            await asyncio.sleep(self._spec.autoscaling.interval_s)
            wish = autoscaler.look(directory.nodes(), self._memory.counts)
            if wish and not self._changing.locked():
                logger.warning("%s", autoscaler.explain())
                answer = unpack(await self._carry_out(self._scale(wish, None)))
                if isinstance(answer, Failed):
                    logger.warning("could not scale: %s", answer.error.message)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ------------------------------------------------------------------ what is known

    def _first_memory(self) -> Memory:
        spec = self._spec
        nodes = {node_id: role for role, node_id in spec.config.node_ids}
        gateways = tuple(f"gateway-{number}" for number in range(spec.gateways.count))
        if spec.directory.url is not None:
            address = DirectoryAddress(spec.directory.url, spec.directory_password)
            return Memory(nodes=nodes, gateways=gateways, directory=address)
        host = self._directory_host
        port = free_port(host)
        address = DirectoryAddress(f"valkey://{host}:{port}", Secret(secrets.token_hex(32)))
        return Memory(nodes=nodes, gateways=gateways, directory=address, directory_port=port)

    def _remember(self, **changes: Any) -> None:
        self._memory = msgspec.structs.replace(self._memory, **changes)
        self._store.save(self._memory)

    @property
    def _directory_host(self) -> str:
        """Where the embedded server listens: for this host only, unless nodes are on others."""
        if self._spec.config.transfer.listens_outside:
            return str(ray.util.get_node_ip_address())
        return "127.0.0.1"

    @property
    def _owner(self) -> str:
        return f"{self._spec.name} on Ray at {ray.get_runtime_context().gcs_address}"


def _let_go(directory: RedisDirectory, owner: str) -> None:
    with contextlib.suppress(DirectoryError):  # it is away, and forgets us by itself
        directory.release(owner)
    directory.close()
