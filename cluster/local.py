"""The whole cluster in one process: nodes, directory and router, without Ray and without servers.

Dispatcher ──► prefill nodes ══ MemoryHub ══► decode nodes      each with its own thread,
    └───────── MemoryDirectory ◄──┴───────────────┘             scheduler and KV pool
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import partial

from cluster.config import LocalConfig
from cluster.directory_listener import DirectoryListener
from cluster.engine_node import EngineNode
from cluster.node_builder import NodeBuilder, stop_node
from cluster.node_compute import RunnerFactory
from cluster.transports import make_transport as make_configured_transport
from directory import MemoryDirectory
from engine.weights import ModelFiles
from kv_transfer import HandoffConfig, MemoryHub, Transport
from protocol import NodeInfo, Role
from router import Dispatcher

TransportFactory = Callable[[MemoryHub, str], Transport]


class LocalCluster:
    """Builds the nodes; `start` and `stop` belong to one event loop."""

    def __init__(
        self,
        config: LocalConfig,
        files: ModelFiles,
        make_compute: RunnerFactory,
        *,
        handoff: HandoffConfig | None = None,
        make_transport: TransportFactory | None = None,
        token: str | None = None,
    ) -> None:
        self.config = config
        self.files = files
        directory = MemoryDirectory()
        self._listener = DirectoryListener(directory)
        hub, secret = MemoryHub(), token or secrets.token_hex(32)
        builder = NodeBuilder(
            config=config,
            files=files,
            make_compute=make_compute,
            make_transport=partial(make_transport, hub)
            if make_transport
            else partial(make_configured_transport, config, hub=hub, token=secret),
            listener=self._listener,
            handoff=handoff,
        )
        self.nodes: list[EngineNode] = [builder.build(*names) for names in config.node_ids]
        self.dispatcher = Dispatcher(
            directory,
            config.fingerprint(files),
            self.prefill_nodes,
            self.decode_nodes,
            config.routing,
        )

    @property
    def prefill_nodes(self) -> list[EngineNode]:
        return [node for node in self.nodes if node.info.role is Role.PREFILL]

    @property
    def decode_nodes(self) -> list[EngineNode]:
        """Unified ones, too."""
        return [node for node in self.nodes if node.info.role is not Role.PREFILL]

    async def start(self) -> None:
        for node in self.nodes:
            self._listener.register(node.info)
            node.start()
        await self.dispatcher.start()

    async def change_role(self, node_id: str, role: Role) -> NodeInfo:
        """Returns when the router knows of it. Raises as `Node.change_role` does."""
        (node,) = (node for node in self.nodes if node.info.node_id == node_id)
        before = node.info
        info = await node.change_role(role)
        if info is not before:
            self._listener.register(info)
            self._listener.on_status(info, await node.status())
            self.dispatcher.add_node(node)
        return info

    async def stop(self) -> None:
        """Returns when no thread of ours is left."""
        await self.dispatcher.stop()
        for node in self.nodes:
            node.ask_stop()
        for node in self.nodes:
            stop_node(node)
            self._listener.deregister(node.info)
