"""A process with one agent that writes its whole pool, of ones, and says how that ended.

Its arguments: UCX transports, number of blocks, and of the other agent the name, the address of
the pool, the port, and the metadata in hexadecimal digits. First it says from where it connects.
"""

from __future__ import annotations

import sys

from kv_transfer import Extents
from kv_transfer.transports.nixl_agent import NixlAgent, NixlConfig, RemotePool, TransferState
from kv_transfer.transports.port_lock import sources_to
from tests.kv_transfer.pools import LAYOUT, make_pool


def main(transports: str, num_blocks: int, agent: str, address: int, port: int, data: str) -> None:
    pool = make_pool(num_blocks, fill=1)
    writer = NixlAgent("writer", pool, NixlConfig(transports=transports))
    writer.add(agent, bytes.fromhex(data))
    sources = " ".join(f"{host}:{source}" for host, source in sources_to(port))
    sys.stdout.write(f"{sources}\n")
    sys.stdout.flush()
    remote = RemotePool.on("cpu", agent, address, pool.num_bytes)
    whole = Extents.of_blocks([(n, n) for n in range(num_blocks)], LAYOUT.bytes_per_block)
    transfer = writer.start(remote, whole.merged().rows)
    sys.stdout.write("started\n")
    while transfer.state is TransferState.RUNNING:
        transfer.poll()
    sys.stdout.write(f"{transfer.state.name}\n")
    writer.close()


if __name__ == "__main__":
    main(
        sys.argv[1],
        int(sys.argv[2]),
        sys.argv[3],
        address=int(sys.argv[4]),
        port=int(sys.argv[5]),
        data=sys.argv[6],
    )
