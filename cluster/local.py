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
from cluster.node_builder import BuiltNode, NodeBuilder, stop_node
from cluster.node_compute import RunnerFactory
from cluster.transports import make_transport as make_configured_transport
from decode_node import LocalDecodeNode
from directory import MemoryDirectory
from engine.weights import ModelFiles
from kv_transfer import HandoffConfig, MemoryHub, Transport
from prefill_node import LocalPrefillNode
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
        self.nodes: list[BuiltNode] = [builder.build(*names) for names in config.node_ids]
        self.dispatcher = Dispatcher(
            directory, files.fingerprint, self.prefill_nodes, self.decode_nodes, config.routing
        )

    @property
    def prefill_nodes(self) -> list[LocalPrefillNode]:
        return [node for node in self.nodes if isinstance(node, LocalPrefillNode)]

    @property
    def decode_nodes(self) -> list[LocalDecodeNode]:
        return [node for node in self.nodes if isinstance(node, LocalDecodeNode)]

    async def start(self) -> None:
        for node in self.nodes:
            self._listener.register(node.info)
            node.start()
        await self.dispatcher.start()

    async def stop(self) -> None:
        """Returns when no thread of ours is left."""
        await self.dispatcher.stop()
        for node in self.nodes:
            node.ask_stop()
        for node in self.nodes:
            stop_node(node)
            self._listener.deregister(node.info)
