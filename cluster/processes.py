"""The whole cluster on one machine, each node in a process of its own.

    this process: Dispatcher, MemoryDirectory
       │ socket pair      │ socket pair            nothing of it can be reached from outside
prefill process ═══════► decode process            KV goes from one to the other directly
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import sys
from collections.abc import Awaitable, Iterable

from cluster.config import LocalConfig
from cluster.directory_listener import DirectoryListener
from cluster.node_messages import Setup
from cluster.remote_node import START_TIMEOUT_S, RemoteNode
from cluster.secret import Secret
from directory import MemoryDirectory
from engine.weights import ModelFiles
from protocol import ConfigError, Role
from router import Dispatcher

TORCH_COMPUTE = "cluster.torch_compute:torch_compute"


class ProcessCluster:
    """Starts and stops the processes; `start` and `stop` belong to one event loop."""

    def __init__(
        self,
        config: LocalConfig,
        files: ModelFiles,
        compute: str = TORCH_COMPUTE,
        *,
        token: str | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """`compute` names a function of files and config that gives a `RunnerFactory`.

        Raises:
            ConfigError: a node is to use cores that are not there.
        """
        self.config = config
        self.files = files
        self._compute = compute
        self._token = Secret(token or secrets.token_hex(32))
        self._directory = MemoryDirectory()
        self._listener = DirectoryListener(self._directory)
        self._dispatcher: Dispatcher | None = None
        self.prefill_nodes: list[RemoteNode] = []
        self.decode_nodes: list[RemoteNode] = []
        for role, node_id in config.node_ids:
            nodes = self.prefill_nodes if role is Role.PREFILL else self.decode_nodes
            setup = self._setup(role, node_id)
            nodes.append(RemoteNode(setup, self._listener, start_timeout_s))

    @property
    def nodes(self) -> list[RemoteNode]:
        return [*self.prefill_nodes, *self.decode_nodes]

    @property
    def dispatcher(self) -> Dispatcher:
        assert self._dispatcher is not None, "the cluster is not started"
        return self._dispatcher

    async def start(self) -> None:
        """Start all processes at once, and return when all nodes are ready.

        Raises:
            ConfigError, ModelError, NodeLost: what the first node that fails says. Then, and if
                this is cancelled, no process is left.
        """
        async with contextlib.AsyncExitStack() as on_failure:
            on_failure.push_async_callback(self._stop_nodes)
            await _all(node.launch() for node in self.nodes)
            for node in self.nodes:
                self._listener.register(node.info)
            await _all(node.start() for node in self.nodes)
            self._dispatcher = Dispatcher(
                self._directory,
                self.config.fingerprint(self.files),
                self.prefill_nodes,
                self.decode_nodes,
                self.config.routing,
            )
            await self._dispatcher.start()
            on_failure.pop_all()

    async def stop(self) -> None:
        """Returns when no process of ours is left."""
        await self.dispatcher.stop()
        await self._stop_nodes()
        for node in self.nodes:
            self._listener.deregister(node.info)

    def hurry(self) -> None:
        """Let `stop` wait for nobody."""
        for node in self.nodes:
            node.kill()

    async def _stop_nodes(self) -> None:
        await asyncio.gather(*(node.stop() for node in self.nodes))

    def _setup(self, role: Role, node_id: str) -> Setup:
        cores, present = self.config.cores(role), os.sched_getaffinity(0)
        if cores.cpus is not None and not present.issuperset(cores.cpus):
            name = self.config.name_of("cores", role)
            raise ConfigError(
                f"{name}.cpus", f"must be some of {sorted(present)}, not {list(cores.cpus)}"
            )
        return Setup(
            role=role,
            node_id=node_id,
            generation=0,
            config=self.config,
            files=self.files,
            compute=self._compute,
            token=self._token,
            threads=cores.num_threads(len(present), len(self.config.node_ids)),
            cpus=cores.cpus,
            module_path=tuple(sys.path),
            log_level=logging.getLogger().getEffectiveLevel(),
        )


async def _all(steps: Iterable[Awaitable[None]]) -> None:
    """Do all at the same time. Raises the first error, once the others have been cancelled."""
    tasks = [asyncio.ensure_future(step) for step in steps]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
