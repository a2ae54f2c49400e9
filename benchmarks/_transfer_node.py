"""One end of a transport with a pool, for benchmarks/transfer.py; run by itself, the far end.

    python -m benchmarks._transfer_node SCHEME BLOCK_BYTES NUM_BLOCKS [--bind ADDRESS]

prints its endpoint, and reads that of the node that is to write from its standard input.
"""

import argparse
import sys
import threading
from dataclasses import dataclass, field

from kv_transfer import BlockLayout, BlockPoolMemory, MemoryHub, MemoryTransport, Transport
from kv_transfer.peering import ClusterToken
from kv_transfer.shared_memory import SharedMemory
from protocol import HandoffTicket

TICKET = HandoffTicket("benchmark", 0)
TOKEN = "of this benchmark only"


@dataclass
class Node:
    transport: Transport
    pool: BlockPoolMemory
    activity: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.transport.register(self.pool, self.activity.set)

    def wait(self) -> None:
        assert self.activity.wait(30), "nothing happens"
        self.activity.clear()


def make_node(
    scheme: str,
    name: str,
    block_bytes: int,
    num_blocks: int,
    hub: MemoryHub,
    bind: str = "127.0.0.1",
) -> Node:
    """A node whose pool has been touched."""
    memory = SharedMemory.create(block_bytes * num_blocks)
    memory.buffer[:] = b"\x01" * memory.num_bytes
    layout = BlockLayout(
        fingerprint="benchmark",
        dtype="float32",
        block_size=16,
        num_layers=1,
        num_kv_heads=1,
        head_dim=1,
        bytes_per_block=block_bytes,
    )
    pool = BlockPoolMemory(layout, memory.address, num_blocks, memory, memory.fd)
    return Node(make_transport(scheme, name, hub, bind), pool)


def make_transport(scheme: str, name: str, hub: MemoryHub, bind: str) -> Transport:
    match scheme:
        case "memory":
            return MemoryTransport(hub, name)
        case "shm":
            from kv_transfer.transports.shm import ShmTransport

            return ShmTransport(name, ClusterToken(TOKEN))
        case _:
            from kv_transfer.transports.nixl import NixlTransport
            from kv_transfer.transports.nixl_agent import NixlConfig

            return NixlTransport(name, ClusterToken(TOKEN), NixlConfig(bind=bind))


class Target:
    """A node that lets `peer` write, and answers its questions until it is stopped."""

    def __init__(self, node: Node, peer: str) -> None:
        self._node = node
        self._peer = node.transport.resolve(peer)
        self._stopped = False
        node.transport.open(TICKET, self._peer, range(1, node.pool.num_blocks))
        node.transport.connect(self._peer)

    def stop(self) -> None:
        self._stopped = True
        self._node.activity.set()

    def serve(self) -> None:
        node = self._node
        while not self._stopped:
            node.activity.wait()
            node.activity.clear()
            for message in node.transport.receive():
                if message.data[:1] == b"?":  # else it is one of many, and none is answered
                    node.transport.notify(self._peer, message.data)
        node.transport.close()


def main() -> None:
    """The node whose endpoint comes on stdin may write until stdin ends."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks._transfer_node")
    parser.add_argument("scheme")
    parser.add_argument("block_bytes", type=int)
    parser.add_argument("num_blocks", type=int)
    parser.add_argument("--bind", default="127.0.0.1")
    given = parser.parse_args()
    node = make_node(
        given.scheme, "target", given.block_bytes, given.num_blocks, MemoryHub(), given.bind
    )
    print(node.transport.endpoint, flush=True)
    target = Target(node, sys.stdin.readline().strip())
    serving = threading.Thread(target=target.serve)
    serving.start()
    sys.stdin.read()
    target.stop()
    serving.join()


if __name__ == "__main__":
    main()
